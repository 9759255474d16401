// Page-locked host memory as tensors use it: an allocator with a cache.

#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Stream.h>

#include <cstdint>

namespace refdev {

c10::Allocator* pinnedAllocator();

// Tells whoever owns this host memory that `stream` has been given work that
// uses it. `context` is the context of its storage.
void reportHostUse(void* address, void* context, c10::Stream stream);

// Unlocks and frees what no tensor and no copy uses.
void emptyPinnedCache();

// How often reportHostUse() found an owner.
uint64_t hostUseReports();

} // namespace refdev
