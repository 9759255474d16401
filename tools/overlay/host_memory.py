"""Page-locked host memory of the current accelerator: statistics, cap, cache, page-locking in place.

The functions here are part of the package: ``torchpin.host_memory_stats()`` and so on. They ask
whoever answers for the accelerator, in this order: functions given to
:func:`register_host_memory_functions`, the host allocator of its hooks, the host allocator that the
base has for it. They work on every supported release.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from torchpin._C import HostMemoryRegistration as HostMemoryRegistration

__all__ = [
    "HostMemoryRegistration",
    "empty_host_cache",
    "host_memory_stats",
    "max_host_memory",
    "record_host_memory_use",
    "register_host_memory",
    "register_host_memory_functions",
    "reset_accumulated_host_memory_stats",
    "reset_peak_host_memory_stats",
    "unregister_host_memory",
]


@functools.cache
def _extension() -> ModuleType:
    from torchpin import _overlay

    return _overlay.load_extension()


def __getattr__(name: str) -> Any:
    # A type of the extension, which may not be loadable where this module is.
    if name == "HostMemoryRegistration":
        return _extension().HostMemoryRegistration
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _accelerator() -> str | None:
    name: str | None = _extension()._pin_target(False)[0]
    return name


# ---- statistics, cap, cache

_NAMES_OF_2_10 = {
    "allocation": "active_requests",
    "allocated_bytes": "active_bytes",
    "segment": "allocations",
    "reserved_bytes": "allocated_bytes",
}


def host_memory_stats() -> OrderedDict[str, int]:
    """Statistics of the host allocator of the current accelerator.

    Returns:
        What :func:`torch.cuda.host_memory_stats` of PyTorch 2.10 and later returns, under the same
        keys and sorted, for every accelerator and on every base: ``allocated_bytes`` and
        ``allocations`` (page-locked, in use or not), ``active_bytes`` and ``active_requests`` (in
        use, or waiting for the accelerator to have finished), each with ``.current``, ``.peak``,
        ``.allocated`` and ``.freed``; ``num_host_alloc`` and ``num_host_free`` (calls that
        page-locked and unlocked); ``host_alloc_time`` and ``host_free_time`` (microseconds spent in
        them) with ``.total``, ``.max``, ``.min``, ``.count`` and ``.avg``. An allocator made with
        ``ATen/core/CachingHostMemory.h`` adds ``requested_bytes`` (what was asked for),
        ``num_alloc_retries``, ``num_ooms`` and ``num_lost_blocks``. Empty where there is no
        accelerator or its allocator counts nothing.

    Initialises nothing. Memory that :func:`register_host_memory` page-locks is not counted.
    """
    stats: dict[str, int] = _extension()._host_memory_stats()
    if not stats and _accelerator() == "cuda" and hasattr(torch.cuda, "host_memory_stats"):
        for key, value in torch.cuda.host_memory_stats().items():
            name, dot, part = key.partition(".")
            stats[_NAMES_OF_2_10.get(name, name) + dot + part] = value
    return OrderedDict(sorted(stats.items()))


def reset_peak_host_memory_stats() -> None:
    """Makes every ``.peak`` of :func:`host_memory_stats` what is current now."""
    _extension()._host_memory_reset_peak()


def reset_accumulated_host_memory_stats() -> None:
    """Sets what :func:`host_memory_stats` has summed up (``.allocated``, ``num_host_alloc``) to 0."""
    _extension()._host_memory_reset_accumulated()


def empty_host_cache() -> None:
    """Unlocks and returns all page-locked memory that no tensor and no running copy uses.

    Does nothing where there is no accelerator or its allocator keeps no cache. As
    ``torch.accelerator.empty_host_cache()`` of 2.12 and later, on every base.
    """
    _extension()._host_memory_empty_cache()


class _Unset:
    def __repr__(self) -> str:
        return "<what it is>"


_UNSET = _Unset()


def max_host_memory(limit: int | _Unset | None = _UNSET) -> int | None:
    """Sets or asks the cap on page-locked bytes of the current accelerator's host allocator.

    Args:
        limit: bytes; None for no cap. Left out: the cap stays.

    Returns:
        The cap that holds now.

    At the cap the allocator first unlocks what it keeps unused. If that is not enough, pinning
    raises :class:`torch.OutOfMemoryError` (``torch.cuda.OutOfMemoryError`` up to 2.4), and a
    DataLoader delivers that batch in ordinary memory. ``TORCHPIN_MAX_HOST_MEMORY`` in the
    environment, bytes or a number such as ``2G``, is the cap a process starts with.

    Raises:
        ValueError: if ``limit`` is negative.
        NotImplementedError: where the allocator cannot be capped. PyTorch's own for CUDA is one of
            those: it bounds neither what it page-locks nor, in all, what it keeps.
    """
    extension = _extension()
    if not isinstance(limit, _Unset):
        if limit is not None and limit < 0:
            raise ValueError(f"a cap on host memory is a number of bytes, not {limit}")
        extension._host_memory_set_max(sys.maxsize * 2 + 1 if limit is None else limit)
    cap: int | None = extension._host_memory_get_max()
    return cap


# ---- page-locking in place


def register_host_memory(data: Any) -> HostMemoryRegistration:
    """Page-locks the memory of a tensor or buffer where it is, for the current accelerator.

    Data, address and sharing stay as they are, also for memory that processes share. A tensor over
    it reads as pinned then, ``pin_memory()`` on it returns it as it is, and asynchronous copies read
    and write it directly.

    Args:
        data: a dense CPU tensor, a storage, a numpy array, or any object with a contiguous buffer
            (``bytearray``, ``mmap.mmap``, ``memoryview``). Of a tensor the part of its storage that
            it covers.

    Returns:
        A context manager. Used plainly, the memory stays locked until its ``unregister()``, until
        :func:`unregister_host_memory` with the same data, or until the memory goes away.

    Registrations of the same memory are counted, and it is unlocked with the last one; so are pages
    that two buffers share. Memory that is pinned already is left alone. The memory of a tensor or
    numpy array is unlocked before it is freed. Other buffers are kept alive until they are
    unregistered. A tensor in shared memory is kept, too. It is freed as soon as the main thread runs
    Python again if ``data`` was the last to hold it; else with the first call of any function here
    after its last reference has gone.

    Unregistering, and freeing registered memory, wait for the copies that use it, so that the memory
    may be written to afterwards. For CUDA that means everything on every device, except while the
    calling thread captures a graph.

    Raises:
        NotImplementedError: if the accelerator cannot page-lock memory in place.
        RuntimeError: if its driver refuses; nothing stays locked then.
        ValueError: for tensors that are not dense and on the CPU.
    """
    registration: HostMemoryRegistration
    if isinstance(data, torch.Tensor):
        registration = _extension()._host_memory_register_tensor(data, data)
    elif isinstance(data, _STORAGES):
        registration = _extension()._host_memory_register_tensor(_tensor_over(data), data)
    else:
        registration = _register_buffer(data)
    return registration


def unregister_host_memory(data: Any) -> bool:
    """Undoes one :func:`register_host_memory` of the same tensor or buffer.

    Returns:
        False if it was not registered, which is no error.
    """
    if isinstance(data, _STORAGES):
        data = _tensor_over(data)
    if isinstance(data, torch.Tensor):
        done: bool = _extension()._host_memory_unregister_tensor(data)
        return done
    return _unregister_buffer(*_extension()._host_memory_buffer(data))


_STORAGES = (torch.UntypedStorage, torch.TypedStorage)


def _tensor_over(storage: Any) -> torch.Tensor:
    storage = storage.untyped() if isinstance(storage, torch.TypedStorage) else storage
    return torch.empty(0, dtype=torch.uint8).set_(storage)


# For each range what undoes it when its owner goes away, or keeps the owner alive.
_buffers: dict[tuple[int, int], list[Any]] = {}


def _register_buffer(data: Any) -> HostMemoryRegistration:
    extension = _extension()
    make: type[HostMemoryRegistration] = extension.HostMemoryRegistration
    address, nbytes = extension._host_memory_buffer(data)
    if nbytes == 0:
        return make(data, 0, None)
    extension._host_memory_register_range(address, nbytes)
    owner = _owner_of_array(data)
    entry: Any
    if owner is None:
        entry = memoryview(data)
    else:
        entry = weakref.finalize(owner, _unregister_buffer, address, nbytes)
        entry.atexit = False
    _buffers.setdefault((address, nbytes), []).append(entry)
    return make(data, nbytes, lambda: _unregister_buffer(address, nbytes))


def _owner_of_array(data: Any) -> Any:
    """The numpy array whose memory ``data`` is; None for everything else."""
    numpy = sys.modules.get("numpy")
    while numpy is not None and isinstance(data, numpy.ndarray):
        if data.base is None:
            return data
        data = data.base
    return None


def _unregister_buffer(address: int, nbytes: int) -> bool:
    entries = _buffers.get((address, nbytes))
    if not entries:
        return False
    entry = entries.pop()
    if not entries:
        del _buffers[address, nbytes]
    if isinstance(entry, weakref.finalize):
        entry.detach()
    done: bool = _extension()._host_memory_unregister_range(address, nbytes)
    return done


# ---- backends that are written in Python


def register_host_memory_functions(
    page_lock: Callable[[int, int], Any] | None,
    unlock: Callable[[int, int], Any] | None,
    *,
    record_event: Callable[[Any], Any] | None = None,
    query_event: Callable[[Any], bool] | None = None,
) -> None:
    """Gives a PrivateUse1 backend without C++ pinned host memory.

    ``Tensor.pin_memory()``, ``is_pinned()``, ``torch.empty(..., pin_memory=True)``, the DataLoader
    and :func:`register_host_memory` work for it afterwards. To be called when the backend is
    imported.

    Args:
        page_lock: called with an address and a number of bytes, multiples of the page size; tells
            the driver to page-lock that memory. Returns False, or raises MemoryError, if the driver
            refuses. None takes all functions away.
        unlock: called with the same two numbers to undo it. Must not return before the accelerator
            has stopped using the memory.
        record_event: called with a :class:`torch.Stream` that uses a block which is being freed;
            returns an object that stands for what is on the stream now. Needed if copies are still
            under way when they return; the backend then reports each to
            :func:`record_host_memory_use`.
        query_event: called with such an object; whether it is done.

    The functions are called in any thread, also from deleters, and must not pin memory themselves.

    A backend whose C++ hooks supply an allocator keeps it; the functions are then used for
    :func:`register_host_memory` only.

    Raises:
        TypeError: if ``unlock`` is missing, or only one of the two functions for events is given.
        RuntimeError: if the current accelerator is not a PrivateUse1 backend.
    """
    if (page_lock is None) != (unlock is None):
        raise TypeError("page_lock and unlock come together")
    if (record_event is None) != (query_event is None):
        raise TypeError("record_event and query_event come together")
    extension = _extension()
    name = torch._C._get_privateuse1_backend_name()
    accelerator, lack = extension._pin_target(False)[:2]
    if accelerator != name:
        raise RuntimeError(
            f"host memory functions are for PrivateUse1 backends, and the current accelerator is "
            f"{accelerator}; register the backend first (torch.utils.rename_privateuse1_backend)"
        )
    supplies = lack in ("hooks", "allocator", "null_allocator", "plain_allocator")
    supplies = supplies or extension._host_memory_is_supplied(name)
    extension._set_host_memory_functions(
        name, page_lock, unlock, None, record_event, query_event, 4096, supplies
    )


def record_host_memory_use(tensor: Any, stream: Any) -> bool:
    """Reports that work on ``stream`` reads or writes the pinned memory of a CPU tensor.

    For backends in Python, after each copy that is still under way when it returns: the memory is
    then not used again before that work has finished. Backends in C++ call ``record_event`` of their
    host allocator.

    Returns:
        False if the memory is not of the accelerator's host allocator.
    """
    done: bool = _extension()._host_memory_record_use(tensor, stream)
    return done
