"""Depth 1: what an asynchronous copy reads and writes is what it was when it was started.

The tests end a tensor's life, or write over it, while a copy of it cannot have finished. Memory that is
given out again too early then shows up in what has arrived.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
from torchpin.conformance.backend import Backend
from torchpin.conformance.requirement import Hook, require, responsible

_NUMBERS: Final = 50_000
_ROUNDS: Final = 300

Verify = Callable[[], None]


def arrives(tensor: torch.Tensor, value: float, hook: str, expected: str) -> None:
    """Requires that all of a device tensor has one value."""
    found = tensor.cpu()
    wrong = found[found != value]
    require(
        wrong.numel() == 0,
        hook,
        expected,
        f"{wrong.numel()} of {found.numel()} numbers are others, the first {wrong[:1].tolist()}, "
        f"expected {value}",
    )


def free_and_reuse(
    backend: Backend, part: Callable[[torch.Tensor], torch.Tensor], device: torch.device
) -> Verify:
    """Copies ``part`` of a pinned tensor, frees it, and writes over what is given out next."""
    whole = torch.full((_NUMBERS,), 1.0).pin_memory()
    source = part(whole)
    target = torch.empty(source.shape, device=device)
    target.copy_(source, non_blocking=True)
    del whole, source
    later = [torch.full((_NUMBERS,), 2.0).pin_memory() for _ in range(3)]

    def verify() -> None:
        arrives(
            target,
            1.0,
            Hook.REPORT,
            f"a copy to {device} from pinned memory, which is freed and pinned again before it is "
            "carried out, brings the old values",
        )
        later.clear()

    return verify


_PARTS: Final[dict[str, Callable[[torch.Tensor], torch.Tensor]]] = {
    "whole": lambda x: x,
    "slice": lambda x: x[_NUMBERS // 2 :],
    "last_element": lambda x: x[-1:],
    "rows": lambda x: x.view(50, -1)[7:9],
    "other_type": lambda x: x.view(torch.int32)[100:].view(torch.float32),
}


@responsible(Hook.REPORT)
@pytest.mark.parametrize("part", _PARTS)
def test_pinned_memory_is_not_reused_before_its_copy(backend: Backend, part: str) -> None:
    """Asynchronous copy from pinned memory, then free, then reuse: never corrupt."""
    backend.while_copies_are_in_flight(
        lambda: free_and_reuse(backend, _PARTS[part], backend.device())
    )


@responsible(Hook.REPORT)
@pytest.mark.parametrize("count", [1, 2])
def test_pinned_memory_is_not_reused_before_copies_of_other_streams(
    backend: Backend, count: int
) -> None:
    """The same for copies on streams, one or two, that are not current when the memory is freed."""
    streams = [backend.new_stream() for _ in range(count)]
    targets = [torch.empty(_NUMBERS, device=backend.device()) for _ in streams]
    backend.synchronize()

    def scenario() -> Verify:
        source = torch.full((_NUMBERS,), 1.0).pin_memory()
        for stream, target in zip(streams, targets, strict=True):
            # Behind the work that occupies the current stream.
            stream.wait_stream(backend.current_stream())
            with backend.on_stream(stream):
                target.copy_(source, non_blocking=True)
        del source
        later = [torch.full((_NUMBERS,), 2.0).pin_memory() for _ in range(2)]

        def verify() -> None:
            for target in targets:
                arrives(
                    target,
                    1.0,
                    Hook.REPORT,
                    f"memory that is copied on {count} other streams is not reused before that",
                )
            later.clear()

        return verify

    backend.while_copies_are_in_flight(scenario)


@responsible(Hook.STAGING)
@pytest.mark.parametrize("numbers", [10, 1000, _NUMBERS, 3_000_000])
def test_ordinary_memory_is_captured_before_the_call_returns(
    backend: Backend, numbers: int
) -> None:
    """Asynchronous copy from ordinary memory: what is written after the call does not arrive."""

    def scenario() -> Verify:
        source = torch.full((numbers,), 1.0)
        target = torch.empty(numbers, device=backend.device())
        target.copy_(source, non_blocking=True)
        source.fill_(2.0)
        return lambda: arrives(
            target,
            1.0,
            Hook.STAGING,
            f"a non-blocking copy of {numbers * 4} bytes of ordinary memory, which is written to "
            "after the call, brings the old values",
        )

    backend.while_copies_are_in_flight(scenario)


@responsible(Hook.STAGING)
def test_views_of_ordinary_memory_are_captured_too(backend: Backend) -> None:
    """The same for slices, for memory shared between processes and for other layouts."""
    kinds: dict[str, tuple[torch.Tensor, Callable[[torch.Tensor], torch.Tensor]]] = {
        "a slice": (torch.empty(_NUMBERS), lambda x: x[1000:]),
        "every other number": (torch.empty(_NUMBERS), lambda x: x[::2]),
        "shared memory": (torch.empty(_NUMBERS).share_memory_(), lambda x: x),
    }

    def scenario() -> Verify:
        targets = {}
        for what, (source, part) in kinds.items():
            source.fill_(1.0)
            targets[what] = part(source).to(backend.device(), non_blocking=True)
            source.fill_(2.0)

        def verify() -> None:
            for what, target in targets.items():
                arrives(target, 1.0, Hook.STAGING, f"{what} is read before the call returns")

        return verify

    backend.while_copies_are_in_flight(scenario)


@responsible(Hook.REPORT)
def test_target_of_a_copy_to_the_host_is_not_reused_before_it(backend: Backend) -> None:
    """Asynchronous copy into pinned memory that is freed: it does not write into its next owner."""
    source = torch.full((_NUMBERS,), 1.0).to(backend.device())
    backend.synchronize()

    def scenario() -> Verify:
        target = torch.zeros(_NUMBERS).pin_memory()
        target.copy_(source, non_blocking=True)
        del target
        later = [torch.full((_NUMBERS,), 2.0).pin_memory() for _ in range(3)]

        def verify() -> None:
            for tensor in later:
                require(
                    bool((tensor == 2.0).all()),
                    Hook.REPORT,
                    "a copy to the host writes into the pinned memory that it was started with, "
                    "also if that is freed meanwhile",
                    "it wrote into memory that was pinned later",
                )

        return verify

    backend.while_copies_are_in_flight(scenario)


@responsible(Hook.COPY)
def test_copies_to_the_host_arrive(backend: Backend) -> None:
    """Device to host: blocking at once, non-blocking after synchronisation, pinned or not."""
    source = torch.arange(float(_NUMBERS)).to(backend.device())
    expected = torch.arange(float(_NUMBERS))
    with backend.slow_copies():
        for what, target in (
            ("ordinary", torch.zeros(_NUMBERS)),
            ("pinned", torch.zeros(_NUMBERS).pin_memory()),
        ):
            for part in (slice(None), slice(1000, None), slice(None, None, 2)):
                target.zero_()
                target[part].copy_(source[part])
                require(
                    torch.equal(target[part], expected[part]),
                    Hook.COPY,
                    f"a blocking copy to {what} memory has arrived when the call returns",
                    "other values",
                )
                target.zero_()
                target[part].copy_(source[part], non_blocking=True)
                backend.synchronize()
                require(
                    torch.equal(target[part], expected[part]),
                    Hook.COPY,
                    f"a non-blocking copy to {what} memory has arrived after synchronisation",
                    "other values",
                )
        moved = source.to("cpu", non_blocking=True)
        backend.synchronize()
        require(torch.equal(moved, expected), Hook.COPY, "to('cpu') arrives", "other values")


@responsible(Hook.COPY)
def test_blocking_copy_from_pinned_memory_has_read_it(backend: Backend) -> None:
    """After a blocking copy the source may be written to."""
    with backend.slow_copies():
        source = torch.full((_NUMBERS,), 1.0).pin_memory()
        target = source.to(backend.device())
        source.fill_(2.0)
        arrives(target, 1.0, Hook.COPY, "a blocking copy has read its source when it returns")


@responsible(Hook.COPY)
def test_types_and_layouts_arrive(backend: Backend) -> None:
    """Whatever is pinned arrives as it is, there and back."""
    grid = torch.arange(24.0).reshape(2, 3, 4)
    for tensor in (
        grid,
        grid.transpose(0, 2),
        grid[:, ::2, 1:],
        torch.tensor(3),
        torch.tensor([True, False]),
        torch.arange(5, dtype=torch.uint8),
        grid.half(),
        torch.empty(0, 3),
    ):
        pinned = tensor.pin_memory()
        back = pinned.to(backend.device(), non_blocking=True).cpu()
        require(
            torch.equal(back, tensor),
            Hook.COPY,
            f"{tensor.dtype} {tuple(tensor.shape)} {tensor.stride()} comes back as it was",
            "other values",
        )


@responsible(Hook.REPORT)
def test_many_sizes_at_once_are_never_mixed_up(backend: Backend) -> None:
    """Hundreds of copies of random sizes, each source freed at once: all arrive."""
    sizes = random.Random(0)
    targets: list[tuple[int, Any]] = []
    with backend.slow_copies():
        for number in range(_ROUNDS):
            source = torch.full((sizes.randint(1, 1 << 15),), float(number)).pin_memory()
            if number % 3 == 0:
                source = source[source.numel() // 2 :]
            targets.append((number, source.to(backend.device(), non_blocking=True)))
            del source
            if len(targets) == 16:
                value, target = targets.pop(sizes.randrange(16))
                arrives(target, float(value), Hook.REPORT, "a copy brings its own numbers")
        for value, target in targets:
            arrives(target, float(value), Hook.REPORT, "a copy brings its own numbers")
