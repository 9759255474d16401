#include "host_memory.h"

#include "runtime.h"

#include <ATen/core/CachingHostMemory.h>

#include <atomic>
#include <mutex>
#include <set>

namespace refdev {
namespace {

struct DriverMemory {
  void* allocate_host_memory(size_t bytes) {
    void* address = nullptr;
    const Status status = hostAlloc(bytes, &address);
    if (status == Status::lockLimit || status == Status::outOfHostMemory) {
      return nullptr;
    }
    check(status, "page-locking host memory");
    return address;
  }

  void free_host_memory(void* address, size_t /*bytes*/) {
    hostFree(address);
  }

  Event record_event(c10::Stream stream) {
    Event event = newEvent();
    check(
        recordEvent(
            event, stream.device_index(), static_cast<int>(stream.id())),
        "recording an event");
    return event;
  }

  bool query_event(Event& event) {
    return queryEvent(event);
  }
};

using HostMemory = at::pin::CachingHostMemory<DriverMemory>;

// Made when the library is loaded: a child that is forked while a thread makes
// it would wait for that thread for ever.
const bool installed = [] {
  HostMemory::instance();
  if (!broken("no_host_allocator")) {
    HostMemory::install(kRefdev);
  }
  return true;
}();

// For the switches leak and exact_start_only.
struct WrongAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    c10::DataPtr data = HostMemory::instance().allocate(bytes);
    {
      std::lock_guard<std::mutex> lock(mutex);
      starts.insert(data.get());
    }
    if (broken("leak")) {
      (void)data.compare_exchange_deleter(data.get_deleter(), &forget);
    }
    return data;
  }

  c10::DeleterFnPtr raw_deleter() const override {
    return broken("leak") ? &forget : HostMemory::instance().raw_deleter();
  }

  void copy_data(void* destination, const void* source, std::size_t bytes)
      const override {
    default_copy_data(destination, source, bytes);
  }

  bool isStart(const void* address) {
    std::lock_guard<std::mutex> lock(mutex);
    return starts.count(address) > 0;
  }

  static void forget(void* /*context*/) {}

  std::mutex mutex;
  std::set<const void*> starts;
};

WrongAllocator& wrongAllocator() {
  static auto* allocator = new WrongAllocator();
  return *allocator;
}

std::atomic<uint64_t> reports{0};

} // namespace

c10::Allocator* pinnedAllocator() {
  if (broken("leak") || broken("exact_start_only")) {
    return &wrongAllocator();
  }
  return &HostMemory::instance();
}

bool isPinned(const void* address) {
  if (broken("exact_start_only")) {
    return hostIsLocked(address) &&
           (hostIsLockedStart(address) || wrongAllocator().isStart(address));
  }
  return hostIsLocked(address);
}

void reportHostUse(void* address, void* context, c10::Stream stream) {
  if (broken("forget_events")) {
    return;
  }
  bool found = false;
#if REFDEV_HAS_HOST_ALLOCATOR
  // Asked for every time: whoever wants to see host use puts an allocator in
  // front of this one.
  if (auto* allocator = at::getHostAllocator(kRefdev)) {
    found = allocator->record_event(address, context, stream);
  } else {
    found = HostMemory::instance().record_event(address, context, stream);
  }
#else
  found = HostMemory::instance().record_event(address, context, stream);
#endif
  reports += found;
}

void emptyPinnedCache() {
  HostMemory::instance().empty_cache();
}

uint64_t hostUseReports() {
  return reports;
}

void resetHostUseReports() {
  reports = 0;
}

} // namespace refdev
