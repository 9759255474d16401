"""Depth 1: pinning in threads, in forked children, and at the end of a process."""

from __future__ import annotations

import os
import threading
import traceback
from collections.abc import Callable
from typing import Any, Final

import torch
from torch.utils.data import DataLoader, Dataset
from torchpin.conformance.backend import Backend, Options
from torchpin.conformance.fresh import run_fresh, step
from torchpin.conformance.requirement import Hook, require, responsible

_THREADS: Final = 4
_SECONDS: Final = 60


def _in_threads(function: Callable[[int], None], count: int = _THREADS) -> None:
    """Runs ``function(number)`` in threads of their own and raises what they raised."""
    errors: list[BaseException] = []

    def body(number: int) -> None:
        try:
            function(number)
        except BaseException as error:
            errors.append(error)

    workers = [
        threading.Thread(target=body, args=(number,), daemon=True) for number in range(count)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(_SECONDS)
        require(
            not worker.is_alive(),
            Hook.THREADS,
            f"{count} threads that pin, copy and free are done",
            f"one is not after {_SECONDS} seconds",
        )
    if errors:
        raise errors[0]


def _pin_and_copy(backend: Backend, number: int) -> None:
    for size in (1, 1000, 50_000, 333) * 5:
        pinned = torch.full((size,), float(number)).pin_memory()
        require(pinned.is_pinned(), Hook.THREADS, "a thread's pinned memory is pinned", "it is not")
        arrived = pinned.to(backend.device(), non_blocking=True)
        del pinned
        require(
            bool((arrived.cpu() == number).all()),
            Hook.THREADS,
            f"{size} numbers {number}, pinned and copied in a thread of its own, arrive",
            "other values arrived",
        )


@responsible(Hook.THREADS)
def test_threads_pin_copy_and_free_at_the_same_time(backend: Backend) -> None:
    """Several threads pin, copy and free at the same time."""
    _in_threads(lambda number: _pin_and_copy(backend, number))


@responsible(Hook.THREADS)
def test_memory_pinned_in_one_thread_is_used_and_freed_in_another(backend: Backend) -> None:
    """Memory that one thread pinned is pinned for all, and may be freed by any."""
    made: list[torch.Tensor] = []
    _in_threads(lambda _: made.append(torch.arange(5000.0).pin_memory()), count=1)
    tensor = made.pop()
    require(tensor.is_pinned(), Hook.IS_PINNED, "it is pinned for another thread", "it is not")
    arrived = tensor.to(backend.device(), non_blocking=True).cpu()
    require(torch.equal(arrived, torch.arange(5000.0)), Hook.COPY, "it arrives", "other values")
    made.append(tensor)
    del tensor
    _in_threads(lambda _: made.clear(), count=1)


@responsible(Hook.START)
def test_first_use_may_be_in_several_threads_and_exit_with_copies_in_flight(
    options: Options,
) -> None:
    """Threads may be the first to pin, and a process may end with pinned tensors and copies."""
    run_fresh(
        options.to_environment(),
        start_in_threads,
        Hook.EXIT,
        "a process ends with pinned tensors alive and copies in flight",
    )


_alive: list[Any] = []


def start_in_threads(backend: Backend) -> None:
    """Run in a fresh process."""
    step("pinning in several threads at once, the first use of the accelerator")
    # PyTorch 2.3 stops for ever if threads are the first to hand it a number.
    torch.full((1,), 0.0)
    _in_threads(lambda number: _pin_and_copy(backend, number))
    step("ending with pinned tensors alive and copies in flight")
    pinned = torch.ones(1 << 20, pin_memory=True)
    hold = backend.ability("hold_copies")
    if hold is not None:
        # Never left: the process ends within it.
        _alive.append(hold())
        _alive[-1].__enter__()
    _alive.append(pinned)
    _alive.extend(pinned.to(backend.device(), non_blocking=True) for _ in range(20))


@responsible(Hook.FORK)
def test_forked_children_pin_before_initialisation_and_do_no_harm_after_it(
    options: Options,
) -> None:
    """A child of a process that has not started the device can pin; any child may free and end."""
    run_fresh(
        options.to_environment(),
        fork_before_and_after,
        Hook.FORK,
        "children are forked and end well",
    )


class _PinsInWorker(Dataset[Any]):
    """Samples that are pinned where they are made."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> tuple[bool, float]:
        sample = torch.full((100,), float(index)).pin_memory()
        return sample.is_pinned(), float(sample.sum())


def _in_child(function: Callable[[], str]) -> str:
    """What ``function`` returns, or how it ended, in a forked child that then exits at once."""
    reader, writer = os.pipe()
    process = os.fork()
    if process == 0:
        text = "nothing"
        try:
            text = function()
        except BaseException:
            text = traceback.format_exc()
        finally:
            os.write(writer, text.encode()[:60_000])
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        text = pipe.read().decode()
    status = os.waitpid(process, 0)[1]
    return text if status == 0 else f"it ended with wait status {status}"


def fork_before_and_after(backend: Backend) -> None:
    """Run in a fresh process."""
    # PyTorch's threads for computing do not outlive a fork.
    torch.set_num_threads(1)

    def pin() -> str:
        pinned = torch.arange(1000.0).pin_memory()
        arrived = pinned.to(backend.device(), non_blocking=True).cpu()
        return f"pinned {pinned.is_pinned()}, arrived {torch.equal(arrived, torch.arange(1000.0))}"

    step("pinning in a child of a process that has not started the device")
    seen = _in_child(pin)
    expected = "pinned True, arrived True"
    require(seen == expected, Hook.FORK, f"the first child says: {expected}", seen)
    step("pinning in forked workers of a DataLoader")
    loader = DataLoader(
        _PinsInWorker(), batch_size=None, num_workers=1, multiprocessing_context="fork"
    )
    samples = [tuple(sample) for sample in loader]
    require(
        samples == [(True, 100.0 * index) for index in range(4)],
        Hook.FORK,
        "samples pinned in a worker are pinned there and have their values",
        samples,
    )

    step("pinning in the parent, after its children")
    kept = torch.full((50_000,), 3.0).pin_memory()
    device = torch.full((50_000,), 4.0).to(backend.device())
    locked = backend.locked_bytes()
    inherited = [kept]
    step("freeing inherited pinned memory in a child")

    def free() -> str:
        nonlocal kept
        inherited.clear()
        del kept
        return "done"

    seen = _in_child(free)
    require(seen == "done", Hook.FORK, "a child frees what it inherited", seen)
    step("pinning in a child of a process that has started the device")

    def pin_or_refuse() -> str:
        try:
            return pin()
        except RuntimeError:
            return "refused"

    seen = _in_child(pin_or_refuse)
    require(
        seen in ("refused", expected),
        Hook.FORK,
        "pinning works in that child, or raises RuntimeError",
        seen,
    )
    step("using the parent's memory after its children have ended")
    require(kept.is_pinned(), Hook.FORK, "the parent's memory is pinned still", "it is not")
    require(
        locked == backend.locked_bytes(),
        Hook.FORK,
        f"{locked} bytes of the parent stay locked",
        f"{backend.locked_bytes()} bytes are locked",
    )
    again = [torch.zeros(50_000).pin_memory() for _ in range(3)]
    require(
        bool((kept == 3).all()) and bool((device.cpu() == 4).all()),
        Hook.FORK,
        "the parent's memory, which a child has freed, keeps its values",
        "others wrote into it",
    )
    require(
        len({tensor.data_ptr() for tensor in (kept, *again)}) == 4,
        Hook.FORK,
        "memory that a child has freed is not given out again in the parent",
        "two tensors lie at one address",
    )
