"""Depth 2: a cache of pinned memory that wastes little, keeps to its cap and can be asked."""

from __future__ import annotations

import contextlib
import random
import warnings
from collections.abc import Callable, Iterator
from typing import Any, Final

import pytest
import torch
import torchpin
from torch.utils.data import DataLoader
from torchpin.conformance.backend import Backend
from torchpin.conformance.requirement import Hook, depth, not_tried, require, responsible
from torchpin.conformance.test_copies import Verify, arrives

pytestmark = depth(2)

_MIB: Final = 1 << 20
# Below 512 bytes the alignment of 64 bytes is more than 1/8.
_ALIGNMENT: Final = 64


def statistic(key: str) -> int:
    """One of ``torchpin.host_memory_stats()``."""
    stats = torchpin.host_memory_stats()
    require(key in stats, Hook.STATISTICS, f"there is a statistic {key!r}", sorted(stats))
    return int(stats[key])


def pinned(nbytes: int) -> torch.Tensor:
    """Pinned memory of so many bytes."""
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)


@pytest.fixture(autouse=True)
def _empty_cache(backend: Backend) -> Iterator[None]:
    """Nothing is cached and no cap is set, before and after."""
    torchpin.empty_host_cache()
    yield
    torchpin.max_host_memory(None)
    backend.synchronize()
    torchpin.empty_host_cache()


@contextlib.contextmanager
def capped(nbytes: int) -> Iterator[None]:
    """A cap on page-locked memory."""
    torchpin.max_host_memory(nbytes)
    try:
        yield
    finally:
        torchpin.max_host_memory(None)


@responsible(Hook.CACHE)
def test_blocks_are_at_most_an_eighth_too_large(backend: Backend) -> None:
    """No block is smaller than what was asked for, or more than 1/8 larger."""
    for nbytes in (1, 63, 65, 500, 513, 1000, 4097, 9000, 40_000, 65_537, 100_001, 1_048_577):
        for size in (nbytes, nbytes * 7 + 3):
            before = statistic("active_bytes.current")
            tensor = pinned(size)
            block = statistic("active_bytes.current") - before
            require(
                block >= size, Hook.CACHE, f"a block for {size} bytes holds them", f"{block} bytes"
            )
            limit = max(size + size // 8, -(-size // _ALIGNMENT) * _ALIGNMENT)
            require(
                block <= limit,
                Hook.CACHE,
                f"a block for {size} bytes has at most {limit}",
                f"{block} bytes",
            )
            del tensor


@responsible(Hook.CACHE)
@pytest.mark.parametrize("nbytes", [33 * _MIB, 129 * _MIB + _MIB // 2])
def test_large_blocks_are_not_rounded_to_a_power_of_two(backend: Backend, nbytes: int) -> None:
    """What is page-locked for a large tensor is at most 1/8 more than it has."""
    before = statistic("allocated_bytes.current")
    tensor = pinned(nbytes)
    locked = statistic("allocated_bytes.current") - before
    require(
        nbytes <= locked <= nbytes + nbytes // 8,
        Hook.CACHE,
        f"for {nbytes} bytes at most 1/8 more is page-locked",
        f"{locked} bytes",
    )
    del tensor


@responsible(Hook.CACHE)
def test_random_sizes_keep_little_more_locked_than_is_used(backend: Backend) -> None:
    """400 random sizes up to 4 MiB, 16 at a time: what stays locked is bounded by what is used."""
    sizes = random.Random(0)
    live: list[torch.Tensor] = []
    most = 0
    torchpin.reset_peak_host_memory_stats()
    before = statistic("allocated_bytes.peak")
    for _ in range(400):
        if len(live) == 16:
            del live[sizes.randrange(16)]
        live.append(pinned(sizes.randint(1, 4 * _MIB)))
        most = max(most, sum(tensor.numel() for tensor in live))
    locked = statistic("allocated_bytes.peak") - before
    require(
        locked <= most * 1.25,
        Hook.CACHE,
        f"at most a quarter more than the {most} bytes in use at one time was page-locked",
        f"{locked} bytes, {locked / most:.3f} times as much",
    )


@responsible(Hook.CACHE)
def test_freed_memory_is_used_again_without_locking(backend: Backend) -> None:
    """The second tensor of a size costs no call of the driver."""
    del_and_again = pinned(300_000)
    del del_and_again
    calls = statistic("num_host_alloc")
    for _ in range(50):
        pinned(300_000)
    require(
        statistic("num_host_alloc") == calls,
        Hook.CACHE,
        "50 tensors of a size that is cached lock nothing",
        f"{statistic('num_host_alloc') - calls} page-lock calls",
    )


@responsible(Hook.CACHE)
def test_empty_cache_gives_back_what_nothing_uses(backend: Backend) -> None:
    """torchpin.empty_host_cache() unlocks what no tensor uses, and nothing else."""
    start = statistic("allocated_bytes.current"), backend.locked_bytes()
    kept = torch.full((100_000,), 7, dtype=torch.uint8).pin_memory()
    with_kept = statistic("allocated_bytes.current"), backend.locked_bytes()
    for size in (10, 5000, 300_000, 40 * _MIB):
        pinned(size)
    backend.synchronize()
    torchpin.empty_host_cache()
    now = statistic("allocated_bytes.current"), backend.locked_bytes()
    require(
        now[0] <= with_kept[0] and (now[1] or 0) <= (with_kept[1] or 0),
        Hook.CACHE,
        f"after empty_host_cache() no more than {with_kept} bytes are locked, as before",
        now,
    )
    require(
        kept.is_pinned() and bool((kept == 7).all()),
        Hook.CACHE,
        "a tensor that is alive stays pinned and keeps its values",
        "it does not",
    )
    del kept
    torchpin.empty_host_cache()
    end = statistic("allocated_bytes.current"), backend.locked_bytes()
    require(
        end == start, Hook.CACHE, f"in the end {start} bytes are locked, as in the beginning", end
    )


@responsible(Hook.CACHE)
def test_empty_cache_leaves_memory_that_is_being_copied(backend: Backend) -> None:
    """Memory of a copy in flight is neither unlocked nor given out, also if the cache is emptied."""
    target = torch.empty(100_000, device=backend.device())

    def scenario() -> Verify:
        source = torch.full((100_000,), 1.0).pin_memory()
        target.copy_(source, non_blocking=True)
        del source
        torchpin.empty_host_cache()
        later = [torch.full((100_000,), 2.0).pin_memory() for _ in range(2)]

        def verify() -> None:
            arrives(target, 1.0, Hook.CACHE, "a copy arrives although the cache was emptied")
            later.clear()

        return verify

    backend.while_copies_are_in_flight(scenario)


@responsible(Hook.CACHE)
def test_functions_of_torch_accelerator_work(backend: Backend) -> None:
    """torch.accelerator.empty_host_cache(), where it exists, does what torchpin's does."""
    accelerator = getattr(torch, "accelerator", None)
    if not hasattr(accelerator, "empty_host_cache"):
        not_tried("this PyTorch has no torch.accelerator.empty_host_cache()")
    start = statistic("allocated_bytes.current")
    pinned(5 * _MIB)
    assert accelerator is not None
    accelerator.empty_host_cache()
    end = statistic("allocated_bytes.current")
    require(end == start, Hook.CACHE, f"{start} bytes are locked, as before", f"{end} bytes")


@responsible(Hook.REPORT)
def test_copies_of_other_libraries_views_are_recorded(backend: Backend) -> None:
    """A copy that is known by an address inside a block, and by no context, keeps the block."""
    owner = torch.full((50_000,), 1.0).pin_memory()
    if not torch.from_numpy(owner.numpy()).is_pinned():
        not_tried("this PyTorch asks the storage whether it is pinned, not the address")
    del owner
    target = torch.empty(20_000, device=backend.device())

    def scenario() -> Callable[[], None]:
        source = torch.full((50_000,), 1.0).pin_memory()
        part = torch.from_numpy(source.numpy()[30_000:])
        target.copy_(part, non_blocking=True)
        del source, part
        later = [torch.full((50_000,), 2.0).pin_memory() for _ in range(3)]

        def verify() -> None:
            arrives(
                target,
                1.0,
                Hook.REPORT,
                "memory that is copied through a numpy view is not reused before the copy",
            )
            later.clear()

        return verify

    backend.while_copies_are_in_flight(scenario)


@responsible(Hook.LIMITS)
def test_cap_is_kept_and_refusal_says_why(backend: Backend) -> None:
    """Above the cap an out-of-memory error says asked, held and cap; below it all goes on."""
    kept = pinned(2 * _MIB)
    held = statistic("allocated_bytes.current")
    cap = held + 8 * _MIB
    with capped(cap):
        small = pinned(4 * _MIB)
        try:
            pinned(16 * _MIB)
        except torch.cuda.OutOfMemoryError as error:
            said = str(error)
        except RuntimeError as error:
            require(
                False,
                Hook.LIMITS,
                "the refusal is an out-of-memory error",
                f"{type(error).__name__}: {error}",
            )
        else:
            require(False, Hook.LIMITS, f"16 MiB are refused under a cap of {cap} bytes", "given")
        for what, number in (("asked for", 16 * _MIB), ("cap", cap)):
            require(
                str(number) in said,
                Hook.LIMITS,
                f"the error says the bytes of what was {what}: {number}",
                said,
            )
        require(
            statistic("allocated_bytes.current") <= cap,
            Hook.LIMITS,
            f"at most {cap} bytes are locked",
            statistic("allocated_bytes.current"),
        )
        del small
        # Only if the cache is emptied first is there room for another size.
        pinned(7 * _MIB)
    pinned(16 * _MIB)
    require(kept.is_pinned(), Hook.LIMITS, "what was pinned before stays pinned", "it is not")


@responsible(Hook.LIMITS)
def test_batches_above_the_cap_are_delivered_unpinned(backend: Backend) -> None:
    """A loader whose batches are refused delivers them in ordinary memory and says so once."""
    samples: Any = torch.arange(4.0)[:, None].expand(4, _MIB // 2)
    loader: DataLoader[Any] = DataLoader(samples, batch_size=1, pin_memory=True)
    with (
        capped(statistic("allocated_bytes.current") + 100_000),
        warnings.catch_warnings(record=True) as caught,
    ):
        warnings.simplefilter("always")
        batches = [(batch.is_pinned(), float(batch[0, -1])) for batch in loader]
    require(
        batches == [(False, float(number)) for number in range(4)],
        Hook.LIMITS,
        "4 batches of 2 MiB arrive, unpinned, under a cap of 100000 bytes",
        batches,
    )
    require(len(caught) == 1, Hook.LIMITS, "there is one warning", [str(c.message) for c in caught])
    batches = [(batch.is_pinned(), float(batch[0, -1])) for batch in loader]
    require(
        batches == [(True, float(number)) for number in range(4)],
        Hook.LIMITS,
        "without the cap they are pinned",
        batches,
    )


@responsible(Hook.ALLOCATOR)
def test_refusal_of_the_driver_empties_the_cache_and_is_survived(backend: Backend) -> None:
    """When the driver refuses, the cache is emptied and the driver asked once more."""
    limit = backend.ability("limit_locked")
    locked = backend.locked_bytes()
    if limit is None or locked is None:
        not_tried("only an adaptor (--adaptor) can make the driver refuse")
    limit(locked + 10 * _MIB)
    try:
        pinned(8 * _MIB)
        # 8 MiB are cached, and 5 more would pass the limit of the driver.
        tensor = pinned(5 * _MIB)
        require(tensor.is_pinned(), Hook.ALLOCATOR, "the cache makes room", "not pinned")
        try:
            pinned(9 * _MIB)
        except torch.cuda.OutOfMemoryError:
            pass
        else:
            require(False, Hook.ALLOCATOR, "9 MiB beside 5 are refused, at most 10 go", "given")
        target = torch.zeros(5 * _MIB, dtype=torch.uint8, device=backend.device())
        target.copy_(tensor.fill_(3), non_blocking=True)
        arrives(target, 3, Hook.ALLOCATOR, "copies work after a refusal")
    finally:
        limit(None)
    require(
        pinned(9 * _MIB).is_pinned(), Hook.ALLOCATOR, "later there is memory again", "there is not"
    )


_COUNTED: Final = ("active_bytes", "active_requests", "allocated_bytes", "allocations")


@responsible(Hook.STATISTICS)
def test_statistics_add_up(backend: Backend) -> None:
    """current is allocated less freed, peak the most of it; calls of the driver are counted."""

    def check(when: str) -> dict[str, int]:
        stats = {key: int(value) for key, value in torchpin.host_memory_stats().items()}
        for name in _COUNTED:
            current, peak, allocated, freed = (
                stats[f"{name}.{part}"] for part in ("current", "peak", "allocated", "freed")
            )
            require(
                current == allocated - freed and 0 <= current <= peak,
                Hook.STATISTICS,
                f"{when}: {name}.current is allocated less freed and not above peak",
                f"current {current}, allocated {allocated}, freed {freed}, peak {peak}",
            )
        require(
            stats["num_host_alloc"] - stats["num_host_free"] == stats["allocations.current"],
            Hook.STATISTICS,
            f"{when}: there are as many segments as were locked and not unlocked",
            stats,
        )
        require(
            stats["active_bytes.current"] <= stats["allocated_bytes.current"],
            Hook.STATISTICS,
            f"{when}: no more is in use than is locked",
            stats,
        )
        return stats

    start = check("in the beginning")
    tensors = [pinned(size) for size in (10, 1000, 100_000, 1000, 5 * _MIB)]
    during = check("with five tensors")
    require(
        during["active_requests.current"] - start["active_requests.current"] == 5,
        Hook.STATISTICS,
        "five requests are active",
        during["active_requests.current"] - start["active_requests.current"],
    )
    grown = during["active_bytes.current"] - start["active_bytes.current"]
    total = sum(tensor.numel() for tensor in tensors)
    require(
        total <= grown <= total * 9 // 8 + 5 * _ALIGNMENT,
        Hook.STATISTICS,
        f"about {total} more bytes are active",
        grown,
    )
    del tensors
    freed = check("without them")
    require(
        freed["active_requests.current"] == start["active_requests.current"],
        Hook.STATISTICS,
        "freed tensors are not active",
        freed["active_requests.current"],
    )
    torchpin.reset_peak_host_memory_stats()
    reset = check("after reset_peak_host_memory_stats()")
    require(
        all(reset[f"{name}.peak"] == reset[f"{name}.current"] for name in _COUNTED),
        Hook.STATISTICS,
        "peaks start anew from what is current",
        reset,
    )
    torchpin.empty_host_cache()
    end = check("in the end")
    require(
        end["allocated_bytes.current"] == start["allocated_bytes.current"],
        Hook.STATISTICS,
        "as much is locked as in the beginning",
        end["allocated_bytes.current"],
    )


@responsible(Hook.STATISTICS)
def test_statistics_agree_with_the_driver(backend: Backend) -> None:
    """What the statistics say is locked is what the driver has locked for it."""
    locked = backend.locked_bytes()
    if locked is None:
        not_tried("only an adaptor (--adaptor) can ask the driver")
    counted = statistic("allocated_bytes.current")
    tensors = [pinned(size) for size in (10, 5000, 3 * _MIB)]
    now = backend.locked_bytes() or 0
    difference = statistic("allocated_bytes.current") - counted
    require(
        now - locked == difference,
        Hook.STATISTICS,
        f"{now - locked} bytes more are locked, as the driver says",
        f"allocated_bytes.current grew by {difference}",
    )
    del tensors
