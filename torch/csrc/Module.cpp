#include <torch/csrc/torchpin.h>

// The extension module torchpin._C. It imports nothing and registers nothing
// by itself: tools/overlay decides what is switched on.

extern "C" __attribute__((visibility("default"))) PyObject* PyInit__C();

PyObject* PyInit__C() {
  static struct PyModuleDef definition = {
      PyModuleDef_HEAD_INIT,
      "torchpin._C",
      nullptr,
      -1,
      nullptr,
      nullptr,
      nullptr,
      nullptr,
      nullptr,
  };
  PyObject* module = PyModule_Create(&definition);
  if (module == nullptr) {
    return nullptr;
  }
  try {
    torch::pin::initPinTargetBindings(module);
    torch::pin::initTensorMethodBindings(module);
    torch::pin::initPinBatchBindings(module);
    torch::pin::initHostMemoryBindings(module);
    torch::pin::initHostMemoryRegistrationBindings(module);
    torch::pin::initTransportBindings(module);
  } catch (const std::exception& error) {
    if (!PyErr_Occurred()) {
      PyErr_SetString(PyExc_ImportError, error.what());
    }
    Py_DECREF(module);
    return nullptr;
  }
  return module;
}
