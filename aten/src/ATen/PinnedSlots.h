#pragma once

// Slots that the accelerator reads and writes where they are: page-locked once,
// handed out as storages, and free again only when nobody uses them.
//
// Note [When a slot may be written again]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
// Two kinds of users keep a slot: storages that lie in it, and copies between
// host and accelerator that were started from such a storage and are still
// running. The storages of one batch share one hold of the slot. Copies are
// seen because the base reports each non-blocking one to
// at::HostAllocator::record_event before the call that started it returns, and
// so while the storage is still alive: an allocator of ours stands in front of
// the accelerator's, keeps an event for addresses in slots, and hands
// everything else on. When the last storage of a batch is gone and an event has
// not fired, the hold waits in a list, which is looked at whenever a batch
// arrives or another one goes. Nobody waits for an event.
//
// So in place is possible only where the accelerator can page-lock foreign
// memory, where the base has that report (2.8 on), and where the backend says
// that it makes it.
//
// The events of one stream fire in order: one per slot and stream is enough.
//
// How many slots get locked. A worker may begin its next batch in the moment
// between next() and the end of the batch before, and so in one slot more than
// pinned batches exist in stock PyTorch. Once as many slots are locked as stock
// would hold batches, those included whose copies are running, a batch in any
// other is moved to one that is locked and free; workers prefer those, so that
// this stays rare. If none is free, a worker is filling one: that one is
// unlocked instead, since the accelerator has nothing in it.

#include <ATen/Base.h>

#include <c10/core/DeviceType.h>
#include <c10/core/SharedSlots.h>
#include <c10/core/Storage.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

namespace at::pin {

// Why batches cannot be delivered in place for the current accelerator, or an
// empty string. The accelerator has to be initialised. Puts the allocator in
// front, once.
std::string whyNotInPlace();

class PinnedSlots {
 public:
  // `usual` is how many batches the base would hold in pinned memory.
  static std::shared_ptr<PinnedSlots> make(
      std::shared_ptr<c10::SharedSlots> slots,
      uint32_t usual);
  PinnedSlots() = default;
  PinnedSlots(const PinnedSlots&) = delete;
  PinnedSlots& operator=(const PinnedSlots&) = delete;
  virtual ~PinnedSlots() = default;

  // Page-locks at least the first `bytes` of a slot that the caller has taken.
  // The first time no more than their pages, so that batches of one size lock
  // no more than their own blocks would. False when the accelerator refuses.
  // Without the GIL.
  virtual bool lock(uint32_t slot, uint64_t bytes) = 0;

  // A free slot, taken, that the first `bytes` of `slot` should be moved to
  // rather than page-lock another one, or because a worker `keeps` it; kNobody
  // if there is none. The caller puts it back.
  virtual uint32_t instead_of(uint32_t slot, uint64_t bytes, bool keeps) = 0;

  // Before more is page-locked in place of a slot that a worker keeps: unlocks
  // one, if as many are locked as the base would hold batches.
  virtual void make_room(uint32_t slot) noexcept = 0;

  // Storages over (offset, bytes) of a slot that the caller has taken and will
  // put back; together they hold the slot.
  virtual std::vector<c10::Storage> deliver(
      uint32_t slot,
      const std::vector<std::pair<uint64_t, uint64_t>>& regions) = 0;

  // Unlocks slots that nobody uses and gives their memory back.
  virtual void give_back() noexcept = 0;

  virtual uint64_t locked_bytes() const noexcept = 0;
  // Slots that only wait for copies.
  virtual uint64_t waiting() const noexcept = 0;

  // Batches in a row that their worker went on using: kept by whoever waits for
  // workers to let go of a batch.
  std::atomic<uint32_t> kept_in_a_row{0};
};

// Lets go of slots whose last copy has finished, of all that exist.
void pollPinnedSlots() noexcept;

// For the test that shows what the events are good for: false lets a slot go
// although copies from it are running.
void setSlotEventsHonoured(bool honoured);

} // namespace at::pin
