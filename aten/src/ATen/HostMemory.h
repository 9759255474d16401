#pragma once

// Page-locked host memory of the current accelerator, beside its tensors:
// statistics, cap and cache of its allocator, page-locking of memory that
// exists already, and what stands in where a backend supplies none of that.
//
// Who answers for an accelerator, first that there is:
//   1. what was supplied here (from Python): setHostMemorySupply
//   2. its hooks: their allocator, and HostMemoryHooks
//   3. at::getHostAllocator(type), on bases that have it
// Thread-safe. Needs no GIL and should be called without it, since a backend
// may take long or need it.

#include <ATen/HostMemoryHooks.h>
#include <ATen/HostMemoryRegistry.h>

#include <c10/core/Allocator.h>
#include <c10/core/DeviceType.h>
#include <c10/core/Storage.h>
#include <c10/core/Stream.h>

#include <cstdint>
#include <memory>
#include <optional>

namespace at::pin {

// ---- supply

// For a device type whose backend has no C++ of its own. Null takes away.
struct HostMemorySupply {
  std::shared_ptr<const HostMemoryLocker> locker;
  // The same for memory that no copy uses any more when it is unlocked, where
  // unlocking would otherwise wait for more than it has to. May be null.
  std::shared_ptr<const HostMemoryLocker> idleLocker;
  // Where pinned memory comes from; null for types that have an allocator. Also
  // derives from HostMemoryCache. Lives for ever.
  c10::Allocator* allocator = nullptr;
};
void setHostMemorySupply(c10::DeviceType type, HostMemorySupply supply);

// The allocator supplied for `type`, or null. Costs one load where there is
// none.
c10::Allocator* suppliedHostAllocator(c10::DeviceType type) noexcept;

// ---- the allocator of the current accelerator

// False where there is no accelerator, or none whose allocator reports
// anything. Keys are those of torch.cuda.host_memory_stats() of 2.10 and later,
// whatever the base calls them.
bool visitHostMemoryStats(HostMemoryCache::StatVisitor visit, void* argument);
// Bytes page-locked by it now, if it says.
std::optional<size_t> hostMemoryHeld();
// False where there is nothing to reset, and no cache to empty.
bool resetPeakHostMemoryStats();
bool resetAccumulatedHostMemoryStats();
bool emptyHostMemoryCache();

// The cap on page-locked bytes; SIZE_MAX is none. Throw a
// c10::NotImplementedError where the allocator cannot be capped.
void setMaxHostMemory(size_t bytes);
size_t maxHostMemory();

// Tells the allocator of the current accelerator that what is on `stream` uses
// the memory at `ptr`. False if the memory is not of that allocator.
bool recordHostMemoryUse(void* ptr, void* ctx, c10::Stream stream);

// ---- page-locking in place

// Page-locks bytes of a storage until they are unregistered as often, or until
// the storage gives its memory up. Throws a c10::NotImplementedError where the
// accelerator cannot, and another c10::Error where it refuses. Unregistering,
// and giving up, return after the copies that use the memory: the functions of
// the driver wait.
//
// The second is seen by a deleter put in front of the storage's own; nobody
// may resize or replace the memory at the same moment. A storage in shared
// memory is known by its deleter, which must stay: with `keep` the storage is
// kept alive instead, and given up at the next call here once nothing else
// holds it.
void registerHostMemory(
    const c10::Storage& storage,
    const void* ptr,
    size_t bytes,
    bool keep);
bool unregisterHostMemory(
    const c10::Storage& storage,
    const void* ptr,
    size_t bytes);

// For memory that is no storage: the caller keeps it alive. With `idle` he also
// knows that copies have finished when he unregisters it: nothing is waited
// for.
void registerHostMemory(const void* ptr, size_t bytes, bool idle = false);
bool unregisterHostMemory(const void* ptr, size_t bytes);

// Gives up registered storages in shared memory that nothing else holds.
void releaseRegisteredHostMemory();

// ---- a stand-in

// On bases with a registry of host allocators, puts one in for device types
// that have none: torch.accelerator.empty_host_cache() of 2.12 to 2.14
// dereferences null there. It hands everything to the allocator that the hooks
// name. A backend that registers its own later replaces it. Calling either
// function twice changes nothing.
void registerStandInHostAllocator();
void deregisterStandInHostAllocator();

} // namespace at::pin
