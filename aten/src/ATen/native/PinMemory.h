#pragma once

// The kernels of aten::is_pinned and aten::_pin_memory, and of the CPU factory
// functions as far as pin_memory=True goes, for the current accelerator.

namespace at::pin {

// Registers the kernels with the dispatcher, unless a backend has put its own
// in the same place. Quiet: the dispatcher's override warning is held back.
// Calling it twice changes nothing.
void registerPinKernels();

// Takes them out again, so that the base's own kernels answer.
void deregisterPinKernels();

} // namespace at::pin
