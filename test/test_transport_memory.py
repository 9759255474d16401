"""What worker batches hold while they travel and afterwards: no more than in stock PyTorch, and nothing
that grows."""

from __future__ import annotations

import gc
import mmap
import multiprocessing
import os
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from common_pin import ACCELERATOR, BASE, DRIVER, run_script
from test_transport import HAS_REPORTS, MODES, Images, check_images, each_mode, loader_of
from torch.testing._internal.common_utils import run_tests
from torch.utils.data import default_collate

told_what_is_locked = pytest.mark.skipif(
    DRIVER is None, reason="no driver of a GPU tells what is locked"
)

# The training loop is slower than the workers, so that as many batches wait as may wait, in every run.
HELD = """
    import importlib, os, sys, time, torch
    driver = importlib.import_module(os.environ["DRIVER"])
    from torch.utils.data import DataLoader, Dataset
    class Large(Dataset):
        def __len__(self): return 160
        def __getitem__(self, index): return torch.full((3, 512, 512), float(index)), index
    def resident():
        total = 0
        for process in processes:
            for line in open(f"/proc/{process}/smaps_rollup"):
                total += int(line.split()[1]) << 10 if line.startswith("Pss:") else 0
        return total
    def look():
        global locked, most
        # The peaks are while batches are made and pinned: until all that are under way are pinned.
        deadline = time.monotonic() + 60
        while iterator._data_queue.qsize() < iterator._tasks_outstanding:
            assert time.monotonic() < deadline
            most = max(most, resident())
        most = max(most, resident())
        locked = max(locked, driver.counters()["locked_bytes"])
    locked = most = 0
    kept = []
    iterator = iter(DataLoader(Large(), batch_size=8, num_workers=2, pin_memory=True))
    processes = ["self", *(worker.pid for worker in iterator._workers)]
"""
LOOPS = {
    "dropped": """
    for _ in range(20):
        batch = next(iterator)
        look()
        del batch
    """,
    "held until the next": """
    for batch in iterator:
        look()
    """,
    "all kept": """
    for _ in range(8):
        kept.append(next(iterator))
        look()
    """,
}
REPORT = """
    made = getattr(iterator, "_transport", None)
    late = made.stats.copied_instead.get("kept_by_worker", 0) if made else 0
    print(locked, most, late)
    sys.stdout.flush()
    os._exit(0)
"""


@told_what_is_locked
@pytest.mark.parametrize("loop", LOOPS)
def test_no_more_is_locked_or_resident_than_in_stock(loop: str) -> None:
    script = HELD + LOOPS[loop] + REPORT

    def held(**environment: str) -> tuple[int, int]:
        for _ in range(10):
            report = run_script(script, ACCELERATOR, DRIVER=DRIVER.__name__, **environment).stdout
            locked, most, late = map(int, report.split())
            # A batch of a worker that lost its processor before it let go of it is copied.
            if late == 0:
                return locked, most
        raise AssertionError("a worker was late each time")

    # Up to 2.6 the base's loader pins for CUDA only; what it sends is the same.
    stock = held(TORCHPIN="0") if BASE >= (2, 7) else held(TORCHPIN_TRANSPORT="off")
    assert stock[0] > 0
    for mode in MODES:
        ours = held(TORCHPIN_TRANSPORT=mode)
        # A batch in place ends with a page of its own, where small tensors of several share one else.
        assert ours[0] <= stock[0] + 16 * mmap.PAGESIZE, f"{mode}: locked"
        # What processes have besides batches differs from run to run, by less than a third of a batch.
        assert ours[1] <= stock[1] + (8 << 20), f"{mode}: resident"


class Gated:
    """A collate function that waits between its work and its end while the gate is closed: at any batch,
    or at the one with sample `only`."""

    def __init__(self, only: int | None = None) -> None:
        self.only = only
        self.open = multiprocessing.Event()
        self.open.set()

    def __call__(self, samples: Any) -> Any:
        batch = default_collate(samples)
        if self.only is None or self.only in batch[1]:
            self.open.wait()
        return batch


def wait_for(what: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def try_until_no_worker_is_late(attempt: Callable[[], bool]) -> None:
    """A worker that lost its processor before it let go of a batch changes which slots are locked; then the
    attempt returns False."""
    for _ in range(10):
        if attempt():
            return
    raise AssertionError("a worker was late each time")


def one_slot_too_many() -> bool:
    """Whether that could be tried."""
    gated = Gated()
    iterator = iter(
        loader_of(Images(200), "in_place", batch_size=4, collate_fn=gated, num_workers=1)
    )
    made = iterator._transport
    kept = [next(iterator) for _ in range(6)]
    # Two more are under way. Once they are here, all that exist are in locked slots.
    wait_for(lambda: made.stats.batches == 8)
    locked = made.pinned.locked_bytes()
    gated.open.clear()
    kept.append(next(iterator))
    wait_for(lambda: made.slots.stats()["claims"] == 9)
    kept.clear()
    gated.open.set()
    check_images(next(iterator))
    batch = next(iterator)
    if "kept_by_worker" in made.stats.copied_instead:
        return False
    assert made.stats.copied_instead == {"enough_locked": 1}
    assert made.pinned.locked_bytes() == locked
    assert batch[0].is_pinned()
    before = made.stats.in_place
    for _ in range(20):
        check_images(next(iterator))
    check_images(batch)
    assert made.pinned.locked_bytes() == locked
    assert made.stats.in_place > before
    return True


@told_what_is_locked
@pytest.mark.skipif(not HAS_REPORTS, reason="in place mode needs PyTorch 2.8")
def test_a_batch_in_one_slot_too_many_is_moved_to_a_locked_one() -> None:
    try_until_no_worker_is_late(one_slot_too_many)


def a_locked_slot_with_a_worker() -> bool:
    gated = Gated(only=16)
    gated.open.clear()
    iterator = iter(
        loader_of(
            Images(200),
            "in_place",
            batch_size=4,
            collate_fn=gated,
            num_workers=2,
            prefetch_factor=1,
        )
    )
    made = iterator._transport
    kept = [next(iterator), next(iterator)]
    wait_for(lambda: made.stats.batches == 4)
    locked = made.pinned.locked_bytes()
    # The first worker fills a slot that is locked, and is not done with it.
    del kept[0]
    kept.append(next(iterator))
    wait_for(lambda: made.slots.stats()["claims"] == 5)
    # All other locked slots are in use: the second worker takes one that is not locked.
    kept.append(next(iterator))
    wait_for(lambda: made.stats.batches == 5)
    if "kept_by_worker" in made.stats.copied_instead:
        return False
    assert made.stats.in_place == 5
    assert made.pinned.locked_bytes() == locked
    gated.open.set()
    kept += [next(iterator), next(iterator)]
    assert made.stats.in_place >= 6
    for number, batch in enumerate(kept, start=1):
        check_images(batch)
        assert batch[1].tolist() == list(range(4 * number, 4 * number + 4))
        assert batch[0].is_pinned()
    return True


@told_what_is_locked
@pytest.mark.skipif(not HAS_REPORTS, reason="in place mode needs PyTorch 2.8")
def test_a_locked_slot_that_a_worker_fills_is_unlocked_before_one_more_is_locked() -> None:
    try_until_no_worker_is_late(a_locked_slot_with_a_worker)


@each_mode
def test_a_slow_loop_holds_no_slots_beside_its_pinned_batches(mode: str) -> None:
    iterator = iter(
        loader_of(Images(2000, 384), mode, batch_size=8, num_workers=2, prefetch_factor=2)
    )
    made = iterator._transport
    resident = []
    for _ in range(12):
        batch = next(iterator)
        time.sleep(0.1)
        check_images(batch)
        resident.append(made.slots.stats()["resident_bytes"])
    slot = batch[0].nbytes
    if mode == "copy":
        assert resident[-1] < 2 * slot
    else:
        assert resident[-1] < 7 * slot


def state() -> dict[str, int]:
    gc.collect()
    found = {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
        # Page-locking divides a mapping, so lines say nothing; each file has a number of its own.
        "mappings": len(
            {
                line.split()[4]
                for line in Path("/proc/self/maps").read_text().splitlines()
                if "torch-slots" in line
            }
        ),
        "resident": 0,
        "locked": 0,
    }
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            found["resident"] = int(line.split()[1]) << 10
    if DRIVER is not None:
        found["locked"] = DRIVER.counters()["locked_bytes"]
    return found


@each_mode
def test_nothing_grows_over_50_epochs(mode: str) -> None:
    persistent = loader_of(
        Images(32, 64), mode, batch_size=8, num_workers=2, persistent_workers=True
    )

    def epoch() -> None:
        for loader in (persistent, loader_of(Images(32, 64), mode, batch_size=8, num_workers=2)):
            for batch in loader:
                assert batch[0].is_pinned()

    for _ in range(5):
        epoch()
    before = state()
    for _ in range(50):
        epoch()
    after = state()
    batch = 8 * 3 * 64 * 64 * 4
    assert after["descriptors"] <= before["descriptors"] + 1
    assert after["threads"] <= before["threads"]
    assert after["mappings"] <= before["mappings"] + 1
    # A slot or two more may have been needed at some moment, but none for each epoch.
    assert after["locked"] <= before["locked"] + 3 * batch
    assert after["resident"] <= before["resident"] + 10 * batch


if __name__ == "__main__":
    run_tests()
