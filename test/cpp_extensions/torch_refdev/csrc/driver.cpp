#include "driver.h"

#include <c10/core/PageMap.h>

#include <fcntl.h>
#include <linux/falloc.h>
#include <pthread.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <set>
#include <shared_mutex>
#include <thread>

namespace refdev {

struct EventState {
  uint64_t recorded = 0;
  uint64_t done = 0;
  std::chrono::steady_clock::time_point when;
  // Where it was last recorded, to see whom a waiter waits for.
  int device = -1;
  int stream = -1;
};

namespace {

using Clock = std::chrono::steady_clock;
using Seconds = std::chrono::duration<double>;

// Address space, not memory: pages come when they are first written.
constexpr size_t kCapacity = size_t(16) << 30;
constexpr size_t kAlignment = 512;
constexpr size_t kPage = 4096;

struct Op {
  enum class Kind { copy, kernel, record, wait };
  explicit Op(Kind kind) : kind(kind) {}
  Kind kind;
  bool held_back = false;   // subject to holds, delay, bandwidth and counting
  bool may_be_gone = false; // the source may be unmapped when its turn comes
  void* destination = nullptr;
  const void* source = nullptr;
  size_t bytes = 0;
  std::shared_ptr<void> staging;
  std::function<void()> kernel;
  Event event;
  uint64_t version = 0;
  bool timed = false;
  Clock::time_point due;
};

struct Stream {
  std::deque<Op> queue;
  uint64_t enqueued = 0;
  uint64_t done = 0;
  // The first op, or one that a caller runs itself, is being worked on.
  bool busy = false;
};

struct PendingFree {
  size_t offset;
  std::vector<std::pair<int, uint64_t>> after;
};

struct Device {
  std::atomic<bool> context{false};
  std::array<Stream, kStreamCount> streams;
  int turn = 0; // the stream that is looked at first
  std::thread engine;
  Clock::time_point engine_busy_until;
  // Set once, before `context`.
  char* arena = nullptr; // what callers see: no access
  char* alias = nullptr; // what kernels see
  int fd = -1;
  std::map<size_t, size_t> free_blocks; // offset to bytes
  std::map<size_t, size_t> used_blocks;
  std::vector<PendingFree> pending;
  size_t in_use = 0;
};

struct LockedRange {
  uintptr_t end;
  bool owned;
};

struct Settings {
  std::atomic<double> delay{0};
  std::atomic<double> bandwidth{0};
  std::atomic<int64_t> locked_limit{-1};
  std::atomic<bool> pageable_is_async{false};
};

// One mutex for streams, events and device memory: work that takes time is
// done outside it.
struct Driver {
  std::mutex mutex;
  std::condition_variable work;
  std::condition_variable progress;
  std::array<Device, kDeviceCount> devices;
  std::map<int64_t, int> holders; // thread to depth
  int holds = 0;
  bool stopping = false;
  int64_t in_flight = 0;
  std::set<std::pair<int, int64_t>> touches;
  uint64_t copies_direct = 0;
  uint64_t copies_staged = 0;
  uint64_t copies_device = 0;

  // Held across a change of `ranges` and the mlock or munlock that follows it:
  // these do not count, so their order must be that of the changes.
  std::mutex page_locks_mutex;
  std::shared_mutex ranges_mutex;
  // By begin, as the caller gave it. A page is locked while a range uses it.
  std::map<uintptr_t, LockedRange> ranges;
  // Their pages, for who asks about memory that is not locked: without a lock.
  c10::PageMap<Driver> pages;
  int64_t locked_bytes = 0;
  uint64_t pin_calls = 0;
  uint64_t unpin_calls = 0;
  uint64_t pin_refusals = 0;
};

std::atomic<bool> initialized_flag{false};
std::atomic<bool> forked_flag{false};
std::atomic<int> next_stream{0};
Settings settings;
thread_local int current_device = 0;

// Made when the library is loaded, so that init() is a flag and no child can be
// forked in the middle of it. Never destroyed: threads may use it until the
// process is gone.
Driver* const the_driver = new Driver();

Driver& driver() {
  return *the_driver;
}

int64_t threadId() {
  static thread_local int64_t id = 0;
  // A forked child's only thread has a new id.
  static thread_local pid_t process = 0;
  if (process != getpid()) {
    process = getpid();
    id = syscall(SYS_gettid);
  }
  return id;
}

uintptr_t pageFloor(uintptr_t address) {
  return address & ~(kPage - 1);
}

uintptr_t pageCeil(uintptr_t address) {
  return (address + kPage - 1) & ~(kPage - 1);
}

bool validDevice(int device) {
  return device >= 0 && device < kDeviceCount;
}

bool validStream(int device, int stream) {
  return validDevice(device) && stream >= 0 && stream < kStreamCount;
}

// Whether waiting for `stream` means waiting for a copy that is held.
bool waitsForHold(const Driver& d, int device, int stream, int depth = 0) {
  const Stream& s = d.devices[device].streams[stream];
  if (s.queue.empty() || s.busy || depth > kStreamCount) {
    return false;
  }
  const Op& op = s.queue.front();
  if (op.kind == Op::Kind::copy) {
    return op.held_back && !op.timed;
  }
  if (op.kind == Op::Kind::wait && op.event->done < op.version) {
    return waitsForHold(d, op.event->device, op.event->stream, depth + 1);
  }
  return false;
}

void finish(Driver& d, Stream& s) {
  if (s.queue.front().held_back) {
    --d.in_flight;
  }
  s.queue.pop_front();
  ++s.done;
}

void move(const Op& op) {
  if (!op.may_be_gone) {
    std::memcpy(op.destination, op.source, op.bytes);
    return;
  }
  // Fails where a load would end the process.
  iovec to{op.destination, op.bytes};
  iovec from{const_cast<void*>(op.source), op.bytes};
  (void)process_vm_readv(getpid(), &to, 1, &from, 1, 0);
}

// One step of an engine: runs at most one op outside the lock. Returns false
// where nothing could be done; `wake` is then the time of the next copy.
bool step(
    Driver& d,
    Device& device,
    std::unique_lock<std::mutex>& lock,
    Clock::time_point* wake) {
  *wake = Clock::time_point::max();
  for (int i = 0; i < kStreamCount; ++i) {
    const int index = (device.turn + i) % kStreamCount;
    Stream& s = device.streams[index];
    if (s.queue.empty() || s.busy) {
      continue;
    }
    Op& op = s.queue.front();
    switch (op.kind) {
      case Op::Kind::record:
        op.event->done = std::max(op.event->done, op.version);
        op.event->when = Clock::now();
        finish(d, s);
        d.progress.notify_all();
        d.work.notify_all();
        return true;
      case Op::Kind::wait:
        if (op.event->done < op.version) {
          continue;
        }
        finish(d, s);
        d.progress.notify_all();
        return true;
      case Op::Kind::copy:
        if (op.held_back) {
          if (!op.timed) {
            if (d.holds > 0) {
              continue;
            }
            const auto now = Clock::now();
            const double bandwidth = settings.bandwidth;
            auto start = std::max(now, device.engine_busy_until);
            if (bandwidth > 0) {
              start += std::chrono::duration_cast<Clock::duration>(
                  Seconds(op.bytes / bandwidth));
              device.engine_busy_until = start;
            } else {
              start = now;
            }
            op.due = start + std::chrono::duration_cast<Clock::duration>(
                                 Seconds(settings.delay.load()));
            op.timed = true;
          }
          if (op.due > Clock::now()) {
            *wake = std::min(*wake, op.due);
            continue;
          }
        }
        s.busy = true;
        lock.unlock();
        move(op);
        break;
      case Op::Kind::kernel:
        s.busy = true;
        lock.unlock();
        op.kernel();
        break;
    }
    {
      // Staging memory and what a kernel captured go outside the lock too.
      auto staging = std::move(op.staging);
      auto kernel = std::move(op.kernel);
    }
    lock.lock();
    s.busy = false;
    device.turn = (index + 1) % kStreamCount;
    finish(d, s);
    d.progress.notify_all();
    return true;
  }
  return false;
}

void engineLoop(int index) {
  pthread_setname_np(
      pthread_self(), ("refdev_engine" + std::to_string(index)).c_str());
  Driver& d = driver();
  Device& device = d.devices[index];
  std::unique_lock<std::mutex> lock(d.mutex);
  while (!d.stopping) {
    Clock::time_point wake;
    if (step(d, device, lock, &wake)) {
      continue;
    }
    if (wake == Clock::time_point::max()) {
      d.work.wait(lock);
    } else {
      d.work.wait_until(lock, wake);
    }
  }
}

// Called with the mutex held.
Status touch(Driver& d, int index) {
  if (forked_flag) {
    return Status::forked;
  }
  if (d.stopping) {
    return Status::shutDown;
  }
  Device& device = d.devices[index];
  d.touches.emplace(index, threadId());
  if (device.context) {
    return Status::ok;
  }
  device.fd = memfd_create("refdev", MFD_CLOEXEC);
  if (device.fd < 0 || ftruncate(device.fd, kCapacity) != 0) {
    return Status::outOfMemory;
  }
  void* arena = mmap(
      nullptr, kCapacity, PROT_NONE, MAP_SHARED | MAP_NORESERVE, device.fd, 0);
  void* alias = mmap(
      nullptr,
      kCapacity,
      PROT_READ | PROT_WRITE,
      MAP_SHARED | MAP_NORESERVE,
      device.fd,
      0);
  if (arena == MAP_FAILED || alias == MAP_FAILED) {
    return Status::outOfMemory;
  }
  device.arena = static_cast<char*>(arena);
  device.alias = static_cast<char*>(alias);
  device.free_blocks[0] = kCapacity;
  // Signals belong to the program's own threads.
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_SETMASK, &all, &before);
  device.engine = std::thread(engineLoop, index);
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  device.context = true;
  return Status::ok;
}

void release(Device& device, size_t offset) {
  auto used = device.used_blocks.find(offset);
  size_t bytes = used->second;
  device.used_blocks.erase(used);
  auto next = device.free_blocks.lower_bound(offset);
  if (next != device.free_blocks.end() && offset + bytes == next->first) {
    bytes += next->second;
    next = device.free_blocks.erase(next);
  }
  if (next != device.free_blocks.begin()) {
    auto previous = std::prev(next);
    if (previous->first + previous->second == offset) {
      previous->second += bytes;
      return;
    }
  }
  device.free_blocks[offset] = bytes;
}

void reclaim(Device& device) {
  auto& pending = device.pending;
  pending.erase(
      std::remove_if(
          pending.begin(),
          pending.end(),
          [&](const PendingFree& block) {
            for (const auto& [stream, target] : block.after) {
              if (device.streams[stream].done < target) {
                return false;
              }
            }
            release(device, block.offset);
            return true;
          }),
      pending.end());
}

// Waits until `done()`, on behalf of `stream`. See Note [Exit].
template <typename Done>
Status waitUntil(
    Driver& d,
    std::unique_lock<std::mutex>& lock,
    int device,
    int stream,
    Done done) {
  if (d.stopping) {
    return Status::shutDown;
  }
  while (!done() || d.stopping) {
    if (d.holds > 0 && d.holders.count(threadId()) &&
        waitsForHold(d, device, stream)) {
      return Status::held;
    }
    d.progress.wait(lock);
  }
  return Status::ok;
}

// Waits until `stream` has done `target` ops.
Status waitFor(
    Driver& d,
    std::unique_lock<std::mutex>& lock,
    int device,
    int stream,
    uint64_t target) {
  const Stream& s = d.devices[device].streams[stream];
  return waitUntil(d, lock, device, stream, [&] { return s.done >= target; });
}

// Waits until no copy reads or writes [begin, end) of host memory.
Status waitForUsers(uintptr_t begin, uintptr_t end) {
  Driver& d = driver();
  std::unique_lock<std::mutex> lock(d.mutex);
  const auto inside = [&](const void* address) {
    const auto at = reinterpret_cast<uintptr_t>(address);
    return at >= begin && at < end;
  };
  for (int device = 0; device < kDeviceCount; ++device) {
    for (int stream = 0; stream < kStreamCount; ++stream) {
      const Stream& s = d.devices[device].streams[stream];
      uint64_t target = 0;
      uint64_t position = s.done;
      for (const Op& op : s.queue) {
        ++position;
        if (op.kind == Op::Kind::copy &&
            (inside(op.source) || inside(op.destination))) {
          target = position;
        }
      }
      const Status status = waitFor(d, lock, device, stream, target);
      if (status != Status::ok) {
        return status;
      }
    }
  }
  return Status::ok;
}

void enqueue(Driver& d, Stream& s, Op op) {
  if (op.held_back) {
    ++d.in_flight;
  }
  s.queue.push_back(std::move(op));
  ++s.enqueued;
  d.work.notify_all();
}

// Runs `work` on the calling thread in the stream's order, if the stream has
// nothing before it.
template <typename Work>
bool runIfIdle(
    Driver& d,
    std::unique_lock<std::mutex>& lock,
    Stream& s,
    Work&& work) {
  if (s.busy || !s.queue.empty()) {
    return false;
  }
  s.busy = true;
  ++s.enqueued;
  lock.unlock();
  work();
  lock.lock();
  s.busy = false;
  ++s.done;
  d.work.notify_all();
  d.progress.notify_all();
  return true;
}

void forkedChild() {
  if (initialized_flag) {
    forked_flag = true;
  }
}

const bool handlers_registered = [] {
  pthread_atfork(nullptr, nullptr, forkedChild);
  // After libtorch's own handlers, so it runs before them.
  std::atexit([] { shutDown(); });
  return true;
}();

// The pages of a range that no other range uses. `next` is the range after it.
std::pair<uintptr_t, uintptr_t> ownPages(
    const Driver& d,
    uintptr_t begin,
    uintptr_t end,
    std::map<uintptr_t, LockedRange>::const_iterator next) {
  uintptr_t first = pageFloor(begin);
  uintptr_t last = pageCeil(end);
  if (next != d.ranges.end()) {
    last = std::min(last, pageFloor(next->first));
  }
  if (next != d.ranges.begin()) {
    first = std::max(first, pageCeil(std::prev(next)->second.end));
  }
  return {first, std::max(first, last)};
}

Status addRange(Driver& d, uintptr_t begin, LockedRange range) {
  std::unique_lock<std::shared_mutex> lock(d.ranges_mutex);
  const auto next = d.ranges.lower_bound(begin);
  if (next != d.ranges.end() && next->first < range.end) {
    return Status::alreadyRegistered;
  }
  if (next != d.ranges.begin() && std::prev(next)->second.end > begin) {
    return Status::alreadyRegistered;
  }
  const auto [first, last] = ownPages(d, begin, range.end, next);
  const auto bytes = static_cast<int64_t>(last - first);
  const int64_t limit = settings.locked_limit;
  if (limit >= 0 && d.locked_bytes + bytes > limit) {
    ++d.pin_refusals;
    return Status::lockLimit;
  }
  d.pages.insert(reinterpret_cast<void*>(first), last - first, &d);
  d.ranges.emplace(begin, range);
  d.locked_bytes += bytes;
  ++d.pin_calls;
  return Status::ok;
}

// Ends a range, but not before the copies that use it.
Status unlock(void* address, bool owned) {
  Driver& d = driver();
  const auto begin = reinterpret_cast<uintptr_t>(address);
  uintptr_t end = 0;
  {
    std::shared_lock<std::shared_mutex> lock(d.ranges_mutex);
    const auto found = d.ranges.find(begin);
    if (found == d.ranges.end() || found->second.owned != owned) {
      return Status::notRegistered;
    }
    end = found->second.end;
  }
  const Status status = waitForUsers(begin, end);
  if (status != Status::ok) {
    return status;
  }
  std::unique_lock<std::mutex> order(d.page_locks_mutex);
  std::pair<uintptr_t, uintptr_t> own;
  {
    std::unique_lock<std::shared_mutex> lock(d.ranges_mutex);
    const auto found = d.ranges.find(begin);
    if (found == d.ranges.end()) {
      return Status::notRegistered;
    }
    own = ownPages(d, begin, end, d.ranges.erase(found));
    d.pages.erase(reinterpret_cast<void*>(own.first), own.second - own.first);
    d.locked_bytes -= static_cast<int64_t>(own.second - own.first);
    ++d.unpin_calls;
  }
  if (owned) {
    order.unlock();
    munmap(address, pageCeil(end) - begin);
  } else if (own.first < own.second) {
    (void)munlock(reinterpret_cast<void*>(own.first), own.second - own.first);
  }
  return Status::ok;
}

// How a call begins that works with a device: the mutex is held when all is
// well.
Status begin(int device, std::unique_lock<std::mutex>& lock) {
  Status status = validDevice(device) ? init() : Status::invalidValue;
  if (status == Status::ok) {
    Driver& d = driver();
    lock = std::unique_lock<std::mutex>(d.mutex);
    status = touch(d, device);
  }
  return status;
}

// The same for one that gives a stream work.
Status begin(int device, int stream, std::unique_lock<std::mutex>& lock) {
  return validStream(device, stream) ? begin(device, lock)
                                     : Status::invalidValue;
}

Status touchCurrent() {
  std::unique_lock<std::mutex> lock;
  return begin(current_device, lock);
}

} // namespace

const char* describe(Status status) noexcept {
  switch (status) {
    case Status::ok:
      return "no error";
    case Status::outOfMemory:
      return "out of device memory";
    case Status::outOfHostMemory:
      return "out of host memory";
    case Status::lockLimit:
      return "the limit on page-locked host memory is reached";
    case Status::alreadyRegistered:
      return "part of this host memory is page-locked already";
    case Status::notRegistered:
      return "no page-locked host memory begins at this address";
    case Status::invalidValue:
      return "invalid value";
    case Status::forked:
      return "Cannot re-initialize refdev in forked subprocess. To use refdev "
             "with multiprocessing, you must use the 'spawn' start method";
    case Status::held:
      return "this thread waits for copies that it holds itself";
    case Status::shutDown:
      return "the driver is shut down";
  }
  return "unknown error";
}

Status init() noexcept {
  if (forked_flag) {
    return Status::forked;
  }
  if (!initialized_flag) {
    initialized_flag = true;
  }
  return Status::ok;
}

bool initialized() noexcept {
  return initialized_flag && !forked_flag;
}

bool inBadFork() noexcept {
  return forked_flag;
}

void shutDown() noexcept {
  if (!initialized()) {
    return;
  }
  Driver& d = driver();
  {
    std::lock_guard<std::mutex> lock(d.mutex);
    d.stopping = true;
    d.work.notify_all();
  }
  for (Device& device : d.devices) {
    if (device.engine.joinable()) {
      device.engine.join();
    }
  }
}

int currentDevice() noexcept {
  return current_device;
}

void selectDevice(int device) noexcept {
  if (validDevice(device)) {
    current_device = device;
  }
}

bool hasContext(int device) noexcept {
  return initialized() && validDevice(device) &&
         driver().devices[device].context;
}

Status deviceAlloc(int device, size_t bytes, void** address) noexcept {
  *address = nullptr;
  if (bytes > kCapacity) {
    return Status::outOfMemory;
  }
  bytes =
      std::max((bytes + kAlignment - 1) / kAlignment * kAlignment, kAlignment);
  Driver& d = driver();
  std::unique_lock<std::mutex> lock;
  Status status = begin(device, lock);
  if (status != Status::ok) {
    return status;
  }
  Device& dev = d.devices[device];
  reclaim(dev);
  for (;;) {
    for (auto it = dev.free_blocks.begin(); it != dev.free_blocks.end(); ++it) {
      if (it->second < bytes) {
        continue;
      }
      const size_t offset = it->first;
      const size_t rest = it->second - bytes;
      dev.free_blocks.erase(it);
      if (rest > 0) {
        dev.free_blocks[offset + bytes] = rest;
      }
      dev.used_blocks[offset] = bytes;
      dev.in_use += bytes;
      *address = dev.arena + offset;
      return Status::ok;
    }
    if (dev.pending.empty()) {
      return Status::outOfMemory;
    }
    const auto after = dev.pending.front().after;
    for (const auto& [stream, target] : after) {
      status = waitFor(d, lock, device, stream, target);
      if (status != Status::ok) {
        return status;
      }
    }
    reclaim(dev);
  }
}

void deviceFree(void* address, const std::vector<int>& streams) noexcept {
  if (address == nullptr || forked_flag) {
    return;
  }
  const int device = deviceOf(address);
  if (device < 0) {
    return;
  }
  Driver& d = driver();
  std::lock_guard<std::mutex> lock(d.mutex);
  Device& dev = d.devices[device];
  PendingFree block{
      static_cast<size_t>(static_cast<char*>(address) - dev.arena), {}};
  auto used = dev.used_blocks.find(block.offset);
  if (used == dev.used_blocks.end()) {
    return;
  }
  dev.in_use -= used->second;
  for (int stream : streams) {
    const Stream& s = dev.streams[stream];
    if (s.done < s.enqueued) {
      block.after.emplace_back(stream, s.enqueued);
    }
  }
  if (block.after.empty()) {
    release(dev, block.offset);
  } else {
    dev.pending.push_back(std::move(block));
  }
}

int deviceOf(const void* address) noexcept {
  if (!initialized_flag) {
    return -1;
  }
  for (int i = 0; i < kDeviceCount; ++i) {
    const Device& device = driver().devices[i];
    if (device.context && address >= device.arena &&
        address < device.arena + kCapacity) {
      return i;
    }
  }
  return -1;
}

void* kernelAddress(const void* address) noexcept {
  const int index = deviceOf(address);
  if (index < 0) {
    return nullptr;
  }
  const Device& device = driver().devices[index];
  return device.alias + (static_cast<const char*>(address) - device.arena);
}

size_t deviceBytesInUse(int device) noexcept {
  if (!initialized() || !validDevice(device)) {
    return 0;
  }
  std::lock_guard<std::mutex> lock(driver().mutex);
  return driver().devices[device].in_use;
}

size_t deviceCapacity() noexcept {
  return kCapacity;
}

void deviceTrim(int device) noexcept {
  if (!hasContext(device)) {
    return;
  }
  Driver& d = driver();
  std::lock_guard<std::mutex> lock(d.mutex);
  Device& dev = d.devices[device];
  reclaim(dev);
  for (const auto& [offset, bytes] : dev.free_blocks) {
    const size_t begin = pageCeil(offset);
    const size_t end = pageFloor(offset + bytes);
    if (begin < end) {
      fallocate(
          dev.fd,
          FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE,
          static_cast<off_t>(begin),
          static_cast<off_t>(end - begin));
    }
  }
}

Status hostAlloc(size_t bytes, void** address) noexcept {
  *address = nullptr;
  Status status = touchCurrent();
  if (status != Status::ok) {
    return status;
  }
  const size_t length = pageCeil(std::max<size_t>(bytes, 1));
  void* memory = mmap(
      nullptr,
      length,
      PROT_READ | PROT_WRITE,
      MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE,
      -1,
      0);
  if (memory == MAP_FAILED) {
    return Status::outOfHostMemory;
  }
  const auto begin = reinterpret_cast<uintptr_t>(memory);
  status = addRange(driver(), begin, {begin + length, true});
  if (status != Status::ok) {
    munmap(memory, length);
    return status;
  }
  // Where the process may not lock that much, the pages are merely resident;
  // what counts for callers is the driver's own table.
  (void)mlock(memory, length);
  *address = memory;
  return Status::ok;
}

Status hostFree(void* address) noexcept {
  if (address == nullptr || forked_flag || !initialized_flag) {
    return Status::ok;
  }
  return unlock(address, true);
}

Status hostRegister(void* address, size_t bytes) noexcept {
  if (address == nullptr || bytes == 0) {
    return Status::invalidValue;
  }
  Status status = touchCurrent();
  if (status != Status::ok) {
    return status;
  }
  const auto begin = reinterpret_cast<uintptr_t>(address);
  const uintptr_t first = pageFloor(begin);
  const uintptr_t last = pageCeil(begin + bytes);
  std::vector<unsigned char> resident((last - first) / kPage);
  auto* pages = reinterpret_cast<void*>(first);
  if (mincore(pages, last - first, resident.data()) != 0) {
    return Status::invalidValue;
  }
  std::lock_guard<std::mutex> order(driver().page_locks_mutex);
  status = addRange(driver(), begin, {begin + bytes, false});
  if (status == Status::ok && mlock(pages, last - first) != 0) {
    // Not allowed to lock: make the pages resident at least.
    (void)madvise(pages, last - first, MADV_WILLNEED);
  }
  return status;
}

Status hostUnregister(void* address) noexcept {
  if (forked_flag || !initialized_flag) {
    return Status::ok;
  }
  return unlock(address, false);
}

bool hostIsLocked(const void* address, size_t bytes) noexcept {
  if (!initialized()) {
    return false;
  }
  Driver& d = driver();
  if (d.pages.find(address) == nullptr) {
    return false;
  }
  auto at = reinterpret_cast<uintptr_t>(address);
  const uintptr_t end = at + std::max<size_t>(bytes, 1);
  std::shared_lock<std::shared_mutex> lock(d.ranges_mutex);
  auto next = d.ranges.upper_bound(at);
  if (next == d.ranges.begin()) {
    return false;
  }
  // A range may be covered by several registrations side by side.
  for (auto it = std::prev(next); it != d.ranges.end(); ++it) {
    if (at < it->first || at >= it->second.end) {
      return false;
    }
    at = it->second.end;
    if (at >= end) {
      return true;
    }
  }
  return false;
}

bool hostIsLockedStart(const void* address) noexcept {
  if (!initialized()) {
    return false;
  }
  Driver& d = driver();
  const auto at = reinterpret_cast<uintptr_t>(address);
  std::shared_lock<std::shared_mutex> lock(d.ranges_mutex);
  return d.ranges.count(at) > 0;
}

int newStream() noexcept {
  return 1 + next_stream++ % (kStreamCount - 1);
}

Status copy(
    int device,
    int stream,
    void* destination,
    const void* source,
    size_t bytes,
    Blocking blocking,
    Traffic traffic,
    bool* in_flight) noexcept {
  *in_flight = false;
  if (bytes == 0) {
    return validStream(device, stream) ? init() : Status::invalidValue;
  }
  const int to = deviceOf(destination);
  const int from = deviceOf(source);
  const bool on_devices = to >= 0 && from >= 0;
  const void* host = to < 0 ? destination : source;
  if (to < 0 && from < 0) {
    return Status::invalidValue;
  }
  const bool really_locked = on_devices || hostIsLocked(host, bytes);
  const bool locked = really_locked || (settings.pageable_is_async && to >= 0);

  Driver& d = driver();
  std::unique_lock<std::mutex> lock;
  Status status = begin(device, stream, lock);
  if (status != Status::ok) {
    return status;
  }
  Stream& s = d.devices[device].streams[stream];
  const bool user = traffic == Traffic::user;
  if (user) {
    ++(on_devices ? d.copies_device
       : locked   ? d.copies_direct
                  : d.copies_staged);
  }
  Op op(Op::Kind::copy);
  op.held_back = user && !(on_devices && to == from);
  op.destination = to >= 0 ? kernelAddress(destination) : destination;
  op.source = from >= 0 ? kernelAddress(source) : source;
  op.bytes = bytes;
  op.may_be_gone = locked && !really_locked;

  // Nothing must be seen of a copy before its time, so only where the caller
  // waits for it, or gives its source away at once, may it be done here.
  const bool capture = !locked && to >= 0;
  const bool wait = blocking == Blocking::yes || (!locked && to < 0);
  const bool undisturbed =
      !op.held_back ||
      (d.holds == 0 && settings.delay == 0 && settings.bandwidth == 0);
  if ((wait || capture) && undisturbed && runIfIdle(d, lock, s, [&] {
        std::memcpy(op.destination, op.source, op.bytes);
      })) {
    return Status::ok;
  }
  if (capture) {
    lock.unlock();
    std::shared_ptr<void> staging(std::malloc(bytes), std::free);
    if (staging == nullptr) {
      return Status::outOfMemory;
    }
    std::memcpy(staging.get(), source, bytes);
    op.source = staging.get();
    op.staging = std::move(staging);
    lock.lock();
  }
  enqueue(d, s, std::move(op));
  if (wait) {
    const uint64_t target = s.enqueued;
    status = waitFor(d, lock, device, stream, target);
    if (status == Status::held) {
      // The caller may give its memory away after the error.
      Op& refused = s.queue[target - s.done - 1];
      refused.bytes = 0;
    }
    return status;
  }
  *in_flight = !capture && !on_devices;
  return Status::ok;
}

Status launch(int device, int stream, std::function<void()> kernel) noexcept {
  Driver& d = driver();
  std::unique_lock<std::mutex> lock;
  const Status status = begin(device, stream, lock);
  if (status != Status::ok) {
    return status;
  }
  Stream& s = d.devices[device].streams[stream];
  if (!runIfIdle(d, lock, s, kernel)) {
    Op op(Op::Kind::kernel);
    op.kernel = std::move(kernel);
    enqueue(d, s, std::move(op));
  }
  return Status::ok;
}

bool queryStream(int device, int stream) noexcept {
  if (!hasContext(device) || !validStream(device, stream)) {
    return true;
  }
  Driver& d = driver();
  std::lock_guard<std::mutex> lock(d.mutex);
  const Stream& s = d.devices[device].streams[stream];
  return d.stopping || s.done == s.enqueued;
}

Status synchronizeStream(int device, int stream) noexcept {
  if (inBadFork()) {
    return Status::forked;
  }
  if (!hasContext(device) || !validStream(device, stream)) {
    return Status::ok;
  }
  Driver& d = driver();
  std::unique_lock<std::mutex> lock(d.mutex);
  return waitFor(
      d, lock, device, stream, d.devices[device].streams[stream].enqueued);
}

Status synchronizeDevice(int device) noexcept {
  for (int stream = 0; stream < kStreamCount; ++stream) {
    Status status = synchronizeStream(device, stream);
    if (status != Status::ok) {
      return status;
    }
  }
  return Status::ok;
}

Event newEvent() {
  return std::make_shared<EventState>();
}

Status recordEvent(const Event& event, int device, int stream) noexcept {
  Driver& d = driver();
  std::unique_lock<std::mutex> lock;
  const Status status = begin(device, stream, lock);
  if (status != Status::ok) {
    return status;
  }
  Stream& s = d.devices[device].streams[stream];
  event->device = device;
  event->stream = stream;
  const uint64_t version = ++event->recorded;
  if (!s.busy && s.queue.empty()) {
    event->done = version;
    event->when = Clock::now();
    d.work.notify_all();
    d.progress.notify_all();
    return Status::ok;
  }
  Op op(Op::Kind::record);
  op.event = event;
  op.version = version;
  enqueue(d, s, std::move(op));
  return Status::ok;
}

Status waitEvent(const Event& event, int device, int stream) noexcept {
  if (!validStream(device, stream)) {
    return Status::invalidValue;
  }
  Status status = init();
  if (status != Status::ok) {
    return status;
  }
  Driver& d = driver();
  std::unique_lock<std::mutex> lock(d.mutex);
  if (event->done >= event->recorded) {
    return Status::ok;
  }
  status = touch(d, device);
  if (status != Status::ok) {
    return status;
  }
  Op op(Op::Kind::wait);
  op.event = event;
  op.version = event->recorded;
  enqueue(d, d.devices[device].streams[stream], std::move(op));
  return Status::ok;
}

bool queryEvent(const Event& event) noexcept {
  if (!initialized()) {
    return true;
  }
  Driver& d = driver();
  std::lock_guard<std::mutex> lock(d.mutex);
  return d.stopping || event->done >= event->recorded;
}

Status synchronizeEvent(const Event& event) noexcept {
  if (inBadFork()) {
    return Status::forked;
  }
  if (!initialized()) {
    return Status::ok;
  }
  Driver& d = driver();
  std::unique_lock<std::mutex> lock(d.mutex);
  const uint64_t version = event->recorded;
  return event->done >= version
             ? Status::ok
             : waitUntil(d, lock, event->device, event->stream, [&] {
                 return event->done >= version;
               });
}

double elapsedMilliseconds(const Event& begin, const Event& end) noexcept {
  if (!initialized()) {
    return -1;
  }
  std::lock_guard<std::mutex> lock(driver().mutex);
  for (const Event& event : {begin, end}) {
    if (event->recorded == 0 || event->done < event->recorded) {
      return -1;
    }
  }
  return Seconds(end->when - begin->when).count() * 1e3;
}

void setCopyDelay(double seconds) noexcept {
  settings.delay = seconds;
}

void setCopyBandwidth(double bytes_per_second) noexcept {
  settings.bandwidth = bytes_per_second;
}

void setLockedLimit(int64_t bytes) noexcept {
  settings.locked_limit = bytes;
}

void holdCopies() noexcept {
  if (inBadFork()) {
    return;
  }
  Driver& d = driver();
  std::lock_guard<std::mutex> lock(d.mutex);
  ++d.holds;
  ++d.holders[threadId()];
}

void releaseCopies() noexcept {
  if (inBadFork()) {
    return;
  }
  Driver& d = driver();
  std::lock_guard<std::mutex> lock(d.mutex);
  auto holder = d.holders.find(threadId());
  if (holder == d.holders.end()) {
    holder = d.holders.begin();
  }
  if (holder == d.holders.end()) {
    return;
  }
  if (--holder->second == 0) {
    d.holders.erase(holder);
  }
  --d.holds;
  d.work.notify_all();
  d.progress.notify_all();
}

void setPageableIsAsync(bool value) noexcept {
  settings.pageable_is_async = value;
}

Counters counters() {
  Counters result;
  if (inBadFork()) {
    return result;
  }
  Driver& d = driver();
  {
    std::lock_guard<std::mutex> lock(d.mutex);
    result.copies_direct = d.copies_direct;
    result.copies_staged = d.copies_staged;
    result.copies_device = d.copies_device;
    result.copies_in_flight = d.in_flight;
    for (int i = 0; i < kDeviceCount; ++i) {
      if (d.devices[i].context) {
        result.contexts.push_back(i);
      }
    }
    for (const auto& [device, thread] : d.touches) {
      result.touches.push_back({device, thread});
    }
  }
  std::shared_lock<std::shared_mutex> lock(d.ranges_mutex);
  result.pin_calls = d.pin_calls;
  result.unpin_calls = d.unpin_calls;
  result.pin_refusals = d.pin_refusals;
  result.locked_bytes = d.locked_bytes;
  result.locked_ranges = d.ranges.size();
  return result;
}

void resetCounters() noexcept {
  if (inBadFork()) {
    return;
  }
  Driver& d = driver();
  {
    std::lock_guard<std::mutex> lock(d.mutex);
    d.copies_direct = d.copies_staged = d.copies_device = 0;
    d.touches.clear();
  }
  std::unique_lock<std::shared_mutex> lock(d.ranges_mutex);
  d.pin_calls = d.unpin_calls = d.pin_refusals = 0;
}

} // namespace refdev
