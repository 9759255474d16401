"""Depth 1: two hundred rounds of everything leave behind what twenty did."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Final

import pytest
import torch
from torch.utils.data import DataLoader
from torchpin.conformance.backend import Backend, descriptors, resident_bytes, threads
from torchpin.conformance.requirement import Hook, require, responsible
from torchpin.conformance.test_dataloader import Samples

_WARM_UP: Final = 20
_ROUNDS: Final = 200
_ROUND_BYTES: Final = 1 << 20
# An allocator may keep the blocks of a few rounds; a leak of 200 is far above it.
_KEPT_BYTES: Final = 24 << 20


def require_no_leak(
    backend: Backend,
    rounds: Callable[[int], None],
    hook: str,
    what: str,
    counts: tuple[int, int] = (_WARM_UP, _ROUNDS),
) -> None:
    """Runs ``rounds(count)`` to warm up, then in earnest, and compares what is held after each.

    Args:
        backend: the accelerator.
        rounds: does so many rounds.
        hook: responsible for descriptors and threads. Memory is the deleter's.
        what: a round, for the message.
        counts: rounds to warm up, and in earnest.
    """

    def held() -> dict[str, int]:
        gc.collect()
        backend.synchronize()
        found = {"bytes of resident memory": resident_bytes()}
        found["open descriptors"] = len(descriptors())
        found["threads"] = threads()
        locked = backend.locked_bytes()
        if locked is not None:
            found["bytes of locked memory"] = locked
        return found

    def allowed(name: str) -> int:
        return _KEPT_BYTES if name.startswith("bytes") else 0

    rounds(counts[0])
    after = held()
    done = 0
    # Once more before it is called a leak, which would grow again: a heap grows when it likes to.
    for _ in range(2):
        done += counts[0] if done == 0 else counts[1]
        before = after
        rounds(counts[1])
        after = held()
        if all(after[name] - value <= allowed(name) for name, value in before.items()):
            return
    for name, value in before.items():
        require(
            after[name] - value <= allowed(name),
            Hook.DELETER if allowed(name) else hook,
            f"{counts[1]} rounds of {what} leave no more {name} than {done} did ({value}"
            + (f", and {allowed(name)} for a cache)" if allowed(name) else ")"),
            after[name],
        )


@responsible(Hook.DELETER)
def test_pinning_copying_and_freeing_leaks_nothing(backend: Backend) -> None:
    """Pin, copy, free: locked bytes, descriptors and threads stay what they are."""
    target = torch.empty(_ROUND_BYTES, dtype=torch.uint8, device=backend.device())

    def rounds(count: int) -> None:
        for number in range(count):
            # Not one size: a cache has to serve others from what it keeps, or give it back.
            nbytes = _ROUND_BYTES - (number % 8) * 40_000
            source = torch.full((nbytes,), 1, dtype=torch.uint8).pin_memory()
            target[:nbytes].copy_(source, non_blocking=True)
            source.copy_(target[:nbytes], non_blocking=True)
            if number % 8 == 7:
                backend.synchronize()

    require_no_leak(backend, rounds, Hook.ALLOCATOR, "pinning, copying and freeing 1 MiB")


@responsible(Hook.LOADER)
@pytest.mark.parametrize("workers", [0, 2])
def test_batches_leak_nothing(backend: Backend, workers: int) -> None:
    """Batches of a loader without workers, and of one whose workers stay."""
    # Large enough that 200 lost batches cannot hide in what a cache may keep.
    loader = DataLoader(
        Samples(60_000),
        batch_size=1,
        pin_memory=True,
        num_workers=workers,
        multiprocessing_context="fork" if workers else None,
        persistent_workers=workers > 0,
    )

    def rounds(count: int) -> None:
        for _ in range(-(-count // len(loader))):
            for batch in loader:
                batch["image"].to(backend.device(), non_blocking=True)

    require_no_leak(backend, rounds, Hook.LOADER, f"a batch made by {workers} workers")


@responsible(Hook.LOADER)
def test_new_workers_and_pin_threads_leak_nothing(backend: Backend) -> None:
    """Epochs of a loader whose worker and pin thread are started anew each time."""
    loader = DataLoader(
        Samples(), batch_size=4, pin_memory=True, num_workers=1, multiprocessing_context="fork"
    )

    def rounds(count: int) -> None:
        for _ in range(count):
            for batch in loader:
                batch["image"].to(backend.device(), non_blocking=True)

    require_no_leak(backend, rounds, Hook.LOADER, "an epoch with new workers", counts=(1, 4))
