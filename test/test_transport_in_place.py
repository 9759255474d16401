"""In place mode: the accelerator reads and writes the slots themselves, and no slot is used again too
early.

On the reference accelerator, or CUDA without a GPU: copies can be held back there, and bugs show as
wrong numbers.
"""

from __future__ import annotations

import collections
import contextlib
import gc
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torchpin
from common_pin import ACCELERATOR, DRIVER, accelerator_module, run_script
from test_transport import HAS_REPORTS, Images, check_images, loader_of
from torch.utils.data import Dataset
from torchpin import _C

pytestmark = [
    pytest.mark.skipif(
        not HAS_REPORTS, reason="copies are reported to the host allocator from 2.8 on"
    ),
    pytest.mark.skipif(DRIVER is None, reason="nobody can hold back the copies of a GPU"),
]
on_refdev = pytest.mark.skipif(ACCELERATOR != "refdev", reason="about a backend that can be broken")


class Numbers(Dataset):
    """Vectors that are full of their index."""

    def __init__(self, length: int, width: int = 4096) -> None:
        self.length = length
        self.width = width

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((self.width,), index, dtype=torch.int64)


@contextlib.contextmanager
def copy_delay(seconds: float) -> Iterator[None]:
    DRIVER.set_copy_delay(seconds)
    try:
        yield
    finally:
        DRIVER.set_copy_delay(0.0)


IN_FLIGHT = 6
"""Copies that a training loop lets run; with the batches under way no more than there are slots."""
KEPT = 64
"""Batches on the device that a training loop has before it looks at them."""


def train(batches: int, streams: int) -> int:
    """Copies each batch without waiting, drops it at once and goes on; how many arrived wrong.

    Stops when some did.
    """
    samples = Numbers(4 * batches, 512)
    loader = loader_of(samples, "in_place", batch_size=4, num_workers=1, prefetch_factor=4)
    accelerator = accelerator_module()
    side = [accelerator.Stream() for _ in range(streams)]
    copies: collections.deque[Any] = collections.deque()
    kept: list[torch.Tensor] = []
    wrong = done = 0
    iterator = iter(loader)
    for number, batch in enumerate(iterator):
        with accelerator.stream(side[number % streams]):
            kept.append(batch.to(ACCELERATOR, non_blocking=True))
            copies.append(accelerator.Event())
            copies[-1].record()
        del batch
        if len(copies) > IN_FLIGHT:
            copies.popleft().synchronize()
        if len(kept) == KEPT or number + 1 == batches:
            accelerator.synchronize()
            # Summed where the copies went, for each sample: those of batch n are 4n to 4n + 3.
            if ACCELERATOR == "cuda":
                kept = [on_device.cpu() for on_device in kept]  # without kernels
            sums = torch.stack([copy.sum(1) for copy in kept]).cpu().flatten()
            kept.clear()
            want = torch.arange(4 * done, 4 * done + len(sums)) * samples.width
            wrong += int((sums != want).sum())
            done = number + 1
            if wrong:
                break
    if not wrong:
        assert done == batches
        assert iterator._transport.stats.in_place > 0.9 * batches
    return wrong


def train_in_threads(batches: int, streams: int, threads: int) -> int:
    """:func:`train` in several threads, which share out ``batches``; how many arrived wrong in all."""
    wrong: list[int] = []

    def run() -> None:
        wrong.append(train(-(-batches // threads), streams))

    with copy_delay(0.0003):
        running = [threading.Thread(target=run) for _ in range(threads)]
        for thread in running:
            thread.start()
        for thread in running:
            thread.join()
    assert len(wrong) == threads
    return sum(wrong)


each_shape = pytest.mark.parametrize(
    ("streams", "threads"), [(1, 1), (3, 1), (2, 3)], ids=["1 stream", "3 streams", "3 threads"]
)


@each_shape
def test_training_loops_with_delayed_copies_read_whole_batches(streams: int, threads: int) -> None:
    assert train_in_threads(10_000, streams, threads) == 0


@each_shape
def test_without_the_guard_the_same_loops_read_what_was_written_later(
    streams: int, threads: int
) -> None:
    _C._set_slot_events_honoured(False)
    try:
        assert train_in_threads(10_000, streams, threads) > 0
    finally:
        _C._set_slot_events_honoured(True)


def test_a_slot_waits_for_its_copies_and_comes_back() -> None:
    iterator = iter(loader_of(Images(200), "in_place", batch_size=4, num_workers=1))
    batch = next(iterator)
    made = iterator._transport
    assert made.stats.in_place > 0
    with DRIVER.hold_copies():
        on_device = batch[0].to(ACCELERATOR, non_blocking=True)
        del batch
        assert made.pinned.waiting() == 1
        for _ in range(10):
            check_images(next(iterator))
        assert made.pinned.waiting() == 1
    accelerator_module().synchronize()
    for _ in range(5):
        check_images(next(iterator))
    assert made.pinned.waiting() == 0
    check_images([on_device.cpu(), torch.arange(4)])


def test_copies_from_the_device_keep_the_slot_too() -> None:
    iterator = iter(loader_of(Images(400), "in_place", batch_size=4, num_workers=1))
    source = torch.full((4, 3, 32, 32), 5.0).to(ACCELERATOR)
    accelerator_module().synchronize()
    target = next(iterator)[0]
    later = []
    with DRIVER.hold_copies():
        target.copy_(source, non_blocking=True)
        del target
        # The copy lands only now; it must not land in one of these.
        later = [next(iterator) for _ in range(8)]
    accelerator_module().synchronize()
    for batch in later:
        check_images(batch)


def test_pinned_memory_of_others_is_still_reported_to_its_own_allocator() -> None:
    iterator = iter(loader_of(Images(40), "in_place", batch_size=4, num_workers=1))
    next(iterator)
    ordinary = torch.full((1 << 16,), 3.0).pin_memory()
    with DRIVER.hold_copies():
        on_device = ordinary.to(ACCELERATOR, non_blocking=True)
        address = ordinary.data_ptr()
        del ordinary
        again = torch.empty(1 << 16).pin_memory()
        assert again.data_ptr() != address
    accelerator_module().synchronize()
    assert bool((on_device.cpu() == 3.0).all())


def test_nothing_is_locked_that_was_never_used_and_all_is_unlocked_at_the_end() -> None:
    gc.collect()
    before = DRIVER.counters()["locked_bytes"]
    iterator = iter(loader_of(Images(400), "in_place", batch_size=4, num_workers=2))
    for _, _batch in zip(range(20), iterator, strict=False):
        pass
    made = iterator._transport
    stats = made.slots.stats()
    assert 0 < made.pinned.locked_bytes() <= stats["most_in_use"] * (64 << 10)
    kept = next(iterator)
    check_images(kept)
    del iterator, made, _batch
    gc.collect()
    assert DRIVER.counters()["locked_bytes"] > before
    check_images(kept)
    del kept
    gc.collect()
    assert DRIVER.counters()["locked_bytes"] == before


def test_a_refused_page_lock_is_a_copy() -> None:
    list(loader_of(Images(40), "in_place", batch_size=4, num_workers=1))
    iterator = iter(loader_of(Images(400), "in_place", batch_size=4, num_workers=1))
    made = iterator._transport
    torchpin.empty_host_cache()
    DRIVER.set_locked_limit(DRIVER.counters()["locked_bytes"])
    try:
        batches = [next(iterator) for _ in range(6)]
    finally:
        DRIVER.set_locked_limit(None)
    for batch in batches:
        check_images(batch)
    assert made.stats.copied_instead["lock_refused"] > 0


@on_refdev
def test_a_backend_that_reports_no_copies_gets_copy_mode() -> None:
    done = run_script(
        """
        import torch, common_pin
        from torch.utils.data import DataLoader
        from common_pin import Samples
        iterator = iter(DataLoader(Samples(64), batch_size=4, num_workers=1, pin_memory=True))
        batches = list(iterator)
        print(iterator._transport.stats.in_place, iterator._transport.why_copy)
        """,
        broken="forget_events",
        TORCHPIN_TRANSPORT="auto",
    )
    assert done.stdout.startswith("0 the backend does not report its copies"), done.stdout


def test_what_forked_processes_inherited_comes_back_when_they_are_gone() -> None:
    iterator = iter(loader_of(Images(600), "in_place", batch_size=4, num_workers=1))
    made = iterator._transport
    # More rounds than there are slots, or columns for forked processes.
    for _ in range(30):
        batch = next(iterator)
        (inner,) = list(loader_of(Images(4), "copy", batch_size=4, num_workers=1))
        check_images(inner)
        check_images(batch)
    for _ in range(20):
        check_images(next(iterator))
    assert made.stats.stock_batches == {}
    assert made.slots.stats()["retired"] == 0


def test_epochs_of_a_persistent_loader_use_the_same_slots() -> None:
    loader = loader_of(Images(64), "in_place", batch_size=8, num_workers=2, persistent_workers=True)
    for _ in range(2):
        list(loader)
    iterator = loader._iterator
    locked = iterator._transport.pinned.locked_bytes()
    before = DRIVER.counters()["pin_calls"]
    for _ in range(20):
        for batch in loader:
            check_images(batch)
    assert iterator._transport.pinned.locked_bytes() <= 2 * locked
    assert DRIVER.counters()["pin_calls"] <= before + 4
