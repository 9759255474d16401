#pragma once

// What a backend may offer beyond the hooks of its base. Its hooks object (the
// PrivateUse1HooksInterface that it registers) or its pinned-memory allocator
// (the c10::Allocator that those hooks return) also derives from one of these
// classes, and torchpin finds it by dynamic_cast. There is nothing to link and
// no order of loading: classes of two libraries are the same class to
// dynamic_cast when their names are equal.
//
// This header needs no other header of torchpin or PyTorch. The order of the
// virtual functions is part of the binary interface: new ones go to the end and
// raise the version, and whoever calls one looks at abi_version() first.

#include <cstddef>
#include <cstdint>

namespace c10 {
class Stream;
}

namespace at::pin {

// For a backend that can page-lock memory which it did not allocate. Derived
// from by the hooks object.
class HostMemoryHooks {
 public:
  // Which of the functions below the backend was compiled with.
  static constexpr uint32_t kAbiVersion = 2;
  virtual uint32_t abi_version() const {
    return kAbiVersion;
  }

  virtual ~HostMemoryHooks() = default;

  // Page-locks [ptr, ptr + bytes) for the accelerator, whatever memory it is:
  // private, or shared between processes. Both are multiples of
  // host_memory_granularity(), the memory is mapped and readable, and no byte
  // of it is page-locked through here already. Returns false when the driver
  // refuses; the caller then behaves as if it had not asked, so the driver must
  // be left without a pending error. May throw instead, to say why. Called
  // without the GIL and without locks of torchpin, from any thread.
  virtual bool register_host_memory(void* ptr, size_t bytes) = 0;

  // Undoes exactly one earlier call with the same arguments. The memory is
  // still mapped. Must not return before the accelerator has stopped using it.
  virtual void unregister_host_memory(void* ptr, size_t bytes) noexcept = 0;

  // Whether the driver knows the page of `ptr` as page-locked: 1 yes, 0 no,
  // -1 it cannot tell. Used by tests and diagnosis only.
  virtual int is_host_memory_registered(const void* /*ptr*/) const noexcept {
    return -1;
  }

  // Whether every asynchronous copy from or to host memory is reported to
  // at::getHostAllocator(type)->record_event before the call that started it
  // returns. Without that nobody but the backend can know when registered
  // memory may be written again.
  virtual bool copies_record_events() const noexcept {
    return false;
  }

  // Version 2. What begin and size of the ranges above are multiples of: 1, for
  // a driver that takes any range and counts how many ranges use a page, or 0
  // for the page size of the system. Pages that belong to other memory as well
  // take calls of their own then.
  virtual size_t host_memory_granularity() const noexcept {
    return 0;
  }
};

// For a pinned-memory allocator that keeps a cache. Derived from by the
// c10::Allocator; at::pin::CachingHostMemory is one. Where the base has
// at::HostAllocator (2.8) the functions of the same name there are these.
class HostMemoryCache {
 public:
  static constexpr uint32_t kAbiVersion = 2;
  virtual uint32_t abi_version() const {
    return kAbiVersion;
  }

  virtual ~HostMemoryCache() = default;

  // Unlocks and returns what no tensor and no running copy uses.
  virtual void empty_cache() = 0;

  // Keeps the block that holds `ctx`, or else `ptr`, from being used again
  // before what is on `stream` now has finished. Any address inside the block
  // will do. False, and nothing done, for memory that is not of this allocator.
  virtual bool record_event(void* ptr, void* ctx, c10::Stream stream) = 0;

  virtual void reset_accumulated_stats() = 0;
  virtual void reset_peak_stats() = 0;

  // Calls visit(argument, key, value) for each statistic. Keys are those of
  // torch.cuda.host_memory_stats() ("allocated_bytes.current", ...) where the
  // thing is the same; bytes, counts and microseconds.
  using StatVisitor = void (*)(void* argument, const char* key, int64_t value);
  virtual void visit_stats(StatVisitor visit, void* argument) const = 0;

  // The most bytes to keep page-locked in all, and of those the most to keep
  // unused; SIZE_MAX is no limit. A smaller limit takes effect on unused memory
  // before this returns.
  virtual void set_limits(size_t locked_bytes, size_t cached_bytes) = 0;
  virtual void get_limits(size_t* locked_bytes, size_t* cached_bytes) const = 0;

  // Whether address lies in memory of this allocator. No lock, no GIL.
  virtual bool owns(const void* address) const noexcept = 0;

  // Version 2. Blocks of so many bytes each, for which raw_deleter() of the
  // allocator is the deleter, in one go: the tensors of a batch are many and
  // small. Stops at the first that is refused, without throwing, and returns
  // how many of `blocks` were filled in. Whoever cannot do better than one at a
  // time returns 0.
  virtual size_t
  allocate_many(const size_t* /*bytes*/, size_t /*count*/, void** /*blocks*/) {
    return 0;
  }
};

} // namespace at::pin
