#include <ATen/EmptyTensor.h>
#include <ATen/HostMemory.h>
#include <ATen/PinTarget.h>
#include <c10/core/CPUAllocator.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/torchpin.h>
#include <torch/csrc/utils/pybind.h>

#include <new>
#include <optional>
#include <utility>

// Page-locking in place, for torchpin.register_host_memory and its likes.
//
// It is measured against the bare call of the driver, which for a few pages
// takes microseconds. So a tensor is registered by one call, and what is given
// back is a type of C: a Python class, with a weak reference to the storage's
// Python object and a function that undoes it, cost more than the driver did.
//
// All of this runs without the GIL while it may call the driver: a thread that
// waits for a range which another one is locking must not hold what functions
// in Python need, see Note [Python functions that page-lock].

namespace torch::pin {

namespace {

using WeakStorage = c10::weak_intrusive_ptr<c10::StorageImpl>;

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

// ---- torchpin.HostMemoryRegistration, described in tools/overlay/_C.pyi

struct Registration {
  PyObject_HEAD
      // What __enter__ gives: a weak reference to it, where there can be one.
      PyObject* data;
  // Of a buffer: the function that undoes the registration, until it is called.
  PyObject* undo;
  // Of a tensor: the storage, until it is undone. None, too, if the memory was
  // pinned by other means.
  std::optional<WeakStorage> storage;
  const void* address;
  size_t bytes;
};

PyTypeObject* registrationType = nullptr;

Registration& registrationOf(PyObject* object) {
  return *reinterpret_cast<Registration*>(object);
}

// One of nothing, which is then filled in: what locks memory must not fail
// afterwards.
py::object makeRegistration(PyObject* data) {
  auto object = py::reinterpret_steal<py::object>(
      registrationType->tp_alloc(registrationType, 0));
  if (!object) {
    throw python_error();
  }
  Registration& self = registrationOf(object.ptr());
  new (&self.storage) std::optional<WeakStorage>();
  self.data = PyWeakref_NewRef(data, nullptr);
  if (self.data == nullptr) {
    if (!PyErr_ExceptionMatches(PyExc_TypeError)) {
      throw python_error();
    }
    PyErr_Clear();
    self.data = Py_NewRef(data);
  }
  return object;
}

PyObject* registrationNew(
    PyTypeObject* /*type*/,
    PyObject* arguments,
    PyObject* keywords) {
  HANDLE_TH_ERRORS
  static const char* names[] = {"data", "nbytes", "undo", nullptr};
  PyObject* data = nullptr;
  Py_ssize_t bytes = 0;
  PyObject* undo = nullptr;
  if (!PyArg_ParseTupleAndKeywords(
          arguments,
          keywords,
          "OnO",
          const_cast<char**>(names),
          &data,
          &bytes,
          &undo)) {
    return nullptr;
  }
  py::object object = makeRegistration(data);
  registrationOf(object.ptr()).bytes = static_cast<size_t>(bytes);
  registrationOf(object.ptr()).undo =
      undo == Py_None ? nullptr : Py_NewRef(undo);
  return object.release().ptr();
  END_HANDLE_TH_ERRORS
}

int registrationTraverse(PyObject* object, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(object));
  Py_VISIT(registrationOf(object).data);
  Py_VISIT(registrationOf(object).undo);
  return 0;
}

int registrationClear(PyObject* object) {
  Py_CLEAR(registrationOf(object).data);
  Py_CLEAR(registrationOf(object).undo);
  return 0;
}

void registrationDealloc(PyObject* object) {
  PyTypeObject* type = Py_TYPE(object);
  PyObject_GC_UnTrack(object);
  registrationClear(object);
  registrationOf(object).storage.~optional();
  type->tp_free(object);
  Py_DECREF(type);
}

PyObject* registrationRepr(PyObject* object) {
  const Registration& self = registrationOf(object);
  const bool undone = self.undo == nullptr && !self.storage.has_value();
  return PyUnicode_FromFormat(
      "<HostMemoryRegistration of %zu bytes%s>",
      self.bytes,
      undone ? ", undone" : "");
}

PyObject* registrationNbytes(PyObject* object, void* /*closure*/) {
  return PyLong_FromSize_t(registrationOf(object).bytes);
}

PyObject* registrationUnregister(PyObject* object, PyObject* /*nothing*/) {
  HANDLE_TH_ERRORS
  Registration& self = registrationOf(object);
  if (self.undo != nullptr) {
    const auto undo =
        py::reinterpret_steal<py::object>(std::exchange(self.undo, nullptr));
    undo();
  } else if (self.storage.has_value()) {
    // It may have gone, which has undone it.
    auto impl = self.storage->lock();
    self.storage.reset();
    const void* address = self.address;
    const size_t bytes = self.bytes;
    py::gil_scoped_release noGil;
    if (impl) {
      const c10::Storage storage(std::move(impl));
      at::pin::unregisterHostMemory(storage, address, bytes);
    }
  }
  Py_RETURN_NONE;
  END_HANDLE_TH_ERRORS
}

PyObject* registrationEnter(PyObject* object, PyObject* /*nothing*/) {
  PyObject* data = registrationOf(object).data;
  return PyWeakref_Check(data) ? PyObject_CallNoArgs(data) : Py_NewRef(data);
}

PyObject* registrationExit(
    PyObject* object,
    PyObject* const* /*args*/,
    Py_ssize_t /*nargs*/) {
  return registrationUnregister(object, nullptr);
}

PyMethodDef registrationMethods[] = {
    {"unregister",
     registrationUnregister,
     METH_NOARGS,
     "unregister() -> None\n\n"
     "Undoes this registration, once; calling it again does nothing."},
    {"__enter__", registrationEnter, METH_NOARGS, nullptr},
    {"__exit__",
     reinterpret_cast<PyCFunction>(
         reinterpret_cast<void (*)()>(registrationExit)),
     METH_FASTCALL,
     nullptr},
    {nullptr, nullptr, 0, nullptr}};

PyGetSetDef registrationProperties[] = {
    {"nbytes",
     registrationNbytes,
     nullptr,
     "Bytes that this registration page-locks: 0 where they were pinned by "
     "other means.",
     nullptr},
    {nullptr, nullptr, nullptr, nullptr, nullptr}};

constexpr const char* kRegistrationDoc =
    "Memory that register_host_memory has page-locked; a context manager that\n"
    "undoes it.\n\n"
    "Keeps neither the memory nor the object it belongs to alive.";

PyType_Slot registrationSlots[] = {
    {Py_tp_new, reinterpret_cast<void*>(registrationNew)},
    {Py_tp_traverse, reinterpret_cast<void*>(registrationTraverse)},
    {Py_tp_clear, reinterpret_cast<void*>(registrationClear)},
    {Py_tp_dealloc, reinterpret_cast<void*>(registrationDealloc)},
    {Py_tp_repr, reinterpret_cast<void*>(registrationRepr)},
    {Py_tp_methods, registrationMethods},
    {Py_tp_getset, registrationProperties},
    {Py_tp_doc, const_cast<char*>(kRegistrationDoc)},
    {0, nullptr}};

PyType_Spec registrationSpec = {
    "torchpin.HostMemoryRegistration",
    sizeof(Registration),
    0,
    Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC,
    registrationSlots};

// ---- tensors

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

// Whether processes share the memory. PyTorch tells by the deleter, and one of
// those lies in a library that is not linked here, so Python is asked; not
// about memory of the CPU allocator, which is nearly all there is.
bool isShared(py::handle tensor, const c10::Storage& storage) {
  return storage.data_ptr().get_deleter() !=
             c10::GetCPUAllocator()->raw_deleter() &&
         tensor.attr("untyped_storage")().attr("is_shared")().cast<bool>();
}

// Takes a tensor and what the caller gave, which is that or its storage.
PyObject*
registerTensor(PyObject* /*module*/, PyObject* const* args, Py_ssize_t nargs) {
  HANDLE_TH_ERRORS
  TORCH_CHECK_TYPE(
      nargs == 2 && THPVariable_Check(args[0]),
      "expected a tensor, and what it stands for");
  const at::Tensor& tensor = THPVariable_Unpack(args[0]);
  const auto [ptr, bytes] = spanOf(tensor);
  py::object result = makeRegistration(args[1]);
  if (bytes == 0) {
    return result.release().ptr();
  }
  // Of its own: without the GIL another thread may give the tensor a new one.
  const c10::Storage storage = tensor.storage();
  const bool shared = isShared(args[0], storage);
  if (shared) {
    py::module_::import("weakref")
        .attr("finalize")(py::handle(args[1]), py::cpp_function(&releaseSoon))
        .attr("atexit") = false;
  }
  bool pinnedOtherwise = false;
  {
    py::gil_scoped_release noGil;
    pinnedOtherwise =
        !at::pin::HostMemoryRegistry::instance().touches(ptr, bytes) &&
        at::pin::isPinned(*storage.unsafeGetStorageImpl());
    if (!pinnedOtherwise) {
      at::pin::registerHostMemory(storage, ptr, bytes, shared);
    }
  }
  if (!pinnedOtherwise) {
    Registration& self = registrationOf(result.ptr());
    self.storage.emplace(storage.getWeakStorageImpl());
    self.address = ptr;
    self.bytes = bytes;
  }
  return result.release().ptr();
  END_HANDLE_TH_ERRORS
}

bool unregisterTensor(const at::Tensor& tensor) {
  const auto [ptr, bytes] = spanOf(tensor);
  return at::pin::unregisterHostMemory(tensor.storage(), ptr, bytes);
}

// ---- buffers

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

PyMethodDef functions[] = {
    {"_host_memory_register_tensor",
     reinterpret_cast<PyCFunction>(
         reinterpret_cast<void (*)()>(registerTensor)),
     METH_FASTCALL,
     nullptr},
    {nullptr, nullptr, 0, nullptr}};

} // namespace

void initHostMemoryRegistrationBindings(PyObject* module) {
  PyObject* type = PyType_FromSpec(&registrationSpec);
  if (type == nullptr || PyModule_AddFunctions(module, functions) != 0 ||
      PyModule_AddObjectRef(module, "HostMemoryRegistration", type) != 0) {
    throw py::error_already_set();
  }
  // Kept for ever, as the module is.
  registrationType = reinterpret_cast<PyTypeObject*>(type);
  auto m = py::handle(module).cast<py::module>();
  m.def("_host_memory_buffer", torch::wrap_pybind_function(bufferOf));
  const auto defNoGil = [&](const char* name, auto function) {
    m.def(name, torch::wrap_pybind_function_no_gil(function));
  };
  defNoGil("_host_memory_unregister_tensor", unregisterTensor);
  defNoGil("_host_memory_register_range", registerRange);
  defNoGil("_host_memory_unregister_range", unregisterRange);
  defNoGil("_host_memory_registered", registered);
}

} // namespace torch::pin
