#pragma once

// What a host block cache reports (statistics with the keys of
// torch.cuda.host_memory_stats()), what bounds it, and the error it throws when
// there is no memory. Plain values; no torch, no lock.

#include <sys/resource.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <stdexcept>
#include <string>

namespace at::pin {
// Each backend compiles this file into its own library. The version keeps
// libraries that were compiled with different releases of it apart.
inline namespace host_cache_v1 {

// A value that is followed over time; the meaning of the four is that of
// torch.cuda.host_memory_stats().
struct HostStat {
  int64_t current = 0;
  int64_t peak = 0;
  int64_t allocated = 0;
  int64_t freed = 0;

  void increase(size_t amount) noexcept {
    current += static_cast<int64_t>(amount);
    allocated += static_cast<int64_t>(amount);
    peak = std::max(peak, current);
  }
  void decrease(size_t amount) noexcept {
    current -= static_cast<int64_t>(amount);
    freed += static_cast<int64_t>(amount);
  }
  void reset_accumulated() noexcept {
    allocated = freed = 0;
  }
  void reset_peak() noexcept {
    peak = current;
  }
};

// Calls of the runtime, in microseconds.
struct HostTiming {
  int64_t total = 0;
  int64_t max = 0;
  int64_t min = 0;
  int64_t count = 0;

  void add(int64_t microseconds) noexcept {
    min = count == 0 ? microseconds : std::min(min, microseconds);
    max = std::max(max, microseconds);
    total += microseconds;
    ++count;
  }
};

struct HostCacheStats {
  HostStat allocations;     // segments owned, used or not
  HostStat allocated_bytes; // their bytes: what is page-locked
  HostStat active_requests; // blocks live or pending
  HostStat active_bytes;    // their bytes
  HostStat requested_bytes; // the bytes that were asked for when they were made
  HostTiming host_alloc_time;
  HostTiming host_free_time;
  int64_t num_host_alloc = 0; // calls of the runtime that gave memory
  int64_t num_host_free = 0;
  int64_t num_alloc_retries = 0; // refusals that were followed by a second try
  int64_t num_ooms = 0;          // requests that failed in the end
  int64_t num_lost_blocks = 0;   // never reused: their event could not be made
};

// Calls visit(argument, key, value) with the keys of
// torch.cuda.host_memory_stats(), and a few more.
inline void visit_host_stats(
    const HostCacheStats& stats,
    void (*visit)(void* argument, const char* key, int64_t value),
    void* argument) {
  const auto one = [&](const char* name, const char* part, int64_t value) {
    char key[64];
    std::snprintf(key, sizeof(key), "%s.%s", name, part);
    visit(argument, key, value);
  };
  const auto stat = [&](const char* name, const HostStat& of) {
    one(name, "current", of.current);
    one(name, "peak", of.peak);
    one(name, "allocated", of.allocated);
    one(name, "freed", of.freed);
  };
  const auto timing = [&](const char* name, const HostTiming& of) {
    one(name, "total", of.total);
    one(name, "max", of.max);
    one(name, "min", of.min);
    one(name, "count", of.count);
    one(name, "avg", of.count == 0 ? 0 : of.total / of.count);
  };
  stat("active_bytes", stats.active_bytes);
  stat("active_requests", stats.active_requests);
  stat("allocated_bytes", stats.allocated_bytes);
  stat("allocations", stats.allocations);
  stat("requested_bytes", stats.requested_bytes);
  timing("host_alloc_time", stats.host_alloc_time);
  timing("host_free_time", stats.host_free_time);
  visit(argument, "num_alloc_retries", stats.num_alloc_retries);
  visit(argument, "num_host_alloc", stats.num_host_alloc);
  visit(argument, "num_host_free", stats.num_host_free);
  visit(argument, "num_lost_blocks", stats.num_lost_blocks);
  visit(argument, "num_ooms", stats.num_ooms);
}

struct HostCacheLimits {
  static constexpr size_t kNone = SIZE_MAX;
  size_t locked = kNone; // the most bytes page-locked in all
  size_t cached = kNone; // the most bytes of idle segments
};

inline std::string host_bytes_text(size_t bytes) {
  char text[64];
  if (bytes < size_t{10} << 20) {
    std::snprintf(text, sizeof(text), "%zu bytes", bytes);
  } else {
    std::snprintf(
        text,
        sizeof(text),
        "%zu bytes (%.1f MiB)",
        bytes,
        static_cast<double>(bytes) / (1 << 20));
  }
  return text;
}

// For a message: what the operating system lets this process lock.
inline std::string locked_memory_limit_text() {
  struct rlimit memlock{};
  const bool limited = ::getrlimit(RLIMIT_MEMLOCK, &memlock) == 0 &&
                       memlock.rlim_cur != RLIM_INFINITY;
  return "Limit of this process on locked memory (ulimit -l): " +
         (limited ? host_bytes_text(memlock.rlim_cur) : std::string("none")) +
         ".";
}

// No page-locked memory to be had, after the cache was emptied.
class HostOutOfMemory : public std::runtime_error {
 public:
  HostOutOfMemory(size_t asked, size_t held, size_t cap, const char* who)
      : std::runtime_error(message(asked, held, cap, who)),
        asked(asked),
        held(held),
        cap(cap) {}

  const size_t asked; // bytes that had to be page-locked for the request
  const size_t held;  // bytes that this cache has page-locked
  const size_t cap;   // HostCacheLimits::locked

 private:
  static std::string
  message(size_t asked, size_t held, size_t cap, const char* who) {
    return "Out of page-locked host memory: " + std::string(who) +
           " when asked for " + host_bytes_text(asked) + ", " +
           host_bytes_text(held) +
           " being held after the cache was emptied. Cap of this allocator: " +
           (cap == HostCacheLimits::kNone ? std::string("none")
                                          : host_bytes_text(cap)) +
           ". " + locked_memory_limit_text();
  }
};

} // namespace host_cache_v1
} // namespace at::pin
