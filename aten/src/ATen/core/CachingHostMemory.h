#pragma once

// The pinned-memory allocator for backends to adopt: caching, thread-safe,
// fork-safe, at most 1/8 over the size asked for. A backend includes this
// header, writes a class of four functions (see HostBlockCache.h) and returns
// the instance from its hooks:
//
//   struct MyRuntime {
//     void* allocate_host_memory(size_t bytes);
//     void free_host_memory(void* ptr, size_t bytes);
//     MyEvent record_event(c10::Stream stream);
//     bool query_event(MyEvent& event);
//     // optional: int numa_node(); size_t max_host_memory();
//   };
//   using MyHostMemory = at::pin::CachingHostMemory<MyRuntime>;
//
//   c10::Allocator* MyHooks::getPinnedMemoryAllocator() const {
//     return &MyHostMemory::instance();
//   }
//   bool MyHooks::isPinnedPtr(const void* ptr) const {
//     return MyHostMemory::instance().owns(ptr);
//   }
//
// and registers it where the base has at::HostAllocator (2.8 on):
//
//   MyHostMemory::install(c10::DeviceType::PrivateUse1);
//
// The header compiles against every base from 2.3 on and links with nothing of
// torchpin. Backends call instance().record_event(ptr, ctx, stream) for each
// asynchronous copy that uses host memory.

#include <ATen/Base.h>
#include <ATen/HostMemoryHooks.h>
#include <ATen/core/HostBlockCache.h>

#include <c10/core/Allocator.h>
#include <c10/core/Stream.h>
#include <c10/util/Exception.h>

#if TORCHPIN_BASE_HAS_HOST_ALLOCATOR
#include <ATen/core/CachingHostAllocator.h>
#endif

#include <algorithm>
#include <cctype>
#include <cstdlib>
#include <cstring>
#include <type_traits>
#include <utility>

namespace at::pin {
inline namespace host_cache_v1 {

namespace detail {

#if TORCHPIN_BASE_HAS_HOST_ALLOCATOR
using HostAllocatorOfBase = at::HostAllocator;

inline void copy_stat(
    const HostStat& from,
    c10::CachingAllocator::Stat& to) noexcept {
  to.current = from.current;
  to.peak = from.peak;
  to.allocated = from.allocated;
  to.freed = from.freed;
}

inline void copy_timing(
    const HostTiming& from,
    c10::CachingAllocator::DurationStat& to) noexcept {
  to.total = from.total;
  to.max = from.max;
  to.min = from.min;
  to.count = from.count;
}
#else
using HostAllocatorOfBase = c10::Allocator;
#endif

// Some runtimes throw PyTorch's own out-of-memory error where this cache
// expects null: the cache is then emptied and the call made once more.
template <class Runtime>
struct RefusalAsNull : Runtime {
  void* allocate_host_memory(size_t bytes) {
    try {
      return Runtime::allocate_host_memory(bytes);
    } catch (const c10::OutOfMemoryError&) {
      return nullptr;
    }
  }
};

// size_t max_host_memory() is optional in a runtime.
template <class Runtime, class = void>
struct MaxHostMemory {
  static size_t of(Runtime&) noexcept {
    return HostCacheLimits::kNone;
  }
};
template <class Runtime>
struct MaxHostMemory<
    Runtime,
    std::void_t<decltype(std::declval<Runtime&>().max_host_memory())>> {
  static size_t of(Runtime& runtime) {
    return runtime.max_host_memory();
  }
};

// The cap that the user set with TORCHPIN_MAX_HOST_MEMORY: bytes, or a number
// with one of K, M, G, T (powers of 1024) behind it. No cap, and a warning, if
// it is neither.
inline size_t max_host_memory_of_user() {
  const char* text = std::getenv("TORCHPIN_MAX_HOST_MEMORY");
  if (text == nullptr || *text == '\0') {
    return HostCacheLimits::kNone;
  }
  char* end = nullptr;
  const double number = std::strtod(text, &end);
  static constexpr char kUnits[] = "KMGT";
  double unit = 1;
  if (*end != '\0') {
    const char* found = std::strchr(kUnits, std::toupper(*end));
    unit =
        found ? static_cast<double>(size_t{1024} << 10 * (found - kUnits)) : 0;
    ++end;
  }
  if (end == text || *end != '\0' || !(number * unit >= 1) ||
      number * unit > static_cast<double>(c10::size_class::kLargest)) {
    TORCH_WARN(
        "TORCHPIN_MAX_HOST_MEMORY is '",
        text,
        "', which is not a number of bytes such as 500000000, 500M or 2G. "
        "Page-locked host memory is not capped.");
    return HostCacheLimits::kNone;
  }
  return static_cast<size_t>(number * unit);
}

} // namespace detail

template <class Runtime>
class CachingHostMemory final : public detail::HostAllocatorOfBase,
                                public HostMemoryCache {
 public:
  // Made at the first call and never destroyed: tensors may be freed after
  // static objects are gone, and what the driver holds goes with the process.
  static CachingHostMemory& instance() {
    static auto* const allocator = new CachingHostMemory();
    return *allocator;
  }

#if TORCHPIN_BASE_HAS_HOST_ALLOCATOR
  // Makes instance() what at::getHostAllocator(type) returns, which is what the
  // base's copies report to and what torch.accelerator.empty_host_cache()
  // empties. To be called while the backend's library is being loaded.
  static void install(c10::DeviceType type) {
    at::setHostAllocator(type, &instance());
  }
#else
  // The base has no registry of host allocators.
  static void install(c10::DeviceType /*type*/) {}
#endif

  // c10::Allocator. Throws c10::OutOfMemoryError with the size asked, the bytes
  // held, the cap and the limit of the process, after the cache was emptied and
  // the runtime asked once more.
  c10::DataPtr allocate(size_t bytes) override {
    void* ptr = nullptr;
    try {
      ptr = cache_.allocate(bytes);
    } catch (const HostOutOfMemory& error) {
      C10_THROW_ERROR(OutOfMemoryError, error.what());
    }
    return {ptr, ptr, &CachingHostMemory::free, c10::DeviceType::CPU};
  }

  // HostMemoryCache.
  size_t allocate_many(const size_t* bytes, size_t count, void** blocks)
      override {
    return cache_.allocate_many(bytes, count, blocks);
  }

  // The context of a DataPtr is its address, so that raw_allocate() works.
  c10::DeleterFnPtr raw_deleter() const override {
    return &CachingHostMemory::free;
  }

  void copy_data(void* dest, const void* src, std::size_t count)
      const override {
    std::memcpy(dest, src, count);
  }

  // HostMemoryCache and, with the same names, at::HostAllocator.
  bool record_event(void* ptr, void* ctx, c10::Stream stream) override {
    return cache_.record(ctx, stream) || cache_.record(ptr, stream);
  }

  void empty_cache() override {
    cache_.empty_cache();
  }

  void reset_accumulated_stats() override {
    cache_.reset_accumulated_stats();
  }

  void reset_peak_stats() override {
    cache_.reset_peak_stats();
  }

#if TORCHPIN_BASE_HAS_HOST_ALLOCATOR
  at::HostStats get_stats() override {
    const HostCacheStats from = cache_.stats();
    at::HostStats to;
#if TORCHPIN_BASE_AT_LEAST(2, 10)
    detail::copy_stat(from.active_requests, to.active_requests);
    detail::copy_stat(from.active_bytes, to.active_bytes);
    detail::copy_stat(from.allocations, to.allocations);
    detail::copy_stat(from.allocated_bytes, to.allocated_bytes);
#else
    detail::copy_stat(from.active_requests, to.allocation);
    detail::copy_stat(from.active_bytes, to.allocated_bytes);
    detail::copy_stat(from.allocations, to.segment);
    detail::copy_stat(from.allocated_bytes, to.reserved_bytes);
#endif
    detail::copy_timing(from.host_alloc_time, to.host_alloc_time);
    detail::copy_timing(from.host_free_time, to.host_free_time);
    to.num_host_alloc = from.num_host_alloc;
    to.num_host_free = from.num_host_free;
    return to;
  }
#endif

  void visit_stats(StatVisitor visit, void* argument) const override {
    visit_host_stats(cache_.stats(), visit, argument);
  }

  void set_limits(size_t locked_bytes, size_t cached_bytes) override {
    cache_.set_limits({locked_bytes, cached_bytes});
  }

  void get_limits(size_t* locked_bytes, size_t* cached_bytes) const override {
    const HostCacheLimits limits = cache_.limits();
    *locked_bytes = limits.locked;
    *cached_bytes = limits.cached;
  }

  // Also for hooks' isPinnedPtr(). Any address inside a block counts.
  bool owns(const void* address) const noexcept override {
    return cache_.owns(address);
  }

  // Unlocks unused memory until at most `cached_bytes` of it are left.
  void trim(size_t cached_bytes) {
    cache_.trim(cached_bytes);
  }

  Runtime& runtime() noexcept {
    return cache_.runtime();
  }

 private:
  CachingHostMemory() {
    HostCacheLimits limits;
    limits.locked = std::min(
        detail::MaxHostMemory<Runtime>::of(cache_.runtime()),
        detail::max_host_memory_of_user());
    cache_.set_limits(limits);
  }

  // The deleter of every DataPtr: records events and links lists, no more.
  // Needs no GIL and never throws.
  static void free(void* ctx) noexcept {
    instance().cache_.free(ctx);
  }

  mutable HostBlockCache<detail::RefusalAsNull<Runtime>, c10::Stream> cache_;
};

} // namespace host_cache_v1
} // namespace at::pin
