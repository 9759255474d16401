#pragma once

// The pieces of the extension module torchpin._C, one function each.

#include <torch/csrc/python_headers.h>

namespace torch::pin {

void initPinTargetBindings(PyObject* module);
void initTensorMethodBindings(PyObject* module);
void initPinBatchBindings(PyObject* module);
void initHostMemoryBindings(PyObject* module);
void initHostMemoryRegistrationBindings(PyObject* module);
void initTransportBindings(PyObject* module);

} // namespace torch::pin
