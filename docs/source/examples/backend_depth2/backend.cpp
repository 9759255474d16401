// Depth 2: four functions, and torchpin's caching allocator over them.

#include "../driver.h"

#include <ATen/core/CachingHostMemory.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

struct Runtime {
  // Page-locked memory on a page boundary; null when the driver refuses.
  void* allocate_host_memory(size_t bytes) {
    return driver::allocate(bytes);
  }

  void free_host_memory(void* ptr, size_t /*bytes*/) {
    driver::free(ptr);
  }

  // What stands for the work that is on the stream now. Here work is done when
  // it is submitted; a real device records one of its events.
  struct Event {};
  Event record_event(c10::Stream /*stream*/) {
    return {};
  }

  // Whether that work has finished. Must not wait.
  bool query_event(Event& /*event*/) {
    return true;
  }
};

using HostMemory = at::pin::CachingHostMemory<Runtime>;

struct Hooks final : at::PrivateUse1HooksInterface {
  c10::Allocator* getPinnedMemoryAllocator() const override {
    return &HostMemory::instance();
  }

  // Virtual from 2.5 on.
  bool isPinnedPtr(const void* ptr) const {
    return HostMemory::instance().owns(ptr);
  }

  bool hasPrimaryContext(c10::DeviceIndex /*device*/) const override {
    return true;
  }

  // Virtual under the first name up to 2.5, then under the second.
  void initPrivateUse1() const {}
  void init() const {}
};

C10_REGISTER_GUARD_IMPL(
    PrivateUse1,
    c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::PrivateUse1>)

const bool registered = [] {
  // Before threads exist, so that no child is forked while it is being made.
  HostMemory::instance();
  // What at::getHostAllocator() returns, on bases that have it (2.8 on).
  HostMemory::install(c10::DeviceType::PrivateUse1);
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  return true;
}();

} // namespace
