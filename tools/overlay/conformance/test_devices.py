"""Depth 1: several devices, and another one than the first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.data import DataLoader
from torchpin.conformance.backend import Backend, Options
from torchpin.conformance.fresh import run_fresh, step
from torchpin.conformance.requirement import Hook, not_tried, require, responsible
from torchpin.conformance.test_copies import arrives, free_and_reuse


@responsible(Hook.DEVICES)
def test_memory_is_pinned_for_all_devices(backend: Backend) -> None:
    """What was pinned while one device was current is pinned for every other, and arrives there."""
    backend.require_devices(2)
    for pinning in range(backend.device_count):
        with backend.on_device(pinning):
            pinned = torch.arange(5000.0).pin_memory()
        for other in range(backend.device_count):
            with backend.on_device(other):
                require(
                    pinned.is_pinned() and pinned[7:].is_pinned(),
                    Hook.IS_PINNED,
                    f"memory pinned on device {pinning} is pinned on device {other}",
                    "is_pinned() is False",
                )
                arrived = pinned.to(backend.device(), non_blocking=True)
            require(
                arrived.device.index == other and torch.equal(arrived.cpu(), torch.arange(5000.0)),
                Hook.DEVICES,
                f"a copy to the current device arrives on device {other}",
                f"other values on {arrived.device}",
            )


@responsible(Hook.REPORT)
def test_copy_to_a_device_that_is_not_current_keeps_the_memory(backend: Backend) -> None:
    """Copy to another device than the current one, free, reuse: never corrupt."""
    backend.require_devices(2)
    other = backend.device_count - 1
    backend.while_copies_are_in_flight(
        lambda: free_and_reuse(backend, lambda x: x, backend.device(other)), index=other
    )


@responsible(Hook.REPORT)
def test_copy_on_a_current_device_other_than_the_first_keeps_the_memory(backend: Backend) -> None:
    """Copy while another device than the first is current, free, reuse: never corrupt."""
    backend.require_devices(2)
    with backend.on_device(backend.device_count - 1):
        backend.while_copies_are_in_flight(
            lambda: free_and_reuse(backend, lambda x: x[1000:], backend.device())
        )


@responsible(Hook.REPORT)
def test_memory_that_two_devices_copy_is_kept_for_both(backend: Backend) -> None:
    """Memory is reused only after the copies to all devices."""
    backend.require_devices(2)
    other = backend.device_count - 1
    targets = [torch.empty(50_000, device=backend.device(index)) for index in (0, other)]
    backend.synchronize()

    def scenario() -> Callable[[], None]:
        source = torch.full((50_000,), 1.0).pin_memory()
        for target in targets:
            target.copy_(source, non_blocking=True)
        del source
        later = [torch.full((50_000,), 2.0).pin_memory() for _ in range(2)]

        def verify() -> None:
            for target in targets:
                arrives(target, 1.0, Hook.REPORT, "memory that two devices copy is kept for both")
            later.clear()

        return verify

    # Once with the first device behind, once with the second.
    for index in (0, other):
        backend.while_copies_are_in_flight(scenario, index=index)


@responsible(Hook.DEVICES)
def test_pinning_on_another_device_starts_no_other(backend: Backend, options: Options) -> None:
    """Pinning, copies and a DataLoader on another device than the first leave the first alone."""
    backend.require_devices(2)
    if backend.contexts() is None:
        not_tried("which devices were started is only known with an adaptor (--adaptor)")
    run_fresh(
        options.to_environment(),
        use_last_device_only,
        Hook.DEVICES,
        "a fresh process uses another device than the first",
    )


def use_last_device_only(backend: Backend) -> None:
    """Run in a fresh process."""
    last = backend.device_count - 1
    backend.set_device(last)

    def started(what: str, hook: str) -> None:
        require(
            (backend.contexts() or set()) <= {last},
            hook,
            f"{what} starts no other device than {last}, which is current",
            f"devices {backend.contexts()} were started",
        )

    step("pinning on the last device")
    pinned = torch.arange(1000.0).pin_memory()
    pinned.is_pinned()
    started("pinning", Hook.ALLOCATOR)
    step("copying on the last device")
    arrived = pinned.to(backend.device(), non_blocking=True)
    del pinned
    require(
        torch.equal(arrived.cpu(), torch.arange(1000.0)), Hook.COPY, "it arrives", "it does not"
    )
    started("copying and freeing", Hook.REPORT)
    samples: Any = torch.arange(8.0)
    for workers in (0, 2):
        step(f"iterating over a DataLoader with {workers} workers on the last device")
        loader: DataLoader[Any] = DataLoader(
            samples,
            batch_size=2,
            num_workers=workers,
            pin_memory=True,
            multiprocessing_context="fork" if workers else None,
        )
        for batch in loader:
            require(batch.is_pinned(), Hook.LOADER, "a batch is pinned", "it is not")
            batch.to(backend.device(), non_blocking=True)
        started(f"a DataLoader with {workers} workers", Hook.LOADER)
