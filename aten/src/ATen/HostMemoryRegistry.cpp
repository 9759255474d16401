#include <ATen/HostMemoryRegistry.h>

#include <algorithm>
#include <cstdio>
#include <exception>
#include <iterator>
#include <new>
#include <string>

namespace at::pin {

namespace {

constexpr char kLockedPage = 0;

using c10::size_class::round_up_to_page;

uintptr_t round_down_to_page(uintptr_t address) {
  return address - address % c10::size_class::kPage;
}

std::string range_text(const void* ptr, size_t bytes) {
  char text[96];
  std::snprintf(text, sizeof(text), "%zu bytes at %p", bytes, ptr);
  return text;
}

} // namespace

HostMemoryRegistry::HostMemoryRegistry(size_t largest_chunk)
    : largest_chunk_(largest_chunk), at_fork_(&after_fork_in_child, this) {}

HostMemoryRegistry& HostMemoryRegistry::instance() {
  static auto* const registry = new HostMemoryRegistry();
  return *registry;
}

void HostMemoryRegistry::register_range(
    const std::shared_ptr<const HostMemoryLocker>& locker,
    const void* ptr,
    size_t bytes) {
  if (bytes == 0) {
    return;
  }
  const auto begin = reinterpret_cast<uintptr_t>(ptr);
  const Range range{begin, begin + bytes};
  Lock lock(tables_.mutex);
  auto found = tables_.registrations.find(range);
  while (found != tables_.registrations.end() && found->second.count == 0) {
    // Another thread is at it, and may fail.
    tables_.changed.wait(lock);
    found = tables_.registrations.find(range);
  }
  if (found != tables_.registrations.end()) {
    ++found->second.count;
    return;
  }
  found = tables_.registrations.emplace(range, Registration{}).first;
  std::vector<uintptr_t> chunks;
  const uint64_t epoch = epoch_;
  try {
    acquire_chunks(locker, range, chunks, lock);
  } catch (...) {
    if (epoch == epoch_) {
      release_chunks(range, chunks, lock);
      tables_.registrations.erase(range);
      tables_.changed.notify_all();
    }
    throw;
  }
  found->second.chunks = std::move(chunks);
  found->second.count = 1;
  tables_.changed.notify_all();
}

// Appends to `chunks` each chunk of which the registration has become a user.
void HostMemoryRegistry::acquire_chunks(
    const std::shared_ptr<const HostMemoryLocker>& locker,
    Range range,
    std::vector<uintptr_t>& chunks,
    Lock& lock) {
  const uint64_t epoch = epoch_;
  const size_t unit = locker->granularity;
  const uintptr_t first = range.first - range.first % unit;
  const uintptr_t last = range.second + (unit - range.second % unit) % unit;
  for (uintptr_t at = first; at < last;) {
    auto next = tables_.chunks.upper_bound(at);
    auto here =
        next == tables_.chunks.begin() ? tables_.chunks.end() : std::prev(next);
    chunks.reserve(chunks.size() + 1);
    if (here != tables_.chunks.end() && here->second.end > at) {
      if (here->second.state != State::Locked) {
        tables_.changed.wait(lock);
        continue;
      }
      if (here->second.shared_page) {
        here->second.parts.push_back(range);
      }
      ++here->second.users;
      chunks.push_back(here->first);
      at = here->second.end;
      continue;
    }
    // A gap. Pages that belong to the range only in part stand alone.
    uintptr_t end = last;
    if (next != tables_.chunks.end()) {
      end = std::min(end, next->first);
    }
    bool shared_page = false;
    if (at < range.first || at + unit > range.second) {
      end = at + unit;
      shared_page = true;
    } else {
      end = std::min(end, range.second - range.second % unit);
      end = std::min(end, at + std::max(largest_chunk_, unit));
    }
    Chunk chunk;
    chunk.end = end;
    chunk.users = 1;
    chunk.shared_page = shared_page;
    chunk.locker = locker;
    if (shared_page) {
      chunk.parts.push_back(range);
    }
    here = tables_.chunks.emplace(at, std::move(chunk)).first;

    auto* const ptr = reinterpret_cast<void*>(at);
    const size_t bytes = end - at;
    bool locked = false;
    std::string why;
    lock.unlock();
    try {
      locked = locker->lock(ptr, bytes);
    } catch (const std::exception& error) {
      why = error.what();
    } catch (...) {
      why = "unknown exception";
    }
    lock.lock();
    if (epoch != epoch_) {
      throw HostMemoryRefused(
          "the process was forked while it page-locked host memory");
    }
    if (locked) {
      try {
        const uintptr_t page = round_down_to_page(at);
        pages_.insert(
            reinterpret_cast<void*>(page),
            round_up_to_page(end) - page,
            &kLockedPage);
      } catch (const std::bad_alloc&) {
        lock.unlock();
        locker->unlock(ptr, bytes);
        lock.lock();
        locked = false;
        why = "no memory for the table of pages";
      }
    }
    if (!locked) {
      tables_.chunks.erase(here);
      tables_.changed.notify_all();
      throw HostMemoryRefused(
          "Cannot page-lock " +
          range_text(
              reinterpret_cast<void*>(range.first),
              range.second - range.first) +
          ": the driver refused " + range_text(ptr, bytes) +
          (why.empty() ? std::string() : " (" + why + ")") +
          ". Nothing of it is registered.");
    }
    here->second.state = State::Locked;
    tables_.locked_bytes += bytes;
    chunks.push_back(at);
    tables_.changed.notify_all();
    at = end;
  }
}

void HostMemoryRegistry::release_chunks(
    Range range,
    const std::vector<uintptr_t>& chunks,
    Lock& lock) noexcept {
  const uint64_t epoch = epoch_;
  for (const uintptr_t at : chunks) {
    const auto here = tables_.chunks.find(at);
    Chunk& chunk = here->second;
    const auto part = std::find(chunk.parts.begin(), chunk.parts.end(), range);
    if (part != chunk.parts.end()) {
      chunk.parts.erase(part);
    }
    if (--chunk.users > 0) {
      continue;
    }
    auto* const ptr = reinterpret_cast<void*>(at);
    const size_t bytes = chunk.end - at;
    chunk.state = State::Unlocking;
    const auto [page, last] = pages_of_its_own(at, chunk);
    if (page < last) {
      pages_.erase(reinterpret_cast<void*>(page), last - page);
    }
    lock.unlock();
    try {
      chunk.locker->unlock(ptr, bytes);
    } catch (...) {
      // There is nobody to tell: the memory may be going away.
    }
    lock.lock();
    if (epoch != epoch_) {
      return;
    }
    tables_.locked_bytes -= bytes;
    tables_.chunks.erase(here);
    tables_.changed.notify_all();
  }
}

// The pages of a chunk that no locked chunk touches besides. Chunks that are
// being locked do not count: they enter their pages afterwards.
HostMemoryRegistry::Range HostMemoryRegistry::pages_of_its_own(
    uintptr_t at,
    const Chunk& chunk) const noexcept {
  uintptr_t first = round_down_to_page(at);
  uintptr_t last = round_up_to_page(chunk.end);
  const auto here = tables_.chunks.find(at);
  for (auto other = here; other != tables_.chunks.begin();) {
    --other;
    if (other->second.end <= first) {
      break;
    }
    if (other->second.state == State::Locked) {
      first = round_up_to_page(other->second.end);
      break;
    }
  }
  for (auto other = std::next(here);
       other != tables_.chunks.end() && other->first < last;
       ++other) {
    if (other->second.state == State::Locked) {
      last = round_down_to_page(other->first);
      break;
    }
  }
  return {first, last};
}

bool HostMemoryRegistry::unregister_range(
    const void* ptr,
    size_t bytes) noexcept {
  const auto begin = reinterpret_cast<uintptr_t>(ptr);
  const Range range{begin, begin + bytes};
  Lock lock(tables_.mutex);
  const auto found = tables_.registrations.find(range);
  // One whose chunks are still being locked belongs to the thread that does it.
  if (found == tables_.registrations.end() || found->second.count == 0) {
    return false;
  }
  if (--found->second.count == 0) {
    const std::vector<uintptr_t> chunks = std::move(found->second.chunks);
    tables_.registrations.erase(found);
    release_chunks(range, chunks, lock);
  }
  return true;
}

bool HostMemoryRegistry::touches(const void* ptr, size_t bytes) const noexcept {
  const auto begin = reinterpret_cast<uintptr_t>(ptr);
  Lock lock(tables_.mutex);
  const auto next = tables_.chunks.lower_bound(begin + bytes);
  return next != tables_.chunks.begin() && std::prev(next)->second.end > begin;
}

bool HostMemoryRegistry::holds(const void* ptr) const noexcept {
  return pages_.find(ptr) != nullptr && touches(ptr, 1);
}

bool HostMemoryRegistry::covers(const void* ptr, size_t bytes) const noexcept {
  if (bytes == 0 || pages_.find(ptr) == nullptr) {
    return false;
  }
  const auto begin = reinterpret_cast<uintptr_t>(ptr);
  const uintptr_t end = begin + bytes;
  Lock lock(tables_.mutex);
  for (uintptr_t at = begin; at < end;) {
    auto here = tables_.chunks.upper_bound(at);
    if (here == tables_.chunks.begin()) {
      return false;
    }
    const Chunk& chunk = (--here)->second;
    if (chunk.end <= at || chunk.state != State::Locked) {
      return false;
    }
    const uintptr_t chunk_end = std::min(end, chunk.end);
    while (chunk.shared_page && at < chunk_end) {
      const auto part = std::find_if(
          chunk.parts.begin(), chunk.parts.end(), [&](const Range& range) {
            return range.first <= at && at < range.second;
          });
      if (part == chunk.parts.end()) {
        return false;
      }
      at = part->second;
    }
    at = std::max(at, chunk_end);
  }
  return true;
}

std::pair<size_t, size_t> HostMemoryRegistry::totals() const noexcept {
  Lock lock(tables_.mutex);
  return {tables_.registrations.size(), tables_.locked_bytes};
}

void HostMemoryRegistry::after_fork_in_child(void* self) noexcept {
  auto& registry = *static_cast<HostMemoryRegistry*>(self);
  // The old tables are neither unlocked nor destroyed: another thread of the
  // parent may have been in the middle of them.
  new (&registry.tables_) Tables;
  registry.pages_.abandon();
  ++registry.epoch_;
}

} // namespace at::pin
