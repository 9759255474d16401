// torch_refdev._C: what the Python side needs beyond PyTorch's own interfaces.

#include "host_memory.h"
#include "runtime.h"

#include <pybind11/pybind11.h>
#include <torch/library.h>

#include <ATen/core/Tensor.h>

namespace py = pybind11;

namespace refdev {
namespace {

using NoGil = py::call_guard<py::gil_scoped_release>;

int checkedDevice(int device) {
  TORCH_CHECK(
      device >= 0 && device < kDeviceCount,
      "refdev: there is no device ",
      device,
      ", only ",
      kDeviceCount,
      " refdev devices");
  return device;
}

// An event for the releases whose own torch.Event is for CUDA only.
struct PythonEvent {
  Event event = newEvent();
  bool timing = false;

  void record(int device, int stream) {
    check(recordEvent(event, device, stream), "recording an event");
  }
  void wait(int device, int stream) {
    check(waitEvent(event, device, stream), "waiting for an event");
  }
  bool query() {
    return queryEvent(event);
  }
  void synchronize() {
    check(synchronizeEvent(event), "synchronizing an event");
  }
  double elapsed(const PythonEvent& end) {
    const double result = elapsedMilliseconds(event, end.event);
    TORCH_CHECK(
        result >= 0,
        "refdev: both events must be recorded and completed before calculating "
        "elapsed time");
    return result;
  }
};

py::dict pythonCounters() {
  Counters c;
  {
    py::gil_scoped_release release;
    c = counters();
  }
  py::dict result;
  result["pin_calls"] = c.pin_calls;
  result["unpin_calls"] = c.unpin_calls;
  result["pin_refusals"] = c.pin_refusals;
  result["locked_bytes"] = c.locked_bytes;
  result["locked_ranges"] = c.locked_ranges;
  result["copies_direct"] = c.copies_direct;
  result["copies_staged"] = c.copies_staged;
  result["copies_device"] = c.copies_device;
  result["copies_in_flight"] = c.copies_in_flight;
  result["host_use_reports"] = hostUseReports();
  result["own_is_pinned_calls"] = ownKernelCalls().is_pinned.load();
  result["own_pin_memory_calls"] = ownKernelCalls().pin_memory.load();
  py::set contexts;
  for (int device : c.contexts) {
    contexts.add(py::int_(device));
  }
  result["contexts"] = contexts;
  py::dict touches;
  for (int device = 0; device < kDeviceCount; ++device) {
    touches[py::int_(device)] = py::set();
  }
  for (const Touch& touch : c.touches) {
    touches[py::int_(touch.device)].cast<py::set>().add(py::int_(touch.thread));
  }
  result["touches"] = touches;
  return result;
}

TORCH_LIBRARY(refdev, m) {
  m.def("get_rng_state(int device) -> Tensor", [](int64_t device) {
    const at::Generator& generator =
        defaultGenerator(checkedDevice(static_cast<int>(device)));
    return generator.get_state();
  });
  m.def(
      "set_rng_state(int device, Tensor state) -> ()",
      [](int64_t device, const at::Tensor& state) {
        at::Generator generator =
            defaultGenerator(checkedDevice(static_cast<int>(device)));
        generator.set_state(state);
      });
}

} // namespace

PYBIND11_MODULE(_C, m) {
  m.def("register_hooks", &registerHooks);
  m.def("broken", &broken);

  m.def("init", [] { check(init(), "initialization"); });
  m.def("initialized", &initialized);
  m.def("in_bad_fork", &inBadFork);
  m.def("device_count", [] { return kDeviceCount; });
  m.def("current_device", &currentDevice);
  m.def(
      "select_device", [](int device) { selectDevice(checkedDevice(device)); });
  m.def("has_context", &hasContext);
  m.def("bytes_in_use", [](int device) {
    return deviceBytesInUse(checkedDevice(device));
  });
  m.def(
      "synchronize_device",
      [](int device) {
        check(
            synchronizeDevice(checkedDevice(device)), "synchronizing a device");
      },
      NoGil());

  m.def("new_stream", &newStream);
  m.def("current_stream", [](int device) {
    return currentStream(checkedDevice(device));
  });
  m.def("set_current_stream", [](int device, int stream) {
    setCurrentStream(checkedDevice(device), stream);
  });
  m.def("query_stream", &queryStream, NoGil());
  m.def(
      "synchronize_stream",
      [](int device, int stream) {
        check(synchronizeStream(device, stream), "synchronizing a stream");
      },
      NoGil());
  py::class_<PythonEvent>(m, "Event")
      .def(py::init<>())
      .def("record", &PythonEvent::record, NoGil())
      .def("wait", &PythonEvent::wait, NoGil())
      .def("query", &PythonEvent::query, NoGil())
      .def("synchronize", &PythonEvent::synchronize, NoGil())
      .def("elapsed_time", &PythonEvent::elapsed, NoGil());

  m.def("manual_seed", [](int device, uint64_t seed) {
    at::Generator generator = defaultGenerator(checkedDevice(device));
    generator.set_current_seed(seed);
  });
  m.def("initial_seed", [](int device) {
    return defaultGenerator(checkedDevice(device)).current_seed();
  });

  m.def("set_copy_delay", &setCopyDelay);
  m.def("set_copy_bandwidth", &setCopyBandwidth);
  m.def("set_locked_limit", &setLockedLimit);
  m.def("hold_copies", &holdCopies, NoGil());
  m.def("release_copies", &releaseCopies, NoGil());
  m.def("counters", &pythonCounters);
  m.def("reset_counters", [] {
    resetCounters();
    resetHostUseReports();
    ownKernelCalls().is_pinned = 0;
    ownKernelCalls().pin_memory = 0;
  });
  m.def("empty_pinned_cache", &emptyPinnedCache, NoGil());
  m.def("is_host_pinned", [](uintptr_t address) {
    return hostIsLocked(reinterpret_cast<const void*>(address));
  });
  m.def("hooks_is_pinned", [](uintptr_t address) {
    return isPinned(reinterpret_cast<const void*>(address));
  });
  m.def(
      "host_register",
      [](uintptr_t address, size_t bytes) {
        check(
            hostRegister(reinterpret_cast<void*>(address), bytes),
            "page-locking host memory");
      },
      NoGil());
  m.def(
      "host_unregister",
      [](uintptr_t address) {
        check(
            hostUnregister(reinterpret_cast<void*>(address)),
            "unlocking host memory");
      },
      NoGil());
}

} // namespace refdev
