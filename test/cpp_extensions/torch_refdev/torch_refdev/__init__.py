"""Registers the reference accelerator with PyTorch as device type ``refdev``.

Importing this package is enough; from PyTorch 2.5 on ``import torch`` does it.
``torch.refdev`` is the device module. This package itself holds what tests of
pinned memory need and no real accelerator offers: settings of the copy engine,
counters, and a way to keep copies in flight for as long as a test wants.

``TORCH_REFDEV_BREAK``, a comma-separated list read at import, leaves parts of
the backend out or makes them wrong; see the README.
"""

from __future__ import annotations

import contextlib
import sys
import types
from collections.abc import Iterator
from typing import Any

import torch

from . import _C

__all__ = [
    "counters",
    "empty_pinned_cache",
    "hold_copies",
    "host_register",
    "host_unregister",
    "is_host_pinned",
    "reset_counters",
    "set_copy_bandwidth",
    "set_copy_delay",
    "set_locked_limit",
]


def _register_python_hooks() -> None:
    """Hooks in Python only, which PyTorch offers from 2.10 on: no allocator among them."""

    class Hooks(torch._C._acc.PrivateUse1Hooks):
        def is_built(self) -> bool:
            return True

        def is_available(self) -> bool:
            return True

        def has_primary_context(self, device_index: int) -> bool:
            return bool(_C.has_context(device_index))

    # PyTorch does not keep the object alive itself.
    global _python_hooks
    _python_hooks = Hooks()
    torch._C._acc.register_python_privateuseone_hook(_python_hooks)


_python_hooks: Any = None


def _register() -> None:
    from . import module

    torch.utils.rename_privateuse1_backend("refdev")
    _C.register_hooks()
    if _C.broken("python_hooks"):
        _register_python_hooks()
    registered: types.ModuleType = module
    if _C.broken("no_module_functions"):
        registered = types.ModuleType("torch.refdev")
        for name in module.__all__:
            if name not in ("is_available", "current_device"):
                setattr(registered, name, getattr(module, name))
    torch._register_device_module("refdev", registered)
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)


def _autoload() -> None:
    """What ``import torch`` calls; importing this module has done it."""


def set_copy_delay(seconds: float) -> None:
    """Makes every copy begin ``seconds`` after its turn in its stream has come.

    Not delayed: data that the CPU moves to compute an operator, and copies within
    one device, which stand for kernels. This is so for bandwidth and holds, too.
    """
    _C.set_copy_delay(seconds)


def set_copy_bandwidth(bytes_per_second: float | None) -> None:
    """Limits the copy engine of each device; ``None``: as fast as the CPU copies."""
    _C.set_copy_bandwidth(bytes_per_second or 0.0)


def set_locked_limit(limit: int | None) -> None:
    """Refuses to page-lock host memory beyond ``limit`` bytes; ``None``: no limit."""
    _C.set_locked_limit(-1 if limit is None else limit)


@contextlib.contextmanager
def hold_copies() -> Iterator[None]:
    """Keeps the engines from starting any copy until the block is left.

    Waiting inside for a copy that is held raises :class:`RuntimeError` in the
    thread that holds, and waits in any other; so a backward pass, which has
    threads of its own, may never end inside.
    """
    _C.hold_copies()
    try:
        yield
    finally:
        _C.release_copies()


def counters() -> dict[str, Any]:
    """What the driver has done since :func:`reset_counters`.

    - ``pin_calls``, ``unpin_calls``, ``pin_refusals``: page-lock calls.
    - ``locked_bytes`` (whole pages) and ``locked_ranges``: now.
    - ``copies_direct``: copies that read or write the caller's host memory.
    - ``copies_staged``: copies of pageable memory, through a buffer.
    - ``copies_device``: copies within or between devices.
    - ``copies_in_flight``: now, enqueued and not finished.
    - ``host_use_reports``: reports of host use that found their block.
    - ``contexts``: the set of devices that have a context now.
    - ``touches``: for each device, the native ids of the threads that touched it.
    - ``own_is_pinned_calls``, ``own_pin_memory_calls``: calls of the backend's
      own kernels (switches ``own_kernels`` and ``own_backend_select``).
    """
    result: dict[str, Any] = _C.counters()
    return result


def reset_counters() -> None:
    """Sets everything in :func:`counters` to zero that does not describe the present."""
    _C.reset_counters()


def is_host_pinned(address: int) -> bool:
    """Whether the driver has page-locked the host memory at ``address``."""
    return bool(_C.is_host_pinned(address))


def host_register(address: int, nbytes: int) -> None:
    """Page-locks host memory that the driver did not allocate.

    Ranges may share pages. Raises :class:`RuntimeError` where a byte of it is
    locked already, a page is not mapped, or it would pass the limit.
    """
    _C.host_register(address, nbytes)


def host_unregister(address: int) -> None:
    """Undoes :func:`host_register`, given the same address."""
    _C.host_unregister(address)


def empty_pinned_cache() -> None:
    """Unlocks and frees the host memory that no tensor and no copy uses."""
    _C.empty_pinned_cache()


if "torch.refdev" not in sys.modules:
    _register()
