#include <ATen/DeviceAccelerator.h>
#include <ATen/HostMemory.h>
#include <ATen/core/CachingHostMemory.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/Stream.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/torchpin.h>
#include <torch/csrc/utils/pybind.h>

#include <sys/mman.h>

#include <memory>
#include <optional>
#include <string>
#include <utility>

// Statistics, cap and cache of host memory, and pinned memory for backends that
// are written in Python.
//
// Note [Python functions that page-lock]
// ~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
// They are called by allocators and by deleters, in any thread, with or without
// the GIL; so each call takes it. Once the interpreter is going away they are
// not called any more: what they locked goes with the process. The objects are
// never destroyed, since memory is freed late.

namespace torch::pin {

namespace {

bool interpreterIsGone() {
#if PY_VERSION_HEX >= 0x030D0000
  return !Py_IsInitialized() || Py_IsFinalizing();
#else
  return !Py_IsInitialized() || _Py_IsFinalizing();
#endif
}

struct Functions {
  py::object lock;        // (address, nbytes) -> False where refused
  py::object unlock;      // (address, nbytes)
  py::object unlockIdle;  // the same, or None
  py::object recordEvent; // (stream) -> event, or None
  py::object queryEvent;  // (event) -> bool
};

// The message of a Python error, in a C++ one that any caller may catch.
[[noreturn]] void rethrow(py::error_already_set& error, const char* what) {
  const std::string text = error.what();
  TORCH_CHECK(
      false,
      "the ",
      what,
      " function of torchpin.register_host_memory_functions raised ",
      text.substr(0, text.find("\n\nAt:")));
}

// Needs no GIL. False where refused.
bool callLock(const Functions& functions, void* ptr, size_t bytes) {
  TORCH_CHECK(!interpreterIsGone(), "the interpreter is shutting down");
  py::gil_scoped_acquire gil;
  try {
    const py::object answer =
        functions.lock(reinterpret_cast<uintptr_t>(ptr), bytes);
    return answer.is_none() || answer.cast<bool>();
  } catch (py::error_already_set& error) {
    if (error.matches(PyExc_MemoryError)) {
      return false;
    }
    rethrow(error, "page-lock");
  }
}

void callUnlock(const py::object& unlock, void* ptr, size_t bytes) {
  if (interpreterIsGone()) {
    return;
  }
  py::gil_scoped_acquire gil;
  try {
    unlock(reinterpret_cast<uintptr_t>(ptr), bytes);
  } catch (py::error_already_set& error) {
    error.restore();
    PyErr_WriteUnraisable(unlock.ptr());
  }
}

std::shared_ptr<const at::pin::HostMemoryLocker> lockerOf(
    const Functions* functions,
    const py::object* unlock,
    size_t granularity) {
  return std::make_shared<const at::pin::HostMemoryLocker>(
      at::pin::HostMemoryLocker{
          [functions](void* ptr, size_t bytes) {
            return callLock(*functions, ptr, bytes);
          },
          [unlock](void* ptr, size_t bytes) {
            callUnlock(*unlock, ptr, bytes);
          },
          granularity});
}

// An event of Python, or none where copies have finished when they return.
class PythonEvent {
 public:
  PythonEvent() = default;
  PythonEvent(PyObject* object, const Functions* functions)
      : object_(object), functions_(functions) {}
  PythonEvent(PythonEvent&& other) noexcept
      : object_(std::exchange(other.object_, nullptr)),
        functions_(other.functions_) {}
  PythonEvent& operator=(PythonEvent&& other) noexcept {
    std::swap(object_, other.object_);
    std::swap(functions_, other.functions_);
    return *this;
  }
  ~PythonEvent() {
    if (object_ != nullptr && !interpreterIsGone()) {
      py::gil_scoped_acquire gil;
      Py_DECREF(object_);
    }
  }

  bool query() const {
    if (object_ == nullptr) {
      return true;
    }
    TORCH_CHECK(!interpreterIsGone(), "the interpreter is shutting down");
    py::gil_scoped_acquire gil;
    return functions_->queryEvent(py::handle(object_)).cast<bool>();
  }

 private:
  PyObject* object_ = nullptr;
  const Functions* functions_ = nullptr;
};

// The runtime of a backend in Python: ordinary memory, locked by its function.
struct PythonRuntime {
  static inline std::atomic<Functions*> functions{nullptr};

  void* allocate_host_memory(size_t bytes) {
    auto* with = functions.load();
    TORCH_CHECK(with != nullptr, "the functions were taken away");
    void* ptr = mmap(
        nullptr,
        bytes,
        PROT_READ | PROT_WRITE,
        MAP_PRIVATE | MAP_ANONYMOUS,
        -1,
        0);
    if (ptr == MAP_FAILED) {
      return nullptr;
    }
    try {
      if (callLock(*with, ptr, bytes)) {
        return ptr;
      }
    } catch (...) {
      munmap(ptr, bytes);
      throw;
    }
    munmap(ptr, bytes);
    return nullptr;
  }

  void free_host_memory(void* ptr, size_t bytes) {
    if (auto* with = functions.load()) {
      callUnlock(with->unlock, ptr, bytes);
    }
    munmap(ptr, bytes);
  }

  PythonEvent record_event(c10::Stream stream) {
    auto* with = functions.load();
    if (with == nullptr || with->recordEvent.is_none()) {
      return {};
    }
    TORCH_CHECK(!interpreterIsGone(), "the interpreter is shutting down");
    py::gil_scoped_acquire gil;
    return {with->recordEvent(stream).release().ptr(), with};
  }

  bool query_event(PythonEvent& event) {
    return event.query();
  }
};
using PythonHostMemory = at::pin::CachingHostMemory<PythonRuntime>;

c10::DeviceType typeFromName(const std::string& name) {
  return c10::Device(name).type();
}

void setFunctions(
    const std::string& deviceType,
    py::object lock,
    py::object unlock,
    py::object unlockIdle,
    py::object recordEvent,
    py::object queryEvent,
    size_t granularity,
    bool withAllocator) {
  const auto type = typeFromName(deviceType);
  at::pin::HostMemorySupply supply;
  if (!lock.is_none()) {
    // Never destroyed, see the note above.
    auto* functions = new Functions{
        std::move(lock),
        std::move(unlock),
        std::move(unlockIdle),
        std::move(recordEvent),
        std::move(queryEvent)};
    supply.locker = lockerOf(functions, &functions->unlock, granularity);
    if (!functions->unlockIdle.is_none()) {
      supply.idleLocker =
          lockerOf(functions, &functions->unlockIdle, granularity);
    }
    if (withAllocator) {
      PythonRuntime::functions = functions;
      supply.allocator = &PythonHostMemory::instance();
    }
  }
  py::gil_scoped_release noGil;
  at::pin::setHostMemorySupply(type, std::move(supply));
}

bool isSupplied(const std::string& deviceType) {
  return at::pin::suppliedHostAllocator(typeFromName(deviceType)) != nullptr;
}

py::object stats() {
  py::dict result;
  std::vector<std::pair<std::string, int64_t>> values;
  {
    py::gil_scoped_release noGil;
    const bool known = at::pin::visitHostMemoryStats(
        [](void* to, const char* key, int64_t value) {
          static_cast<decltype(values)*>(to)->emplace_back(key, value);
        },
        &values);
    if (!known) {
      values.clear();
    }
  }
  for (const auto& [key, value] : values) {
    result[py::str(key)] = value;
  }
  return result;
}

std::optional<size_t> maxHostMemory() {
  const size_t bytes = at::pin::maxHostMemory();
  return bytes == SIZE_MAX ? std::nullopt : std::optional<size_t>(bytes);
}

// The stream is taken apart here, because the pybind11 caster of some releases
// (2.3) can make a Stream but not load one.
bool recordUse(const at::Tensor& tensor, const py::object& object) {
  TORCH_CHECK_TYPE(
      THPStream_Check(object.ptr()),
      "record_host_memory_use: expected a torch.Stream, got ",
      Py_TYPE(object.ptr())->tp_name);
  const auto* raw = reinterpret_cast<THPStream*>(object.ptr());
  const auto stream = c10::Stream::unpack3(
      raw->stream_id,
      static_cast<c10::DeviceIndex>(raw->device_index),
      static_cast<c10::DeviceType>(raw->device_type));
  const auto& data = tensor.storage().data_ptr();
  py::gil_scoped_release noGil;
  return at::pin::recordHostMemoryUse(
      const_cast<void*>(tensor.storage().data()), data.get_context(), stream);
}

} // namespace

void initHostMemoryBindings(PyObject* module) {
  auto m = py::handle(module).cast<py::module>();
  const auto def = [&](const char* name, auto function, auto... arguments) {
    m.def(name, torch::wrap_pybind_function(function), arguments...);
  };
  def("_set_host_memory_functions", setFunctions);
  def("_host_memory_is_supplied", isSupplied);
  def("_host_memory_stats", stats);
  def("_host_memory_record_use", recordUse);
  const auto defNoGil = [&](const char* name, auto function) {
    m.def(name, torch::wrap_pybind_function_no_gil(function));
  };
  defNoGil("_host_memory_reset_peak", at::pin::resetPeakHostMemoryStats);
  defNoGil(
      "_host_memory_reset_accumulated",
      at::pin::resetAccumulatedHostMemoryStats);
  defNoGil("_host_memory_empty_cache", at::pin::emptyHostMemoryCache);
  defNoGil("_host_memory_set_max", at::pin::setMaxHostMemory);
  defNoGil("_host_memory_get_max", maxHostMemory);
  defNoGil(
      "_register_stand_in_host_allocator",
      at::pin::registerStandInHostAllocator);
  defNoGil(
      "_deregister_stand_in_host_allocator",
      at::pin::deregisterStandInHostAllocator);
}

} // namespace torch::pin
