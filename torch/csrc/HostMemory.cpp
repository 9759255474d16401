#include <ATen/DeviceAccelerator.h>
#include <ATen/EmptyTensor.h>
#include <ATen/HostMemory.h>
#include <ATen/PinTarget.h>
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

// Statistics, cap and cache of host memory, page-locking in place, and pinned
// memory for backends that are written in Python.
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

void callUnlock(const Functions& functions, void* ptr, size_t bytes) {
  if (interpreterIsGone()) {
    return;
  }
  py::gil_scoped_acquire gil;
  try {
    functions.unlock(reinterpret_cast<uintptr_t>(ptr), bytes);
  } catch (py::error_already_set& error) {
    error.restore();
    PyErr_WriteUnraisable(functions.unlock.ptr());
  }
}

std::shared_ptr<const at::pin::HostMemoryLocker> lockerOf(
    Functions* functions,
    size_t granularity) {
  return std::make_shared<const at::pin::HostMemoryLocker>(
      at::pin::HostMemoryLocker{
          [functions](void* ptr, size_t bytes) {
            return callLock(*functions, ptr, bytes);
          },
          [functions](void* ptr, size_t bytes) {
            callUnlock(*functions, ptr, bytes);
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
      callUnlock(*with, ptr, bytes);
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
        std::move(recordEvent),
        std::move(queryEvent)};
    supply.locker = lockerOf(functions, granularity);
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

// What of its storage a tensor covers.
std::pair<const void*, size_t> spanOf(const at::Tensor& tensor) {
  TORCH_CHECK_VALUE(
      tensor.is_cpu() && tensor.has_storage(),
      "only dense CPU tensors can be page-locked in place, not one on ",
      tensor.device(),
      " with layout ",
      tensor.layout());
  const auto itemsize = tensor.dtype().itemsize();
  const size_t bytes = at::detail::computeStorageNbytes(
      tensor.sizes(), tensor.strides(), itemsize);
  const auto* data = static_cast<const char*>(tensor.storage().data());
  return {data + tensor.storage_offset() * itemsize, data ? bytes : 0};
}

// Address and bytes of what is registered now; nothing where the memory is
// pinned by other means, or empty, so that there is nothing to undo.
std::optional<std::pair<uintptr_t, size_t>> registerTensor(
    const at::Tensor& tensor,
    bool keep) {
  const auto [ptr, bytes] = spanOf(tensor);
  const bool ours = at::pin::HostMemoryRegistry::instance().touches(ptr, bytes);
  if (bytes == 0 ||
      (!ours && at::pin::isPinned(*tensor.storage().unsafeGetStorageImpl()))) {
    return std::nullopt;
  }
  at::pin::registerHostMemory(tensor.storage(), ptr, bytes, keep);
  return std::make_pair(reinterpret_cast<uintptr_t>(ptr), bytes);
}

// `tensor` is any tensor of the storage.
bool unregisterStorage(
    const at::Tensor& tensor,
    uintptr_t address,
    size_t bytes) {
  return at::pin::unregisterHostMemory(
      tensor.storage(), reinterpret_cast<const void*>(address), bytes);
}

bool unregisterTensor(const at::Tensor& tensor) {
  const auto [ptr, bytes] = spanOf(tensor);
  return at::pin::unregisterHostMemory(tensor.storage(), ptr, bytes);
}

// Gives up storages that nobody holds any more as soon as the main thread has
// left what it is doing now, for example the deallocation of a tensor.
void releaseSoon() {
  Py_AddPendingCall(
      [](void*) {
        py::gil_scoped_release noGil;
        at::pin::releaseRegisteredHostMemory();
        return 0;
      },
      nullptr);
}

// Address and bytes of an object with the buffer protocol.
std::pair<uintptr_t, size_t> bufferOf(py::handle object) {
  Py_buffer view;
  if (PyObject_GetBuffer(object.ptr(), &view, PyBUF_ANY_CONTIGUOUS) != 0) {
    throw py::error_already_set();
  }
  const std::pair<uintptr_t, size_t> result{
      reinterpret_cast<uintptr_t>(view.buf), static_cast<size_t>(view.len)};
  PyBuffer_Release(&view);
  return result;
}

void registerRange(uintptr_t address, size_t bytes) {
  at::pin::registerHostMemory(reinterpret_cast<const void*>(address), bytes);
}

bool unregisterRange(uintptr_t address, size_t bytes) {
  return at::pin::unregisterHostMemory(
      reinterpret_cast<const void*>(address), bytes);
}

std::pair<size_t, size_t> registered() {
  at::pin::releaseRegisteredHostMemory();
  return at::pin::HostMemoryRegistry::instance().totals();
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
  def("_host_memory_release_soon", releaseSoon);
  def("_host_memory_buffer", bufferOf);
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
  defNoGil("_host_memory_register_tensor", registerTensor);
  defNoGil("_host_memory_unregister_tensor", unregisterTensor);
  defNoGil("_host_memory_unregister_storage", unregisterStorage);
  defNoGil("_host_memory_register_range", registerRange);
  defNoGil("_host_memory_unregister_range", unregisterRange);
  defNoGil("_host_memory_registered", registered);
  defNoGil(
      "_register_stand_in_host_allocator",
      at::pin::registerStandInHostAllocator);
  defNoGil(
      "_deregister_stand_in_host_allocator",
      at::pin::deregisterStandInHostAllocator);
}

} // namespace torch::pin
