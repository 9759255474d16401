"""Pinning batches: torchpin against the installed PyTorch, ratios of one and the same run.

Each row times ``pin_memory(batch)`` as the DataLoader calls it, stock (after ``torchpin.disable()``)
and with torchpin in turn, and prints the better half of several rounds; where stock takes seconds, one
call of it and the median of several of ours. The column ``and drop`` is the ratio if dropping the
result counts as well: the training loop does that, in another thread, and of each tensor PyTorch's
destructor takes the same time, however it was pinned. Then a batch of 64x3x224x224 float32, pinned by a thread
of its own with one copy thread and with two. The last row is the longest pause of a main thread that
only reads a clock while a second thread takes batches of 400 MiB from a DataLoader with one worker: the
time that somebody else held the interpreter lock. PyTorch 2.5 or newer with the reference accelerator
or CUDA.
"""

from __future__ import annotations

import argparse
import collections
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.utils.data._utils.pin_memory
import torchpin
from torch.utils.data import DataLoader, Dataset


class Layer(NamedTuple):
    weights: list[torch.Tensor]
    name: str


class Row(NamedTuple):
    title: str
    batch: Any
    calls: int
    wanted: float
    """How many times faster than stock; 0.9 stands for "not slower"."""
    too_slow_for_stock: bool = False


def nested_record() -> dict[str, Any]:
    """Five levels of dicts, lists and named tuples around 100 tensors."""
    return {
        "views": [
            {
                "meta": {"id": i, "path": "x.png"},
                "layers": [Layer([torch.randn(16) for _ in range(5)], "layer") for _ in range(4)],
            }
            for i in range(5)
        ]
    }


def rows() -> list[Row]:
    return [
        Row("dict of 64 tensors of 16 floats", {i: torch.randn(16) for i in range(64)}, 200, 5),
        Row("list of 1000 tensors of 16 floats", [torch.randn(16) for _ in range(1000)], 20, 5),
        Row("8 tensors of 4 MB", [torch.randn(1_000_000) for _ in range(8)], 5, 0.95),
        Row("nested record, 5 levels, 100 leaves", nested_record(), 100, 4),
        Row("list of 1e6 ints", list(range(1_000_000)), 2, 10),
        Row("bytearray of 5 MB", bytearray(5_000_000), 1, 1e5, True),
    ]


class Seconds(NamedTuple):
    call: float
    call_and_drop: float


def seconds(call: Callable[[], object], calls: int) -> Seconds:
    """Of one call, and of one call with the end of what it returned."""
    alone = 0.0
    start = time.perf_counter()
    for _ in range(calls):
        begin = time.perf_counter()
        result = call()
        alone += time.perf_counter() - begin
        del result
    return Seconds(alone / calls, (time.perf_counter() - start) / calls)


def pin(batch: Any) -> Any:
    # Looked up at each call, as the DataLoader does.
    return torch.utils.data._utils.pin_memory.pin_memory(batch)


def compare(row: Row, rounds: int) -> tuple[Seconds, Seconds]:
    """Stock and torchpin."""
    if row.too_slow_for_stock:
        torchpin.disable()
        stock = seconds(lambda: pin(row.batch), 1)
        torchpin.enable()
        ours = sorted(seconds(lambda: pin(row.batch), 1) for _ in range(rounds))
        return stock, ours[rounds // 2]
    times: dict[bool, list[Seconds]] = {False: [], True: []}
    for number in range(rounds):
        # Which comes first is of some concern where the caches of the processor are.
        for enabled in (False, True) if number % 2 else (True, False):
            torchpin.enable() if enabled else torchpin.disable()
            pin(row.batch)
            times[enabled].append(seconds(lambda: pin(row.batch), row.calls))
    torchpin.enable()
    middle = {
        enabled: Seconds(*(sorted(column)[len(found) // 4] for column in zip(*found, strict=True)))
        for enabled, found in times.items()
    }
    return middle[False], middle[True]


def copy_threads(shared: bool, rounds: int) -> tuple[float, float]:
    """Seconds of one batch in a thread of its own, with one copy thread and with two; medians."""
    batch = torch.randn(64, 3, 224, 224)
    if shared:
        batch.share_memory_()
    times: dict[int, list[float]] = {1: [], 2: []}

    def measure(threads: int) -> None:
        torch.set_num_threads(1)
        torchpin.set_pin_threads(threads)
        pin(batch)
        times[threads] += [seconds(lambda: pin(batch), 1).call for _ in range(10)]

    for _ in range(rounds):
        for threads in times:
            thread = threading.Thread(target=measure, args=(threads,))
            thread.start()
            thread.join()
    torchpin.set_pin_threads(1)
    one, two = (sorted(found)[len(found) // 2] for found in times.values())
    return one, two


class Large(Dataset[torch.Tensor]):
    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.ones(100 * 1024 * 1024)


def longest_pause(pin_memory: bool) -> float:
    """Seconds between two looks at the clock, at most, once the first batches have come."""
    loader = DataLoader(Large(), batch_size=None, num_workers=1, pin_memory=pin_memory)
    warm = threading.Event()
    done = threading.Event()

    def consume() -> None:
        for index, _ in enumerate(loader):
            if index == 3:
                warm.set()
        done.set()

    consumer = threading.Thread(target=consume)
    consumer.start()
    warm.wait()
    longest = 0.0
    last = time.perf_counter()
    while not done.is_set():
        now = time.perf_counter()
        longest = max(longest, now - last)
        last = now
    consumer.join()
    return longest


def pauses(rounds: int) -> dict[str, float]:
    found = collections.defaultdict(list)
    for _ in range(rounds):
        found["off"].append(longest_pause(False))
        torchpin.disable()
        found["stock"].append(longest_pause(True))
        torchpin.enable()
        found["torchpin"].append(longest_pause(True))
    return {name: sorted(values)[len(values) // 2] for name, values in found.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--skip-slow", action="store_true", help="leave the bytearray out")
    arguments = parser.parse_args()
    torchpin.enable()
    if torch._C._get_accelerator().type == "cpu":
        import torch_refdev  # noqa: F401  (up to 2.4 nothing loads it)
    print(f"PyTorch {torch.__version__}, accelerator {torch._C._get_accelerator().type}")
    print(
        f"{'work':38}{'stock us':>12}{'torchpin us':>13}{'faster':>12}{'and drop':>10}{'wanted':>9}"
    )
    missed = 0
    for row in rows():
        if row.too_slow_for_stock and arguments.skip_slow:
            continue
        stock, ours = compare(row, arguments.rounds)
        ratio = stock.call / ours.call
        missed += ratio < row.wanted
        print(
            f"{row.title:38}{stock.call * 1e6:12.1f}{ours.call * 1e6:13.1f}{ratio:12.1f}"
            f"{stock.call_and_drop / ours.call_and_drop:10.1f}{row.wanted:9g}"
        )
        sys.stdout.flush()
    for shared in (False, True):
        one, two = copy_threads(shared, arguments.rounds)
        print(
            f"64x3x224x224 float32 in {'shared' if shared else 'pageable'} memory: one copy thread "
            f"{one * 1e3:.2f} ms, two {two * 1e3:.2f} ms"
        )
    found = pauses(3)
    ratio = found["torchpin"] / found["off"]
    missed += ratio > 1.5
    print(
        f"longest pause, 400 MiB batches: pin_memory=False {found['off'] * 1e3:.1f} ms, stock "
        f"{found['stock'] * 1e3:.1f} ms, torchpin {found['torchpin'] * 1e3:.1f} ms, "
        f"{ratio:.2f} times pin_memory=False, wanted 1.5"
    )
    print("all as wanted" if missed == 0 else f"{missed} not as wanted")
    return 0


if __name__ == "__main__":
    sys.exit(main())
