#include <ATen/PinTarget.h>

#include <ATen/Base.h>
#include <ATen/Context.h>
#include <ATen/DeviceAccelerator.h>
#include <ATen/HostMemory.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/util/Type.h>

#include <atomic>
#include <typeinfo>

namespace at::pin {

namespace {

// Deleter of the memory that the PrivateUse1 host allocator hands out, learned
// from the first block. On releases whose hooks cannot be asked about an
// address it is what tells pinned memory from ordinary memory, because
// Allocator::raw_deleter() may legitimately be null.
std::atomic<c10::DeleterFnPtr> learnedDeleter{nullptr};

// Set once the backend's memory was seen to be recognised as pinned. Hooks can
// be registered only once per process, so the answer stays true.
std::atomic<c10::Allocator*> recognisedAllocator{nullptr};
std::atomic<c10::Allocator*> unrecognisedAllocator{nullptr};

std::string firstLine(const std::exception& error) {
  const auto* c10Error = dynamic_cast<const c10::Error*>(&error);
  std::string text =
      c10Error ? c10Error->what_without_backtrace() : error.what();
  return text.substr(0, text.find('\n'));
}

std::string backendName(c10::DeviceType type) {
  return c10::DeviceTypeName(type, /*lower_case=*/true);
}

// Whether a kernel that is neither the base's nor ours answers for `name`.
bool overriddenByBackend(const char* name) {
  auto op = c10::Dispatcher::singleton().findSchema({name, ""});
  if (!op.has_value()) {
    return false;
  }
#if TORCHPIN_BASE_HAS_GENERIC_PIN_KERNELS
  if (op->hasKernelForDispatchKey(c10::DispatchKey::BackendSelect)) {
    return true;
  }
  const std::string head = "\nCPU: registered at ";
#else
  if (op->hasKernelForDispatchKey(c10::DispatchKey::PrivateUse1)) {
    return true;
  }
  const std::string head = "\nBackendSelect: registered at ";
#endif
  // A vendor may have overridden the kernel that torchpin registered at the
  // same key. The dispatcher tells only in its dump who is active: the first
  // line for the key, with the file that registered it.
  const std::string dump = op->dumpState();
  const auto at = dump.find(head);
  if (at == std::string::npos) {
    return false;
  }
  const auto from = at + head.size();
  const std::string file = dump.substr(from, dump.find(':', from) - from);
  return file != "aten/src/ATen/native/PinMemory.cpp" &&
         file.find("RegisterBackendSelect.cpp") == std::string::npos;
}

bool isPlain(c10::Allocator* allocator) {
  if (allocator == c10::GetCPUAllocator() ||
      allocator == c10::GetDefaultCPUAllocator()) {
    return true;
  }
  const auto deleter = allocator->raw_deleter();
  return deleter != nullptr &&
         deleter == c10::GetDefaultCPUAllocator()->raw_deleter();
}

void lazyInit(c10::DeviceType type) {
#if TORCHPIN_BASE_HAS_LAZY_INIT_DEVICE
  at::globalContext().lazyInitDevice(type);
#else
  if (type == c10::kPrivateUse1) {
    at::globalContext().lazyInitPrivateUse1();
  } else if (type == c10::kCUDA) {
    at::globalContext().lazyInitCUDA();
  }
#endif
}

PinTarget lacking(PinTarget target, Lack lack, std::string reason) {
  target.lack = lack;
  target.reason = std::move(reason);
  return target;
}

bool recognises(void* block, c10::DeleterFnPtr deleter) {
#if TORCHPIN_BASE_HAS_GENERIC_PIN_KERNELS
  (void)deleter;
  return at::detail::getPrivateUse1Hooks().isPinnedPtr(block);
#else
  (void)block;
  return deleter != nullptr &&
         deleter != c10::GetDefaultCPUAllocator()->raw_deleter();
#endif
}

// Takes one small block to learn its deleter and whether the hooks recognise
// their own memory. Needs an initialised device.
bool recognisesOwnMemory(c10::Allocator* allocator) {
  c10::DataPtr block;
  try {
    block = allocator->allocate(64);
  } catch (const std::exception&) {
    // A refusal says nothing about recognition. Whoever pins next meets it
    // himself, and can still deliver ordinary memory.
    return true;
  }
  const bool recognised =
      block.get() != nullptr && recognises(block.get(), block.get_deleter());
  if (recognised) {
    learnedDeleter.store(block.get_deleter(), std::memory_order_release);
    recognisedAllocator.store(allocator, std::memory_order_release);
  } else {
    unrecognisedAllocator.store(allocator, std::memory_order_release);
  }
  return recognised;
}

// The allocator of a backend that pins by kernels of its own: factory functions
// can use it, but such a backend need not have one.
c10::Allocator* allocatorBesideKernels(Initialize initialize) {
  if (initialize == Initialize::No || !at::isPrivateUse1HooksRegistered()) {
    return nullptr;
  }
  lazyInit(c10::kPrivateUse1);
  try {
    auto* allocator =
        at::detail::getPrivateUse1Hooks().getPinnedMemoryAllocator();
    return allocator != nullptr && !isPlain(allocator) ? allocator : nullptr;
  } catch (const std::exception&) {
    return nullptr;
  }
}

PinTarget privateUse1Target(PinTarget target, Initialize initialize) {
  if (auto* supplied = suppliedHostAllocator(c10::kPrivateUse1)) {
    if (initialize == Initialize::Yes && at::isPrivateUse1HooksRegistered()) {
      lazyInit(c10::kPrivateUse1);
    }
    target.lack = Lack::Nothing;
    target.allocator = supplied;
    return target;
  }
  // Kernels and hooks are registered once, when a backend is imported, so what
  // has worked stays the answer, and a batch costs no second diagnosis.
  if (auto* known = recognisedAllocator.load(std::memory_order_acquire)) {
    target.lack = Lack::Nothing;
    target.allocator = known;
    return target;
  }
  const std::string name = backendName(c10::kPrivateUse1);
  if (overriddenByBackend("aten::_pin_memory")) {
    target.lack = Lack::Nothing;
    target.ownKernels = true;
    target.allocator = allocatorBesideKernels(initialize);
    return target;
  }
  if (!at::isPrivateUse1HooksRegistered()) {
    return lacking(
        std::move(target),
        Lack::Hooks,
        c10::str(
            "the backend '",
            name,
            "' has registered no hooks; it has to register a "
            "PrivateUse1HooksInterface with "
            "at::RegisterPrivateUse1HooksInterface "
            "that overrides getPinnedMemoryAllocator and isPinnedPtr"));
  }
  const auto& hooks = at::detail::getPrivateUse1Hooks();
  const std::string hooksName = c10::demangle(typeid(hooks).name());
  c10::Allocator* allocator = nullptr;
  if (initialize == Initialize::Yes) {
    lazyInit(c10::kPrivateUse1);
  }
  try {
    allocator = hooks.getPinnedMemoryAllocator();
  } catch (const std::exception& error) {
    return lacking(
        std::move(target),
        Lack::Allocator,
        c10::str(
            "the hooks of '",
            name,
            "' (",
            hooksName,
            ") supply no pinned-memory allocator: getPinnedMemoryAllocator "
            "raised \"",
            firstLine(error),
            "\"; the backend has to override it in C++ (hooks written in "
            "Python cannot)"));
  }
  if (allocator == nullptr) {
    return lacking(
        std::move(target),
        Lack::NullAllocator,
        c10::str(
            "getPinnedMemoryAllocator of the hooks of '",
            name,
            "' (",
            hooksName,
            ") returned null; it has to return an allocator of page-locked "
            "host memory"));
  }
  if (isPlain(allocator)) {
    return lacking(
        std::move(target),
        Lack::PlainAllocator,
        c10::str(
            "getPinnedMemoryAllocator of the hooks of '",
            name,
            "' (",
            hooksName,
            ") returned the ordinary CPU allocator, whose memory is not "
            "page-locked; it has to return an allocator of page-locked host "
            "memory, and isPinnedPtr has to recognise that memory"));
  }
  const bool recognised =
      initialize == Initialize::Yes
          ? recognisesOwnMemory(allocator)
          : unrecognisedAllocator.load(std::memory_order_acquire) != allocator;
  if (!recognised) {
    return lacking(
        std::move(target),
        Lack::Recognition,
        c10::str(
            "isPinnedPtr of the hooks of '",
            name,
            "' (",
            hooksName,
            ") does not recognise the memory that its own "
            "getPinnedMemoryAllocator allocates, so that it would be copied "
            "again at each use; it has to return true for any address in it"));
  }
  target.lack = Lack::Nothing;
  target.allocator = allocator;
  return target;
}

c10::Allocator* builtinAllocator(c10::DeviceType type, Initialize initialize) {
  // Asking the context starts the device, so a question that must not gets the
  // answer "ready" without the allocator.
  if (initialize == Initialize::No) {
    return nullptr;
  }
#if TORCHPIN_BASE_HAS_GENERIC_PIN_KERNELS
  lazyInit(type);
  return at::globalContext().getPinnedMemoryAllocator(type);
#else
  lazyInit(type);
  TORCH_CHECK(
      type == c10::kCUDA,
      "pinned memory for ",
      type,
      " is not supported by this release of PyTorch");
  return at::detail::getCUDAHooks().getPinnedMemoryAllocator();
#endif
}

// Whether CUDA was started on any device. Its runtime, asked about an address,
// makes a context where there is none; where there is none nothing is pinned.
bool cudaIsStarted() {
  static std::atomic<bool> started{false};
  if (started.load(std::memory_order_relaxed)) {
    return true;
  }
  try {
    const auto& hooks = at::detail::getCUDAHooks();
    const auto devices = static_cast<c10::DeviceIndex>(at::getNumGPUs());
    for (c10::DeviceIndex device = 0; device < devices; ++device) {
      if (hooks.hasPrimaryContext(device)) {
        started.store(true, std::memory_order_relaxed);
        return true;
      }
    }
    return false;
  } catch (const std::exception&) {
    // It cannot be told; then the base does what it does.
    return true;
  }
}

} // namespace

const char* lackName(Lack lack) {
  switch (lack) {
    case Lack::Nothing:
      return "nothing";
    case Lack::Accelerator:
      return "accelerator";
    case Lack::PinnedMemory:
      return "pinned_memory";
    case Lack::Hooks:
      return "hooks";
    case Lack::Allocator:
      return "allocator";
    case Lack::NullAllocator:
      return "null_allocator";
    case Lack::PlainAllocator:
      return "plain_allocator";
    case Lack::Recognition:
      return "recognition";
  }
  return "unknown";
}

PinTarget pinTarget(Initialize initialize) {
  PinTarget target;
  target.accelerator = at::getAccelerator(/*checked=*/false);
  if (!target.accelerator.has_value()) {
    return lacking(
        std::move(target), Lack::Accelerator, "no accelerator was found");
  }
  const auto type = *target.accelerator;
  if (type == c10::kPrivateUse1) {
    return privateUse1Target(std::move(target), initialize);
  }
  if (type == c10::kCUDA && !at::globalContext().hasCUDA()) {
    // What PyTorch was built for, on a machine that has none: newer releases
    // call it the accelerator all the same.
    target.accelerator.reset();
    return lacking(
        std::move(target),
        Lack::Accelerator,
        "no accelerator was found (this PyTorch is built for CUDA, but no CUDA "
        "device is available)");
  }
  if (type == c10::kMPS) {
    return lacking(
        std::move(target),
        Lack::PinnedMemory,
        "mps shares its memory with the CPU and has no pinned memory");
  }
  target.allocator = builtinAllocator(type, initialize);
  target.lack = Lack::Nothing;
  return target;
}

PinTarget requirePinTarget() {
  PinTarget target = pinTarget(Initialize::Yes);
  TORCH_CHECK(
      target.ready(),
      "Cannot pin memory for the current accelerator",
      target.accelerator.has_value()
          ? c10::str(" '", backendName(*target.accelerator), "'")
          : std::string(),
      ": ",
      target.reason,
      ".");
  return target;
}

bool isPinned(const c10::StorageImpl& storage) {
  const void* data = storage.data();
  const auto accelerator = at::getAccelerator(/*checked=*/false);
  if (data == nullptr || !accelerator.has_value()) {
    return false;
  }
  const auto& registry = HostMemoryRegistry::instance();
  if (registry.covers(data, storage.nbytes())) {
    return true;
  }
  if (registry.holds(data)) {
    // In part; the backend, asked about the first address, would say yes.
    return false;
  }
  if (*accelerator == c10::kCUDA && !cudaIsStarted()) {
    return false;
  }
  if (auto* supplied = suppliedHostAllocator(*accelerator)) {
    const auto* cache = dynamic_cast<HostMemoryCache*>(supplied);
    if (cache != nullptr && cache->owns(data)) {
      return true;
    }
  }
#if TORCHPIN_BASE_HAS_GENERIC_PIN_KERNELS
  if (*accelerator == c10::kPrivateUse1 &&
      !at::isPrivateUse1HooksRegistered()) {
    return false;
  }
  return at::globalContext().isPinnedPtr(data, accelerator);
#else
  if (*accelerator == c10::kPrivateUse1) {
    const auto deleter = storage.data_ptr().get_deleter();
    if (deleter == nullptr ||
        deleter == c10::GetDefaultCPUAllocator()->raw_deleter()) {
      return false;
    }
    if (deleter == learnedDeleter.load(std::memory_order_acquire)) {
      return true;
    }
    if (!at::isPrivateUse1HooksRegistered()) {
      return false;
    }
    try {
      auto* allocator =
          at::detail::getPrivateUse1Hooks().getPinnedMemoryAllocator();
      return allocator != nullptr && !isPlain(allocator) &&
             allocator->raw_deleter() == deleter;
    } catch (const std::exception&) {
      // Hooks without an allocator have pinned nothing.
      return false;
    }
  }
  return at::globalContext().isPinnedPtr(const_cast<void*>(data));
#endif
}

bool isPinned(const c10::StorageImpl& storage, const void* ptr, size_t bytes) {
  return isPinned(storage) || HostMemoryRegistry::instance().covers(ptr, bytes);
}

} // namespace at::pin
