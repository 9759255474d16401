#include <ATen/native/PinMemory.h>

#include <ATen/Base.h>
#include <ATen/Context.h>
#include <ATen/DeviceAccelerator.h>
#include <ATen/EmptyTensor.h>
#include <ATen/HostMemoryHooks.h>
#include <ATen/MemoryOverlap.h>
#include <ATen/PinTarget.h>
#include <ATen/core/HostCacheStats.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/native/TensorFactories.h>
#include <ATen/ops/empty_cpu_dispatch.h>
#include <ATen/ops/empty_native.h>
#include <ATen/ops/empty_strided_native.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include <cstring>
#include <memory>
#include <mutex>

// Note [Where the pin kernels sit]
// From 2.5 on the base has one CompositeExplicitAutograd kernel for each
// operator. A kernel at the CPU key is more specific, so ours answers without
// overriding anything, and a vendor's kernel at BackendSelect is asked before
// it, whatever was imported first.
// Up to 2.4 the base chooses among per-backend kernels at BackendSelect, by the
// device argument, and takes a missing one for CUDA. Ours replaces that choice:
// the current accelerator's own kernel where there is one, else its hooks. The
// dispatcher lets the latest registration win; torchpin registers as `import
// torch` ends, before a vendor's package can, and stays away if one got there
// first.
//
// Note [Factory functions that ask for pinned memory]
// The base's factories ask the hooks without looking at the answer: a backend
// whose hooks return null crashes the process there, and one without an
// allocator makes `tensor.to("cpu", non_blocking=True)` raise. The kernels of
// empty and empty_strided at the CPU key pass every request that does not ask
// for pinned memory straight on.

namespace at::pin {

namespace {

bool is_pinned_dense(const Tensor& self, std::optional<Device> /*device*/) {
  if (!self.is_cpu() || !self.has_storage()) {
    return false;
  }
  const auto& storage = *self.storage().unsafeGetStorageImpl();
  if (storage.data() == nullptr || self.is_nested()) {
    return isPinned(storage); // a nested tensor has no strides
  }
  const auto itemsize = self.dtype().itemsize();
  return isPinned(
      storage,
      static_cast<const char*>(storage.data()) +
          self.storage_offset() * itemsize,
      detail::computeStorageNbytes(self.sizes(), self.strides(), itemsize));
}

Storage pinned_storage(size_t bytes, c10::Allocator* allocator) {
  try {
    return Storage(
        Storage::use_byte_size_t(), bytes, allocator, /*resizable=*/false);
  } catch (c10::Error& error) {
    // The type stays; allocators that are not ours leave the limit out.
    if (dynamic_cast<HostMemoryCache*>(allocator) == nullptr) {
      error.add_context(
          c10::str(
              "Asked to pin ",
              host_bytes_text(bytes),
              ". ",
              locked_memory_limit_text()));
    }
    throw;
  }
}

Tensor pin_memory_dense(const Tensor& self, std::optional<Device> /*device*/) {
  TORCH_CHECK(
      self.is_cpu(),
      "cannot pin a tensor on ",
      self.device(),
      ": only dense CPU tensors can be pinned");
  TORCH_CHECK_NOT_IMPLEMENTED(
      self.layout() == kStrided,
      "cannot pin a tensor of layout ",
      self.layout(),
      ": only dense CPU tensors can be pinned");
  const PinTarget target = requirePinTarget();
  TORCH_CHECK(
      target.allocator != nullptr,
      "cannot pin memory: the accelerator's backend overrides "
      "aten::_pin_memory, its kernel left the work to PyTorch's, and its hooks "
      "supply no allocator for that");
  const auto bytes = detail::computeStorageNbytes(
      self.sizes(), self.strides(), self.dtype().itemsize());
  auto storage = pinned_storage(bytes, target.allocator);
  auto pinned = at::cpu::empty({0}, self.options())
                    .set_(storage, 0, self.sizes(), self.strides());
  if (at::has_internal_overlap(self) == MemOverlap::Yes) {
    // An expanded tensor: copy_ refuses to write where several elements are
    // one.
    std::memcpy(pinned.data_ptr(), self.const_data_ptr(), bytes);
  } else {
    pinned.copy_(self);
  }
  return pinned;
}

#if !TORCHPIN_BASE_HAS_GENERIC_PIN_KERNELS

// Runs the accelerator's own kernel of `name`, if it has one. That of CUDA is
// the base's, and ours knows more.
template <typename Return>
std::optional<Return> accelerator_kernel(const char* name, const Tensor& self) {
  const auto accelerator = at::getAccelerator(/*checked=*/false);
  if (!accelerator.has_value() || *accelerator == c10::kCUDA) {
    return std::nullopt;
  }
  const auto key = c10::computeDispatchKey(
      std::nullopt, self.layout(), Device(*accelerator));
  const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(name, "");
  if (!op.hasKernelForDispatchKey(key)) {
    return std::nullopt;
  }
  return op.typed<Return(const Tensor&, std::optional<Device>)>().redispatch(
      c10::DispatchKeySet(key), self, Device(*accelerator));
}

bool is_pinned_select(const Tensor& self, std::optional<Device> device) {
  if (self.is_nested()) {
    // Cannot be asked for its layout.
    return is_pinned_dense(self, device);
  }
  if (!self.is_cpu() || self.layout() != kStrided) {
    return false;
  }
  if (auto pinned = accelerator_kernel<bool>("aten::is_pinned", self)) {
    return *pinned;
  }
  return is_pinned_dense(self, device);
}

Tensor _pin_memory_select(const Tensor& self, std::optional<Device> device) {
  if (self.is_nested()) {
    // Pins the buffer, so it is back here in a moment.
    const auto op =
        c10::Dispatcher::singleton().findSchemaOrThrow("aten::_pin_memory", "");
    return op.typed<Tensor(const Tensor&, std::optional<Device>)>().redispatch(
        c10::DispatchKeySet(c10::DispatchKey::NestedTensorCPU), self, device);
  }
  if (auto pinned = accelerator_kernel<Tensor>("aten::_pin_memory", self)) {
    return *std::move(pinned);
  }
  return pin_memory_dense(self, device);
}

#endif // !TORCHPIN_BASE_HAS_GENERIC_PIN_KERNELS

// Where the memory of a factory function that asks for pinned memory comes
// from.
struct FactoryMemory {
  c10::Allocator* allocator = nullptr;
  // No allocator, but kernels of the backend's own: pin what was made.
  bool pinAfterwards = false;
};

// Throws if there is no accelerator at all. An incomplete backend gets ordinary
// memory and a warning.
FactoryMemory factoryMemory() {
  const PinTarget target = pinTarget(Initialize::Yes);
  if (target.ready()) {
    return {target.allocator, target.allocator == nullptr};
  }
  if (target.lack == Lack::Accelerator) {
    requirePinTarget();
  }
  TORCH_WARN_ONCE(
      "pin_memory=True was asked for, but ordinary memory is used: ",
      target.reason,
      ".");
  return {};
}

// As every factory of the base does: see torch.utils.deterministic.
Tensor filled(Tensor result) {
  if (C10_UNLIKELY(
          at::globalContext().deterministicAlgorithms() &&
          at::globalContext().deterministicFillUninitializedMemory())) {
    at::native::fill_empty_deterministic_(result);
  }
  return result;
}

Tensor empty_memory_format(
    IntArrayRef size,
    std::optional<ScalarType> dtype,
    std::optional<Layout> layout,
    std::optional<Device> device,
    std::optional<bool> pin_memory,
    std::optional<MemoryFormat> memory_format) {
  if (C10_LIKELY(!pin_memory.value_or(false))) {
    return at::native::empty_cpu(
        size, dtype, layout, device, pin_memory, memory_format);
  }
  const auto memory = factoryMemory();
  if (memory.allocator == nullptr) {
    auto plain = at::native::empty_cpu(
        size, dtype, layout, device, /*pin_memory=*/false, memory_format);
    return memory.pinAfterwards ? plain.pin_memory() : plain;
  }
  return filled(
      at::detail::empty_generic(
          size,
          memory.allocator,
          c10::DispatchKeySet(c10::DispatchKey::CPU),
          c10::dtype_or_default(dtype),
          memory_format));
}

Tensor empty_strided(
    IntArrayRef size,
    IntArrayRef stride,
    std::optional<ScalarType> dtype,
    std::optional<Layout> layout,
    std::optional<Device> device,
    std::optional<bool> pin_memory) {
  if (C10_LIKELY(!pin_memory.value_or(false))) {
    return at::native::empty_strided_cpu(
        size, stride, dtype, layout, device, pin_memory);
  }
  const auto memory = factoryMemory();
  if (memory.allocator == nullptr) {
    auto plain = at::native::empty_strided_cpu(
        size, stride, dtype, layout, device, /*pin_memory=*/false);
    return memory.pinAfterwards ? plain.pin_memory() : plain;
  }
  return filled(
      at::detail::empty_strided_generic(
          size,
          stride,
          memory.allocator,
          c10::DispatchKeySet(c10::DispatchKey::CPU),
          c10::dtype_or_default(dtype)));
}

std::mutex registrationMutex;
std::unique_ptr<torch::Library> pinKernels;
std::unique_ptr<torch::Library> factoryKernels;
// Where memory is does not depend on how its bits are read; the base's fallback
// would ask about a resolved copy, which is never pinned.
std::unique_ptr<torch::Library> conjugateKernels;
std::unique_ptr<torch::Library> negativeKernels;

// Drops warnings; the dispatcher reports an overridden kernel as one.
class QuietHandler final : public c10::WarningHandler {
 public:
  void process(const c10::Warning& /*warning*/) override {}
};

// Whether the kernel that answers for `name` at the key of ours is the base's.
bool baseAnswers(const char* name) {
  const auto op = c10::Dispatcher::singleton().findSchemaOrThrow(name, "");
#if TORCHPIN_BASE_HAS_GENERIC_PIN_KERNELS
  return !op.hasKernelForDispatchKey(c10::DispatchKey::CPU);
#else
  return op.dumpState().find(
             "BackendSelect: registered at "
             "aten/src/ATen/RegisterBackendSelect.cpp") != std::string::npos;
#endif
}

} // namespace

void registerPinKernels() {
  std::lock_guard<std::mutex> lock(registrationMutex);
  if (factoryKernels) {
    return;
  }
  QuietHandler quiet;
  c10::WarningUtils::WarningHandlerGuard guard(&quiet);
#if TORCHPIN_BASE_HAS_GENERIC_PIN_KERNELS
  pinKernels = std::make_unique<torch::Library>(
      torch::Library::IMPL, "aten", c10::DispatchKey::CPU, __FILE__, __LINE__);
  if (baseAnswers("aten::is_pinned") && baseAnswers("aten::_pin_memory")) {
    pinKernels->impl("is_pinned", TORCH_FN(is_pinned_dense));
    pinKernels->impl("_pin_memory", TORCH_FN(pin_memory_dense));
  }
#else
  pinKernels = std::make_unique<torch::Library>(
      torch::Library::IMPL,
      "aten",
      c10::DispatchKey::BackendSelect,
      __FILE__,
      __LINE__);
  if (baseAnswers("aten::is_pinned") && baseAnswers("aten::_pin_memory")) {
    pinKernels->impl("is_pinned", TORCH_FN(is_pinned_select));
    pinKernels->impl("_pin_memory", TORCH_FN(_pin_memory_select));
  }
#endif
  factoryKernels = std::make_unique<torch::Library>(
      torch::Library::IMPL, "aten", c10::DispatchKey::CPU, __FILE__, __LINE__);
  factoryKernels->impl("empty.memory_format", TORCH_FN(empty_memory_format));
  factoryKernels->impl("empty_strided", TORCH_FN(empty_strided));
  conjugateKernels = std::make_unique<torch::Library>(
      torch::Library::IMPL,
      "aten",
      c10::DispatchKey::Conjugate,
      __FILE__,
      __LINE__);
  conjugateKernels->impl("is_pinned", torch::CppFunction::makeFallthrough());
  negativeKernels = std::make_unique<torch::Library>(
      torch::Library::IMPL,
      "aten",
      c10::DispatchKey::Negative,
      __FILE__,
      __LINE__);
  negativeKernels->impl("is_pinned", torch::CppFunction::makeFallthrough());
}

void deregisterPinKernels() {
  std::lock_guard<std::mutex> lock(registrationMutex);
  pinKernels.reset();
  factoryKernels.reset();
  conjugateKernels.reset();
  negativeKernels.reset();
}

} // namespace at::pin
