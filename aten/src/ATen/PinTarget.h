#pragma once

// The accelerator as pin target: for which device type host memory is pinned
// now, which allocator supplies it, or what that backend lacks.
//
// Used by the pin kernels, by batch pinning and, through torch/csrc, by the
// DataLoader. Thread-safe; never needs the GIL.

#include <c10/core/Allocator.h>
#include <c10/core/DeviceType.h>
#include <c10/core/StorageImpl.h>

#include <cstdint>
#include <optional>
#include <string>

namespace at::pin {

// What stands between at::getAccelerator() and pinned host memory.
enum class Lack : uint8_t {
  Nothing,        // pinned memory is to be had
  Accelerator,    // at::getAccelerator() names none
  PinnedMemory,   // the device type has no notion of it (MPS)
  Hooks,          // PrivateUse1 without registered hooks
  Allocator,      // hooks whose getPinnedMemoryAllocator is missing or raises
  NullAllocator,  // hooks whose getPinnedMemoryAllocator returns null
  PlainAllocator, // the ordinary CPU allocator, offered as pinned
  Recognition,    // memory of its allocator that isPinnedPtr does not recognise
};

// "hooks", "allocator", ...: stable names for reports and tests.
const char* lackName(Lack lack);

struct PinTarget {
  // at::getAccelerator(), whatever it lacks; none if there is no such device.
  std::optional<c10::DeviceType> accelerator;
  Lack lack = Lack::Accelerator;
  // Supplies page-locked memory. Null while something is lacking, and perhaps
  // for a backend that pins by kernels of its own (see ownKernels).
  c10::Allocator* allocator = nullptr;
  // The backend overrides aten::is_pinned/_pin_memory itself: pin through the
  // dispatcher, not through the allocator.
  bool ownKernels = false;
  // One sentence for a person: what was found and what has to be added. Empty
  // when nothing is lacking.
  std::string reason;

  bool ready() const {
    return lack == Lack::Nothing;
  }
};

enum class Initialize : bool { No, Yes };

// The current pin target. With Initialize::No nothing of the backend is
// started and the answer may be more hopeful than the truth: that its memory
// is recognised as pinned is only tried with Initialize::Yes. What the
// backend's own initialisation throws comes through.
PinTarget pinTarget(Initialize initialize);

// As pinTarget(Initialize::Yes), but throws a c10::Error that names the
// accelerator and what it lacks.
PinTarget requirePinTarget();

// Whether storage's memory is pinned for the current accelerator. Initialises
// nothing; any address inside a pinned block counts. Never throws.
bool isPinned(const c10::StorageImpl& storage);

// The same for some of its bytes: of memory that is page-locked in part, that
// part is pinned.
bool isPinned(const c10::StorageImpl& storage, const void* ptr, size_t bytes);

} // namespace at::pin
