// Depth 3: the hooks also page-lock memory that was allocated elsewhere.

#include "../driver.h"

#include <ATen/HostMemoryHooks.h>
#include <ATen/core/CachingHostMemory.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>

namespace {

// As in depth 2.
struct Runtime {
  void* allocate_host_memory(size_t bytes) {
    return driver::allocate(bytes);
  }
  void free_host_memory(void* ptr, size_t /*bytes*/) {
    driver::free(ptr);
  }
  struct Event {};
  Event record_event(c10::Stream /*stream*/) {
    return {};
  }
  bool query_event(Event& /*event*/) {
    return true;
  }
};

using HostMemory = at::pin::CachingHostMemory<Runtime>;

// torchpin finds HostMemoryHooks by dynamic_cast from the registered hooks.
struct Hooks final : at::PrivateUse1HooksInterface, at::pin::HostMemoryHooks {
  c10::Allocator* getPinnedMemoryAllocator() const override {
    return &HostMemory::instance();
  }

  // The driver knows both: memory of the allocator, and what was page-locked in
  // place. Virtual from 2.5 on.
  bool isPinnedPtr(const void* ptr) const {
    return driver::is_locked(ptr);
  }

  // Whole pages that are mapped, none of them page-locked through here already.
  // False when the driver refuses; take back any error it then has pending.
  bool register_host_memory(void* ptr, size_t bytes) override {
    return driver::lock(ptr, bytes);
  }

  // The arguments of an earlier call. Does not return before the device has
  // stopped using the memory.
  void unregister_host_memory(void* ptr, size_t /*bytes*/) noexcept override {
    driver::unlock(ptr);
  }

  int is_host_memory_registered(const void* ptr) const noexcept override {
    return driver::is_locked(ptr) ? 1 : 0;
  }

  // This device has no copies that are in flight when the call returns, so that
  // all of them are reported. One that has says true only if its copy kernels
  // call at::getHostAllocator(type)->record_event(ptr, context, stream).
  bool copies_record_events() const noexcept override {
    return true;
  }

  bool hasPrimaryContext(c10::DeviceIndex /*device*/) const override {
    return true;
  }
  void initPrivateUse1() const {}
  void init() const {}
};

C10_REGISTER_GUARD_IMPL(
    PrivateUse1,
    c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::PrivateUse1>)

const bool registered = [] {
  HostMemory::instance();
  HostMemory::install(c10::DeviceType::PrivateUse1);
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  return true;
}();

} // namespace
