#pragma once

// Page-locking of memory that exists already: which ranges are registered, how
// often, and with which calls of the driver. Knows nothing of tensors; see
// HostMemory.h for those, and HostMemoryHooks.h for what a backend supplies.
//
// Note [Registered ranges]
// ~~~~~~~~~~~~~~~~~~~~~~~~
// A *registration* is a range of bytes as a caller named it, with a count. What
// the driver is asked to lock are *chunks*: disjoint, on boundaries of the
// driver's granularity (a page, or a byte for a driver that takes any range and
// counts how many use a page), each of them one call, undone by one call. A
// registration uses all chunks that it touches and makes new ones for the gaps;
// a chunk is undone when nothing uses it any more.
//
// A page that a registration covers only in part, at its start or end, is a
// chunk of its own. The rest of such a page belongs to other memory: should
// that be registered too, both use the chunk, and when the first of the two
// goes away only that page stays locked, not a range whose memory is gone.
//
// Large gaps become several chunks, so that no call of the driver is too large.
// If one is refused, those before it are undone.
//
// The driver is called without a lock, since what it runs may come back here. A
// chunk that is being locked or unlocked is in the table, and registrations
// that touch it wait. Unregistering never waits.
//
// In a forked child nothing is registered: page locks are not inherited, and
// what the driver knows is the parent's.

#include <c10/core/AtFork.h>
#include <c10/core/PageMap.h>

#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <utility>
#include <vector>

namespace at::pin {

// How one accelerator page-locks.
struct HostMemoryLocker {
  // Page-locks [ptr, ptr + bytes). False when refused; may throw instead.
  std::function<bool(void* ptr, size_t bytes)> lock;
  // Undoes one call of the above. What it throws is dropped.
  std::function<void(void* ptr, size_t bytes)> unlock;
  // What begin and end of a range are multiples of: the page size, or 1.
  size_t granularity = c10::size_class::kPage;
};

// The driver refused. What was locked for the registration is unlocked again.
class HostMemoryRefused : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

// All functions are thread-safe, need no GIL and should be called without it.
class HostMemoryRegistry {
 public:
  static constexpr size_t kLargestChunk = size_t{1} << 30;

  explicit HostMemoryRegistry(size_t largest_chunk = kLargestChunk);
  ~HostMemoryRegistry() = default;
  HostMemoryRegistry(const HostMemoryRegistry&) = delete;
  HostMemoryRegistry& operator=(const HostMemoryRegistry&) = delete;

  // That of the process, never destroyed: memory is freed late.
  static HostMemoryRegistry& instance();

  // Page-locks the range, or counts one more registration if it is registered
  // already. Throws HostMemoryRefused. Does nothing for 0 bytes.
  void register_range(
      const std::shared_ptr<const HostMemoryLocker>& locker,
      const void* ptr,
      size_t bytes);

  // Undoes one registration of exactly this range. False if there is none.
  bool unregister_range(const void* ptr, size_t bytes) noexcept;

  // Whether anything of the range is page-locked through here.
  bool touches(const void* ptr, size_t bytes) const noexcept;

  // Whether every byte of the range is registered, in one registration or
  // several. Takes no lock where nothing of the first page is locked, which is
  // the case of ordinary memory.
  bool covers(const void* ptr, size_t bytes) const noexcept;

  // Whether the byte at ptr is page-locked through here, registered or in a
  // page with something that is. As cheap as covers().
  bool holds(const void* ptr) const noexcept;

  // Ranges registered, and bytes locked for them.
  std::pair<size_t, size_t> totals() const noexcept;

 private:
  enum class State : uint8_t { Locking, Locked, Unlocking };

  using Range = std::pair<uintptr_t, uintptr_t>;
  using Lock = std::unique_lock<std::mutex>;

  struct Chunk {
    uintptr_t end = 0;
    size_t users = 0;
    State state = State::Locking;
    // A page of which a registration covers only a part: `parts` are the
    // registrations that use it.
    bool shared_page = false;
    std::vector<Range> parts;
    std::shared_ptr<const HostMemoryLocker> locker;
  };

  struct Registration {
    size_t count = 0; // 0 while its chunks are being locked
    std::vector<uintptr_t> chunks;
  };

  struct Tables {
    std::mutex mutex;
    std::condition_variable changed;
    std::map<uintptr_t, Chunk> chunks; // by first address
    std::map<Range, Registration> registrations;
    size_t locked_bytes = 0;
  };

  void acquire_chunks(
      const std::shared_ptr<const HostMemoryLocker>& locker,
      Range range,
      std::vector<uintptr_t>& chunks,
      Lock& lock);
  void release_chunks(
      Range range,
      const std::vector<uintptr_t>& chunks,
      Lock& lock) noexcept;
  Range pages_of_its_own(uintptr_t at, const Chunk& chunk) const noexcept;
  static void after_fork_in_child(void* self) noexcept;

  const size_t largest_chunk_;
  mutable Tables tables_;
  // How many forks lie between here and the first process.
  uint64_t epoch_ = 0;
  // Pages that locked chunks touch; all entries are the same. Read without the
  // mutex.
  c10::PageMap<const char> pages_;
  c10::AtForkInChild at_fork_; // last: see there
};

} // namespace at::pin
