#pragma once

// Reusable slots in one shared-memory mapping, for moving batches from worker
// processes to the process that made the mapping. Bytes only: no tensors, no
// Python, no accelerator. Any thread of a process that has the mapping may call
// anything here except where a comment names one participant.
//
// Note [Slots and who may touch them]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
// Participants. Index 0 is the process that called create() ("main"), 1 to W
// are its workers, the rest are guests: processes that something forked off
// while its parent held a slot. A slot may be touched by the participant that
// owns it and by those that hold it, by nobody else.
//
// One word per slot says (generation, state, owner) and changes by
// compare-and-swap only:
//
//     FREE ----claim----> CLAIMED(w) ---commit---> READY(w) ---take---> TAKEN
//      ^                      |                        |                  |
//      +------- abandon ------+                        |                  |
//      +------- reclaim ------+------- reclaim --------+                  |
//      +---------------------------- put_back ----------------------------+
//
//   claim     a worker, for itself; bumps the generation
//   commit    the owner; publishes every byte that it wrote before
//   take      main, with the ticket that commit returned
//   put_back  main
//   reclaim   main, for a worker that is dead
//
// A ticket names the generation, so a ticket of an earlier use, or one whose
// slot was reclaimed, is refused. Only commit makes tickets: a slot that a
// worker was still writing when it was killed cannot be taken.
//
// Holds. holds[slot][participant] counts what that participant still has in
// the slot (for example one per storage). Only the participant itself writes
// its column, except that main clears the column of a dead one, and that a fork
// fills the column of the guest that is about to exist. A hold may rise from
// zero only while the slot is CLAIMED by the holder, or TAKEN and the holder is
// main. Hence: a slot that is FREE at generation g and has no hold can get one
// only after a claim, which changes the generation. A claim reads the word,
// finds the holds zero, then swaps the word: if that succeeds nobody is in it.
//
// There is no lock in shared memory, every step is one atomic operation, and
// nothing waits: claim finds a slot or does not. A process may be killed
// between any two instructions; whatever it owned carries its index, and its
// holds are in its own column, so both can be cleared without it.
//
// Liveness. Each worker and guest keeps an open file description of its own on
// the memfd, and with it a lock on the byte that has its index. The kernel
// drops the lock when the process dies or replaces itself by exec, and no
// process id is involved that could be used again. For a guest the parent takes
// the lock before the fork, so that a child killed in its first instruction is
// seen too. (Classic POSIX locks would not do: a process loses them when it
// closes any descriptor of the file.) reclaim refuses while the lock is there.
//
// Memory. The file is sparse and as large as all slots at their largest; pages
// exist once they are touched, so a slot grows where it stands, without a new
// mapping or descriptor. A slot's pages are made before anybody writes to them
// (MADV_POPULATE_WRITE, else fallocate), so running out of memory is an error
// return here and not a SIGBUS in a copy loop. The out-of-memory killer of the
// kernel or of a control group is beyond that, as for any other memory. The
// file has no name and no mount point: when the last process that has it is
// gone, by whatever signal, nothing of it is left. It does not count against
// /dev/shm.
//
// Fork. A child that inherits memory in a slot (nested loaders, a data set that
// keeps a batch of another loader) must find it unchanged. fork handlers give
// it a column of its own before it exists; without a free column the slots
// that the parent holds are retired for good. retain() takes a mutex of its
// own process for that, never one that another process could hold.

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

namespace c10 {

class SlotClaim;

// What a worker sends to main in place of the bytes.
struct SlotTicket {
  uint32_t slot = 0;
  uint64_t generation = 0;
  uint64_t bytes = 0;
};

// Says under which identity of this process a hold was counted; see
// Note [Slots and who may touch them], Fork.
struct SlotHold {
  uint32_t slot = 0;
  uint32_t fork_depth = 0;
};

struct SharedSlotsOptions {
  // Processes that will adopt a worker index, at most 1000.
  uint32_t workers = 1;
  // At most 1024. More slots cost address space, not memory.
  uint32_t slots = 4;
  // The largest a slot may become, in bytes; rounded up to 2 MiB. Halved until
  // the address space can be had, see max_slot_bytes().
  uint64_t max_slot_bytes = uint64_t{8} << 30;
  // Bound on the bytes that all slots keep resident; 0: no bound.
  uint64_t max_resident_bytes = 0;
  uint32_t guests = 32;
};

struct SharedSlotsStats {
  uint32_t slots = 0;
  // Not claimable now: owned, held or retired.
  uint32_t in_use = 0;
  uint32_t retired = 0;
  uint32_t most_in_use = 0;
  uint64_t resident_bytes = 0;
  uint64_t claims = 0;
  uint64_t commits = 0;
  // Claims refused because no slot was free.
  uint64_t refused_no_slot = 0;
  // Reservations refused because the slot or the bound was too small.
  uint64_t refused_size = 0;
  // Reservations refused because the system had no memory.
  uint64_t refused_memory = 0;
  // Slots taken back from dead workers and guests.
  uint64_t reclaimed = 0;
};

class SharedSlots : public std::enable_shared_from_this<SharedSlots> {
 public:
  static constexpr size_t kAlignment = 64;
  static constexpr uint32_t kNobody = UINT32_MAX;

  // Makes the mapping; the caller is participant 0. nullptr and a reason in
  // *error if the system refuses or an option is out of range.
  static std::shared_ptr<SharedSlots> create(
      const SharedSlotsOptions& options,
      std::string* error);

  // Maps what another process made. Takes over `fd` in every case. nullptr and
  // a reason if it is not such a file or of another layout. The caller is
  // nobody until it calls adopt().
  static std::shared_ptr<SharedSlots> attach(int fd, std::string* error);

  ~SharedSlots();
  SharedSlots(const SharedSlots&) = delete;
  SharedSlots& operator=(const SharedSlots&) = delete;

  // Makes this process worker `participant` (1 to workers). False if the index
  // is out of range or still has slots or holds of a predecessor: main has to
  // reclaim it first.
  bool adopt(uint32_t participant) noexcept;

  // The same mapping under another index, for threads that stand in for
  // processes. It has no part in the fork handling and no liveness lock.
  std::shared_ptr<SharedSlots> view_as(uint32_t participant) const;

  // Workers. An empty claim if no slot is free; never waits. `hint` is the
  // number of bytes expected: a slot that already has them is preferred, of
  // those one that has them page-locked, of those one that this worker had
  // before, of those the one freed last.
  SlotClaim try_claim(uint64_t hint = 0) noexcept;

  // Main. False if the ticket is stale or was never committed.
  bool take(const SlotTicket& ticket) noexcept;
  // Main: takes a slot that nobody uses and that has `bytes` page-locked;
  // kNobody if there is none. What is in it is of no concern.
  uint32_t take_free(uint64_t bytes) noexcept;
  // Main, for a slot that it took. Holds outlive it.
  void put_back(uint32_t slot) noexcept;

  // Adds `count` holds of the calling process. False, and nothing is added,
  // unless the caller owns the slot (a worker: claimed and not committed, main:
  // taken and not put back) or already holds it.
  bool retain(uint32_t slot, uint32_t count, SlotHold* hold) noexcept;
  // Drops holds; may be called after a fork in the child with a hold that the
  // parent took. Never throws, never waits.
  void release(SlotHold hold, uint32_t count = 1) noexcept;

  // Main: clears what a dead worker owned and held. READY slots, which are
  // whole and whose tickets may still arrive, stay unless `ready_too`. False,
  // and nothing changes, if the worker is alive.
  bool reclaim(uint32_t participant, bool ready_too) noexcept;
  // Main: the same for all guests that are gone; cheap without guests.
  // Returns how many.
  uint32_t reap_guests() noexcept;

  // Main: tells the workers that they are to end, without a lock that a killed
  // one could keep. Not undone.
  void end() noexcept;
  bool is_ending() const noexcept;

  // Makes the first `bytes` of a slot present in the page tables of this
  // process with one call, where the system can.
  void map_in(uint32_t slot, uint64_t bytes) noexcept;

  // Gives pages past `keep` back to the system. The caller owns the slot. Never
  // below the pinned extent. Returns the bytes given back.
  uint64_t trim(uint32_t slot, uint64_t keep) noexcept;
  // Main: trims every slot that nobody uses, for the end of an epoch.
  uint64_t trim_free_slots(uint64_t keep = 0) noexcept;
  // Main: trims slots that nobody uses, the one that was freed first before the
  // others, until at most `slots` exist in memory or all have `bytes` together.
  // What a worker's own data set keeps is not counted.
  uint64_t trim_to(uint32_t slots, uint64_t bytes) noexcept;

  // How much of the slot, from its start, the caller has page-locked. Written
  // by main; the locking itself is the caller's business.
  void set_pinned_extent(uint32_t slot, uint64_t bytes) noexcept;
  uint64_t pinned_extent(uint32_t slot) const noexcept;

  // Start of the slot in this process, 2 MiB aligned to the file.
  char* slot_data(uint32_t slot) const noexcept;
  // The slot that an address of this process lies in, or kNobody.
  uint32_t slot_of(const void* address) const noexcept;
  // Bytes of the slot that exist in memory.
  uint64_t resident_bytes(uint32_t slot) const noexcept;
  bool in_use(uint32_t slot) const noexcept;
  // Whether a participant other than main holds the slot.
  bool held_by_others(uint32_t slot) const noexcept;
  // Whether a worker fills the slot, or has filled it and main has not taken it
  // yet. Main: nothing of this process is in it until it is taken.
  bool is_with_worker(uint32_t slot) const noexcept;

  uint32_t slots() const noexcept;
  uint32_t workers() const noexcept;
  uint64_t max_slot_bytes() const noexcept;
  uint32_t participant() const noexcept;
  // For passing on to a process that is started by spawn or forkserver; stays
  // open, and the mapping's own.
  int fd() const noexcept;
  SharedSlotsStats stats() const noexcept;

 private:
  friend class SlotClaim;
  friend struct SlotForkHandlers;
  struct Shared;
  class Mapping;

  SharedSlots(std::shared_ptr<Mapping> mapping, uint32_t self, bool is_view);

  uint32_t identity_of(SlotHold hold) const noexcept;
  bool has_holds(uint32_t slot) const noexcept;
  bool take_unused(uint32_t slot) noexcept;
  bool grow(uint32_t slot, uint64_t bytes) noexcept;
  void clear_participant(uint32_t participant, bool ready_too) noexcept;
  bool is_gone(uint32_t participant) const noexcept;
  int lock_byte(uint32_t participant) const noexcept;
  void before_fork() noexcept;
  void after_fork_in_parent() noexcept;
  void after_fork_in_child() noexcept;

  std::shared_ptr<Mapping> mapping_;
  Shared* shared_;
  std::atomic<uint32_t> self_;
  // The column that holds inherited over the last fork are counted in.
  uint32_t inherited_ = kNobody;
  uint32_t fork_depth_ = 0;
  uint32_t guest_of_fork_ = kNobody;
  // What shows that this process is alive, as a worker, as a guest, and as the
  // guest that the fork in progress makes.
  int worker_fd_ = -1;
  int guest_fd_ = -1;
  int fork_fd_ = -1;
  bool is_view_;
  // How much of each slot this process has in its page tables.
  std::unique_ptr<std::atomic<uint64_t>[]> mapped_;
};

// A slot while one worker fills it; belongs to that worker. Destroyed without
// commit() it gives the slot back. Not for several threads at once.
class SlotClaim {
 public:
  SlotClaim() = default;
  SlotClaim(SlotClaim&& other) noexcept;
  SlotClaim& operator=(SlotClaim&& other) noexcept;
  ~SlotClaim();

  explicit operator bool() const noexcept {
    return slots_ != nullptr;
  }

  // `bytes` at an address that is a multiple of kAlignment in the slot, or
  // nullptr if they do not fit or the system has no memory; then the claim is
  // as before.
  void* reserve(uint64_t bytes) noexcept;

  // mark() before some reservations, rollback(mark) to undo them.
  uint64_t mark() const noexcept {
    return used_;
  }
  void rollback(uint64_t mark) noexcept;

  // Publishes the slot to main. The claim is empty afterwards.
  SlotTicket commit() noexcept;
  void abandon() noexcept;

  uint32_t slot() const noexcept {
    return slot_;
  }
  uint64_t generation() const noexcept {
    return generation_;
  }
  // Offset in the slot of an address inside what was reserved, or UINT64_MAX.
  uint64_t offset_of(const void* address, uint64_t bytes) const noexcept;
  const std::shared_ptr<SharedSlots>& slots() const noexcept {
    return slots_;
  }

 private:
  friend class SharedSlots;
  bool still_ours() const noexcept;

  std::shared_ptr<SharedSlots> slots_;
  uint32_t slot_ = 0;
  uint32_t owner_ = 0;
  uint64_t generation_ = 0;
  uint64_t used_ = 0;
};

} // namespace c10
