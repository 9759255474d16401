"""Depth 3: memory that somebody else allocated is page-locked where it is."""

from __future__ import annotations

import gc
import mmap
import os
from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
import torchpin
from torchpin.conformance.backend import Backend
from torchpin.conformance.requirement import Hook, depth, not_tried, require, responsible
from torchpin.conformance.test_copies import arrives
from torchpin.conformance.test_leaks import require_no_leak

pytestmark = depth(3)

_NUMBERS: Final = 100_000
_PAGE: Final = mmap.PAGESIZE
_MIB: Final = 1 << 20


def require_pinned(tensor: torch.Tensor, what: str) -> None:
    """Requires that memory registered in place counts as pinned."""
    require(tensor.is_pinned(), Hook.REGISTER, f"{what} is pinned", "is_pinned() is False")


def require_not_pinned(tensor: torch.Tensor, what: str) -> None:
    """Requires that memory that is not registered does not count as pinned."""
    require(not tensor.is_pinned(), Hook.UNREGISTER, f"{what} is not pinned", "is_pinned() is True")


@responsible(Hook.REGISTER)
def test_registered_memory_is_pinned_where_it_is(backend: Backend) -> None:
    """Data and sharing are kept, views count as pinned, pin_memory() does nothing, later it is over."""
    tensor = torch.arange(float(_NUMBERS))
    view = tensor[100:]
    address = tensor.data_ptr()
    with torchpin.register_host_memory(tensor):
        require_pinned(tensor, "registered memory")
        require_pinned(view, "a view of registered memory")
        require_pinned(tensor[-1:], "the last number of registered memory")
        require(
            tensor.pin_memory().data_ptr() == address == tensor.data_ptr(),
            Hook.REGISTER,
            "pin_memory() of registered memory does nothing",
            "it was copied",
        )
        view[0] = -1.0
        require(float(tensor[100]) == -1.0, Hook.REGISTER, "views share the memory still", "not")
        arrived = tensor.to(backend.device(), non_blocking=True).cpu()
        require(
            torch.equal(arrived, tensor), Hook.COPY, "registered memory arrives", "other values"
        )
    require_not_pinned(tensor, "memory that was unregistered")
    require(float(tensor[-1]) == _NUMBERS - 1, Hook.UNREGISTER, "its values are kept", "not")


@responsible(Hook.REGISTER)
def test_same_memory_is_registered_again_and_again(backend: Backend) -> None:
    """Register, unregister, again at the same address; nested registrations are counted."""
    tensor = torch.ones(_NUMBERS)
    locked = backend.locked_bytes()
    for _ in range(5):
        torchpin.register_host_memory(tensor)
        require_pinned(tensor, "memory registered at an address that was registered before")
        torchpin.register_host_memory(tensor)
        torchpin.unregister_host_memory(tensor)
        require_pinned(tensor, "memory that was registered twice and unregistered once")
        torchpin.unregister_host_memory(tensor)
        require_not_pinned(tensor, "memory that was unregistered as often as registered")
    require(
        locked == backend.locked_bytes(),
        Hook.UNREGISTER,
        f"{locked} bytes are locked, as in the beginning",
        f"{backend.locked_bytes()} bytes",
    )


@responsible(Hook.REGISTER)
def test_ranges_that_share_a_page_are_independent(backend: Backend) -> None:
    """Two tensors that meet in a page: unregistering one leaves the other pinned."""
    whole = torch.arange(8 * _PAGE, dtype=torch.int64).to(torch.uint8)
    middle = 3 * _PAGE + 1234
    left, right = whole[100:middle], whole[middle : 6 * _PAGE]
    with torchpin.register_host_memory(left):
        with torchpin.register_host_memory(right):
            require_pinned(left, "the first range")
            require_pinned(right, "the second range")
        require_pinned(left, "the first range, after the second was unregistered,")
        arrived = left.to(backend.device(), non_blocking=True).cpu()
        require(torch.equal(arrived, left), Hook.UNREGISTER, "it arrives", "other values")
    torchpin.register_host_memory(right)
    torchpin.register_host_memory(left)
    torchpin.unregister_host_memory(right)
    require_pinned(left, "the first range, registered later and in a page of both,")
    torchpin.unregister_host_memory(left)
    require_not_pinned(whole, "the whole, in the end,")


@responsible(Hook.REGISTER)
@pytest.mark.parametrize("numbers", [1, 1000, 16 * _MIB])
def test_any_size_is_locked_from_the_first_byte_to_the_last(backend: Backend, numbers: int) -> None:
    """Sizes from a few bytes to many megabytes, none of which are whole pages."""
    tensor = torch.ones(numbers + 1)[1:]
    with torchpin.register_host_memory(tensor):
        require_pinned(tensor[:1], f"the first of {numbers} registered numbers")
        require_pinned(tensor[-1:], f"the last of {numbers} registered numbers")
        target = tensor.to(backend.device(), non_blocking=True)
        arrives(target, 1.0, Hook.REGISTER, f"{numbers} registered numbers arrive")


@responsible(Hook.REGISTER)
def test_memory_shared_between_processes_stays_shared(backend: Backend) -> None:
    """Shared memory can be page-locked; what another process writes is what is copied."""
    tensor = torch.zeros(_NUMBERS).share_memory_()
    with torchpin.register_host_memory(tensor):
        require_pinned(tensor, "registered shared memory")
        require(tensor.is_shared(), Hook.REGISTER, "it is shared still", "it is not")
        process = os.fork()
        if process == 0:
            # By numpy: PyTorch's threads for computing are not there in a child.
            tensor.numpy().fill(5.0)
            os._exit(0)
        os.waitpid(process, 0)
        target = tensor.to(backend.device(), non_blocking=True)
        arrives(target, 5.0, Hook.REGISTER, "what a child wrote into shared memory is copied")
    require_not_pinned(tensor, "shared memory that was unregistered")


@responsible(Hook.REGISTER)
def test_buffers_of_other_libraries_can_be_registered(backend: Backend) -> None:
    """numpy arrays, mappings and byte arrays, which are no tensors."""
    buffers: dict[str, Any] = {
        "a numpy array": torch.zeros(_NUMBERS).numpy(),
        "a mapping": mmap.mmap(-1, 10 * _PAGE),
        "a byte array": bytearray(100_000),
    }
    for what, buffer in buffers.items():
        locked = backend.locked_bytes()
        with torchpin.register_host_memory(buffer):
            tensor = torch.frombuffer(buffer, dtype=torch.uint8)
            tensor.fill_(3)
            target = tensor.to(backend.device(), non_blocking=True)
            arrives(target, 3, Hook.REGISTER, f"{what} that is registered arrives")
            now = backend.locked_bytes()
            require(
                now is None or locked is None or now > locked,
                Hook.REGISTER,
                f"more is locked while {what} is registered",
                f"{now} bytes, {locked} before",
            )
        require(
            locked == backend.locked_bytes(),
            Hook.UNREGISTER,
            f"{locked} bytes are locked after {what} was unregistered",
            f"{backend.locked_bytes()} bytes",
        )


@responsible(Hook.UNREGISTER)
def test_registration_ends_with_the_memory(backend: Backend) -> None:
    """Memory that goes away is unregistered, and is not pinned when it comes back."""
    locked = backend.locked_bytes()
    addresses = set()
    for _ in range(10):
        # Large enough to be mapped and unmapped, mostly at one address.
        tensor = torch.zeros(4 * _MIB)
        require_not_pinned(tensor, f"new memory (seen before: {tensor.data_ptr() in addresses})")
        addresses.add(tensor.data_ptr())
        torchpin.register_host_memory(tensor)
        require_pinned(tensor, "registered memory")
        del tensor
        gc.collect()
    require(
        locked == backend.locked_bytes(),
        Hook.UNREGISTER,
        f"{locked} bytes are locked after registered memory has gone away",
        f"{backend.locked_bytes()} bytes",
    )


@responsible(Hook.REGISTER)
def test_copy_from_registered_memory_reads_it_in_place(backend: Backend) -> None:
    """Registered memory is not staged: what is written before the copy runs is what arrives."""
    tensor = torch.full((_NUMBERS,), 1.0)
    target = torch.empty(_NUMBERS, device=backend.device())
    if backend.ability("hold_copies") is None:
        not_tried("only an adaptor (--adaptor) can keep a copy from being started")

    def scenario() -> Callable[[], None]:
        target.copy_(tensor, non_blocking=True)
        tensor.fill_(2.0)
        return lambda: arrives(
            target, 2.0, Hook.REGISTER, "a copy from registered memory reads the memory itself"
        )

    with torchpin.register_host_memory(tensor):
        backend.while_copies_are_in_flight(scenario)


@responsible(Hook.UNREGISTER)
def test_unregistering_waits_for_copies(backend: Backend) -> None:
    """After unregistering the memory may be written to: copies of it have been carried out."""
    tensor = torch.full((_NUMBERS,), 1.0)
    target = torch.empty(_NUMBERS, device=backend.device())
    for value in range(1, 20):
        tensor.fill_(float(value))
        with backend.slow_copies(), torchpin.register_host_memory(tensor):
            for _ in range(3):
                target.copy_(tensor, non_blocking=True)
        tensor.fill_(0.0)
        arrives(
            target,
            float(value),
            Hook.UNREGISTER,
            "a copy of memory that is unregistered while it is in flight brings the old values",
        )


@responsible(Hook.REGISTER)
def test_refused_registration_leaves_nothing_behind(backend: Backend) -> None:
    """When the driver refuses there is an error, nothing is locked, and everything works on."""
    limit = backend.ability("limit_locked")
    locked = backend.locked_bytes()
    if limit is None or locked is None:
        not_tried("only an adaptor (--adaptor) can make the driver refuse")
    tensor = torch.ones(4 * _MIB)
    limit(locked + _MIB)
    try:
        try:
            torchpin.register_host_memory(tensor)
        except RuntimeError:
            pass
        else:
            require(False, Hook.REGISTER, "16 MiB are refused where 1 MiB is left", "registered")
        require_not_pinned(tensor, "memory whose registration was refused")
        require(
            backend.locked_bytes() == locked,
            Hook.REGISTER,
            f"{locked} bytes are locked, as before",
            f"{backend.locked_bytes()} bytes",
        )
        target = torch.full((10,), 4.0).to(backend.device(), non_blocking=True)
        arrives(target, 4.0, Hook.REGISTER, "a copy after a refusal finds no pending error")
    finally:
        limit(None)
    with torchpin.register_host_memory(tensor):
        require_pinned(tensor, "the same memory, when there is room,")


@responsible(Hook.UNREGISTER)
def test_registering_leaks_nothing(backend: Backend) -> None:
    """Two hundred rounds of register, copy, unregister."""
    tensor = torch.ones(_MIB // 4)

    def rounds(count: int) -> None:
        for number in range(count):
            part = tensor[number % 7 :]
            with torchpin.register_host_memory(part):
                part.to(backend.device(), non_blocking=True)
            memory = torch.ones(_MIB // 4)
            torchpin.register_host_memory(memory)

    require_no_leak(backend, rounds, Hook.UNREGISTER, "registering 1 MiB")
