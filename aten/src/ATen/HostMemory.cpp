#include <ATen/HostMemory.h>

#include <ATen/Base.h>
#include <ATen/DeviceAccelerator.h>
#include <ATen/PinTarget.h>
#include <ATen/core/HostCacheStats.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/util/Exception.h>
#include <c10/util/Type.h>

#if TORCHPIN_BASE_HAS_HOST_ALLOCATOR
#include <ATen/core/CachingHostAllocator.h>
#endif

#include <dlfcn.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <mutex>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

namespace at::pin {

namespace {

std::string nameOf(std::optional<c10::DeviceType> type) {
  return type.has_value() ? c10::DeviceTypeName(*type, /*lower_case=*/true)
                          : std::string("none");
}

// ---- supply

using Bytes = std::pair<const void*, size_t>;

struct Shared {
  std::mutex mutex;
  std::array<HostMemorySupply, c10::COMPILE_TIME_MAX_DEVICE_TYPES> supplies;
  // Registered storages that keep their deleter, with what is registered.
  std::vector<std::pair<c10::Storage, std::vector<Bytes>>> kept;
  c10::AtForkInChild at_fork{&after_fork_in_child, this};

  // The mutex may have been held, and the vector half-written.
  static void after_fork_in_child(void* self) noexcept {
    auto& shared = *static_cast<Shared*>(self);
    new (&shared.mutex) std::mutex;
    new (&shared.kept) decltype(shared.kept);
  }
};

// Never destroyed: storages are freed late.
Shared& shared() {
  static auto* const object = new Shared();
  return *object;
}

std::array<std::atomic<c10::Allocator*>, c10::COMPILE_TIME_MAX_DEVICE_TYPES>
    suppliedAllocators{};

std::shared_ptr<const HostMemoryLocker> suppliedLocker(
    c10::DeviceType type,
    bool idle) {
  std::lock_guard<std::mutex> lock(shared().mutex);
  const auto& supply = shared().supplies[static_cast<size_t>(type)];
  return idle && supply.idleLocker ? supply.idleLocker : supply.locker;
}

HostMemoryHooks* hooksOf(c10::DeviceType type) {
  if (type != c10::kPrivateUse1 || !at::isPrivateUse1HooksRegistered()) {
    return nullptr;
  }
  // The base hands hooks out as const, and keeps what was not.
  auto* hooks = const_cast<PrivateUse1HooksInterface*>(
      &at::detail::getPrivateUse1Hooks());
  return dynamic_cast<HostMemoryHooks*>(hooks);
}

size_t granularityOf(const HostMemoryHooks& hooks) {
  const size_t granularity =
      hooks.abi_version() >= 2 ? hooks.host_memory_granularity() : 0;
  TORCH_CHECK(
      granularity <= 1 || granularity % c10::size_class::kPage == 0,
      "host_memory_granularity() of the hooks of the current accelerator is ",
      granularity,
      ". It must be 1, for a driver that takes any range, or 0 for whole "
      "pages.");
  return granularity == 0 ? c10::size_class::kPage : granularity;
}

std::shared_ptr<const HostMemoryLocker> requireLocker(bool idle) {
  const auto type = at::getAccelerator(/*checked=*/false);
  TORCH_CHECK_NOT_IMPLEMENTED(
      type.has_value(),
      "Cannot page-lock memory in place: no accelerator was found.");
  if (auto supplied = suppliedLocker(*type, idle)) {
    return supplied;
  }
  HostMemoryHooks* hooks = hooksOf(*type);
  TORCH_CHECK_NOT_IMPLEMENTED(
      hooks != nullptr,
      "Cannot page-lock memory in place for the current accelerator '",
      nameOf(type),
      "': its hooks do not derive from at::pin::HostMemoryHooks "
      "(ATen/HostMemoryHooks.h), and no functions were given to "
      "torchpin.register_host_memory_functions.");
  // Locking touches the device; let it say for itself why it cannot start.
  pinTarget(Initialize::Yes);
  static const auto ofHooks =
      std::make_shared<const HostMemoryLocker>(HostMemoryLocker{
          [hooks](void* ptr, size_t bytes) {
            return hooks->register_host_memory(ptr, bytes);
          },
          [hooks](void* ptr, size_t bytes) {
            hooks->unregister_host_memory(ptr, bytes);
          },
          granularityOf(*hooks)});
  return ofHooks;
}

// ---- the allocator

struct Answering {
  std::optional<c10::DeviceType> type;
  HostMemoryCache* cache = nullptr;
#if TORCHPIN_BASE_HAS_HOST_ALLOCATOR
  at::HostAllocator* allocator = nullptr;
#endif
};

#if TORCHPIN_BASE_HAS_HOST_ALLOCATOR
bool isStandIn(const c10::Allocator* allocator);
#endif

// Starts nothing.
Answering answering() {
  Answering answer;
  const PinTarget target = pinTarget(Initialize::No);
  answer.type = target.accelerator;
  if (!answer.type.has_value()) {
    return answer;
  }
  answer.cache = dynamic_cast<HostMemoryCache*>(target.allocator);
#if TORCHPIN_BASE_HAS_HOST_ALLOCATOR
  auto* registered = at::getHostAllocator(*answer.type);
  if (registered != nullptr && !isStandIn(registered)) {
    if (answer.cache == nullptr) {
      answer.cache = dynamic_cast<HostMemoryCache*>(registered);
    }
    answer.allocator = registered;
  }
#endif
  return answer;
}

#if TORCHPIN_BASE_HAS_HOST_ALLOCATOR

// Hands everything to the allocator that the hooks of the accelerator name.
struct StandInHostAllocator final : at::HostAllocator {
  static HostMemoryCache* cache() {
    return dynamic_cast<HostMemoryCache*>(pinTarget(Initialize::No).allocator);
  }

  c10::DataPtr allocate(size_t bytes) override {
    const PinTarget target = requirePinTarget();
    TORCH_CHECK(
        target.allocator != nullptr,
        "The backend '",
        nameOf(target.accelerator),
        "' pins by kernels of its own and has no host allocator.");
    return target.allocator->allocate(bytes);
  }
  void copy_data(void* dest, const void* src, std::size_t count)
      const override {
    default_copy_data(dest, src, count);
  }
  bool record_event(void* ptr, void* ctx, c10::Stream stream) override {
    auto* to = cache();
    return to != nullptr && to->record_event(ptr, ctx, stream);
  }
  void empty_cache() override {
    if (auto* to = cache()) {
      to->empty_cache();
    }
  }
  void reset_accumulated_stats() override {
    if (auto* to = cache()) {
      to->reset_accumulated_stats();
    }
  }
  void reset_peak_stats() override {
    if (auto* to = cache()) {
      to->reset_peak_stats();
    }
  }
  at::HostStats get_stats() override {
    // Who asks through here knows at::HostStats and no more than zeros where
    // the backend has no statistics; the full ones are in visitHostMemoryStats.
    return {};
  }
};

StandInHostAllocator& standIn() {
  static auto* const allocator = new StandInHostAllocator();
  return *allocator;
}

bool isStandIn(const c10::Allocator* allocator) {
  return allocator == &standIn();
}

void visitStats(
    const at::HostStats& from,
    HostMemoryCache::StatVisitor visit,
    void* argument) {
  const auto stat = [](const c10::CachingAllocator::Stat& of) {
    return HostStat{of.current, of.peak, of.allocated, of.freed};
  };
  const auto timing = [](const c10::CachingAllocator::DurationStat& of) {
    return HostTiming{of.total, of.max, of.min, of.count};
  };
  HostCacheStats to;
#if TORCHPIN_BASE_AT_LEAST(2, 10)
  to.active_requests = stat(from.active_requests);
  to.active_bytes = stat(from.active_bytes);
  to.allocations = stat(from.allocations);
  to.allocated_bytes = stat(from.allocated_bytes);
#else
  to.active_requests = stat(from.allocation);
  to.active_bytes = stat(from.allocated_bytes);
  to.allocations = stat(from.segment);
  to.allocated_bytes = stat(from.reserved_bytes);
#endif
  to.host_alloc_time = timing(from.host_alloc_time);
  to.host_free_time = timing(from.host_free_time);
  to.num_host_alloc = from.num_host_alloc;
  to.num_host_free = from.num_host_free;
  struct Filter {
    HostMemoryCache::StatVisitor visit;
    void* argument;
  } filter{visit, argument};
  // What the base does not count is left out, not zero.
  visit_host_stats(
      to,
      [](void* self, const char* key, int64_t value) {
        for (const char* unknown :
             {"requested_bytes",
              "num_alloc_retries",
              "num_lost_blocks",
              "num_ooms"}) {
          if (std::strncmp(key, unknown, std::strlen(unknown)) == 0) {
            return;
          }
        }
        const auto* to = static_cast<Filter*>(self);
        to->visit(to->argument, key, value);
      },
      &filter);
}

#endif // TORCHPIN_BASE_HAS_HOST_ALLOCATOR

// Before at::HostAllocator the host allocator of CUDA is a few functions of
// libtorch_cuda, which a build without CUDA does not have and this library must
// not be linked to. Without a block of memory they do not touch CUDA. False
// where there is no such function.
bool tellCUDA(const char* mangledName) {
  void* library = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
  if (library == nullptr) {
    return false;
  }
  auto* function = reinterpret_cast<void (*)()>(dlsym(library, mangledName));
  if (function != nullptr) {
    function();
  }
  dlclose(library);
  return function != nullptr;
}

// Has `method` called with whoever answers, or the function of CUDA on bases
// where nobody does. False if there is neither.
template <class Method>
bool tell(Method method, const char* ofCUDA) {
  const Answering answer = answering();
  if (answer.cache != nullptr) {
    method(*answer.cache);
    return true;
  }
#if TORCHPIN_BASE_HAS_HOST_ALLOCATOR
  if (answer.allocator != nullptr) {
    method(*answer.allocator);
    return true;
  }
#endif
  return answer.type == c10::kCUDA && tellCUDA(ofCUDA);
}

// `asked` says for what, in an error.
HostMemoryCache& requireCache(const std::string& asked) {
  const Answering answer = answering();
  TORCH_CHECK_NOT_IMPLEMENTED(
      answer.type.has_value(),
      asked,
      " was asked for, but there is no host allocator: no accelerator was "
      "found.");
  TORCH_CHECK_NOT_IMPLEMENTED(
      answer.cache != nullptr || answer.type == c10::kPrivateUse1,
      asked,
      " was asked for, but the host allocator of the current accelerator '",
      nameOf(answer.type),
      "' is PyTorch's own, which has no cap on what it page-locks. "
      "torchpin.empty_host_cache() gives back what is unused; from 2.13 on "
      "PYTORCH_ALLOC_CONF=pinned_max_cached_size_mb:N in the environment keeps "
      "freed blocks of more than N MiB from being kept.");
  TORCH_CHECK_NOT_IMPLEMENTED(
      answer.cache != nullptr,
      asked,
      " was asked for, but the host allocator of the current accelerator '",
      nameOf(answer.type),
      "' has no cap: it does not derive from at::pin::HostMemoryCache "
      "(ATen/HostMemoryHooks.h). Its backend can use "
      "at::pin::CachingHostMemory, which does.");
  return *answer.cache;
}

// ---- storages

// The context of a registered storage.
struct Registered {
  c10::DataPtr original;
  std::vector<Bytes> ranges;
};

void giveUp(void* context) {
  // `original` goes last, after the ranges in it are unlocked.
  std::unique_ptr<Registered> registered(static_cast<Registered*>(context));
  for (const auto& [ptr, bytes] : registered->ranges) {
    HostMemoryRegistry::instance().unregister_range(ptr, bytes);
  }
}

Registered* registeredOf(const c10::Storage& storage) {
  return static_cast<Registered*>(
      storage.data_ptr().get_deleter() == &giveUp
          ? storage.data_ptr().get_context()
          : nullptr);
}

// On newer bases a storage that has a Python object counts one reference from
// it, and the object lives as long as the storage; older ones count none.
template <class Slot, class = void>
struct PythonObject {
  static bool isOnlyKept(const Slot& /*slot*/) {
    return false;
  }
};
template <class Slot>
struct PythonObject<
    Slot,
    std::void_t<decltype(std::declval<const Slot&>().has_unique_reference())>> {
  static bool isOnlyKept(const Slot& slot) {
    return slot.has_unique_reference();
  }
};

bool heldByNobodyElse(const c10::Storage& storage) {
  const auto count = storage.use_count();
  const auto* slot = storage.unsafeGetStorageImpl()->pyobj_slot();
  return count == 1 ||
         (count == 2 &&
          PythonObject<std::decay_t<decltype(*slot)>>::isOnlyKept(*slot));
}

// Remembers that `bytes` are registered for this storage.
void follow(const c10::Storage& storage, Bytes bytes, bool keep) {
  std::lock_guard<std::mutex> lock(shared().mutex);
  if (keep) {
    for (auto& [kept, ranges] : shared().kept) {
      if (kept.unsafeGetStorageImpl() == storage.unsafeGetStorageImpl()) {
        ranges.push_back(bytes);
        return;
      }
    }
    shared().kept.emplace_back(storage, std::vector<Bytes>{bytes});
    return;
  }
  Registered* registered = registeredOf(storage);
  if (registered == nullptr) {
    auto* impl = storage.unsafeGetStorageImpl();
    auto fresh = std::make_unique<Registered>();
    registered = fresh.get();
    registered->ranges.push_back(bytes);
    const auto& data = impl->mutable_data_ptr();
    c10::DataPtr replacement(
        data.get(), fresh.release(), &giveUp, data.device());
    registered->original = impl->set_data_ptr(std::move(replacement));
    return;
  }
  registered->ranges.push_back(bytes);
}

// Undoes one follow(). False if there was none. What it returns in `holds`
// keeps the memory until the caller has unlocked it.
struct Holds {
  c10::Storage storage;
  c10::DataPtr replaced;
};

bool unfollow(const c10::Storage& storage, Bytes bytes, Holds& holds) {
  std::lock_guard<std::mutex> lock(shared().mutex);
  const auto remove = [&](std::vector<Bytes>& ranges) {
    const auto found = std::find(ranges.begin(), ranges.end(), bytes);
    if (found == ranges.end()) {
      return false;
    }
    ranges.erase(found);
    return true;
  };
  auto& kept = shared().kept;
  for (auto it = kept.begin(); it != kept.end(); ++it) {
    if (it->first.unsafeGetStorageImpl() == storage.unsafeGetStorageImpl()) {
      const bool removed = remove(it->second);
      if (it->second.empty()) {
        holds.storage = std::move(it->first);
        kept.erase(it);
      }
      return removed;
    }
  }
  Registered* registered = registeredOf(storage);
  if (registered == nullptr || !remove(registered->ranges)) {
    return false;
  }
  if (registered->ranges.empty()) {
    holds.replaced = storage.unsafeGetStorageImpl()->set_data_ptr(
        std::move(registered->original));
  }
  return true;
}

} // namespace

void setHostMemorySupply(c10::DeviceType type, HostMemorySupply supply) {
  std::lock_guard<std::mutex> lock(shared().mutex);
  suppliedAllocators[static_cast<size_t>(type)].store(
      supply.allocator, std::memory_order_release);
  shared().supplies[static_cast<size_t>(type)] = std::move(supply);
}

c10::Allocator* suppliedHostAllocator(c10::DeviceType type) noexcept {
  return suppliedAllocators[static_cast<size_t>(type)].load(
      std::memory_order_acquire);
}

bool visitHostMemoryStats(HostMemoryCache::StatVisitor visit, void* argument) {
  const Answering answer = answering();
  if (answer.cache != nullptr) {
    answer.cache->visit_stats(visit, argument);
    return true;
  }
#if TORCHPIN_BASE_HAS_HOST_ALLOCATOR
  if (answer.allocator != nullptr) {
    visitStats(answer.allocator->get_stats(), visit, argument);
    return true;
  }
#endif
  return false;
}

std::optional<size_t> hostMemoryHeld() {
  std::optional<size_t> held;
  visitHostMemoryStats(
      [](void* to, const char* key, int64_t value) {
        if (std::strcmp(key, "allocated_bytes.current") == 0) {
          *static_cast<std::optional<size_t>*>(to) =
              static_cast<size_t>(std::max<int64_t>(value, 0));
        }
      },
      &held);
  return held;
}

bool resetPeakHostMemoryStats() {
  return tell(
      [](auto& allocator) { allocator.reset_peak_stats(); },
      "_ZN2at4cuda35CachingHostAllocator_resetPeakStatsEv");
}

bool resetAccumulatedHostMemoryStats() {
  return tell(
      [](auto& allocator) { allocator.reset_accumulated_stats(); },
      "_ZN2at4cuda42CachingHostAllocator_resetAccumulatedStatsEv");
}

bool emptyHostMemoryCache() {
  releaseRegisteredHostMemory();
  return tell(
      [](auto& allocator) { allocator.empty_cache(); },
      "_ZN2at4cuda31CachingHostAllocator_emptyCacheEv");
}

void setMaxHostMemory(size_t bytes) {
  HostMemoryCache& cache = requireCache(
      bytes == SIZE_MAX ? std::string("No cap on page-locked host memory")
                        : "A cap of " + std::to_string(bytes) +
                              " bytes on page-locked host memory");
  size_t locked = 0;
  size_t cached = 0;
  cache.get_limits(&locked, &cached);
  cache.set_limits(bytes, cached);
}

size_t maxHostMemory() {
  size_t locked = 0;
  size_t cached = 0;
  requireCache("The cap on page-locked host memory")
      .get_limits(&locked, &cached);
  return locked;
}

bool recordHostMemoryUse(void* ptr, void* ctx, c10::Stream stream) {
  const Answering answer = answering();
#if TORCHPIN_BASE_HAS_HOST_ALLOCATOR
  // Whoever wants to see host use stands in front of the cache.
  if (answer.allocator != nullptr) {
    return answer.allocator->record_event(ptr, ctx, stream);
  }
#endif
  return answer.cache != nullptr &&
         answer.cache->record_event(ptr, ctx, stream);
}

void registerHostMemory(const void* ptr, size_t bytes, bool idle) {
  if (bytes == 0) {
    return;
  }
  releaseRegisteredHostMemory();
  const auto locker = requireLocker(idle);
  try {
    HostMemoryRegistry::instance().register_range(locker, ptr, bytes);
  } catch (const HostMemoryRefused& error) {
    TORCH_CHECK(false, error.what());
  }
}

bool unregisterHostMemory(const void* ptr, size_t bytes) {
  return HostMemoryRegistry::instance().unregister_range(ptr, bytes);
}

void registerHostMemory(
    const c10::Storage& storage,
    const void* ptr,
    size_t bytes,
    bool keep) {
  if (bytes == 0) {
    return;
  }
  // A lazy copy is made now, so that the address stays.
  storage.unsafeGetStorageImpl()->mutable_data_ptr();
  registerHostMemory(ptr, bytes);
  try {
    follow(storage, {ptr, bytes}, keep);
  } catch (...) {
    HostMemoryRegistry::instance().unregister_range(ptr, bytes);
    throw;
  }
}

bool unregisterHostMemory(
    const c10::Storage& storage,
    const void* ptr,
    size_t bytes) {
  Holds holds;
  const bool registered = unfollow(storage, {ptr, bytes}, holds);
  if (registered) {
    HostMemoryRegistry::instance().unregister_range(ptr, bytes);
  }
  releaseRegisteredHostMemory();
  return registered;
}

void releaseRegisteredHostMemory() {
  std::vector<std::pair<c10::Storage, std::vector<Bytes>>> alone;
  {
    std::lock_guard<std::mutex> lock(shared().mutex);
    auto& kept = shared().kept;
    for (auto it = kept.begin(); it != kept.end();) {
      if (heldByNobodyElse(it->first)) {
        alone.push_back(std::move(*it));
        it = kept.erase(it);
      } else {
        ++it;
      }
    }
  }
  for (const auto& [storage, ranges] : alone) {
    for (const auto& [ptr, bytes] : ranges) {
      HostMemoryRegistry::instance().unregister_range(ptr, bytes);
    }
  }
}

#if TORCHPIN_BASE_HAS_HOST_ALLOCATOR

void registerStandInHostAllocator() {
  if (at::getHostAllocator(c10::kPrivateUse1) == nullptr) {
    at::setHostAllocator(c10::kPrivateUse1, &standIn());
  }
}

void deregisterStandInHostAllocator() {
  if (at::getHostAllocator(c10::kPrivateUse1) == &standIn()) {
    at::setHostAllocator(c10::kPrivateUse1, nullptr);
  }
}

#else

void registerStandInHostAllocator() {}
void deregisterStandInHostAllocator() {}

#endif

} // namespace at::pin
