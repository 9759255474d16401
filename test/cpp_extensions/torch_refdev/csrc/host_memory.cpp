#include "host_memory.h"

#include "runtime.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <vector>

#if REFDEV_HAS_HOST_ALLOCATOR
#include <ATen/core/CachingHostAllocator.h>
#endif

namespace refdev {
namespace {

#if REFDEV_HAS_HOST_ALLOCATOR
using AllocatorBase = at::HostAllocator;
#define REFDEV_HOST_OVERRIDE override
#else
using AllocatorBase = c10::Allocator;
#define REFDEV_HOST_OVERRIDE
#endif

struct Block {
  void* address;
  size_t bytes;
  bool live = true;
  std::vector<Event> events;
};

size_t roundUp(size_t bytes) {
  size_t step = 4096;
  while (step * 8 < bytes) {
    step *= 2;
  }
  return (bytes + step - 1) / step * step;
}

std::atomic<uint64_t> reports{0};

void freeBlock(void* context);

struct PinnedAllocator final : AllocatorBase {
  at::DataPtr allocate(size_t bytes) override {
    if (bytes == 0) {
      return {nullptr, nullptr, &freeBlock, c10::Device(c10::kCPU)};
    }
    bytes = roundUp(bytes);
    check(init(), "pinning host memory");
    std::unique_lock<std::mutex> lock(mutex_);
    collect();
    auto found = cache_.lower_bound(bytes);
    if (found != cache_.end() && found->first <= bytes + bytes / 8) {
      Block* block = found->second;
      cache_.erase(found);
      block->live = true;
      return {block->address, block, &freeBlock, c10::Device(c10::kCPU)};
    }
    lock.unlock();
    void* address = nullptr;
    Status status = hostAlloc(bytes, &address);
    if (status == Status::lockLimit) {
      empty_cache();
      status = hostAlloc(bytes, &address);
    }
    TORCH_CHECK_WITH(
        OutOfMemoryError,
        status != Status::lockLimit,
        "refdev: cannot page-lock ",
        bytes,
        " bytes of host memory, ",
        counters().locked_bytes,
        " bytes are locked: ",
        describe(status));
    check(status, "pinning host memory");
    auto* block = new Block{address, bytes, true, {}};
    lock.lock();
    blocks_[reinterpret_cast<uintptr_t>(address)] = block;
    return {address, block, &freeBlock, c10::Device(c10::kCPU)};
  }

  // Not for raw_allocate(): whoever wants to know whose memory a tensor has
  // compares deleters.
  c10::DeleterFnPtr raw_deleter() const override {
    return &freeBlock;
  }

  void copy_data(void* destination, const void* source, std::size_t bytes)
      const override {
    default_copy_data(destination, source, bytes);
  }

  bool record_event(void* address, void* context, c10::Stream stream)
      REFDEV_HOST_OVERRIDE {
    if (broken("forget_events")) {
      return false;
    }
    std::lock_guard<std::mutex> lock(mutex_);
    auto next = blocks_.upper_bound(reinterpret_cast<uintptr_t>(address));
    if (next == blocks_.begin()) {
      return false;
    }
    Block* block = std::prev(next)->second;
    if (address >= static_cast<char*>(block->address) + block->bytes) {
      return false;
    }
    Event event = newEvent();
    check(
        recordEvent(event, stream.device_index(), static_cast<int>(stream.id())),
        "recording an event");
    block->events.push_back(std::move(event));
    ++reports;
    (void)context;
    return true;
  }

  void empty_cache() REFDEV_HOST_OVERRIDE {
    std::lock_guard<std::mutex> lock(mutex_);
    collect();
    for (const auto& [bytes, block] : cache_) {
      blocks_.erase(reinterpret_cast<uintptr_t>(block->address));
      hostFree(block->address);
      delete block;
    }
    cache_.clear();
  }

#if REFDEV_HAS_HOST_ALLOCATOR
  at::HostStats get_stats() override {
    return {};
  }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
#endif

  void free(Block* block) {
    if (inBadFork() || broken("leak")) {
      return;
    }
    std::lock_guard<std::mutex> lock(mutex_);
    block->live = false;
    waiting_.push_back(block);
    collect();
  }

 private:
  void collect() {
    for (auto it = waiting_.begin(); it != waiting_.end();) {
      auto& events = (*it)->events;
      events.erase(
          std::remove_if(events.begin(), events.end(), queryEvent),
          events.end());
      if (events.empty()) {
        cache_.emplace((*it)->bytes, *it);
        it = waiting_.erase(it);
      } else {
        ++it;
      }
    }
  }

  std::mutex mutex_;
  std::map<uintptr_t, Block*> blocks_;
  std::multimap<size_t, Block*> cache_;
  std::list<Block*> waiting_;
};

PinnedAllocator& instance() {
  static auto* allocator = new PinnedAllocator();
  return *allocator;
}

void freeBlock(void* context) {
  if (context != nullptr) {
    instance().free(static_cast<Block*>(context));
  }
}

#if REFDEV_HAS_HOST_ALLOCATOR
REGISTER_HOST_ALLOCATOR(kRefdev, &instance())
#endif

} // namespace

c10::Allocator* pinnedAllocator() {
  return &instance();
}

void reportHostUse(void* address, void* context, c10::Stream stream) {
#if REFDEV_HAS_HOST_ALLOCATOR
  // Asked for every time: whoever wants to see host use registers an
  // allocator in front of this one.
  if (auto* allocator = at::getHostAllocator(kRefdev)) {
    allocator->record_event(address, context, stream);
  }
#else
  instance().record_event(address, context, stream);
#endif
}

void emptyPinnedCache() {
  instance().empty_cache();
}

uint64_t hostUseReports() {
  return reports;
}

} // namespace refdev
