#pragma once

// Which PyTorch this is compiled against, and what that release offers.
//
// The one place in C++ that knows release numbers; everything else asks for a
// capability by the names below. The facts behind each line were read from the
// headers of the releases named.

#include <torch/version.h>

#define TORCHPIN_BASE_AT_LEAST(major, minor) \
  (TORCH_VERSION_MAJOR > (major) ||          \
   (TORCH_VERSION_MAJOR == (major) && TORCH_VERSION_MINOR >= (minor)))

// is_pinned/_pin_memory are one device-generic kernel each, which asks the
// accelerator's hooks (2.5). Before that each backend had a kernel of its own,
// chosen by the device argument, and no argument meant CUDA.
#define TORCHPIN_BASE_HAS_GENERIC_PIN_KERNELS TORCHPIN_BASE_AT_LEAST(2, 5)

// Context::lazyInitDevice(type) and hooks->init() (2.6).
#define TORCHPIN_BASE_HAS_LAZY_INIT_DEVICE TORCHPIN_BASE_AT_LEAST(2, 6)

// at::HostAllocator, at::getHostAllocator, at::setHostAllocator (2.8).
#define TORCHPIN_BASE_HAS_HOST_ALLOCATOR TORCHPIN_BASE_AT_LEAST(2, 8)

// HostAllocator with private pools (2.11), and with a history (2.14).
#define TORCHPIN_BASE_HAS_HOST_POOLS TORCHPIN_BASE_AT_LEAST(2, 11)
#define TORCHPIN_BASE_HAS_HOST_HISTORY TORCHPIN_BASE_AT_LEAST(2, 14)

// Named tensors exist (removed in 2.13).
#define TORCHPIN_BASE_HAS_NAMED_TENSORS (!TORCHPIN_BASE_AT_LEAST(2, 13))
