"""How CUDA page-locks memory that exists: ``cudaHostRegister``, through :func:`torch.cuda.cudart`.

Importing this module gives the two functions to the registry of page-locked ranges, which calls them
for ``torchpin.register_host_memory`` and for the slots that batches of workers arrive in. Nothing of
CUDA is touched before that.
"""

from __future__ import annotations

import contextlib
import ctypes

import torch
from torchpin import _C


def page_lock(address: int, nbytes: int) -> bool:
    """Page-locks ``nbytes`` bytes at ``address``.

    Raises:
        RuntimeError: if the driver refuses, with its reason. No error stays pending in the runtime.
    """
    error = torch.cuda.cudart().cudaHostRegister(address, nbytes, 0)
    if int(error) == 0:
        return True
    _clear_error()
    raise RuntimeError(f"cudaHostRegister: {torch.cuda.cudart().cudaGetErrorString(error)}")


def unlock(address: int, nbytes: int) -> None:
    """Undoes one :func:`page_lock`, after whatever is running on any device.

    CUDA does not say that ``cudaHostUnregister`` waits, and nobody knows which copies use a range. While
    a graph is captured on this thread's stream waiting is not allowed, and the copies of the graph have
    not been started.
    """
    if not torch.cuda.is_current_stream_capturing():
        for device in range(torch.cuda.device_count()):
            if torch._C._cuda_hasPrimaryContext(device):  # type: ignore[attr-defined]
                # An error of a kernel is for whoever waits for that.
                with contextlib.suppress(RuntimeError):
                    torch.cuda.synchronize(device)
    unlock_idle(address, nbytes)


def unlock_idle(address: int, nbytes: int) -> None:
    """Undoes one :func:`page_lock` of memory that no copy uses any more."""
    if int(torch.cuda.cudart().cudaHostUnregister(address)) != 0:
        _clear_error()


def _clear_error() -> None:
    """Takes back the error that the runtime remembers, which would show up at the next kernel."""
    # PyTorch loads what it links to into the global namespace.
    runtime = ctypes.CDLL(None)
    for name in ("cudaGetLastError", "hipGetLastError"):
        if hasattr(runtime, name):
            getattr(runtime, name)()
            return
    # Linked in statically: the check after a kernel launch takes it back, and raises it.
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device="cuda")


# The driver takes any range and counts bytes, so nothing is rounded to pages.
_C._set_host_memory_functions("cuda", page_lock, unlock, unlock_idle, None, None, 1, False)
