// What the files of the backend share: errors, current streams, the switches
// that break it on purpose, and the memory allocators.

#pragma once

#include <ATen/core/Generator.h>
#include <c10/core/Allocator.h>
#include <c10/core/Stream.h>

#include <atomic>
#include <string_view>

#include "base.h"
#include "driver.h"

namespace refdev {

constexpr auto kRefdev = c10::DeviceType::PrivateUse1;

inline c10::Device deviceAt(int index) {
  return {kRefdev, static_cast<c10::DeviceIndex>(index)};
}

// Throws what `status` means: OutOfMemoryError where there is no device
// memory, else Error.
void check(Status status, const char* what);

// Current stream of the calling thread for a device, by its number there.
int currentStream(int device);
void setCurrentStream(int device, int stream);

// The ways of being incomplete or wrong that TORCH_REFDEV_BREAK names, see
// README. Read once, when the extension is loaded.
bool broken(std::string_view way);

// Counted by the kernels that the switches own_kernels and own_backend_select
// register.
struct OwnKernelCalls {
  std::atomic<uint64_t> is_pinned{0};
  std::atomic<uint64_t> pin_memory{0};
};
OwnKernelCalls& ownKernelCalls();

c10::Allocator* deviceAllocator();

// The generator of a device; random numbers come from its CPU twin, because
// operators are computed on the CPU.
const at::Generator& defaultGenerator(int device);
at::Generator newGenerator(int device);
at::Generator& cpuTwin(const at::Generator& generator);

// Registers hooks as far as the switches allow.
void registerHooks();

} // namespace refdev
