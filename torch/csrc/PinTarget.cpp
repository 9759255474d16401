#include <ATen/DeviceAccelerator.h>
#include <ATen/PinTarget.h>
#include <ATen/native/PinMemory.h>
#include <c10/util/Type.h>
#include <torch/csrc/Device.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/torchpin.h>
#include <torch/csrc/utils/pybind.h>

#include <typeinfo>

// The accelerator and the pin target, as Python sees them.

namespace torch::pin {

namespace {

std::optional<std::string> typeName(
    const std::optional<c10::DeviceType>& type) {
  if (!type.has_value()) {
    return std::nullopt;
  }
  return c10::DeviceTypeName(*type, /*lower_case=*/true);
}

// (accelerator type or None, name of what is lacking, reason, own kernels,
// C++ class of the host allocator or None where it was not asked for)
py::tuple pinTarget(bool initialize) {
  at::pin::PinTarget target;
  {
    py::gil_scoped_release noGil;
    target = at::pin::pinTarget(
        initialize ? at::pin::Initialize::Yes : at::pin::Initialize::No);
  }
  return py::make_tuple(
      typeName(target.accelerator),
      at::pin::lackName(target.lack),
      target.reason,
      target.ownKernels,
      target.allocator
          ? py::cast(c10::demangle(typeid(*target.allocator).name()))
          : py::object(py::none()));
}

// As torch._C._get_accelerator of the releases that have it: the CPU device
// stands for "none".
py::object getAccelerator() {
  const auto type = at::getAccelerator(/*checked=*/false);
  return py::reinterpret_steal<py::object>(
      THPDevice_New(c10::Device(type.value_or(c10::kCPU))));
}

} // namespace

void initPinTargetBindings(PyObject* module) {
  auto m = py::handle(module).cast<py::module>();
  m.def("_get_accelerator", torch::wrap_pybind_function(getAccelerator));
  m.def(
      "_pin_target",
      torch::wrap_pybind_function(pinTarget),
      py::arg("initialize"));
  m.def(
      "_register_pin_kernels",
      torch::wrap_pybind_function(at::pin::registerPinKernels));
  m.def(
      "_deregister_pin_kernels",
      torch::wrap_pybind_function(at::pin::deregisterPinKernels));
}

} // namespace torch::pin
