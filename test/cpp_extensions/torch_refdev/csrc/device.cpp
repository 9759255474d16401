// The backend without its operators: device guard, device memory, generators,
// hooks, and the switches that leave part of them out.

#include "host_memory.h"
#include "runtime.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/HostMemoryHooks.h>
#include <ATen/core/GeneratorForPrivateuseone.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/CPUAllocator.h>
#include <c10/core/DeviceGuard.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <c10/util/Exception.h>

#include <array>
#include <cstdlib>
#include <functional>
#include <memory>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#if REFDEV_HAS_DEVICE_ALLOCATOR
#include <c10/core/CachingDeviceAllocator.h>
#endif

namespace refdev {

void check(Status status, const char* what) {
  TORCH_CHECK_WITH(
      OutOfMemoryError,
      status != Status::outOfMemory,
      "refdev: ",
      what,
      ": ",
      describe(status));
  // The text that users know from other accelerators stands alone.
  TORCH_CHECK(status != Status::forked, describe(status));
  TORCH_CHECK(status == Status::ok, "refdev: ", what, ": ", describe(status));
}

namespace {

thread_local std::array<int, kDeviceCount> current_streams{};

int indexOf(c10::Device device) {
  TORCH_CHECK(
      device.type() == kRefdev && device.index() < kDeviceCount,
      "refdev: there is no device ",
      device,
      ", only ",
      kDeviceCount,
      " refdev devices");
  return device.index() < 0 ? currentDevice() : device.index();
}

c10::Stream streamAt(int device, int stream) {
  return c10::Stream(c10::Stream::UNSAFE, deviceAt(device), stream);
}

int numberOf(c10::Stream stream) {
  return static_cast<int>(stream.id());
}

// Events that PyTorch holds by a bare pointer.
Event& eventAt(void* event) {
  return *static_cast<Event*>(event);
}

struct GuardImpl final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override {
    return kRefdev;
  }

  c10::Device exchangeDevice(c10::Device device) const override {
    c10::Device before = getDevice();
    selectDevice(indexOf(device));
    return before;
  }

  c10::Device getDevice() const override {
    return deviceAt(currentDevice());
  }

  void setDevice(c10::Device device) const override {
    selectDevice(indexOf(device));
  }

  void uncheckedSetDevice(c10::Device device) const noexcept override {
    selectDevice(device.index());
  }

  c10::Stream getStream(c10::Device device) const noexcept override {
    const int index = device.index() < 0 ? currentDevice() : device.index();
    return streamAt(index, currentStream(index));
  }

  c10::Stream getDefaultStream(c10::Device device) const override {
    return streamAt(indexOf(device), 0);
  }

  c10::Stream getStreamFromGlobalPool(
      c10::Device device,
      bool /*is_high_priority*/ = false) const override {
    return streamAt(indexOf(device), newStream());
  }

  c10::Stream getNewStream(c10::Device device, int /*priority*/ = 0) const
      REFDEV_OVERRIDE_2_4 {
    return streamAt(indexOf(device), newStream());
  }

  c10::Stream exchangeStream(c10::Stream stream) const noexcept override {
    const int index = stream.device_index();
    c10::Stream before = streamAt(index, currentStream(index));
    setCurrentStream(index, numberOf(stream));
    return before;
  }

  void* getStreamNativeHandle(const c10::Stream stream) const
      REFDEV_OVERRIDE_2_11 {
    return reinterpret_cast<void*>(static_cast<intptr_t>(stream.id()));
  }

  void destroyEvent(void* event, const c10::DeviceIndex /*device*/)
      const noexcept override {
    delete static_cast<Event*>(event);
  }

  void record(
      void** event,
      const c10::Stream& stream,
      const c10::DeviceIndex device,
      const c10::EventFlag /*flag*/) const override {
    TORCH_CHECK(
        device == -1 || device == stream.device_index(),
        "refdev: an event of device ",
        static_cast<int>(device),
        " cannot be recorded on a stream of device ",
        static_cast<int>(stream.device_index()));
    if (*event == nullptr) {
      *event = new Event(newEvent());
    }
    check(
        recordEvent(eventAt(*event), stream.device_index(), numberOf(stream)),
        "recording an event");
  }

  void block(void* event, const c10::Stream& stream) const override {
    if (event != nullptr) {
      check(
          waitEvent(eventAt(event), stream.device_index(), numberOf(stream)),
          "waiting for an event");
    }
  }

  bool queryEvent(void* event) const override {
    return event == nullptr || refdev::queryEvent(eventAt(event));
  }

  void synchronizeEvent(void* event) const REFDEV_OVERRIDE_2_4 {
    if (event != nullptr) {
      check(refdev::synchronizeEvent(eventAt(event)), "synchronizing an event");
    }
  }

  double elapsedTime(void* begin, void* end, const c10::DeviceIndex /*device*/)
      const REFDEV_OVERRIDE_2_4 {
    const double milliseconds =
        begin == nullptr || end == nullptr
            ? -1
            : elapsedMilliseconds(eventAt(begin), eventAt(end));
    TORCH_CHECK(
        milliseconds >= 0,
        "refdev: both events must be recorded and completed before calculating "
        "elapsed time");
    return milliseconds;
  }

  c10::DeviceIndex deviceCount() const noexcept override {
    return kDeviceCount;
  }

#if REFDEV_HAS_DEVICE_CAPABILITY
  c10::DeviceCapability getDeviceCapability(
      c10::Device /*device*/) const override {
    return {};
  }
#endif

  bool queryStream(const c10::Stream& stream) const override {
    return refdev::queryStream(stream.device_index(), numberOf(stream));
  }

  void synchronizeStream(const c10::Stream& stream) const override {
    check(
        refdev::synchronizeStream(stream.device_index(), numberOf(stream)),
        "synchronizing a stream");
  }

  void synchronizeDevice(const c10::DeviceIndex device) const
      REFDEV_OVERRIDE_2_6 {
    check(refdev::synchronizeDevice(device), "synchronizing a device");
  }

  void recordDataPtrOnStream(
      const c10::DataPtr& data,
      const c10::Stream& stream) const override;
};

C10_REGISTER_GUARD_IMPL(PrivateUse1, GuardImpl)

#if REFDEV_HAS_DEVICE_ALLOCATOR
using DeviceAllocatorBase = c10::DeviceAllocator;
#define REFDEV_DEVICE_OVERRIDE override
#else
using DeviceAllocatorBase = c10::Allocator;
#define REFDEV_DEVICE_OVERRIDE
#endif

struct DeviceBlock {
  void* address;
  // Streams that may still use the block when it is freed; the first is the
  // one that was current when it was allocated.
  std::set<int> streams;
};

void freeDeviceBlock(void* context) {
  std::unique_ptr<DeviceBlock> block(static_cast<DeviceBlock*>(context));
  deviceFree(block->address, {block->streams.begin(), block->streams.end()});
}

struct DeviceMemory final : DeviceAllocatorBase {
  c10::DataPtr allocate(size_t bytes) override {
    const int device = currentDevice();
    if (bytes == 0) {
      return {nullptr, deviceAt(device)};
    }
    void* address = nullptr;
    const Status status = deviceAlloc(device, bytes, &address);
    TORCH_CHECK_WITH(
        OutOfMemoryError,
        status != Status::outOfMemory,
        "refdev out of memory: tried to allocate ",
        bytes,
        " bytes on device ",
        device,
        ", ",
        deviceBytesInUse(device),
        " of ",
        deviceCapacity(),
        " bytes are in use");
    check(status, "allocating device memory");
    auto* block = new DeviceBlock{address, {refdev::currentStream(device)}};
    return {address, block, &freeDeviceBlock, deviceAt(device)};
  }

  c10::DeleterFnPtr raw_deleter() const override {
    return nullptr;
  }

  void copy_data(void* destination, const void* source, std::size_t bytes)
      const override {
    const int device = deviceOf(destination);
    bool in_flight;
    check(
        copy(
            device,
            refdev::currentStream(device),
            destination,
            source,
            bytes,
            Blocking::yes,
            Traffic::internal,
            &in_flight),
        "copying device memory");
  }

  bool initialized() REFDEV_DEVICE_OVERRIDE {
    return refdev::initialized();
  }

  void recordStream(const c10::DataPtr& data, c10::Stream stream)
      REFDEV_DEVICE_OVERRIDE {
    // Views share the block; nothing else has this deleter.
    if (auto* block = data.cast_context<DeviceBlock>(&freeDeviceBlock)) {
      static std::mutex mutex;
      std::lock_guard<std::mutex> lock(mutex);
      block->streams.insert(numberOf(stream));
    }
  }

#if REFDEV_HAS_DEVICE_ALLOCATOR
  void emptyCache(c10::MempoolId_t /*pool*/ = {0, 0}) override {
    for (int device = 0; device < kDeviceCount; ++device) {
      deviceTrim(device);
    }
  }

  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(
      c10::DeviceIndex device) override {
    c10::CachingDeviceAllocator::DeviceStats stats;
    const auto bytes = static_cast<int64_t>(deviceBytesInUse(device));
    stats.allocated_bytes[0].current = bytes;
    stats.active_bytes[0].current = bytes;
    stats.reserved_bytes[0].current = bytes;
    return stats;
  }

  void resetAccumulatedStats(c10::DeviceIndex /*device*/) override {}
  void resetPeakStats(c10::DeviceIndex /*device*/) override {}

  std::pair<size_t, size_t> getMemoryInfo(c10::DeviceIndex device)
      REFDEV_OVERRIDE_2_10 {
    return {deviceCapacity() - deviceBytesInUse(device), deviceCapacity()};
  }
#endif
};

DeviceMemory& deviceMemory() {
  static auto* allocator = new DeviceMemory();
  return *allocator;
}

REGISTER_ALLOCATOR(kRefdev, &deviceMemory())

void GuardImpl::recordDataPtrOnStream(
    const c10::DataPtr& data,
    const c10::Stream& stream) const {
  deviceMemory().recordStream(data, stream);
}

struct GeneratorImpl final : c10::GeneratorImpl {
  GeneratorImpl(int device, at::Generator twin)
      : c10::GeneratorImpl(
            deviceAt(device),
            c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        twin(std::move(twin)) {}

  void set_current_seed(uint64_t seed) override {
    twin.set_current_seed(seed);
  }
  void set_offset(uint64_t offset) override {
    twin.set_offset(offset);
  }
  uint64_t get_offset() const override {
    return twin.get_offset();
  }
  uint64_t current_seed() const override {
    return twin.current_seed();
  }
  uint64_t seed() override {
    return twin.seed();
  }
  void set_state(const c10::TensorImpl& state) override {
    twin.unsafeGetGeneratorImpl()->set_state(state);
  }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override {
    return twin.unsafeGetGeneratorImpl()->get_state();
  }
  GeneratorImpl* clone_impl() const override {
    return new GeneratorImpl(device_.index(), twin.clone());
  }

  at::Generator twin;
};

#if REFDEV_REGISTERS_GENERATOR
at::Generator makeGenerator(c10::DeviceIndex device) {
  return newGenerator(device);
}

REGISTER_GENERATOR_PRIVATEUSE1(makeGenerator)
#endif

struct Hooks : at::PrivateUse1HooksInterface {
  void REFDEV_INIT() const override {
    check(refdev::init(), "initialization");
  }

  bool hasPrimaryContext(c10::DeviceIndex device) const override {
    return hasContext(device);
  }

  bool isBuilt() const REFDEV_OVERRIDE_2_7 {
    return true;
  }

  bool isAvailable() const REFDEV_OVERRIDE_2_7 {
    return true;
  }

  c10::DeviceIndex deviceCount() const REFDEV_OVERRIDE_2_4 {
    return kDeviceCount;
  }

  void setCurrentDevice(c10::DeviceIndex device) const REFDEV_OVERRIDE_2_4 {
    selectDevice(indexOf(deviceAt(device)));
  }

  c10::DeviceIndex getCurrentDevice() const REFDEV_OVERRIDE_2_4 {
    return static_cast<c10::DeviceIndex>(currentDevice());
  }

  c10::DeviceIndex exchangeDevice(c10::DeviceIndex device) const
      REFDEV_OVERRIDE_2_4 {
    const auto before = static_cast<c10::DeviceIndex>(currentDevice());
    selectDevice(indexOf(deviceAt(device)));
    return before;
  }

  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex device) const
      REFDEV_OVERRIDE_2_4 {
    // Selecting a device does not touch it.
    return exchangeDevice(device);
  }

  at::Device getDeviceFromPtr(void* data) const override {
    const int device = deviceOf(data);
    TORCH_CHECK(device >= 0, "refdev: no device has the address ", data);
    return deviceAt(device);
  }

  const at::Generator& getDefaultGenerator(c10::DeviceIndex device)
      REFDEV_CONST_2_5 override {
    return defaultGenerator(indexOf(deviceAt(device)));
  }

  at::Generator getNewGenerator(c10::DeviceIndex device = -1) const
      REFDEV_OVERRIDE_2_6 {
    return newGenerator(device);
  }

  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes)
      const override {
    c10::DeviceGuard guard(storage.device());
    c10::DataPtr data = deviceMemory().allocate(bytes);
    const size_t kept = std::min(bytes, storage.nbytes());
    if (kept > 0) {
      deviceMemory().copy_data(data.get(), storage.data(), kept);
    }
    storage.set_data_ptr_noswap(std::move(data));
    storage.unsafeGetStorageImpl()->set_nbytes(bytes);
  }
};

struct HooksWithPinnedMemory final : Hooks, at::pin::HostMemoryHooks {
  explicit HooksWithPinnedMemory(c10::Allocator* allocator, bool recognises)
      : allocator(allocator), recognises(recognises) {}

  c10::Allocator* getPinnedMemoryAllocator() const override {
    return allocator;
  }

  bool isPinnedPtr(const void* data) const REFDEV_OVERRIDE_2_5 {
    return recognises && isPinned(data);
  }

  bool register_host_memory(void* address, size_t bytes) override {
    const Status status = hostRegister(address, bytes);
    if (status == Status::lockLimit || status == Status::alreadyRegistered) {
      return false;
    }
    check(status, "page-locking host memory");
    return true;
  }

  void unregister_host_memory(void* address, size_t /*bytes*/) noexcept
      override {
    hostUnregister(address);
  }

  int is_host_memory_registered(const void* address) const noexcept override {
    return hostIsLocked(address) ? 1 : 0;
  }

  bool copies_record_events() const noexcept override {
    return REFDEV_HAS_HOST_ALLOCATOR && !broken("forget_events");
  }

  size_t host_memory_granularity() const noexcept override {
    return 1;
  }

  c10::Allocator* allocator;
  bool recognises;
};

} // namespace

int currentStream(int device) {
  return current_streams[device];
}

void setCurrentStream(int device, int stream) {
  if (device >= 0 && device < kDeviceCount) {
    current_streams[device] = stream;
  }
}

bool broken(std::string_view way) {
  static const auto* ways = [] {
    auto* result = new std::set<std::string, std::less<>>();
    const char* value = std::getenv("TORCH_REFDEV_BREAK");
    std::istringstream list(value == nullptr ? "" : value);
    std::string item;
    while (std::getline(list, item, ',')) {
      result->insert(item);
    }
    return result;
  }();
  return !ways->empty() && ways->count(way) > 0;
}

OwnKernelCalls& ownKernelCalls() {
  static OwnKernelCalls calls;
  return calls;
}

c10::Allocator* deviceAllocator() {
  return &deviceMemory();
}

const at::Generator& defaultGenerator(int device) {
  static const auto* generators = [] {
    auto* result = new std::vector<at::Generator>();
    for (int i = 0; i < kDeviceCount; ++i) {
      result->push_back(newGenerator(i));
    }
    return result;
  }();
  return (*generators)[device];
}

at::Generator newGenerator(int device) {
  return at::make_generator<GeneratorImpl>(
      device < 0 ? currentDevice() : device,
      at::detail::createCPUGenerator(c10::default_rng_seed_val));
}

at::Generator& cpuTwin(const at::Generator& generator) {
  return static_cast<GeneratorImpl*>(generator.unsafeGetGeneratorImpl())->twin;
}

void registerHooks() {
  setPageableIsAsync(broken("async_pageable"));
  defaultGenerator(0);
  if (broken("no_hooks") || broken("python_hooks")) {
    return;
  }
  // Leaked: PyTorch keeps the pointer until the end.
  at::PrivateUse1HooksInterface* hooks;
  if (broken("no_allocator")) {
    hooks = new Hooks();
  } else if (broken("null_allocator")) {
    hooks = new HooksWithPinnedMemory(nullptr, true);
  } else if (broken("plain_allocator")) {
    hooks = new HooksWithPinnedMemory(c10::GetCPUAllocator(), false);
  } else {
    hooks = new HooksWithPinnedMemory(pinnedAllocator(), true);
  }
  at::RegisterPrivateUse1HooksInterface(hooks);
}

} // namespace refdev
