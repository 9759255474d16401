#include <torch/csrc/Exceptions.h>
#include <torch/csrc/torchpin.h>
#include <torch/csrc/utils/pybind.h>

// Tensor.pin_memory and Tensor.is_pinned without their device argument.
//
// Methods of a C type have neither a module file nor a Python body that could
// be patched, so they are replaced by C methods: with no argument they cost one
// call more than the base's own; with a device they raise the deprecation and
// go on without it.

namespace torch::pin {

namespace {

struct Method {
  const char* name;
  PyObject* base = nullptr; // descriptor of torch._C.TensorBase
};

Method pinMemory{"pin_memory"};
Method isPinned{"is_pinned"};
// Called as f(qualified name, device) when a device was given.
PyObject* onDeviceArgument = nullptr;

PyObject* call(
    const Method& method,
    PyObject* self,
    PyObject* const* args,
    Py_ssize_t nargs,
    PyObject* kwnames) {
  const Py_ssize_t nkwargs = kwnames ? PyTuple_GET_SIZE(kwnames) : 0;
  PyObject* only[] = {self};
  if (nargs + nkwargs == 0) {
    return PyObject_Vectorcall(method.base, only, 1, nullptr);
  }
  const bool oneDevice =
      nargs + nkwargs == 1 &&
      (nkwargs == 0 || PyUnicode_CompareWithASCIIString(
                           PyTuple_GET_ITEM(kwnames, 0), "device") == 0);
  if (!oneDevice) {
    // The base words the TypeError.
    py::list positional;
    positional.append(py::reinterpret_borrow<py::object>(self));
    for (Py_ssize_t i = 0; i < nargs; ++i) {
      positional.append(py::reinterpret_borrow<py::object>(args[i]));
    }
    py::dict named;
    for (Py_ssize_t i = 0; i < nkwargs; ++i) {
      named[PyTuple_GET_ITEM(kwnames, i)] =
          py::reinterpret_borrow<py::object>(args[nargs + i]);
    }
    return PyObject_Call(method.base, py::tuple(positional).ptr(), named.ptr());
  }
  if (args[0] != Py_None) {
    py::object done = py::reinterpret_steal<py::object>(
        PyObject_CallFunction(onDeviceArgument, "sO", method.name, args[0]));
    if (!done) {
      return nullptr;
    }
  }
  return PyObject_Vectorcall(method.base, only, 1, nullptr);
}

PyObject* tensorPinMemory(
    PyObject* self,
    PyObject* const* args,
    Py_ssize_t nargs,
    PyObject* kwnames) {
  HANDLE_TH_ERRORS
  return call(pinMemory, self, args, nargs, kwnames);
  END_HANDLE_TH_ERRORS
}

PyObject* tensorIsPinned(
    PyObject* self,
    PyObject* const* args,
    Py_ssize_t nargs,
    PyObject* kwnames) {
  HANDLE_TH_ERRORS
  return call(isPinned, self, args, nargs, kwnames);
  END_HANDLE_TH_ERRORS
}

PyMethodDef pinMemoryDefinition = {
    "pin_memory",
    reinterpret_cast<PyCFunction>(
        reinterpret_cast<void (*)()>(tensorPinMemory)),
    METH_FASTCALL | METH_KEYWORDS,
    "pin_memory() -> Tensor\n\n"
    "Copies the tensor into page-locked memory of the current accelerator, or\n"
    "returns it as it is if it lies there already. A device argument is\n"
    "deprecated and ignored. Raises RuntimeError if there is no accelerator,\n"
    "or if its backend supplies no page-locked memory."};

PyMethodDef isPinnedDefinition = {
    "is_pinned",
    reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(tensorIsPinned)),
    METH_FASTCALL | METH_KEYWORDS,
    "is_pinned() -> bool\n\n"
    "Whether the tensor lies in page-locked memory of the current\n"
    "accelerator. Starts nothing. A device argument is deprecated and "
    "ignored."};

// {"pin_memory": descriptor, "is_pinned": descriptor} for torch.Tensor.
py::dict tensorMethods(py::object callback) {
  const py::object base = py::module_::import("torch._C").attr("TensorBase");
  TORCH_CHECK(PyType_Check(base.ptr()), "torch._C.TensorBase is not a type");
  onDeviceArgument = callback.release().ptr();
  py::dict methods;
  auto add = [&](Method& method, PyMethodDef& definition) {
    method.base = py::object(base.attr(method.name)).release().ptr();
    PyObject* descriptor = PyDescr_NewMethod(
        reinterpret_cast<PyTypeObject*>(base.ptr()), &definition);
    if (descriptor == nullptr) {
      throw python_error();
    }
    methods[method.name] = py::reinterpret_steal<py::object>(descriptor);
  };
  add(pinMemory, pinMemoryDefinition);
  add(isPinned, isPinnedDefinition);
  return methods;
}

} // namespace

void initTensorMethodBindings(PyObject* module) {
  auto m = py::handle(module).cast<py::module>();
  m.def(
      "_tensor_methods",
      torch::wrap_pybind_function(tensorMethods),
      py::arg("on_device_argument"));
}

} // namespace torch::pin
