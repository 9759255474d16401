// Every condition on the release of PyTorch that this backend is built
// against. Elsewhere the code reads as if there were one PyTorch.

#pragma once

#include <torch/version.h>

#define REFDEV_BASE_AT_LEAST(major, minor) \
  (TORCH_VERSION_MAJOR > (major) ||        \
   (TORCH_VERSION_MAJOR == (major) && TORCH_VERSION_MINOR >= (minor)))

// Virtuals that a release does not know are plain members there.
#if REFDEV_BASE_AT_LEAST(2, 4)
#define REFDEV_OVERRIDE_2_4 override
#else
#define REFDEV_OVERRIDE_2_4
#endif

// getDefaultGenerator becomes const, isPinnedPtr appears.
#if REFDEV_BASE_AT_LEAST(2, 5)
#define REFDEV_OVERRIDE_2_5 override
#define REFDEV_CONST_2_5 const
#else
#define REFDEV_OVERRIDE_2_5
#define REFDEV_CONST_2_5
#endif

// initPrivateUse1 becomes init.
#if REFDEV_BASE_AT_LEAST(2, 6)
#define REFDEV_OVERRIDE_2_6 override
#define REFDEV_INIT init
#else
#define REFDEV_OVERRIDE_2_6
#define REFDEV_INIT initPrivateUse1
#endif

// Hooks make generators (getNewGenerator); before, a registered function does.
#define REFDEV_REGISTERS_GENERATOR (!REFDEV_BASE_AT_LEAST(2, 7))

#if REFDEV_BASE_AT_LEAST(2, 7)
#define REFDEV_OVERRIDE_2_7 override
#else
#define REFDEV_OVERRIDE_2_7
#endif

// at::HostAllocator and its registry.
#define REFDEV_HAS_HOST_ALLOCATOR REFDEV_BASE_AT_LEAST(2, 8)

// c10::DeviceAllocator; its getMemoryInfo is a virtual from 2.10 on.
#define REFDEV_HAS_DEVICE_ALLOCATOR REFDEV_BASE_AT_LEAST(2, 9)
#if REFDEV_BASE_AT_LEAST(2, 10)
#define REFDEV_OVERRIDE_2_10 override
#else
#define REFDEV_OVERRIDE_2_10
#endif

// DeviceGuardImplInterface::getDeviceCapability.
#define REFDEV_HAS_DEVICE_CAPABILITY REFDEV_BASE_AT_LEAST(2, 10)

#if REFDEV_BASE_AT_LEAST(2, 11)
#define REFDEV_OVERRIDE_2_11 override
#else
#define REFDEV_OVERRIDE_2_11
#endif

// aten::is_pinned and aten::_pin_memory have a dispatch key computed from the
// device argument, so a backend can have kernels of its own for them.
#define REFDEV_PIN_OPS_DISPATCH_ON_DEVICE (!REFDEV_BASE_AT_LEAST(2, 5))
