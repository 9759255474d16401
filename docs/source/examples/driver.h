#pragma once

// Stands for the vendor's driver in the examples of the backend guide. The
// "device" is the host: nothing runs behind the caller's back, so that all work
// of a stream has finished when the call that submits it returns. Page-locking
// is a table of ranges, which is what a driver keeps, too.

#include <sys/mman.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>

namespace driver {

constexpr size_t kPage = 4096;

struct Locked {
  std::mutex mutex;
  std::map<uintptr_t, size_t> ranges; // bytes by first address
};

inline Locked& locked() {
  static auto* table = new Locked();
  return *table;
}

inline bool lock(void* ptr, size_t bytes) {
  std::lock_guard<std::mutex> guard(locked().mutex);
  return locked()
      .ranges.emplace(reinterpret_cast<uintptr_t>(ptr), bytes)
      .second;
}

inline void unlock(void* ptr) {
  std::lock_guard<std::mutex> guard(locked().mutex);
  locked().ranges.erase(reinterpret_cast<uintptr_t>(ptr));
}

// Whether ptr lies anywhere inside of a locked range.
inline bool is_locked(const void* ptr) {
  std::lock_guard<std::mutex> guard(locked().mutex);
  const auto address = reinterpret_cast<uintptr_t>(ptr);
  auto after = locked().ranges.upper_bound(address);
  if (after == locked().ranges.begin()) {
    return false;
  }
  const auto& [start, bytes] = *--after;
  return address - start < bytes;
}

inline size_t whole_pages(size_t bytes) {
  return (bytes + kPage - 1) / kPage * kPage;
}

// New memory that is page-locked, on a page boundary; null when refused.
inline void* allocate(size_t bytes) {
  void* ptr = mmap(
      nullptr,
      whole_pages(bytes),
      PROT_READ | PROT_WRITE,
      MAP_PRIVATE | MAP_ANONYMOUS,
      -1,
      0);
  if (ptr == MAP_FAILED) {
    return nullptr;
  }
  lock(ptr, whole_pages(bytes));
  return ptr;
}

inline void free(void* ptr) {
  size_t bytes = 0;
  {
    std::lock_guard<std::mutex> guard(locked().mutex);
    const auto found = locked().ranges.find(reinterpret_cast<uintptr_t>(ptr));
    if (found == locked().ranges.end()) {
      return;
    }
    bytes = found->second;
    locked().ranges.erase(found);
  }
  munmap(ptr, bytes);
}

} // namespace driver
