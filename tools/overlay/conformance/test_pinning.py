"""Depth 1: what is pinned, and that asking about it costs nothing."""

from __future__ import annotations

import ctypes
import mmap
import resource
from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
from torchpin.conformance.backend import Backend, Options, descriptors, threads
from torchpin.conformance.fresh import run_fresh, step
from torchpin.conformance.requirement import Hook, not_tried, require, responsible

_QUESTIONS: Final = 20_000


@responsible(Hook.ALLOCATOR)
def test_pin_memory_without_a_device_pins_for_the_accelerator(backend: Backend) -> None:
    """Tensor.pin_memory() and its kin pin for the accelerator without being told its name."""
    source = torch.arange(1000.0)
    pinned = {
        "Tensor.pin_memory()": source.pin_memory(),
        "torch.empty(pin_memory=True)": torch.empty(1000, pin_memory=True),
        "torch.full(pin_memory=True)": torch.full((1000,), 7.0, pin_memory=True),
        "torch.tensor(pin_memory=True)": torch.tensor([1.0, 2.0], pin_memory=True),
        "empty_like(pin_memory=True)": torch.empty_like(source, pin_memory=True),
    }
    for what, tensor in pinned.items():
        require(tensor.is_cpu, Hook.ALLOCATOR, f"{what} gives a CPU tensor", tensor.device)
        require(tensor.is_pinned(), Hook.IS_PINNED, f"{what} is pinned", "is_pinned() is False")
    same = torch.equal(pinned["Tensor.pin_memory()"], source)
    require(same, Hook.ALLOCATOR, "pin_memory() keeps the values", "other values")
    storage = source.untyped_storage().pin_memory()
    require(
        storage.is_pinned(), Hook.IS_PINNED, "UntypedStorage.pin_memory() is pinned", "it is not"
    )


@responsible(Hook.ALLOCATOR)
def test_pinned_memory_belongs_to_one_tensor(backend: Backend) -> None:
    """Pinned tensors that live at the same time share no memory, also of other sizes."""
    sizes = [1, 3, 64, 65, 1000, 4096, 5000, 70_000, 1 << 20] * 8
    tensors = [
        torch.full((size,), number % 251, dtype=torch.uint8, pin_memory=True)
        for number, size in enumerate(sizes)
    ]
    for number, tensor in enumerate(tensors):
        require(
            bool((tensor == number % 251).all()),
            Hook.ALLOCATOR,
            f"a pinned tensor of {tensor.numel()} bytes keeps its values while others are made",
            "others wrote into it",
        )


_VIEWS: Final[dict[str, Callable[[torch.Tensor], torch.Tensor]]] = {
    "slice": lambda x: x[17:],
    "last_element": lambda x: x[-1:].flatten()[-1:],
    "row": lambda x: x[31],
    "every_other": lambda x: x[::2, 3:],
    "transposed": lambda x: x.t(),
    "narrowed": lambda x: x.narrow(1, 10, 20),
    "as_strided": lambda x: x.as_strided((5,), (3,), 1001),
    "reshaped": lambda x: x.reshape(-1)[777:],
    "other_type": lambda x: x.view(torch.uint8)[:, 5:],
    "detached": lambda x: x.detach()[1:],
    "chunk": lambda x: x.chunk(4)[3],
}


@responsible(Hook.IS_PINNED)
@pytest.mark.parametrize("view", _VIEWS)
def test_view_of_pinned_memory_is_pinned(backend: Backend, view: str) -> None:
    """Views, slices and offsets of pinned memory count as pinned and are not pinned again."""
    whole = torch.arange(64 * 65.0).reshape(64, 65).pin_memory()
    part = _VIEWS[view](whole)
    offset = part.data_ptr() - whole.data_ptr()
    require(
        part.is_pinned(),
        Hook.IS_PINNED,
        f"a view ({view}) that begins {offset} bytes into pinned memory counts as pinned",
        "is_pinned() is False",
    )
    require(
        part.pin_memory().data_ptr() == part.data_ptr(),
        Hook.IS_PINNED,
        f"pin_memory() of a view ({view}) that is pinned already does nothing",
        "it was copied",
    )


@responsible(Hook.IS_PINNED)
@pytest.mark.parametrize("first", [1, 100, 4096, 99_999])
def test_any_address_in_pinned_memory_is_pinned(backend: Backend, first: int) -> None:
    """Tensors made of an address inside pinned memory, by other libraries, count as pinned."""
    owner = torch.empty(100_000, dtype=torch.uint8, pin_memory=True)
    if not torch.from_numpy(owner.numpy()).is_pinned():
        not_tried("this PyTorch asks the storage whether it is pinned, not the address")
    require(
        torch.from_numpy(owner.numpy()[first:]).is_pinned(),
        Hook.IS_PINNED,
        f"a numpy view that begins {first} bytes into pinned memory counts as pinned",
        "is_pinned() is False",
    )


@responsible(Hook.IS_PINNED)
@pytest.mark.parametrize("nbytes", [1, 100, 4096, 4097, 100_000, 3 << 20, (40 << 20) + 1])
def test_first_and_last_byte_of_any_size_are_pinned(backend: Backend, nbytes: int) -> None:
    """Every size can be pinned, and counts as pinned from its first byte to its last."""
    tensor = torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    for name, place in (("first", 0), ("middle", nbytes // 2), ("last", nbytes - 1)):
        require(
            tensor[place : place + 1].is_pinned(),
            Hook.IS_PINNED,
            f"the {name} byte of {nbytes} pinned bytes counts as pinned",
            "is_pinned() is False",
        )


@responsible(Hook.ALLOCATOR)
def test_layout_and_type_survive(backend: Backend) -> None:
    """pin_memory() keeps values, type and shape, whatever the layout; no bytes are no trouble."""
    grid = torch.arange(24.0).reshape(2, 3, 4)
    for tensor in (
        grid.transpose(0, 2),
        grid[:, ::2, 1:],
        torch.tensor(3),
        torch.tensor([True, False]),
        grid.half(),
        grid.to(torch.complex64),
        torch.empty(0, 3),
    ):
        pinned = tensor.pin_memory()
        require(
            torch.equal(pinned, tensor) and pinned.dtype == tensor.dtype,
            Hook.ALLOCATOR,
            f"pin_memory() of {tensor.dtype} {tuple(tensor.shape)} {tensor.stride()} keeps the values",
            "other values",
        )


@responsible(Hook.IS_PINNED)
def test_ordinary_memory_is_not_pinned(backend: Backend) -> None:
    """Memory that the accelerator has not page-locked never counts as pinned."""
    kept = [torch.empty(size, pin_memory=True) for size in (10, 1000, 100_000)]
    shared = torch.ones(1000).share_memory_()
    mapped = torch.frombuffer(mmap.mmap(-1, 8192), dtype=torch.uint8)
    numpy = torch.from_numpy(torch.ones(1000).numpy().copy())
    ordinary = {
        "a new tensor": torch.ones(1000),
        "a slice": torch.ones(1000)[3:],
        "a large tensor": torch.ones(1 << 20),
        "a tensor in shared memory": shared,
        "a memory mapping": mapped,
        "a numpy array": numpy,
        "a clone of pinned memory": kept[1].clone(),
        "a sum": kept[1] + 1,
        "a tensor without elements": torch.empty(0),
        "a tensor of the accelerator": torch.empty(10, device=backend.device()),
    }
    for what, tensor in ordinary.items():
        require(
            not tensor.is_pinned(), Hook.IS_PINNED, f"{what} is not pinned", "is_pinned() is True"
        )


@responsible(Hook.IS_PINNED)
def test_memory_locked_by_the_system_only_is_not_pinned(backend: Backend) -> None:
    """mlock keeps memory from being swapped out; the accelerator knows nothing of it."""
    tensor = torch.ones(5000)
    libc = ctypes.CDLL(None, use_errno=True)
    address, nbytes = ctypes.c_void_p(tensor.data_ptr()), ctypes.c_size_t(20_000)
    if libc.mlock(address, nbytes) != 0:
        not_tried("the system does not let this process lock memory")
    try:
        require(
            not tensor.is_pinned(),
            Hook.IS_PINNED,
            "memory that was only given to mlock is not pinned",
            "is_pinned() is True",
        )
    finally:
        libc.munlock(address, nbytes)


@responsible(Hook.IS_PINNED)
def test_is_pinned_waits_for_nothing(backend: Backend) -> None:
    """is_pinned() neither waits for the device nor locks memory nor gives up the processor."""
    pinned = torch.empty(100_000, pin_memory=True)
    ordinary = torch.empty(100_000)
    target = torch.empty(100_000, device=backend.device())

    def ask() -> Callable[[], None]:
        target.copy_(pinned, non_blocking=True)
        locked = backend.locked_bytes()
        before = resource.getrusage(resource.RUSAGE_THREAD)
        for _ in range(_QUESTIONS // 2):
            pinned.is_pinned()
            ordinary.is_pinned()
        after = resource.getrusage(resource.RUSAGE_THREAD)
        locked_after = backend.locked_bytes()
        still_running = backend.is_running()

        def verify() -> None:
            waits = after.ru_nvcsw - before.ru_nvcsw
            require(
                waits < _QUESTIONS // 100,
                Hook.IS_PINNED,
                f"{_QUESTIONS} questions while a copy is in flight are answered without waiting",
                f"the thread waited {waits} times",
            )
            require(
                locked == locked_after,
                Hook.IS_PINNED,
                "questions lock no memory",
                f"{locked} bytes were locked before, {locked_after} after",
            )
            hold = backend.ability("hold_copies")
            require(
                hold is None or still_running is not False,
                Hook.IS_PINNED,
                "a copy in flight before the questions is in flight after them",
                "the device had finished",
            )

        return verify

    backend.while_copies_are_in_flight(ask)


@responsible(Hook.START)
def test_questions_start_nothing_and_pinning_works_before_initialisation(options: Options) -> None:
    """is_pinned() and making a DataLoader start nothing; pin_memory() is then the first use."""
    run_fresh(
        options.to_environment(),
        ask_then_pin,
        Hook.START,
        "a fresh process asks about pinned memory, then pins",
    )


class _State:
    """What starting a device would change, as far as it can be seen."""

    def __init__(self, backend: Backend) -> None:
        module = backend.module
        self.contexts = backend.contexts()
        self.initialised = module.is_initialized() if hasattr(module, "is_initialized") else None
        self.descriptors = descriptors()
        self.threads = threads()

    def changes(self, before: _State) -> str:
        changed = []
        if self.contexts != before.contexts:
            changed.append(f"contexts of devices {before.contexts} -> {self.contexts}")
        if self.initialised != before.initialised:
            changed.append(f"is_initialized() {before.initialised} -> {self.initialised}")
        if self.threads != before.threads:
            changed.append(f"threads {before.threads} -> {self.threads}")
        opened = set(self.descriptors) - set(before.descriptors)
        if opened:
            changed.append(f"opened {sorted(opened)}")
        return ", ".join(changed)


def ask_then_pin(backend: Backend) -> None:
    """Run in a fresh process."""
    # Threads that PyTorch starts to compute on the CPU are no matter here.
    torch.set_num_threads(1)
    from torch.utils.data import DataLoader

    # Counting devices may load the driver. What is asked below must do no more.
    backend.module.is_available()
    assert backend.device_count > 0
    state = _State(backend)
    step("asking whether ordinary memory is pinned")
    tensors = [torch.ones(size) for size in (1, 1000, 100_000)]
    for _ in range(100):
        answers = {tensor.is_pinned() for tensor in tensors}
        answers |= {tensor[-1:].is_pinned() for tensor in tensors}
    require(answers == {False}, Hook.IS_PINNED, "ordinary memory is not pinned", answers)
    changes = _State(backend).changes(state)
    require(not changes, Hook.IS_PINNED, "600 calls of is_pinned() start nothing", changes)
    step("making a DataLoader")
    samples: Any = range(4)
    loader: DataLoader[Any] = DataLoader(samples, pin_memory=True, batch_size=2)
    changes = _State(backend).changes(state)
    require(not changes, Hook.START, "making a DataLoader starts nothing", changes)
    step("pinning, the first use of the accelerator")
    pinned = torch.arange(100.0).pin_memory()
    require(pinned.is_pinned(), Hook.START, "pin_memory() starts what it needs", "not pinned")
    require(
        torch.equal(pinned.to(backend.device()).cpu(), torch.arange(100.0)),
        Hook.COPY,
        "memory pinned before the first copy arrives",
        "other values arrived",
    )
    contexts = backend.contexts()
    require(
        contexts is None or contexts <= {0},
        Hook.START,
        "pinning on device 0 starts no other device",
        f"devices {contexts} were started",
    )
    batches = [batch.is_pinned() for batch in loader]
    require(batches == [True, True], Hook.LOADER, "batches are pinned", batches)
