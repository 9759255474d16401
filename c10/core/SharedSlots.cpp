#include <c10/core/SharedSlots.h>

#include <fcntl.h>
#include <pthread.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <mutex>
#include <new>
#include <vector>

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23
#endif
#ifndef MFD_NOEXEC_SEAL
#define MFD_NOEXEC_SEAL 0x0008U
#endif

namespace c10 {
namespace {

constexpr uint64_t kMagic = 0x746f7263'68736c74ULL;
constexpr uint32_t kLayoutVersion = 1;
constexpr uint64_t kSlotGranule = uint64_t{2} << 20;
// Slots grow by at least this much, so that a batch of many small tensors
// makes few system calls. It is also the most that a slot wastes.
constexpr uint64_t kGrowGranule = uint64_t{64} << 10;
constexpr uint32_t kMaxSlots = 1024;
constexpr uint32_t kMaxWorkers = 1000;
constexpr uint32_t kMaxGuests = 4096;

enum State : uint32_t { kFree = 0, kClaimed = 1, kReady = 2, kTaken = 3 };
enum MemberState : uint32_t { kUnused = 0, kStarting = 1, kAlive = 2 };

// What lock_byte returns in place of a descriptor.
constexpr int kCannotLock = -1;
constexpr int kLockTaken = -2;

// The word of a slot: 40 bits of generation (a million claims a second for
// twelve days before one comes back), 8 of state, 16 of owner.
constexpr uint64_t word_of(uint64_t generation, State state, uint32_t owner) {
  return (generation << 24) | (uint64_t{state} << 16) | owner;
}
constexpr uint64_t generation_of(uint64_t word) {
  return word >> 24;
}
constexpr State state_of(uint64_t word) {
  return static_cast<State>((word >> 16) & 0xff);
}
constexpr uint32_t owner_of(uint64_t word) {
  return static_cast<uint32_t>(word & 0xffff);
}
constexpr uint64_t kGenerationMask = (uint64_t{1} << 40) - 1;

constexpr uint64_t round_up(uint64_t value, uint64_t to) {
  return (value + to - 1) / to * to;
}

struct alignas(64) SlotState {
  std::atomic<uint64_t> word;
  std::atomic<uint64_t> used;
  // Bytes from the start of the slot that may be resident. Raised before pages
  // are made and lowered after they are gone, so that it never understates.
  std::atomic<uint64_t> resident;
  std::atomic<uint64_t> pinned;
  std::atomic<uint64_t> freed_at;
  std::atomic<uint32_t> retired;
  std::atomic<uint32_t> last_owner;
};

struct alignas(64) Member {
  std::atomic<uint32_t> state;
  std::atomic<uint32_t> locked;
  std::atomic<uint64_t> claims;
  std::atomic<uint64_t> commits;
  std::atomic<uint64_t> refused_no_slot;
  std::atomic<uint64_t> refused_size;
  std::atomic<uint64_t> refused_memory;
  std::atomic<uint64_t> reclaimed;
};

// A mutex inside an atomic would be a lock that a killed process may hold.
static_assert(std::atomic<uint64_t>::is_always_lock_free);
static_assert(std::atomic<uint32_t>::is_always_lock_free);

std::string reason(const char* what) {
  return std::string(what) + ": " + std::strerror(errno);
}

int make_memfd() {
  for (unsigned flags :
       {MFD_CLOEXEC | MFD_ALLOW_SEALING | MFD_NOEXEC_SEAL,
        MFD_CLOEXEC | MFD_ALLOW_SEALING}) {
    const int fd = memfd_create("torch-slots", flags);
    if (fd >= 0 || errno != EINVAL) {
      return fd;
    }
  }
  return -1;
}

// Never destroyed: slots may be released while the process exits.
struct Registry {
  std::mutex mutex;
  std::vector<SharedSlots*> members;
};
Registry& registry() {
  static Registry* instance = new Registry();
  return *instance;
}

} // namespace

// What lies at the start of the file. SlotState, Member and the rows of holds
// follow it, then, 2 MiB aligned, the slots.
struct SharedSlots::Shared {
  uint64_t magic;
  uint32_t layout_version;
  uint32_t slots;
  uint32_t workers;
  uint32_t guests;
  uint32_t participants;
  uint32_t holds_per_row;
  uint64_t stride;
  uint64_t total;
  uint64_t members_offset;
  uint64_t holds_offset;
  uint64_t data_offset;
  uint64_t max_resident;
  std::atomic<uint64_t> clock;
  std::atomic<bool> ending;

  char* base() {
    return reinterpret_cast<char*>(this);
  }
  SlotState& slot(uint32_t i) {
    return reinterpret_cast<SlotState*>(
        base() + round_up(sizeof(Shared), 64))[i];
  }
  Member& member(uint32_t i) {
    return reinterpret_cast<Member*>(base() + members_offset)[i];
  }
  std::atomic<uint32_t>& holds(uint32_t slot, uint32_t participant) {
    return reinterpret_cast<std::atomic<uint32_t>*>(
        base() + holds_offset)[size_t{slot} * holds_per_row + participant];
  }
  char* data(uint32_t slot) {
    return base() + data_offset + slot * stride;
  }
  uint64_t tick() {
    return clock.fetch_add(1, std::memory_order_relaxed) + 1;
  }

  void lay_out(const SharedSlotsOptions& options) {
    slots = options.slots;
    workers = options.workers;
    guests = options.guests;
    participants = 1 + workers + guests;
    holds_per_row = static_cast<uint32_t>(round_up(participants, 16));
    members_offset =
        round_up(sizeof(Shared), 64) + uint64_t{slots} * sizeof(SlotState);
    holds_offset = members_offset + uint64_t{participants} * sizeof(Member);
    data_offset = round_up(
        holds_offset + uint64_t{slots} * holds_per_row * sizeof(uint32_t),
        kSlotGranule);
  }
};

class SharedSlots::Mapping {
 public:
  Mapping(int fd, const struct stat& identity, void* base, size_t bytes)
      : fd_(fd), identity_(identity), base_(base), bytes_(bytes) {}
  Mapping(const Mapping&) = delete;
  Mapping& operator=(const Mapping&) = delete;
  ~Mapping() {
    munmap(base_, bytes_);
    if (fd_is_ours()) {
      close(fd_);
    }
  }

  int fd() const {
    return fd_;
  }
  void* base() const {
    return base_;
  }
  // A program may close descriptors that it does not know (a daemon does), and
  // the number may by now mean a file of the user's.
  bool fd_is_ours() const {
    return is_ours(fd_);
  }
  bool is_ours(int fd) const {
    struct stat now{};
    return fstat(fd, &now) == 0 && now.st_ino == identity_.st_ino &&
           now.st_dev == identity_.st_dev;
  }

 private:
  int fd_;
  struct stat identity_;
  void* base_;
  size_t bytes_;
};

struct SlotForkHandlers {
  static void install() {
    static const int once = pthread_atfork(&before, &in_parent, &in_child);
    (void)once;
  }
  static void before() {
    registry().mutex.lock();
    for (SharedSlots* slots : registry().members) {
      slots->before_fork();
    }
  }
  static void in_parent() {
    for (SharedSlots* slots : registry().members) {
      slots->after_fork_in_parent();
    }
    registry().mutex.unlock();
  }
  static void in_child() {
    for (SharedSlots* slots : registry().members) {
      slots->after_fork_in_child();
    }
    registry().mutex.unlock();
  }
};

SharedSlots::SharedSlots(
    std::shared_ptr<Mapping> mapping,
    uint32_t self,
    bool is_view)
    : mapping_(std::move(mapping)),
      shared_(static_cast<Shared*>(mapping_->base())),
      self_(self),
      is_view_(is_view),
      mapped_(new std::atomic<uint64_t>[shared_->slots]) {
  for (uint32_t i = 0; i < shared_->slots; ++i) {
    mapped_[i].store(0, std::memory_order_relaxed);
  }
  if (!is_view_) {
    SlotForkHandlers::install();
    std::lock_guard<std::mutex> guard(registry().mutex);
    registry().members.push_back(this);
  }
}

SharedSlots::~SharedSlots() {
  if (!is_view_) {
    std::lock_guard<std::mutex> guard(registry().mutex);
    auto& members = registry().members;
    members.erase(
        std::remove(members.begin(), members.end(), this), members.end());
  }
  for (int fd : {worker_fd_, guest_fd_}) {
    if (fd >= 0 && mapping_->is_ours(fd)) {
      close(fd);
    }
  }
}

std::shared_ptr<SharedSlots> SharedSlots::create(
    const SharedSlotsOptions& options,
    std::string* error) {
  if (options.slots == 0 || options.slots > kMaxSlots || options.workers == 0 ||
      options.workers > kMaxWorkers || options.guests > kMaxGuests ||
      options.max_slot_bytes == 0) {
    *error = "expected 1 to " + std::to_string(kMaxSlots) + " slots and 1 to " +
             std::to_string(kMaxWorkers) + " workers, got " +
             std::to_string(options.slots) + " slots and " +
             std::to_string(options.workers) + " workers";
    return nullptr;
  }
  Shared layout{};
  layout.lay_out(options);
  const uint64_t wanted = std::min<uint64_t>(
      options.max_slot_bytes, (uint64_t{1} << 46) / options.slots);
  uint64_t stride = round_up(wanted, kSlotGranule);

  const int fd = make_memfd();
  if (fd < 0) {
    *error = reason("memfd_create");
    return nullptr;
  }
  // Growing a file beyond this limit does not fail, it kills the process.
  struct rlimit file_limit{};
  if (getrlimit(RLIMIT_FSIZE, &file_limit) != 0) {
    file_limit.rlim_cur = RLIM_INFINITY;
  }
  void* base = MAP_FAILED;
  uint64_t total = 0;
  errno = EFBIG;
  for (; stride >= kSlotGranule;
       stride = stride / 2 / kSlotGranule * kSlotGranule) {
    total = layout.data_offset + stride * options.slots;
    if (file_limit.rlim_cur != RLIM_INFINITY && total > file_limit.rlim_cur) {
      continue;
    }
    if (ftruncate(fd, static_cast<off_t>(total)) != 0) {
      continue;
    }
    base = mmap(
        nullptr,
        total,
        PROT_READ | PROT_WRITE,
        MAP_SHARED | MAP_NORESERVE,
        fd,
        0);
    if (base != MAP_FAILED) {
      break;
    }
  }
  struct stat identity{};
  if (base == MAP_FAILED || fstat(fd, &identity) != 0) {
    *error = reason("cannot map the slots");
    if (base != MAP_FAILED) {
      munmap(base, total);
    }
    close(fd);
    return nullptr;
  }
  // Nobody who has the descriptor can shrink the file under a reader.
  (void)fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL);

  auto mapping = std::make_shared<Mapping>(fd, identity, base, total);
  // The file is zeros, which every atomic here takes as its first value.
  auto* shared = new (base) Shared();
  shared->lay_out(options);
  shared->stride = stride;
  shared->total = total;
  shared->max_resident = options.max_resident_bytes;
  shared->layout_version = kLayoutVersion;
  shared->magic = kMagic;
  for (uint32_t i = 0; i < shared->slots; ++i) {
    shared->slot(i).last_owner.store(kNobody, std::memory_order_relaxed);
  }
  return std::shared_ptr<SharedSlots>(
      new SharedSlots(std::move(mapping), 0, false));
}

std::shared_ptr<SharedSlots> SharedSlots::attach(int fd, std::string* error) {
  struct stat identity{};
  if (fstat(fd, &identity) != 0) {
    *error = reason("fstat");
    return nullptr;
  }
  Shared head{};
  const auto size = static_cast<uint64_t>(identity.st_size);
  const bool readable =
      size >= sizeof(Shared) &&
      pread(fd, static_cast<void*>(&head), sizeof(Shared), 0) ==
          static_cast<ssize_t>(sizeof(Shared));
  if (!readable || head.magic != kMagic ||
      head.layout_version != kLayoutVersion || head.total != size) {
    *error = "descriptor " + std::to_string(fd) + " (" + std::to_string(size) +
             " bytes) has no slots of layout version " +
             std::to_string(kLayoutVersion) +
             "; do both processes use the same installation?";
    close(fd);
    return nullptr;
  }
  void* base = mmap(
      nullptr,
      head.total,
      PROT_READ | PROT_WRITE,
      MAP_SHARED | MAP_NORESERVE,
      fd,
      0);
  if (base == MAP_FAILED) {
    *error = reason("cannot map the slots");
    close(fd);
    return nullptr;
  }
  (void)fcntl(fd, F_SETFD, FD_CLOEXEC);
  return std::shared_ptr<SharedSlots>(new SharedSlots(
      std::make_shared<Mapping>(fd, identity, base, head.total),
      kNobody,
      false));
}

std::shared_ptr<SharedSlots> SharedSlots::view_as(uint32_t participant) const {
  return std::shared_ptr<SharedSlots>(
      new SharedSlots(mapping_, participant, true));
}

// Called between fork handlers: nothing here may allocate.
int SharedSlots::lock_byte(uint32_t participant) const noexcept {
  char path[64];
  std::snprintf(path, sizeof(path), "/proc/self/fd/%d", mapping_->fd());
  if (!mapping_->fd_is_ours()) {
    return kCannotLock;
  }
  const int fd = open(path, O_RDWR | O_CLOEXEC);
  if (fd < 0) {
    return kCannotLock;
  }
  struct flock lock{};
  lock.l_type = F_WRLCK;
  lock.l_whence = SEEK_SET;
  lock.l_start = participant;
  lock.l_len = 1;
  if (fcntl(fd, F_OFD_SETLK, &lock) == 0) {
    return fd;
  }
  const bool taken = errno == EAGAIN || errno == EACCES;
  close(fd);
  return taken ? kLockTaken : kCannotLock;
}

bool SharedSlots::is_gone(uint32_t participant) const noexcept {
  Member& member = shared_->member(participant);
  const uint32_t state = member.state.load(std::memory_order_acquire);
  if (state != kAlive) {
    return state == kUnused;
  }
  if (member.locked.load(std::memory_order_relaxed) == 0) {
    // A system without /proc: the word of the caller, who waited for it.
    return true;
  }
  struct flock lock{};
  lock.l_type = F_WRLCK;
  lock.l_whence = SEEK_SET;
  lock.l_start = participant;
  lock.l_len = 1;
  return mapping_->fd_is_ours() && fcntl(mapping_->fd(), F_GETLK, &lock) == 0 &&
         lock.l_type == F_UNLCK;
}

bool SharedSlots::adopt(uint32_t participant) noexcept {
  if (participant == 0 || participant > shared_->workers) {
    return false;
  }
  for (uint32_t i = 0; i < shared_->slots; ++i) {
    const uint64_t word = shared_->slot(i).word.load(std::memory_order_acquire);
    if (shared_->holds(i, participant).load(std::memory_order_acquire) != 0 ||
        (state_of(word) == kClaimed && owner_of(word) == participant)) {
      return false;
    }
  }
  if (participant != this->participant()) {
    const int fd = lock_byte(participant);
    if (fd == kLockTaken) {
      return false;
    }
    if (worker_fd_ >= 0) {
      close(worker_fd_);
    }
    worker_fd_ = fd;
    Member& member = shared_->member(participant);
    member.locked.store(fd >= 0 ? 1 : 0, std::memory_order_relaxed);
    member.state.store(kAlive, std::memory_order_release);
  }
  self_.store(participant, std::memory_order_release);
  return true;
}

bool SharedSlots::has_holds(uint32_t slot) const noexcept {
  return shared_->holds(slot, 0).load(std::memory_order_acquire) != 0 ||
         held_by_others(slot);
}

bool SharedSlots::is_with_worker(uint32_t slot) const noexcept {
  const auto state =
      state_of(shared_->slot(slot).word.load(std::memory_order_acquire));
  return state == kClaimed || state == kReady;
}

bool SharedSlots::held_by_others(uint32_t slot) const noexcept {
  for (uint32_t p = 1; p < shared_->participants; ++p) {
    if (shared_->holds(slot, p).load(std::memory_order_acquire) != 0) {
      return true;
    }
  }
  return false;
}

SlotClaim SharedSlots::try_claim(uint64_t hint) noexcept {
  SlotClaim claim;
  const uint32_t self = participant();
  if (self == kNobody || self == 0) {
    return claim;
  }
  Member& member = shared_->member(self);
  // One bit for each slot that turned out to be unusable in this call.
  uint64_t refused[kMaxSlots / 64] = {};
  for (;;) {
    uint32_t best = kNobody;
    uint64_t best_word = 0;
    // Compared in this order: has the bytes, has any bytes; has them
    // page-locked, this worker had it (its pages are in our page table), freed
    // last (in the cache).
    uint32_t best_class = 0;
    uint64_t best_order = 0;
    for (uint32_t i = 0; i < shared_->slots; ++i) {
      if ((refused[i / 64] >> (i % 64)) & 1) {
        continue;
      }
      SlotState& slot = shared_->slot(i);
      const uint64_t word = slot.word.load(std::memory_order_acquire);
      if (state_of(word) != kFree ||
          slot.retired.load(std::memory_order_relaxed) != 0) {
        continue;
      }
      const uint64_t resident = slot.resident.load(std::memory_order_relaxed);
      uint32_t rank = 1;
      // Unused ones from the front; growing the largest wastes least.
      uint64_t order = shared_->slots - i;
      if (resident != 0 && resident < hint) {
        rank = 2;
        order = resident;
      } else if (resident != 0) {
        const uint64_t pinned = slot.pinned.load(std::memory_order_relaxed);
        rank =
            3 + (pinned != 0 && pinned >= hint ? 2 : 0) +
            (slot.last_owner.load(std::memory_order_relaxed) == self ? 1 : 0);
        order = slot.freed_at.load(std::memory_order_relaxed);
      }
      if (best == kNobody || rank > best_class ||
          (rank == best_class && order > best_order)) {
        best = i;
        best_word = word;
        best_class = rank;
        best_order = order;
      }
    }
    if (best == kNobody) {
      member.refused_no_slot.fetch_add(1, std::memory_order_relaxed);
      return claim;
    }
    refused[best / 64] |= uint64_t{1} << (best % 64);
    if (has_holds(best)) {
      continue;
    }
    SlotState& slot = shared_->slot(best);
    const uint64_t generation =
        (generation_of(best_word) + 1) & kGenerationMask;
    if (!slot.word.compare_exchange_strong(
            best_word,
            word_of(generation, kClaimed, self),
            std::memory_order_acq_rel,
            std::memory_order_relaxed)) {
      // Another worker was faster; the slot is busy now.
      continue;
    }
    slot.last_owner.store(self, std::memory_order_relaxed);
    member.claims.fetch_add(1, std::memory_order_relaxed);
    // Somebody may have given pages back since we mapped them.
    const uint64_t resident = slot.resident.load(std::memory_order_relaxed);
    if (mapped_[best].load(std::memory_order_relaxed) > resident) {
      mapped_[best].store(resident, std::memory_order_relaxed);
    }
    claim.slots_ = shared_from_this();
    claim.slot_ = best;
    claim.owner_ = self;
    claim.generation_ = generation;
    claim.used_ = 0;
    return claim;
  }
}

bool SharedSlots::grow(uint32_t index, uint64_t bytes) noexcept {
  if (bytes <= mapped_[index].load(std::memory_order_relaxed)) {
    return true;
  }
  Member& member = shared_->member(participant());
  SlotState& slot = shared_->slot(index);
  const uint64_t before = slot.resident.load(std::memory_order_relaxed);
  const uint64_t target =
      std::min(shared_->stride, round_up(bytes, kGrowGranule));
  if (target > before) {
    slot.resident.store(target, std::memory_order_seq_cst);
    if (shared_->max_resident != 0) {
      // Everybody announces first and adds up then, so two that grow at once
      // may both be refused but cannot both pass the bound.
      uint64_t sum = 0;
      for (uint32_t i = 0; i < shared_->slots; ++i) {
        sum += shared_->slot(i).resident.load(std::memory_order_seq_cst);
      }
      if (sum > shared_->max_resident) {
        slot.resident.store(before, std::memory_order_relaxed);
        member.refused_size.fetch_add(1, std::memory_order_relaxed);
        return false;
      }
    }
  }
  const uint64_t from = mapped_[index].load(std::memory_order_relaxed);
  char* start = shared_->data(index) + from;
  bool made = false;
  for (int tries = 0; tries < 64; ++tries) {
    made = madvise(start, target - from, MADV_POPULATE_WRITE) == 0;
    if (made || (errno != EINTR && errno != EAGAIN)) {
      break;
    }
  }
  if (!made && errno == EINVAL && target <= before) {
    made = true;
  } else if (!made && errno == EINVAL) {
    // Kernels before 5.14. Without fallocate either, all that is left is to
    // touch the pages as any other program does.
    int result = EOPNOTSUPP;
    if (mapping_->fd_is_ours()) {
      const auto offset = static_cast<off_t>(
          shared_->data_offset + index * shared_->stride + before);
      do {
        result = fallocate(
                     mapping_->fd(),
                     FALLOC_FL_KEEP_SIZE,
                     offset,
                     static_cast<off_t>(target - before)) == 0
                     ? 0
                     : errno;
      } while (result == EINTR);
    }
    made = result == 0 || result == EOPNOTSUPP || result == ENOSYS;
  }
  if (!made) {
    if (target > before) {
      (void)madvise(
          shared_->data(index) + before, target - before, MADV_REMOVE);
      slot.resident.store(before, std::memory_order_relaxed);
    }
    member.refused_memory.fetch_add(1, std::memory_order_relaxed);
    return false;
  }
  mapped_[index].store(target, std::memory_order_relaxed);
  return true;
}

void SharedSlots::map_in(uint32_t index, uint64_t bytes) noexcept {
  const uint64_t from = mapped_[index].load(std::memory_order_relaxed);
  const uint64_t to = std::min(
      round_up(bytes, kGrowGranule),
      shared_->slot(index).resident.load(std::memory_order_relaxed));
  if (from < to &&
      madvise(shared_->data(index) + from, to - from, MADV_POPULATE_WRITE) ==
          0) {
    mapped_[index].store(to, std::memory_order_relaxed);
  }
}

bool SharedSlots::take(const SlotTicket& ticket) noexcept {
  if (participant() != 0 || ticket.slot >= shared_->slots) {
    return false;
  }
  SlotState& slot = shared_->slot(ticket.slot);
  uint64_t word = slot.word.load(std::memory_order_acquire);
  return generation_of(word) == ticket.generation && state_of(word) == kReady &&
         slot.used.load(std::memory_order_relaxed) == ticket.bytes &&
         slot.word.compare_exchange_strong(
             word,
             word_of(ticket.generation, kTaken, 0),
             std::memory_order_acq_rel,
             std::memory_order_relaxed);
}

// Main: takes a slot if it is free and nobody holds it.
bool SharedSlots::take_unused(uint32_t index) noexcept {
  SlotState& slot = shared_->slot(index);
  uint64_t word = slot.word.load(std::memory_order_acquire);
  if (state_of(word) != kFree ||
      slot.retired.load(std::memory_order_relaxed) != 0 || has_holds(index)) {
    return false;
  }
  const uint64_t generation = (generation_of(word) + 1) & kGenerationMask;
  return slot.word.compare_exchange_strong(
      word,
      word_of(generation, kTaken, 0),
      std::memory_order_acq_rel,
      std::memory_order_relaxed);
}

uint32_t SharedSlots::take_free(uint64_t bytes) noexcept {
  if (participant() != 0) {
    return kNobody;
  }
  for (uint32_t i = 0; i < shared_->slots; ++i) {
    const uint64_t pinned = pinned_extent(i);
    if (pinned != 0 && pinned >= bytes && take_unused(i)) {
      return i;
    }
  }
  return kNobody;
}

void SharedSlots::put_back(uint32_t index) noexcept {
  if (participant() != 0 || index >= shared_->slots) {
    return;
  }
  SlotState& slot = shared_->slot(index);
  uint64_t word = slot.word.load(std::memory_order_relaxed);
  if (state_of(word) == kTaken) {
    slot.freed_at.store(shared_->tick(), std::memory_order_relaxed);
    slot.word.compare_exchange_strong(
        word,
        word_of(generation_of(word), kFree, 0),
        std::memory_order_release,
        std::memory_order_relaxed);
  }
}

uint32_t SharedSlots::identity_of(SlotHold hold) const noexcept {
  return hold.fork_depth == fork_depth_ ? participant() : inherited_;
}

bool SharedSlots::retain(
    uint32_t slot,
    uint32_t count,
    SlotHold* hold) noexcept {
  std::unique_lock<std::mutex> guard(registry().mutex);
  const uint32_t self = participant();
  if (self == kNobody || slot >= shared_->slots) {
    return false;
  }
  std::atomic<uint32_t>& holds = shared_->holds(slot, self);
  const uint64_t word =
      shared_->slot(slot).word.load(std::memory_order_relaxed);
  const bool owns = owner_of(word) == self &&
                    state_of(word) == (self == 0 ? kTaken : kClaimed);
  if (!owns && holds.load(std::memory_order_relaxed) == 0) {
    return false;
  }
  holds.fetch_add(count, std::memory_order_relaxed);
  *hold = SlotHold{slot, fork_depth_};
  return true;
}

void SharedSlots::release(SlotHold hold, uint32_t count) noexcept {
  const uint32_t self = identity_of(hold);
  if (self == kNobody || hold.slot >= shared_->slots) {
    return;
  }
  std::atomic<uint32_t>& holds = shared_->holds(hold.slot, self);
  uint32_t now = holds.load(std::memory_order_relaxed);
  if (now == count) {
    shared_->slot(hold.slot).freed_at.store(
        shared_->tick(), std::memory_order_relaxed);
  }
  // Main may have cleared the column of a process that it believed dead.
  while (now != 0 && !holds.compare_exchange_weak(
                         now,
                         now - std::min(now, count),
                         std::memory_order_release,
                         std::memory_order_relaxed)) {
  }
}

void SharedSlots::clear_participant(
    uint32_t participant,
    bool ready_too) noexcept {
  Member& member = shared_->member(participant);
  for (uint32_t i = 0; i < shared_->slots; ++i) {
    SlotState& slot = shared_->slot(i);
    uint64_t freed = 0;
    if (shared_->holds(i, participant).exchange(0, std::memory_order_acq_rel) !=
        0) {
      freed = 1;
    }
    uint64_t word = slot.word.load(std::memory_order_acquire);
    const State state = state_of(word);
    if (owner_of(word) == participant &&
        (state == kClaimed || (state == kReady && ready_too))) {
      slot.freed_at.store(shared_->tick(), std::memory_order_relaxed);
      if (slot.word.compare_exchange_strong(
              word,
              word_of(generation_of(word), kFree, 0),
              std::memory_order_acq_rel,
              std::memory_order_relaxed)) {
        freed = 1;
      }
    }
    member.reclaimed.fetch_add(freed, std::memory_order_relaxed);
  }
}

bool SharedSlots::reclaim(uint32_t worker, bool ready_too) noexcept {
  if (participant() != 0 || worker == 0 || worker > shared_->workers ||
      !is_gone(worker)) {
    return false;
  }
  clear_participant(worker, ready_too);
  shared_->member(worker).state.store(kUnused, std::memory_order_release);
  return true;
}

void SharedSlots::end() noexcept {
  shared_->ending.store(true, std::memory_order_release);
}

bool SharedSlots::is_ending() const noexcept {
  return shared_->ending.load(std::memory_order_acquire);
}

uint32_t SharedSlots::reap_guests() noexcept {
  if (participant() != 0) {
    return 0;
  }
  uint32_t reaped = 0;
  for (uint32_t p = shared_->workers + 1; p < shared_->participants; ++p) {
    Member& member = shared_->member(p);
    if (member.state.load(std::memory_order_acquire) == kAlive && is_gone(p)) {
      clear_participant(p, false);
      member.state.store(kUnused, std::memory_order_release);
      ++reaped;
    }
  }
  return reaped;
}

uint64_t SharedSlots::trim(uint32_t index, uint64_t keep) noexcept {
  SlotState& slot = shared_->slot(index);
  const uint64_t resident = slot.resident.load(std::memory_order_relaxed);
  const uint64_t floor = std::max(
      round_up(keep, kGrowGranule),
      round_up(slot.pinned.load(std::memory_order_acquire), kGrowGranule));
  if (floor >= resident ||
      madvise(shared_->data(index) + floor, resident - floor, MADV_REMOVE) !=
          0) {
    return 0;
  }
  slot.resident.store(floor, std::memory_order_relaxed);
  if (mapped_[index].load(std::memory_order_relaxed) > floor) {
    mapped_[index].store(floor, std::memory_order_relaxed);
  }
  return resident - floor;
}

uint64_t SharedSlots::trim_free_slots(uint64_t keep) noexcept {
  if (participant() != 0) {
    return 0;
  }
  uint64_t given_back = 0;
  for (uint32_t i = 0; i < shared_->slots; ++i) {
    if (resident_bytes(i) > keep && take_unused(i)) {
      given_back += trim(i, keep);
      put_back(i);
    }
  }
  return given_back;
}

uint64_t SharedSlots::trim_to(uint32_t slots, uint64_t bytes) noexcept {
  if (participant() != 0) {
    return 0;
  }
  uint64_t given_back = 0;
  uint64_t looked_at[kMaxSlots / 64] = {};
  for (;;) {
    uint32_t resident_slots = 0;
    uint64_t resident = 0;
    uint32_t first = kNobody;
    uint64_t freed_at = 0;
    for (uint32_t i = 0; i < shared_->slots; ++i) {
      const uint64_t size = resident_bytes(i);
      SlotState& slot = shared_->slot(i);
      const bool is_free =
          state_of(slot.word.load(std::memory_order_acquire)) == kFree;
      if (size == 0 || (is_free && has_holds(i))) {
        continue;
      }
      ++resident_slots;
      resident += size;
      const uint64_t freed = slot.freed_at.load(std::memory_order_relaxed);
      if (is_free && size > round_up(pinned_extent(i), kGrowGranule) &&
          ((looked_at[i / 64] >> (i % 64)) & 1) == 0 &&
          (first == kNobody || freed < freed_at)) {
        first = i;
        freed_at = freed;
      }
    }
    if (first == kNobody || resident_slots <= slots || resident <= bytes) {
      return given_back;
    }
    looked_at[first / 64] |= uint64_t{1} << (first % 64);
    if (take_unused(first)) {
      given_back += trim(first, 0);
      put_back(first);
    }
  }
}

void SharedSlots::set_pinned_extent(uint32_t slot, uint64_t bytes) noexcept {
  shared_->slot(slot).pinned.store(bytes, std::memory_order_release);
}

uint64_t SharedSlots::pinned_extent(uint32_t slot) const noexcept {
  return shared_->slot(slot).pinned.load(std::memory_order_acquire);
}

char* SharedSlots::slot_data(uint32_t slot) const noexcept {
  return shared_->data(slot);
}

uint32_t SharedSlots::slot_of(const void* address) const noexcept {
  const auto at = reinterpret_cast<uintptr_t>(address);
  const auto first = reinterpret_cast<uintptr_t>(shared_->data(0));
  if (at < first || at >= first + shared_->stride * shared_->slots) {
    return kNobody;
  }
  return static_cast<uint32_t>((at - first) / shared_->stride);
}

uint64_t SharedSlots::resident_bytes(uint32_t slot) const noexcept {
  return shared_->slot(slot).resident.load(std::memory_order_relaxed);
}

bool SharedSlots::in_use(uint32_t slot) const noexcept {
  return state_of(shared_->slot(slot).word.load(std::memory_order_acquire)) !=
             kFree ||
         has_holds(slot);
}

uint32_t SharedSlots::slots() const noexcept {
  return shared_->slots;
}

uint32_t SharedSlots::workers() const noexcept {
  return shared_->workers;
}

uint64_t SharedSlots::max_slot_bytes() const noexcept {
  return shared_->stride;
}

uint32_t SharedSlots::participant() const noexcept {
  return self_.load(std::memory_order_acquire);
}

int SharedSlots::fd() const noexcept {
  return mapping_->fd();
}

SharedSlotsStats SharedSlots::stats() const noexcept {
  SharedSlotsStats result;
  result.slots = shared_->slots;
  for (uint32_t i = 0; i < shared_->slots; ++i) {
    SlotState& slot = shared_->slot(i);
    const bool retired = slot.retired.load(std::memory_order_relaxed) != 0;
    result.retired += retired ? 1 : 0;
    result.in_use += retired || in_use(i) ? 1 : 0;
    // A used slot is always preferred, so a slot that was ever claimed was
    // claimed when all earlier ones were in use.
    result.most_in_use +=
        generation_of(slot.word.load(std::memory_order_relaxed)) != 0 ? 1 : 0;
    result.resident_bytes += slot.resident.load(std::memory_order_relaxed);
  }
  for (uint32_t p = 0; p < shared_->participants; ++p) {
    Member& member = shared_->member(p);
    result.claims += member.claims.load(std::memory_order_relaxed);
    result.commits += member.commits.load(std::memory_order_relaxed);
    result.refused_no_slot +=
        member.refused_no_slot.load(std::memory_order_relaxed);
    result.refused_size += member.refused_size.load(std::memory_order_relaxed);
    result.refused_memory +=
        member.refused_memory.load(std::memory_order_relaxed);
    result.reclaimed += member.reclaimed.load(std::memory_order_relaxed);
  }
  return result;
}

void SharedSlots::before_fork() noexcept {
  guest_of_fork_ = kNobody;
  const uint32_t self = participant();
  const auto held = [&](uint32_t slot) {
    uint32_t count = 0;
    for (uint32_t p : {self, inherited_}) {
      if (p != kNobody) {
        count += shared_->holds(slot, p).load(std::memory_order_relaxed);
      }
    }
    return count;
  };
  bool any = false;
  for (uint32_t i = 0; i < shared_->slots && !any; ++i) {
    any = held(i) != 0;
  }
  if (!any) {
    return;
  }
  for (uint32_t p = shared_->workers + 1; p < shared_->participants; ++p) {
    Member& member = shared_->member(p);
    uint32_t expected = kUnused;
    if (!member.state.compare_exchange_strong(
            expected, kStarting, std::memory_order_acq_rel)) {
      continue;
    }
    fork_fd_ = lock_byte(p);
    if (fork_fd_ >= 0) {
      guest_of_fork_ = p;
      break;
    }
    member.state.store(kUnused, std::memory_order_release);
    break;
  }
  for (uint32_t i = 0; i < shared_->slots; ++i) {
    const uint32_t count = held(i);
    if (count == 0) {
      continue;
    }
    if (guest_of_fork_ == kNobody) {
      shared_->slot(i).retired.store(1, std::memory_order_relaxed);
    } else {
      shared_->holds(i, guest_of_fork_).store(count, std::memory_order_relaxed);
    }
  }
  if (guest_of_fork_ != kNobody) {
    Member& member = shared_->member(guest_of_fork_);
    member.locked.store(1, std::memory_order_relaxed);
    member.state.store(kAlive, std::memory_order_release);
  }
}

void SharedSlots::after_fork_in_parent() noexcept {
  guest_of_fork_ = kNobody;
  if (fork_fd_ >= 0) {
    close(fork_fd_);
    fork_fd_ = -1;
  }
}

void SharedSlots::after_fork_in_child() noexcept {
  self_.store(kNobody, std::memory_order_release);
  inherited_ = guest_of_fork_;
  guest_of_fork_ = kNobody;
  ++fork_depth_;
  // A fork does not copy the page tables of shared mappings.
  for (uint32_t i = 0; i < shared_->slots; ++i) {
    mapped_[i].store(0, std::memory_order_relaxed);
  }
  for (int fd : {worker_fd_, guest_fd_}) {
    if (fd >= 0 && mapping_->is_ours(fd)) {
      close(fd);
    }
  }
  worker_fd_ = -1;
  guest_fd_ = fork_fd_;
  fork_fd_ = -1;
}

SlotClaim::SlotClaim(SlotClaim&& other) noexcept
    : slots_(std::move(other.slots_)),
      slot_(other.slot_),
      owner_(other.owner_),
      generation_(other.generation_),
      used_(other.used_) {
  other.slots_.reset();
}

SlotClaim& SlotClaim::operator=(SlotClaim&& other) noexcept {
  if (this != &other) {
    abandon();
    slots_ = std::move(other.slots_);
    other.slots_.reset();
    slot_ = other.slot_;
    owner_ = other.owner_;
    generation_ = other.generation_;
    used_ = other.used_;
  }
  return *this;
}

SlotClaim::~SlotClaim() {
  abandon();
}

// A fork copies claims; the copy in the child must leave the slot alone.
bool SlotClaim::still_ours() const noexcept {
  return slots_ != nullptr && slots_->participant() == owner_;
}

void* SlotClaim::reserve(uint64_t bytes) noexcept {
  if (!still_ours()) {
    return nullptr;
  }
  const uint64_t start = round_up(used_, SharedSlots::kAlignment);
  const uint64_t limit = slots_->max_slot_bytes();
  if (start > limit || bytes > limit - start) {
    slots_->shared_->member(owner_).refused_size.fetch_add(
        1, std::memory_order_relaxed);
    return nullptr;
  }
  if (!slots_->grow(slot_, start + bytes)) {
    return nullptr;
  }
  used_ = start + bytes;
  return slots_->slot_data(slot_) + start;
}

void SlotClaim::rollback(uint64_t mark) noexcept {
  used_ = std::min(used_, mark);
}

uint64_t SlotClaim::offset_of(const void* address, uint64_t bytes)
    const noexcept {
  if (slots_ == nullptr) {
    return UINT64_MAX;
  }
  const auto at = reinterpret_cast<uintptr_t>(address);
  const auto start = reinterpret_cast<uintptr_t>(slots_->slot_data(slot_));
  if (at < start || at - start > used_ || bytes > used_ - (at - start)) {
    return UINT64_MAX;
  }
  return at - start;
}

SlotTicket SlotClaim::commit() noexcept {
  SlotTicket ticket;
  if (still_ours()) {
    ticket = SlotTicket{slot_, generation_, used_};
    SlotState& slot = slots_->shared_->slot(slot_);
    slot.used.store(used_, std::memory_order_relaxed);
    uint64_t word = word_of(generation_, kClaimed, owner_);
    if (slot.word.compare_exchange_strong(
            word,
            word_of(generation_, kReady, owner_),
            std::memory_order_release,
            std::memory_order_relaxed)) {
      slots_->shared_->member(owner_).commits.fetch_add(
          1, std::memory_order_relaxed);
    }
  }
  slots_.reset();
  return ticket;
}

void SlotClaim::abandon() noexcept {
  if (still_ours()) {
    SlotState& slot = slots_->shared_->slot(slot_);
    slot.freed_at.store(slots_->shared_->tick(), std::memory_order_relaxed);
    uint64_t word = word_of(generation_, kClaimed, owner_);
    slot.word.compare_exchange_strong(
        word,
        word_of(generation_, kFree, 0),
        std::memory_order_release,
        std::memory_order_relaxed);
  }
  slots_.reset();
}

} // namespace c10
