// Tests of c10/core/SharedSlots.h alone, without PyTorch. Each case is a name
// on the command line; test/test_shared_slots.py builds this file (plain, and
// with ThreadSanitizer) and runs the cases. Exit status 0 is a pass.

#include <c10/core/SharedSlots.h>

#include <fcntl.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <poll.h>
#include <signal.h>
#include <stddef.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

using c10::SharedSlots;
using c10::SharedSlotsOptions;
using c10::SlotClaim;
using c10::SlotHold;
using c10::SlotTicket;

namespace {

constexpr uint64_t kMiB = uint64_t{1} << 20;

#define CHECK(condition)                                                   \
  do {                                                                     \
    if (!(condition)) {                                                    \
      std::fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, #condition); \
      std::fflush(stderr);                                                 \
      _exit(1);                                                            \
    }                                                                      \
  } while (0)

std::shared_ptr<SharedSlots> make(
    uint32_t workers,
    uint32_t slots,
    uint64_t max_slot_bytes = 64 * kMiB,
    uint64_t max_resident = 0,
    uint32_t guests = 8) {
  SharedSlotsOptions options;
  options.workers = workers;
  options.slots = slots;
  options.max_slot_bytes = max_slot_bytes;
  options.max_resident_bytes = max_resident;
  options.guests = guests;
  std::string error;
  auto result = SharedSlots::create(options, &error);
  if (result == nullptr) {
    std::fprintf(stderr, "create: %s\n", error.c_str());
    _exit(1);
  }
  return result;
}

uint64_t blocks_of(const SharedSlots& slots) {
  struct stat info{};
  CHECK(fstat(slots.fd(), &info) == 0);
  return static_cast<uint64_t>(info.st_blocks) * 512;
}

// Every 8 bytes depend on the place and the key, so that a mixture of two
// batches, an old one and a page of zeros are all seen.
void fill(void* data, uint64_t bytes, uint64_t key) {
  auto* words = static_cast<uint64_t*>(data);
  for (uint64_t i = 0; i < bytes / 8; ++i) {
    words[i] = (key + i) * 0x9e3779b97f4a7c15ULL;
  }
}

bool is_filled(const void* data, uint64_t bytes, uint64_t key) {
  const auto* words = static_cast<const uint64_t*>(data);
  for (uint64_t i = 0; i < bytes / 8; ++i) {
    if (words[i] != (key + i) * 0x9e3779b97f4a7c15ULL) {
      return false;
    }
  }
  return true;
}

int in_child(const std::function<void()>& body) {
  const pid_t pid = fork();
  CHECK(pid >= 0);
  if (pid == 0) {
    body();
    _exit(0);
  }
  int status = 0;
  CHECK(waitpid(pid, &status, 0) == pid);
  return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

void test_life_of_a_slot() {
  auto main = make(2, 2);
  auto worker = main->view_as(1);
  SlotClaim claim = worker->try_claim();
  CHECK(claim);
  CHECK(!main->try_claim());
  void* first = claim.reserve(100);
  void* second = claim.reserve(1);
  CHECK(first != nullptr && second != nullptr);
  CHECK(static_cast<char*>(second) - static_cast<char*>(first) == 128);
  CHECK(reinterpret_cast<uintptr_t>(first) % SharedSlots::kAlignment == 0);
  CHECK(claim.offset_of(second, 1) == 128);
  CHECK(claim.offset_of(second, 2) == UINT64_MAX);
  CHECK(worker->slot_of(second) == claim.slot());
  CHECK(worker->slot_of(&main) == SharedSlots::kNobody);

  const uint64_t mark = claim.mark();
  CHECK(claim.reserve(5000) != nullptr);
  claim.rollback(mark);
  CHECK(claim.reserve(1) == static_cast<char*>(second) + 64);
  fill(first, 96, 7);

  const uint32_t slot = claim.slot();
  CHECK(main->is_with_worker(slot));
  const SlotTicket ticket = claim.commit();
  CHECK(!claim);
  CHECK(!claim.reserve(8));
  CHECK(!worker->take(ticket));
  CHECK(main->is_with_worker(slot));
  CHECK(main->take(ticket));
  CHECK(!main->is_with_worker(slot));
  CHECK(!main->take(ticket));
  CHECK(is_filled(main->slot_data(slot), 96, 7));
  SlotHold hold;
  CHECK(main->retain(slot, 2, &hold));
  CHECK(!worker->retain(slot, 1, &hold));
  main->put_back(slot);
  CHECK(main->in_use(slot));

  SlotClaim other = worker->try_claim();
  CHECK(other && other.slot() != slot);
  CHECK(!worker->try_claim());
  CHECK(main->stats().refused_no_slot == 1);
  CHECK(main->stats().in_use == 2);
  other.abandon();

  main->release(hold);
  CHECK(main->in_use(slot));
  CHECK(!main->is_with_worker(slot));
  CHECK(main->retain(slot, 1, &hold));
  main->release(hold, 2);
  CHECK(!main->in_use(slot));
  CHECK(!main->is_with_worker(slot));
  CHECK(!main->retain(slot, 1, &hold));
  main->release(hold);
  CHECK(!main->in_use(slot));
  CHECK(!main->take(ticket));

  CHECK(other = worker->try_claim());
  CHECK(other.slot() == slot);
  CHECK(!main->take(ticket));
}

void test_a_worker_that_keeps_memory_keeps_the_slot() {
  auto main = make(2, 1);
  auto keeper = main->view_as(1);
  auto other = main->view_as(2);
  SlotClaim claim = keeper->try_claim();
  CHECK(claim.reserve(64) != nullptr);
  SlotHold hold;
  CHECK(keeper->retain(claim.slot(), 1, &hold));
  const SlotTicket ticket = claim.commit();
  CHECK(main->take(ticket));
  main->put_back(ticket.slot);
  CHECK(!other->try_claim());
  CHECK(!keeper->try_claim());
  keeper->release(hold);
  CHECK(other->try_claim());
}

void test_choice_of_a_slot() {
  auto main = make(2, 4);
  auto one = main->view_as(1);
  auto two = main->view_as(2);
  const auto use = [&](SharedSlots& worker, uint64_t bytes) {
    SlotClaim claim = worker.try_claim(bytes);
    CHECK(claim && claim.reserve(bytes) != nullptr);
    const SlotTicket ticket = claim.commit();
    CHECK(main->take(ticket));
    return ticket.slot;
  };
  const uint32_t small = use(*one, 1 * kMiB);
  const uint32_t large = use(*one, 8 * kMiB);
  const uint32_t others = use(*two, 1 * kMiB);
  main->put_back(small);
  main->put_back(large);
  main->put_back(others);
  CHECK(use(*one, 4 * kMiB) == large);
  CHECK(use(*one, 1 * kMiB) == small);
  // One that must grow comes before one that was never used.
  CHECK(use(*two, 4 * kMiB) == others);
  CHECK(main->stats().most_in_use == 3);
  main->put_back(small);
  main->put_back(others);
  main->put_back(large);
  // Its own first, of those the one freed last.
  CHECK(use(*two, 0) == others);
  CHECK(use(*one, 0) == large);
  CHECK(use(*one, 0) == small);
}

void test_memory_appears_when_touched_and_can_be_given_back() {
  auto main = make(1, 8, uint64_t{4} << 30);
  CHECK(main->max_slot_bytes() == uint64_t{4} << 30);
  CHECK(blocks_of(*main) < kMiB);
  struct stat info{};
  CHECK(fstat(main->fd(), &info) == 0);
  CHECK(info.st_nlink == 0);
  CHECK(ftruncate(main->fd(), 4096) != 0);

  auto worker = main->view_as(1);
  SlotClaim claim = worker->try_claim();
  void* data = claim.reserve(32 * kMiB);
  CHECK(data != nullptr);
  fill(data, 32 * kMiB, 1);
  CHECK(blocks_of(*main) >= 32 * kMiB && blocks_of(*main) < 33 * kMiB);
  CHECK(main->resident_bytes(claim.slot()) == 32 * kMiB);
  CHECK(claim.reserve(uint64_t{5} << 30) == nullptr);
  CHECK(main->stats().refused_size == 1);
  CHECK(is_filled(data, 32 * kMiB, 1));

  const SlotTicket ticket = claim.commit();
  CHECK(main->take(ticket));
  main->map_in(ticket.slot, ticket.bytes);
  main->set_pinned_extent(ticket.slot, 8 * kMiB);
  CHECK(main->trim(ticket.slot, 4 * kMiB) == 24 * kMiB);
  CHECK(is_filled(main->slot_data(ticket.slot), 8 * kMiB, 1));
  CHECK(main->trim_free_slots() == 0);
  main->put_back(ticket.slot);
  CHECK(main->trim_free_slots() == 0);
  main->set_pinned_extent(ticket.slot, 0);
  CHECK(main->trim_free_slots() == 8 * kMiB);
  CHECK(blocks_of(*main) < kMiB);
  CHECK(main->stats().resident_bytes == 0);

  claim = worker->try_claim();
  data = claim.reserve(2 * kMiB);
  CHECK(data != nullptr && *static_cast<char*>(data) == 0);
}

void test_free_slots_are_trimmed_down_to_a_number() {
  auto main = make(1, 8, 64 * kMiB);
  auto worker = main->view_as(1);
  std::vector<SlotTicket> tickets;
  for (int i = 0; i < 4; ++i) {
    SlotClaim claim = worker->try_claim();
    CHECK(claim.reserve(2 * kMiB) != nullptr);
    tickets.push_back(claim.commit());
    CHECK(main->take(tickets.back()));
  }
  // In use, all of them.
  CHECK(main->trim_to(1, 0) == 0);
  for (int i : {2, 0, 3}) {
    main->put_back(tickets[i].slot);
  }
  CHECK(main->trim_to(4, 0) == 0);
  CHECK(main->trim_to(1, 8 * kMiB) == 0);
  CHECK(main->trim_to(1, 7 * kMiB) == 2 * kMiB);
  // The one that was free for longest.
  CHECK(main->resident_bytes(tickets[2].slot) == 0);
  CHECK(main->trim_to(2, 0) == 2 * kMiB);
  CHECK(main->resident_bytes(tickets[0].slot) == 0);
  CHECK(main->trim_to(0, 0) == 2 * kMiB);
  CHECK(main->resident_bytes(tickets[1].slot) == 2 * kMiB);
  CHECK(worker->trim_to(0, 0) == 0);
  // A slot that the worker's own data set keeps is free, but not unused.
  SlotClaim claim = worker->try_claim();
  CHECK(claim.reserve(kMiB) != nullptr);
  SlotHold hold;
  const uint32_t slot = claim.slot();
  CHECK(worker->retain(slot, 1, &hold));
  CHECK(main->take(claim.commit()));
  main->put_back(slot);
  CHECK(main->trim_to(0, 0) == 0);
  SlotClaim other = worker->try_claim();
  CHECK(other.slot() != slot && other.reserve(kMiB) != nullptr);
  CHECK(main->take(other.commit()));
  main->put_back(other.slot());
  // The one in use above, and this one.
  CHECK(main->trim_to(2, 0) == 0);
  CHECK(main->trim_to(1, 0) == kMiB);
  worker->release(hold);
  CHECK(main->trim_to(0, 0) == kMiB);
}

void test_bound_on_resident_bytes() {
  auto main = make(2, 4, 64 * kMiB, 10 * kMiB);
  auto worker = main->view_as(1);
  SlotClaim one = worker->try_claim();
  SlotClaim two = worker->try_claim();
  CHECK(one.reserve(6 * kMiB) != nullptr);
  CHECK(two.reserve(6 * kMiB) == nullptr);
  CHECK(two.mark() == 0);
  CHECK(two.reserve(4 * kMiB) != nullptr);
  CHECK(one.reserve(kMiB) == nullptr);
  CHECK(main->stats().refused_size == 2);
  CHECK(main->stats().resident_bytes == 10 * kMiB);
}

// Lets the chosen system calls fail in this process from here on.
void refuse(int populate_errno, int fallocate_errno) {
  std::vector<sock_filter> filter;
  const auto load = [&](size_t offset) {
    filter.push_back(
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, static_cast<uint32_t>(offset)));
  };
  const auto refuse_with = [&](int error) {
    filter.push_back(BPF_STMT(
        BPF_RET | BPF_K, SECCOMP_RET_ERRNO | static_cast<uint32_t>(error)));
  };
  load(offsetof(seccomp_data, nr));
  if (fallocate_errno != 0) {
    filter.push_back(BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_fallocate, 0, 1));
    refuse_with(fallocate_errno);
  }
  filter.push_back(BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_madvise, 0, 3));
  load(offsetof(seccomp_data, args[2]));
  filter.push_back(BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, 23, 0, 1));
  refuse_with(populate_errno);
  filter.push_back(BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW));
  sock_fprog program{static_cast<unsigned short>(filter.size()), filter.data()};
  CHECK(prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) == 0);
  CHECK(prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) == 0);
}

void test_no_memory_is_an_error_return() {
  const auto attempt = [](int populate_errno, int fallocate_errno) {
    return in_child([&] {
      auto main = make(1, 2);
      auto worker = main->view_as(1);
      SlotClaim claim = worker->try_claim();
      CHECK(claim.reserve(kMiB) != nullptr);
      refuse(populate_errno, fallocate_errno);
      void* data = claim.reserve(4 * kMiB);
      if (data == nullptr) {
        CHECK(claim.mark() == kMiB);
        CHECK(main->stats().refused_memory == 1);
        CHECK(main->stats().resident_bytes == kMiB);
        CHECK(claim.reserve(8) == nullptr);
        const SlotTicket ticket = claim.commit();
        CHECK(ticket.bytes == kMiB && main->take(ticket));
        _exit(10);
      }
      CHECK(main->resident_bytes(claim.slot()) == 5 * kMiB);
      fill(data, 4 * kMiB, 3);
      CHECK(is_filled(data, 4 * kMiB, 3));
    });
  };
  CHECK(attempt(ENOMEM, 0) == 10);
  CHECK(attempt(EFAULT, 0) == 10);
  // An old kernel: fallocate makes the pages, or says that it cannot.
  CHECK(attempt(EINVAL, 0) == 0);
  CHECK(attempt(EINVAL, ENOSPC) == 10);
  CHECK(attempt(EINVAL, EOPNOTSUPP) == 0);
}

void test_limits_of_the_process() {
  CHECK(in_child([] {
          const rlimit limit{uint64_t{3} << 30, uint64_t{3} << 30};
          CHECK(setrlimit(RLIMIT_AS, &limit) == 0);
          auto main = make(1, 4, uint64_t{8} << 30);
          CHECK(main->max_slot_bytes() <= uint64_t{1} << 29);
          CHECK(main->max_slot_bytes() >= uint64_t{1} << 28);
          CHECK(main->view_as(1)->try_claim().reserve(kMiB) != nullptr);
        }) == 0);
  CHECK(in_child([] {
          const rlimit limit{64 * kMiB, 64 * kMiB};
          CHECK(setrlimit(RLIMIT_FSIZE, &limit) == 0);
          auto main = make(1, 4, uint64_t{8} << 30);
          CHECK(main->max_slot_bytes() <= 16 * kMiB);
          CHECK(main->view_as(1)->try_claim().reserve(kMiB) != nullptr);
        }) == 0);
  std::string error;
  CHECK(in_child([&] {
          const rlimit limit{kMiB, kMiB};
          CHECK(setrlimit(RLIMIT_FSIZE, &limit) == 0);
          CHECK(SharedSlots::create({}, &error) == nullptr);
          CHECK(error.find("cannot map the slots") == 0);
        }) == 0);
  CHECK(in_child([&] {
          const rlimit limit{3, 3};
          CHECK(setrlimit(RLIMIT_NOFILE, &limit) == 0);
          CHECK(SharedSlots::create({}, &error) == nullptr);
          CHECK(error.find("memfd_create") == 0);
        }) == 0);
  SharedSlotsOptions options;
  options.slots = 0;
  CHECK(SharedSlots::create(options, &error) == nullptr);
  CHECK(error.find("got 0 slots") != std::string::npos);
}

// As after spawn: another program image that has nothing but the descriptor.
void attached_main(int fd) {
  std::string error;
  auto worker = SharedSlots::attach(fd, &error);
  CHECK(worker != nullptr);
  CHECK(!worker->try_claim());
  CHECK(!worker->adopt(0));
  CHECK(!worker->adopt(3));
  CHECK(worker->adopt(2));
  SlotClaim claim = worker->try_claim();
  void* data = claim.reserve(3 * kMiB);
  CHECK(data != nullptr);
  fill(data, 3 * kMiB, 42);
  const SlotTicket ticket = claim.commit();
  CHECK(write(1, &ticket, sizeof(ticket)) == sizeof(ticket));
}

void test_attach_by_descriptor(const char* program) {
  auto main = make(2, 2);
  int ends[2];
  CHECK(pipe(ends) == 0);
  const int status = in_child([&] {
    const std::string number = std::to_string(dup(main->fd()));
    CHECK(dup2(ends[1], 1) == 1);
    execl(
        program,
        program,
        "attached",
        number.c_str(),
        static_cast<char*>(nullptr));
    _exit(99);
  });
  CHECK(status == 0);
  SlotTicket ticket;
  CHECK(read(ends[0], &ticket, sizeof(ticket)) == sizeof(ticket));
  CHECK(main->take(ticket));
  CHECK(ticket.bytes == 3 * kMiB);
  CHECK(is_filled(main->slot_data(ticket.slot), ticket.bytes, 42));

  std::string error;
  const int wrong = memfd_create("wrong", 0);
  CHECK(SharedSlots::attach(wrong, &error) == nullptr);
  CHECK(error.find("no slots of layout version") != std::string::npos);
  CHECK(fcntl(wrong, F_GETFD) == -1);
  CHECK(SharedSlots::attach(wrong, &error) == nullptr);
}

void test_reclaim() {
  auto main = make(2, 4);
  int ends[2];
  CHECK(pipe(ends) == 0);
  const pid_t pid = fork();
  if (pid == 0) {
    CHECK(main->adopt(1));
    SlotClaim ready = main->try_claim();
    CHECK(ready.reserve(64) != nullptr);
    const SlotTicket ticket = ready.commit();
    SlotClaim half = main->try_claim();
    CHECK(half.reserve(64) != nullptr);
    SlotClaim kept = main->try_claim();
    SlotHold hold;
    CHECK(main->retain(kept.slot(), 3, &hold));
    const SlotTicket sent = kept.commit();
    CHECK(write(ends[1], &ticket, sizeof(ticket)) > 0);
    CHECK(write(ends[1], &sent, sizeof(sent)) > 0);
    pause();
  }
  SlotTicket ticket;
  SlotTicket sent;
  CHECK(read(ends[0], &ticket, sizeof(ticket)) == sizeof(ticket));
  CHECK(read(ends[0], &sent, sizeof(sent)) == sizeof(sent));
  CHECK(main->stats().in_use == 3);
  // Alive: nothing happens, and nobody else can be worker 1.
  CHECK(!main->reclaim(1, true));
  CHECK(in_child([&] { _exit(main->adopt(1) ? 0 : 7); }) == 7);
  CHECK(main->take(sent));
  main->put_back(sent.slot);
  CHECK(main->in_use(sent.slot));
  CHECK(kill(pid, SIGKILL) == 0 && waitpid(pid, nullptr, 0) == pid);
  CHECK(in_child([&] { _exit(main->adopt(1) ? 0 : 7); }) == 7);

  CHECK(main->reclaim(1, false));
  CHECK(main->stats().in_use == 1);
  CHECK(!main->in_use(sent.slot));
  // Whole, and its ticket was on the way.
  CHECK(main->take(ticket));
  main->put_back(ticket.slot);
  CHECK(main->stats().in_use == 0);
  // Never ready: no ticket of that use can be made up.
  SlotTicket forged = ticket;
  for (forged.slot = 0; forged.slot < 4; ++forged.slot) {
    for (forged.generation = 0; forged.generation < 4; ++forged.generation) {
      CHECK(!main->take(forged));
    }
  }
  CHECK(in_child([&] { CHECK(main->adopt(1)); }) == 0);
  CHECK(main->reclaim(1, true));
  CHECK(main->reclaim(2, true));
  CHECK(!main->reclaim(0, true));
  CHECK(!main->reclaim(3, true));
}

void test_a_forked_child_keeps_what_it_inherited(const char* program) {
  auto main = make(1, 2);
  auto worker = main->view_as(1);
  const auto deliver = [&](uint64_t key) {
    SlotClaim claim = worker->try_claim();
    CHECK(claim);
    void* data = claim.reserve(kMiB);
    CHECK(data != nullptr);
    fill(data, kMiB, key);
    const SlotTicket ticket = claim.commit();
    CHECK(main->take(ticket));
    SlotHold hold;
    CHECK(main->retain(ticket.slot, 2, &hold));
    main->put_back(ticket.slot);
    return hold;
  };
  const auto free_slots = [&] { return 2 - main->stats().in_use; };
  int to_child[2];
  int to_main[2];
  char byte = 0;
  CHECK(pipe(to_child) == 0 && pipe(to_main) == 0);
  const auto tell = [&](int* ends) { CHECK(write(ends[1], "x", 1) == 1); };
  const auto hear = [&](int* ends) { CHECK(read(ends[0], &byte, 1) == 1); };

  // The parent lets go first; the child, then a grandchild, still has it.
  SlotHold hold = deliver(1);
  pid_t pid = fork();
  if (pid == 0) {
    hear(to_child);
    CHECK(is_filled(main->slot_data(hold.slot), kMiB, 1));
    CHECK(!main->take(SlotTicket{}));
    CHECK(!main->retain(hold.slot, 1, &hold));
    const pid_t grandchild = fork();
    if (grandchild == 0) {
      hear(to_child);
      CHECK(is_filled(main->slot_data(hold.slot), kMiB, 1));
      main->release(hold, 2);
      _exit(0);
    }
    main->release(hold, 1);
    main->release(hold, 1);
    tell(to_main);
    int status = 0;
    CHECK(waitpid(grandchild, &status, 0) == grandchild && status == 0);
    tell(to_main);
    hear(to_child);
    _exit(0);
  }
  main->release(hold, 2);
  for (uint64_t key = 50; key < 60; ++key) {
    main->release(deliver(key), 2);
  }
  CHECK(free_slots() == 1);
  tell(to_child);
  hear(to_main);
  CHECK(free_slots() == 1);
  tell(to_child);
  hear(to_main);
  CHECK(free_slots() == 2);
  tell(to_child);
  CHECK(waitpid(pid, nullptr, 0) == pid);
  CHECK(main->reap_guests() == 2);
  CHECK(main->reap_guests() == 0);

  // A child that is killed never lets go; its column is cleared for it.
  hold = deliver(2);
  pid = fork();
  if (pid == 0) {
    tell(to_main);
    pause();
  }
  hear(to_main);
  main->release(hold, 2);
  CHECK(main->reap_guests() == 0 && free_slots() == 1);
  CHECK(kill(pid, SIGKILL) == 0 && waitpid(pid, nullptr, 0) == pid);
  CHECK(main->reap_guests() == 1 && free_slots() == 2);

  // One that becomes another program has nothing any more.
  hold = deliver(3);
  int gone[2];
  CHECK(pipe2(gone, O_CLOEXEC) == 0);
  pid = fork();
  if (pid == 0) {
    execl(program, program, "sleep", static_cast<char*>(nullptr));
    _exit(99);
  }
  close(gone[1]);
  CHECK(read(gone[0], &byte, 1) == 0);
  main->release(hold, 2);
  // The descriptors close one after the other during exec.
  for (int i = 0; i < 2000 && main->reap_guests() == 0; ++i) {
    usleep(1000);
  }
  CHECK(free_slots() == 2);
  CHECK(kill(pid, 0) == 0);
  CHECK(kill(pid, SIGKILL) == 0 && waitpid(pid, nullptr, 0) == pid);

  // A child that becomes a worker of the same slots (the next epoch of the same
  // loader) drops what it inherited without touching its own holds.
  hold = deliver(4);
  CHECK(in_child([&] {
          CHECK(main->adopt(1));
          SlotClaim claim = main->try_claim();
          SlotHold own;
          CHECK(claim && main->retain(claim.slot(), 1, &own));
          claim.abandon();
          main->release(hold, 2);
          CHECK(main->in_use(own.slot));
          CHECK(!main->try_claim());
          main->release(own);
          CHECK(!main->in_use(own.slot));
        }) == 0);
  CHECK(main->reclaim(1, true));
  main->release(hold, 2);
  CHECK(main->reap_guests() == 1 && free_slots() == 2);

  // A copy of a claim in a child leaves the slot alone.
  CHECK(in_child([&] {
          CHECK(main->adopt(1));
          SlotClaim claim = main->try_claim();
          CHECK(in_child([&] {
                  CHECK(claim.reserve(8) == nullptr);
                  claim.abandon();
                }) == 0);
          CHECK(main->stats().in_use == 1);
          CHECK(claim.reserve(8) != nullptr);
        }) == 0);
}

void test_no_column_left_for_a_child() {
  auto main = make(1, 2, 64 * kMiB, 0, 0);
  auto worker = main->view_as(1);
  SlotClaim claim = worker->try_claim();
  const SlotTicket ticket = claim.commit();
  CHECK(main->take(ticket));
  SlotHold hold;
  CHECK(main->retain(ticket.slot, 1, &hold));
  main->put_back(ticket.slot);
  CHECK(in_child([&] { main->release(hold); }) == 0);
  CHECK(main->stats().retired == 1);
  main->release(hold);
  CHECK(main->stats().in_use == 1);
  SlotClaim other = worker->try_claim();
  CHECK(other && other.slot() != ticket.slot);
  CHECK(!worker->try_claim());
}

void test_the_mapping_outlives_the_object() {
  SlotHold hold;
  char* data = nullptr;
  std::shared_ptr<SharedSlots> kept;
  {
    auto main = make(1, 2);
    auto worker = main->view_as(1);
    SlotClaim claim = worker->try_claim();
    data = static_cast<char*>(claim.reserve(kMiB));
    fill(data, kMiB, 9);
    const SlotTicket ticket = claim.commit();
    CHECK(main->take(ticket) && main->retain(ticket.slot, 1, &hold));
    kept = main;
  }
  CHECK(is_filled(data, kMiB, 9));
  const int fd = kept->fd();
  kept->release(hold);
  kept.reset();
  CHECK(fcntl(fd, F_GETFD) == -1);

  // A program that closed our descriptor and opened its own gets it back.
  auto main = make(1, 2);
  CHECK(close(main->fd()) == 0);
  const int theirs = open("/dev/null", O_RDONLY);
  CHECK(theirs == main->fd());
  main.reset();
  CHECK(fcntl(theirs, F_GETFD) != -1);
}

// Threads stand in for processes, so that ThreadSanitizer sees every access.
void test_threads(int milliseconds) {
  constexpr uint32_t kWorkers = 4;
  auto main = make(kWorkers, 6, 4 * kMiB);
  std::mutex mutex;
  std::deque<std::pair<SlotTicket, uint64_t>> queue;
  std::atomic<bool> stop{false};
  std::atomic<uint64_t> delivered{0};
  std::vector<std::thread> threads;
  for (uint32_t w = 1; w <= kWorkers; ++w) {
    threads.emplace_back([&, w] {
      auto self = main->view_as(w);
      std::mt19937_64 random(w);
      std::vector<std::pair<SlotHold, std::pair<char*, uint64_t>>> kept;
      uint64_t number = 0;
      while (!stop) {
        SlotClaim claim = self->try_claim(4096);
        if (!claim) {
          std::this_thread::yield();
          for (auto& [hold, what] : kept) {
            CHECK(is_filled(what.first, 4096, what.second));
            self->release(hold);
          }
          kept.clear();
          continue;
        }
        const uint64_t key = (uint64_t{w} << 32) + ++number;
        auto* data = static_cast<char*>(claim.reserve(4096));
        CHECK(data != nullptr);
        fill(data, 4096, key);
        SlotHold hold;
        const bool keep = random() % 4 == 0;
        if (keep) {
          CHECK(self->retain(claim.slot(), 1, &hold));
          kept.push_back({hold, {data, key}});
        }
        if (random() % 8 == 0) {
          claim.abandon();
        } else {
          const SlotTicket ticket = claim.commit();
          std::lock_guard<std::mutex> guard(mutex);
          queue.push_back({ticket, key});
        }
      }
      for (auto& [hold, what] : kept) {
        CHECK(is_filled(what.first, 4096, what.second));
        self->release(hold);
      }
    });
  }
  // Main takes in one thread and lets go in another.
  std::deque<std::pair<SlotHold, uint64_t>> alive;
  std::mutex alive_mutex;
  threads.emplace_back([&] {
    while (!stop) {
      std::pair<SlotTicket, uint64_t> item;
      {
        std::lock_guard<std::mutex> guard(mutex);
        if (queue.empty()) {
          std::this_thread::yield();
          continue;
        }
        item = queue.front();
        queue.pop_front();
      }
      CHECK(main->take(item.first));
      SlotHold hold;
      CHECK(main->retain(item.first.slot, 1, &hold));
      main->put_back(item.first.slot);
      ++delivered;
      std::lock_guard<std::mutex> guard(alive_mutex);
      alive.push_back({hold, item.second});
    }
  });
  threads.emplace_back([&] {
    while (!stop) {
      std::pair<SlotHold, uint64_t> item;
      {
        std::lock_guard<std::mutex> guard(alive_mutex);
        if (alive.empty()) {
          std::this_thread::yield();
          continue;
        }
        item = alive.front();
        alive.pop_front();
      }
      CHECK(is_filled(main->slot_data(item.first.slot), 4096, item.second));
      main->release(item.first);
    }
  });
  std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds));
  stop = true;
  for (auto& thread : threads) {
    thread.join();
  }
  std::printf("%llu delivered\n", static_cast<unsigned long long>(delivered));
  CHECK(delivered > 100);
  for (auto& item : queue) {
    CHECK(main->take(item.first));
    main->put_back(item.first.slot);
  }
  for (auto& item : alive) {
    main->release(item.first);
  }
  CHECK(main->stats().in_use == 0);
}

struct Message {
  SlotTicket ticket;
  uint64_t key;
  uint64_t first_bytes;
  uint64_t second_bytes;
};

[[noreturn]] void working(
    const std::shared_ptr<SharedSlots>& slots,
    uint32_t index,
    int out,
    uint64_t seed,
    pid_t parent) {
  prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (getppid() != parent) {
    _exit(0); // it died before the line above
  }
  CHECK(slots->adopt(index));
  std::mt19937_64 random(seed);
  struct Kept {
    SlotHold hold;
    char* data;
    uint64_t bytes;
    uint64_t key;
  };
  std::deque<Kept> kept;
  const auto let_go = [&] {
    CHECK(is_filled(kept.front().data, kept.front().bytes, kept.front().key));
    slots->release(kept.front().hold);
    kept.pop_front();
  };
  for (uint64_t number = 0;; ++number) {
    while (kept.size() > 2 || (!kept.empty() && random() % 2 == 0)) {
      let_go();
    }
    SlotClaim claim = slots->try_claim(random() % (256 << 10));
    if (!claim) {
      usleep(100);
      continue;
    }
    Message message{};
    message.key = (seed << 24) + number;
    message.first_bytes = 8 * (1 + random() % 8192);
    message.second_bytes = 8 * (1 + random() % 8192);
    auto* first = static_cast<char*>(claim.reserve(message.first_bytes));
    auto* second = static_cast<char*>(claim.reserve(message.second_bytes));
    CHECK(first != nullptr && second != nullptr);
    fill(first, message.first_bytes, message.key);
    fill(second, message.second_bytes, ~message.key);
    if (random() % 4 == 0) {
      SlotHold hold;
      CHECK(slots->retain(claim.slot(), 1, &hold));
      kept.push_back({hold, second, message.second_bytes, ~message.key});
    }
    if (random() % 8 == 0) {
      claim.abandon();
      continue;
    }
    message.ticket = claim.commit();
    CHECK(write(out, &message, sizeof(message)) == sizeof(message));
  }
}

// Worker processes are killed at random moments and replaced. With
// `careless`, main reads after it gave the slot back: the case must fail then,
// which shows that it would notice.
void test_kills(int kills, bool careless) {
  constexpr uint32_t kWorkers = 4;
  constexpr uint32_t kSlots = 12;
  auto main = make(kWorkers, kSlots, kMiB, 0, 16);
  struct Worker {
    pid_t pid = -1;
    int in = -1;
  };
  std::vector<Worker> workers(kWorkers + 1);
  struct Alive {
    SlotHold hold;
    Message message;
  };
  std::deque<Alive> alive;
  uint64_t seed = 0;
  const auto start = [&](uint32_t index) {
    int ends[2];
    CHECK(pipe(ends) == 0);
    ++seed;
    const pid_t parent = getpid();
    const pid_t pid = fork();
    CHECK(pid >= 0);
    if (pid == 0) {
      for (const Alive& item : alive) {
        main->release(item.hold);
      }
      working(main, index, ends[1], seed, parent);
    }
    close(ends[1]);
    workers[index] = {pid, ends[0]};
  };

  uint64_t delivered = 0;
  uint64_t recovered = 0;
  std::mt19937_64 random(std::random_device{}());
  const auto verify = [&](const Message& message) {
    const char* data = main->slot_data(message.ticket.slot);
    CHECK(is_filled(data, message.first_bytes, message.key));
    const uint64_t second = (message.first_bytes + 63) / 64 * 64;
    CHECK(is_filled(data + second, message.second_bytes, ~message.key));
  };
  const auto let_go = [&] {
    verify(alive.front().message);
    if (!careless) {
      main->release(alive.front().hold);
    }
    alive.pop_front();
  };
  const auto receive = [&](uint32_t index) {
    Message message{};
    const ssize_t got = read(workers[index].in, &message, sizeof(message));
    if (got == 0) {
      return false;
    }
    CHECK(got == sizeof(message));
    CHECK(main->take(message.ticket));
    CHECK(!main->take(message.ticket));
    verify(message);
    ++delivered;
    Alive item{{}, message};
    CHECK(main->retain(message.ticket.slot, 1, &item.hold));
    main->put_back(message.ticket.slot);
    if (careless) {
      main->release(item.hold);
    }
    alive.push_back(item);
    while (alive.size() > 4 || (!alive.empty() && random() % 2 == 0)) {
      let_go();
    }
    return true;
  };

  for (uint32_t i = 1; i <= kWorkers; ++i) {
    start(i);
  }
  auto next_kill = std::chrono::steady_clock::now();
  while (kills > 0) {
    std::vector<pollfd> polled;
    for (uint32_t i = 1; i <= kWorkers; ++i) {
      polled.push_back({workers[i].in, POLLIN, 0});
    }
    CHECK(poll(polled.data(), polled.size(), 1000) >= 0);
    for (uint32_t i = 1; i <= kWorkers; ++i) {
      if (polled[i - 1].revents & POLLIN) {
        CHECK(receive(i));
      }
    }
    if (std::chrono::steady_clock::now() < next_kill) {
      continue;
    }
    next_kill = std::chrono::steady_clock::now() +
                std::chrono::microseconds(random() % 8000);
    --kills;
    const uint32_t victim = 1 + random() % kWorkers;
    CHECK(kill(workers[victim].pid, SIGKILL) == 0);
    int status = 0;
    CHECK(waitpid(workers[victim].pid, &status, 0) == workers[victim].pid);
    // Anything else than our signal is a check that failed in the worker.
    CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
    while (receive(victim)) {
    }
    close(workers[victim].in);
    CHECK(main->reclaim(victim, true));
    recovered = main->stats().reclaimed;
    main->reap_guests();
    start(victim);
  }
  for (uint32_t i = 1; i <= kWorkers; ++i) {
    CHECK(kill(workers[i].pid, SIGKILL) == 0);
    CHECK(waitpid(workers[i].pid, nullptr, 0) == workers[i].pid);
    while (receive(i)) {
    }
    CHECK(main->reclaim(i, true));
  }
  while (!alive.empty()) {
    let_go();
  }
  main->reap_guests();
  const auto stats = main->stats();
  std::printf(
      "%llu delivered, %llu slots taken back, %u retired, %u in use\n",
      static_cast<unsigned long long>(delivered),
      static_cast<unsigned long long>(recovered),
      stats.retired,
      stats.in_use - stats.retired);
  CHECK(delivered > 100 && recovered > 0);
  CHECK(stats.in_use == stats.retired);
  CHECK(stats.resident_bytes <= kSlots * kMiB);
}

// Prints the inode, then waits to be killed with a worker that has the slots.
void orphan() {
  auto main = make(1, 4);
  const pid_t pid = fork();
  if (pid == 0) {
    CHECK(main->adopt(1));
    const pid_t parent = getppid();
    SlotClaim claim = main->try_claim();
    void* data = claim.reserve(32 * kMiB);
    fill(data, 32 * kMiB, 1);
    while (getppid() == parent) {
      usleep(1000);
    }
    _exit(0);
  }
  struct stat info{};
  CHECK(fstat(main->fd(), &info) == 0);
  std::printf("%llu\n", static_cast<unsigned long long>(info.st_ino));
  std::fflush(stdout);
  pause();
}

} // namespace

int main(int argc, char** argv) {
  const std::string name = argc > 1 ? argv[1] : "";
  const int number = argc > 2 ? std::atoi(argv[2]) : 0;
  const std::map<std::string, std::function<void()>> cases{
      {"life", test_life_of_a_slot},
      {"worker_keeps", test_a_worker_that_keeps_memory_keeps_the_slot},
      {"choice", test_choice_of_a_slot},
      {"memory", test_memory_appears_when_touched_and_can_be_given_back},
      {"trim_to", test_free_slots_are_trimmed_down_to_a_number},
      {"bound", test_bound_on_resident_bytes},
      {"no_memory", test_no_memory_is_an_error_return},
      {"limits", test_limits_of_the_process},
      {"attach", [&] { test_attach_by_descriptor(argv[0]); }},
      {"reclaim", test_reclaim},
      {"fork", [&] { test_a_forked_child_keeps_what_it_inherited(argv[0]); }},
      {"no_column", test_no_column_left_for_a_child},
      {"outlives", test_the_mapping_outlives_the_object},
      {"threads", [&] { test_threads(number); }},
      {"kills", [&] { test_kills(number, false); }},
      {"kills_careless", [&] { test_kills(number, true); }},
      {"attached", [&] { attached_main(number); }},
      {"sleep", [] { pause(); }},
      {"orphan", orphan},
  };
  const auto found = cases.find(name);
  if (found == cases.end()) {
    std::fprintf(stderr, "no case \"%s\"\n", name.c_str());
    return 2;
  }
  found->second();
  return 0;
}
