// Operators: those that make, view, resize and copy tensors are written here;
// everything else is computed on the CPU.

#include "host_memory.h"
#include "runtime.h"

#include <ATen/ATen.h>
#include <ATen/EmptyTensor.h>
#include <ATen/ExpandUtils.h>
#include <ATen/native/CPUFallback.h>
#include <ATen/ops/_reshape_alias_native.h>
#include <ATen/ops/as_strided_native.h>
#include <ATen/ops/set_cpu_dispatch.h>
#include <ATen/ops/unfold_native.h>
#include <ATen/ops/view_native.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <torch/library.h>

#include <memory>
#include <optional>

namespace refdev {
namespace {

using at::IntArrayRef;
using at::Tensor;

// Set while the CPU computes an operator in the place of a kernel.
thread_local bool standing_in = false;

struct StandingIn {
  StandingIn() : before(standing_in) {
    standing_in = true;
  }
  ~StandingIn() {
    standing_in = before;
  }
  bool before;
};

int64_t storageBytes(
    IntArrayRef size,
    IntArrayRef stride,
    size_t itemsize,
    int64_t offset) {
  return static_cast<int64_t>(at::detail::computeStorageNbytes(
      size, stride, itemsize, static_cast<size_t>(offset)));
}

// The same elements as a CPU tensor that only work in stream order may use.
Tensor kernelView(const Tensor& tensor) {
  void* data = tensor.numel() == 0
                   ? nullptr
                   : kernelAddress(
                         static_cast<const char*>(tensor.storage().data()) +
                         tensor.storage_offset() *
                             static_cast<int64_t>(tensor.element_size()));
  return at::from_blob(
      data,
      tensor.sizes(),
      tensor.strides(),
      tensor.options().device(at::kCPU).requires_grad(false));
}

void* address(const Tensor& tensor) {
  return static_cast<char*>(const_cast<void*>(tensor.storage().data())) +
         tensor.storage_offset() * static_cast<int64_t>(tensor.element_size());
}

void launchOn(const Tensor& tensor, std::function<void()> kernel) {
  const int device = tensor.get_device();
  check(
      launch(
          device,
          currentStream(device),
          [kernel = std::move(kernel)] {
            // Whoever runs this, it must neither record nor dispatch to us.
            at::AutoDispatchBelowADInplaceOrView guard;
            kernel();
          }),
      "launching a kernel");
}

Tensor emptyStrided(
    IntArrayRef size,
    IntArrayRef stride,
    c10::ScalarType dtype,
    c10::Device device) {
  c10::DeviceGuard guard(device);
  return at::detail::empty_strided_generic(
      size,
      stride,
      deviceAllocator(),
      c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      dtype);
}

// Whether both occupy memory in the same way without gaps, so that one block
// copy moves all elements.
bool sameDenseLayout(const Tensor& a, const Tensor& b) {
  return a.scalar_type() == b.scalar_type() && a.sizes() == b.sizes() &&
         ((a.is_contiguous() && b.is_contiguous()) ||
          (a.strides() == b.strides() && a.is_non_overlapping_and_dense()));
}

// Moves the bytes of two tensors of the same dense layout.
void moveBytes(const Tensor& to, const Tensor& from, bool non_blocking) {
  const auto bytes =
      static_cast<size_t>(to.numel()) * static_cast<size_t>(to.element_size());
  if (bytes == 0) {
    return;
  }
  const bool to_host = to.device().is_cpu();
  const bool from_host = from.device().is_cpu();
  const int device = (from_host ? to : from).get_device();
  const int stream = currentStream(device);
  const bool across = !to_host && !from_host && to.device() != from.device();
  Event event;
  if (across) {
    // The copy runs on the source's stream, between what came before and what
    // will come after it on the destination's.
    const int other = to.get_device();
    event = newEvent();
    check(recordEvent(event, other, currentStream(other)), "copy");
    check(waitEvent(event, device, stream), "copy");
  }
  bool in_flight = false;
  check(
      copy(
          device,
          stream,
          address(to),
          address(from),
          bytes,
          non_blocking || (!to_host && !from_host) ? Blocking::no
                                                   : Blocking::yes,
          standing_in ? Traffic::internal : Traffic::user,
          &in_flight),
      "copy");
  if (across) {
    const int other = to.get_device();
    event = newEvent();
    check(recordEvent(event, device, stream), "copy");
    check(waitEvent(event, other, currentStream(other)), "copy");
  }
  if (in_flight) {
    const Tensor& host = to_host ? to : from;
    reportHostUse(
        address(host),
        host.storage().data_ptr().get_context(),
        c10::Stream(c10::Stream::UNSAFE, deviceAt(device), stream));
  }
}

void copyWithin(const Tensor& to, const Tensor& from) {
  if (sameDenseLayout(to, from)) {
    moveBytes(to, from, true);
    return;
  }
  launchOn(to, [target = kernelView(to), source = kernelView(from)] {
    target.copy_(source);
  });
}

Tensor contiguousAs(const Tensor& tensor, c10::ScalarType dtype) {
  if (tensor.device().is_cpu()) {
    return tensor.to(dtype).contiguous();
  }
  Tensor result = emptyStrided(
      tensor.sizes(),
      c10::contiguous_strides(tensor.sizes()),
      dtype,
      tensor.device());
  copyWithin(result, tensor);
  return result;
}

Tensor withoutBits(const Tensor& tensor) {
  // Plain data of a conjugated or negated view: the bits are settled at the
  // end of copyFrom().
  Tensor result = tensor;
  if (result.is_conj()) {
    result = result.conj();
  }
  if (result.is_neg()) {
    result = at::_neg_view(result);
  }
  return result;
}

Tensor copyFrom(const Tensor& self, const Tensor& dst, bool non_blocking) {
  if (dst.numel() == 0) {
    return dst;
  }
  at::AutoDispatchBelowADInplaceOrView below;
  c10::OptionalDeviceGuard guard;
  guard.reset_device(self.device().is_cpu() ? dst.device() : self.device());
  Tensor from = withoutBits(
      self.sizes() == dst.sizes() ? self : self.expand(dst.sizes()));
  Tensor to = withoutBits(dst);

  if (to.device() == from.device()) {
    copyWithin(to, from);
  } else if (sameDenseLayout(to, from)) {
    moveBytes(to, from, non_blocking);
  } else {
    // Convert and compact where the source is, lay out where the destination
    // is, and let one block copy go between.
    Tensor source =
        from.scalar_type() == to.scalar_type() && from.is_contiguous()
            ? from
            : contiguousAs(from, to.scalar_type());
    if (to.is_contiguous()) {
      moveBytes(to, source, non_blocking);
    } else if (to.device().is_cpu()) {
      Tensor landed = at::empty(to.sizes(), to.options().pinned_memory(false));
      moveBytes(landed, source, false);
      to.copy_(landed);
    } else {
      Tensor landed = emptyStrided(
          to.sizes(),
          c10::contiguous_strides(to.sizes()),
          to.scalar_type(),
          to.device());
      moveBytes(landed, source, non_blocking);
      copyWithin(to, landed);
    }
  }
  if (self.is_conj() != dst.is_conj()) {
    to.conj_physical_();
  }
  if (self.is_neg() != dst.is_neg()) {
    to.neg_();
  }
  return dst;
}

Tensor emptyMemoryFormat(
    IntArrayRef size,
    std::optional<c10::ScalarType> dtype,
    std::optional<c10::Layout> layout,
    std::optional<c10::Device> device,
    std::optional<bool> pin_memory,
    std::optional<c10::MemoryFormat> memory_format) {
  TORCH_CHECK(
      c10::layout_or_default(layout) == c10::kStrided,
      "refdev: only strided tensors, not ",
      c10::layout_or_default(layout));
  TORCH_CHECK(
      !c10::pinned_memory_or_default(pin_memory),
      "refdev: only dense CPU tensors can be pinned");
  c10::DeviceGuard guard(c10::device_or_default(device));
  return at::detail::empty_generic(
      size,
      deviceAllocator(),
      c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      c10::dtype_or_default(dtype),
      memory_format);
}

Tensor emptyStridedOp(
    IntArrayRef size,
    IntArrayRef stride,
    std::optional<c10::ScalarType> dtype,
    std::optional<c10::Layout> layout,
    std::optional<c10::Device> device,
    std::optional<bool> pin_memory) {
  TORCH_CHECK(
      c10::layout_or_default(layout) == c10::kStrided &&
          !c10::pinned_memory_or_default(pin_memory),
      "refdev: only strided tensors that are not pinned");
  return emptyStrided(
      size,
      stride,
      c10::dtype_or_default(dtype),
      c10::device_or_default(device));
}

void growStorage(const Tensor& tensor, size_t bytes) {
  const c10::Storage& storage = tensor.storage();
  if (bytes <= storage.nbytes()) {
    return;
  }
  c10::DeviceGuard guard(tensor.device());
  c10::DataPtr data = deviceAllocator()->allocate(bytes);
  if (storage.nbytes() > 0) {
    deviceAllocator()->copy_data(data.get(), storage.data(), storage.nbytes());
  }
  storage.set_data_ptr_noswap(std::move(data));
  storage.unsafeGetStorageImpl()->set_nbytes(bytes);
}

const Tensor& resizeOp(
    const Tensor& self,
    IntArrayRef size,
    std::optional<c10::MemoryFormat> memory_format) {
  auto* impl = self.unsafeGetTensorImpl();
  if (self.sizes() != size) {
    impl->set_sizes_contiguous(size);
  }
  if (memory_format.has_value()) {
    impl->empty_tensor_restride(*memory_format);
  }
  if (self.numel() > 0) {
    growStorage(
        self,
        static_cast<size_t>(storageBytes(
            self.sizes(),
            self.strides(),
            self.element_size(),
            self.storage_offset())));
  }
  return self;
}

Tensor& setSourceStorageOffset(
    Tensor& self,
    c10::Storage source,
    int64_t offset,
    IntArrayRef size,
    IntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  const auto strides =
      stride.data() != nullptr && stride.size() == size.size()
          ? stride.vec()
          : [&] {
              auto contiguous = c10::contiguous_strides(size);
              return std::vector<int64_t>(contiguous.begin(), contiguous.end());
            }();
  impl->set_sizes_and_strides(size, strides, offset);
  if (self.numel() > 0) {
    growStorage(
        self,
        static_cast<size_t>(
            storageBytes(size, strides, self.element_size(), offset)));
  }
  return self;
}

Tensor& setSourceStorage(Tensor& self, c10::Storage source) {
  const auto elements =
      static_cast<int64_t>(source.nbytes() / self.element_size());
  return setSourceStorageOffset(self, std::move(source), 0, {elements}, {1});
}

Tensor& setSourceTensor(Tensor& self, const Tensor& source) {
  return setSourceStorageOffset(
      self,
      source.storage(),
      source.storage_offset(),
      source.sizes(),
      source.strides());
}

Tensor& setEmpty(Tensor& self) {
  c10::DeviceGuard guard(self.device());
  c10::Storage storage(
      c10::Storage::use_byte_size_t(),
      0,
      deviceAllocator()->allocate(0),
      deviceAllocator(),
      /*resizable=*/true);
  return setSourceStorageOffset(self, std::move(storage), 0, {0}, {});
}

Tensor copyFromAndResize(const Tensor& self, const Tensor& dst) {
  if (dst.sizes() != self.sizes()) {
    if (dst.device().is_cpu()) {
      dst.resize_(self.sizes());
    } else {
      resizeOp(dst, self.sizes(), std::nullopt);
    }
  }
  return copyFrom(self, dst, false);
}

c10::Scalar localScalarDense(const Tensor& self) {
  Tensor host =
      at::empty({}, self.options().device(at::kCPU).pinned_memory(false));
  copyFrom(self, host, false);
  return host.item();
}

Tensor& fillScalar(Tensor& self, const c10::Scalar& value) {
  if (self.numel() > 0) {
    launchOn(self, [target = kernelView(withoutBits(self)), value] {
      target.fill_(value);
    });
    if (self.is_conj() && value.isComplex()) {
      withoutBits(self).conj_physical_();
    }
    if (self.is_neg()) {
      withoutBits(self).neg_();
    }
  }
  return self;
}

Tensor& zero(Tensor& self) {
  return fillScalar(self, 0);
}

void recordStream(Tensor& self, c10::Stream stream) {
  c10::impl::VirtualGuardImpl(kRefdev).recordDataPtrOnStream(
      self.storage().data_ptr(), stream);
}

// Convolutions of a backend come through these two and not the fallback.

Tensor toHost(const Tensor& tensor) {
  StandingIn standing;
  return tensor.defined() ? tensor.to(at::kCPU) : tensor;
}

Tensor toDevice(const Tensor& tensor, c10::Device device) {
  StandingIn standing;
  return tensor.defined() ? tensor.to(device) : tensor;
}

Tensor convolution(
    const Tensor& input,
    const Tensor& weight,
    const std::optional<Tensor>& bias,
    IntArrayRef stride,
    IntArrayRef padding,
    IntArrayRef dilation,
    bool transposed,
    IntArrayRef output_padding,
    int64_t groups) {
  return toDevice(
      at::convolution(
          toHost(input),
          toHost(weight),
          toHost(bias.value_or(Tensor())),
          stride,
          padding,
          dilation,
          transposed,
          output_padding,
          groups),
      input.device());
}

std::tuple<Tensor, Tensor, Tensor> convolutionBackward(
    const Tensor& grad_output,
    const Tensor& input,
    const Tensor& weight,
    IntArrayRef stride,
    IntArrayRef padding,
    IntArrayRef dilation,
    bool transposed,
    IntArrayRef output_padding,
    int64_t groups,
    std::array<bool, 3> output_mask) {
  const int64_t outputs = transposed ? weight.size(1) * groups : weight.size(0);
  auto [grad_input, grad_weight, grad_bias] = at::convolution_backward(
      toHost(grad_output),
      toHost(input),
      toHost(weight),
      IntArrayRef{outputs},
      stride,
      padding,
      dilation,
      transposed,
      output_padding,
      groups,
      output_mask);
  return {
      toDevice(grad_input, input.device()),
      toDevice(grad_weight, input.device()),
      toDevice(grad_bias, input.device())};
}

// The device that an operator's arguments are on.
std::optional<int> deviceIn(const c10::Stack& stack, size_t begin) {
  for (size_t i = begin; i < stack.size(); ++i) {
    const c10::IValue& value = stack[i];
    if (value.isTensor()) {
      const Tensor& tensor = value.toTensor();
      if (tensor.defined() && tensor.device().type() == kRefdev) {
        return tensor.get_device();
      }
    } else if (value.isTensorList()) {
      for (const Tensor& tensor : value.toTensorVector()) {
        if (tensor.defined() && tensor.device().type() == kRefdev) {
          return tensor.get_device();
        }
      }
    }
  }
  return std::nullopt;
}

void fallback(const c10::OperatorHandle& op, c10::Stack* stack) {
  const auto& arguments = op.schema().arguments();
  const size_t begin = stack->size() - arguments.size();
  const int device = deviceIn(*stack, begin).value_or(currentDevice());
  c10::DeviceGuard guard(deviceAt(device));
  StandingIn standing;
  // A CPU operator takes a CPU generator; where none is given, the device's
  // own has to be the one that counts.
  for (size_t i = 0; i < arguments.size(); ++i) {
    const auto& type = *arguments[i].type();
    const bool is_generator =
        type.kind() == c10::TypeKind::GeneratorType ||
        (type.kind() == c10::TypeKind::OptionalType &&
         type.castRaw<c10::OptionalType>()->getElementType()->kind() ==
             c10::TypeKind::GeneratorType);
    if (!is_generator) {
      continue;
    }
    c10::IValue& value = (*stack)[begin + i];
    if (value.isNone()) {
      value = cpuTwin(defaultGenerator(device));
    } else if (value.toGenerator().device().type() == kRefdev) {
      value = cpuTwin(value.toGenerator());
    }
  }
  at::native::cpu_fallback(op, stack);
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

// Autocast is accepted and changes no type.
TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) {
  m.fallback(torch::CppFunction::makeFallthrough());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", &emptyMemoryFormat);
  m.impl("empty_strided", &emptyStridedOp);
  m.impl("as_strided", &at::native::as_strided_tensorimpl);
  m.impl("view", &at::native::view);
  m.impl("_reshape_alias", &at::native::_reshape_alias);
  m.impl("unfold", &at::native::unfold);
  m.impl("set_", &setEmpty);
  m.impl("set_.source_Storage", &setSourceStorage);
  m.impl("set_.source_Storage_storage_offset", &setSourceStorageOffset);
  m.impl("set_.source_Tensor", &setSourceTensor);
  m.impl("resize_", &resizeOp);
  m.impl("_copy_from", &copyFrom);
  m.impl("_copy_from_and_resize", &copyFromAndResize);
  m.impl("_local_scalar_dense", &localScalarDense);
  m.impl("fill_.Scalar", &fillScalar);
  m.impl("zero_", &zero);
  m.impl("record_stream", &recordStream);
  m.impl("convolution_overrideable", &convolution);
  m.impl("convolution_backward_overrideable", &convolutionBackward);
}

// The way of vendors who override the operators themselves.

bool ownIsPinned(const Tensor& self, std::optional<c10::Device> /*device*/) {
  ++ownKernelCalls().is_pinned;
  return self.device().is_cpu() && hostIsLocked(self.storage().data());
}

Tensor ownPinMemory(const Tensor& self, std::optional<c10::Device> /*device*/) {
  ++ownKernelCalls().pin_memory;
  const auto bytes = static_cast<size_t>(
      storageBytes(self.sizes(), self.strides(), self.element_size(), 0));
  c10::Storage storage(
      c10::Storage::use_byte_size_t(),
      bytes,
      pinnedAllocator()->allocate(bytes),
      pinnedAllocator(),
      /*resizable=*/false);
  Tensor result =
      at::empty({0}, self.options())
          .set_(std::move(storage), 0, self.sizes(), self.strides());
  result.copy_(self);
  return result;
}

void registerOwnKernels(c10::DispatchKey key) {
  // Leaked: its destructor would take the kernels away.
  auto* library =
      new torch::Library(torch::Library::IMPL, "aten", key, __FILE__, __LINE__);
  library->impl("is_pinned", &ownIsPinned);
  library->impl("_pin_memory", &ownPinMemory);
}

const bool own_kernels_registered = [] {
  if (broken("own_kernels")) {
    registerOwnKernels(
        REFDEV_PIN_OPS_DISPATCH_ON_DEVICE ? c10::DispatchKey::PrivateUse1
                                          : c10::DispatchKey::CPU);
  }
  if (broken("own_backend_select")) {
    registerOwnKernels(c10::DispatchKey::BackendSelect);
  }
  return true;
}();

} // namespace
} // namespace refdev
