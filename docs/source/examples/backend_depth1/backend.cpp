// Depth 1: an allocator and the hooks that name it. Needs nothing of torchpin.

#include "../driver.h"

#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/Allocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/Exception.h>

namespace {

struct PinnedMemory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    void* ptr = bytes == 0 ? nullptr : driver::allocate(bytes);
    if (bytes != 0 && ptr == nullptr) {
      C10_THROW_ERROR(
          OutOfMemoryError,
          c10::str("the driver refused to page-lock ", bytes, " bytes"));
    }
    // The memory is on the CPU. The context is the address, so that the deleter
    // can be told apart from that of ordinary memory, and raw_allocate() works.
    return {ptr, ptr, &release, c10::DeviceType::CPU};
  }

  // On 2.3 and 2.4 torchpin recognises pinned memory by this.
  c10::DeleterFnPtr raw_deleter() const override {
    return &release;
  }

  void copy_data(void* to, const void* from, std::size_t bytes) const override {
    default_copy_data(to, from, bytes);
  }

  // May run in any thread, with the GIL or without, and when the process ends.
  // A device that copies behind the caller's back must not free memory here
  // that a copy still uses; depth 2 takes care of that.
  static void release(void* ptr) {
    if (ptr != nullptr) {
      driver::free(ptr);
    }
  }
};

struct Hooks final : at::PrivateUse1HooksInterface {
  c10::Allocator* getPinnedMemoryAllocator() const override {
    // Never destroyed: tensors may be freed after static objects are gone.
    static auto* const allocator = new PinnedMemory();
    return allocator;
  }

  // Virtual from 2.5 on; without `override` it compiles before, too.
  bool isPinnedPtr(const void* ptr) const {
    return driver::is_locked(ptr);
  }

  bool hasPrimaryContext(c10::DeviceIndex /*device*/) const override {
    return true;
  }

  // Starts the device. Virtual under the first name up to 2.5, then under the
  // second.
  void initPrivateUse1() const {}
  void init() const {}
};

// Devices and streams: there is one of each, and nothing to select.
C10_REGISTER_GUARD_IMPL(
    PrivateUse1,
    c10::impl::NoOpDeviceGuardImpl<c10::DeviceType::PrivateUse1>)

// When the library is loaded. PyTorch keeps the pointer until the end.
const bool registered = [] {
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  return true;
}();

} // namespace
