// Page-locked host memory as tensors use it: torchpin's caching allocator over
// the driver. Only headers of torchpin are used, so the backend is the same
// with and without torchpin installed.

#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Stream.h>

#include <cstdint>

namespace refdev {

// The allocator for hooks, as far as the switches allow.
c10::Allocator* pinnedAllocator();

// Whether the driver has page-locked this address; for the switch
// exact_start_only, whether an allocation or a registered range begins here.
bool isPinned(const void* address);

// Tells whoever owns this host memory that `stream` has been given work that
// uses it. `context` is the context of its storage.
void reportHostUse(void* address, void* context, c10::Stream stream);

// Unlocks and frees what no tensor and no copy uses.
void emptyPinnedCache();

// How often reportHostUse() found an owner.
uint64_t hostUseReports();
void resetHostUseReports();

} // namespace refdev
