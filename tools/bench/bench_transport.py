"""Batches of workers: stock PyTorch, copy mode and in-place mode, ratios of one and the same run.

Each row is a DataLoader whose workers do nothing but collate samples that they have in memory. Ways are
measured in turn, several rounds; printed are batches per second (median), processor time of the main
process for each batch, and the ratio to stock. The last column is the ratio to what one worker could do
at best: one ``torch.stack(..., out=resident memory)`` for each tensor, measured in the same run.
PyTorch 2.5 or newer with the reference accelerator or CUDA.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torchpin
from torch.utils.data import DataLoader, Dataset

if torch.accelerator.current_accelerator() is None:
    import torch_refdev  # noqa: F401

WAYS = ("stock", "copy", "in_place")


class Repeated(Dataset[Any]):
    """The same sample again and again."""

    def __init__(self, sample: Any) -> None:
        self.sample = sample

    def __len__(self) -> int:
        return 1 << 30

    def __getitem__(self, index: int) -> Any:
        return self.sample


def first(batch: list[Any]) -> Any:
    """A collate function that does next to nothing: clones of what one sample has."""
    return {key: value.clone() for key, value in batch[0].items()}


class Row(NamedTuple):
    title: str
    sample: Any
    batch_size: int
    workers: int
    batches: int
    wanted: tuple[float, float]
    """Ratio to stock in copy mode and in place."""
    collate: Callable[[list[Any]], Any] | None = None


def rows() -> list[Row]:
    image = (torch.randn(3, 224, 224), 1)
    small = (torch.randn(3, 64, 64), 1)
    many = [torch.randn(128) for _ in range(40)]
    thousand = {f"name{i}": torch.randn(16) for i in range(1000)}
    latents = {
        "latent": torch.randn(4, 64, 64),
        "text": torch.randn(77, 2048),
        "size": torch.tensor([512, 512]),
    }
    return [
        Row("64x3x224x224 float32, 1 worker", image, 64, 1, 60, (4, 8)),
        Row("64x3x224x224 float32, 2 workers", image, 64, 2, 60, (2.5, 5)),
        Row("32x3x64x64, 1 worker", small, 32, 1, 600, (5, 6)),
        Row("40 tensors of 32x128, 1 worker", many, 32, 1, 100, (7, 9)),
        Row("dict of 1000 tensors of 16 floats", thousand, 1, 1, 60, (5, 5), first),
        Row("cached latents, batch 4, 2 workers", latents, 4, 2, 600, (4, 6)),
    ]


def measure(row: Row, way: str, batches: int) -> tuple[float, float]:
    """Batches per second, and seconds of processor time of this process for each batch."""
    if way == "stock":
        torchpin.disable()
    else:
        torchpin.enable()
    loader: Any = DataLoader(
        Repeated(row.sample),
        batch_size=row.batch_size,
        num_workers=row.workers,
        pin_memory=True,
        collate_fn=row.collate,
    )
    if way != "stock":
        loader.transport = way
    iterator = iter(loader)
    for _ in range(max(8, batches // 5)):
        batch = next(iterator)
    used, start = time.process_time(), time.perf_counter()
    for _ in range(batches):
        batch = next(iterator)
    seconds, used = time.perf_counter() - start, time.process_time() - used
    if way == "in_place":
        stats = iterator._transport.stats
        if stats.in_place < stats.batches // 2:
            print(f"not in place: {stats.copied_instead}, {iterator._transport.why_copy}")
    if way != "stock" and iterator._transport.stats.stock_batches:
        print(f"{way}: {iterator._transport.stats.stock_batches}")
    del iterator, batch
    return batches / seconds, used / batches


def limit(row: Row) -> float | None:
    """Batches per second of one process that only stacks into memory it has."""
    if row.collate is not None:
        return None
    sample = row.sample
    tensors = [
        x
        for x in (sample.values() if isinstance(sample, dict) else sample)
        if isinstance(x, torch.Tensor)
    ]
    places = [torch.stack([x] * row.batch_size) for x in tensors]
    torch.set_num_threads(1)
    rounds = 0
    start = time.perf_counter()
    while time.perf_counter() - start < 0.5:
        for x, place in zip(tensors, places, strict=True):
            torch.stack([x] * row.batch_size, out=place)
        rounds += 1
    return rounds / (time.perf_counter() - start)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", help="a part of the title")
    parser.add_argument("--ways", default=",".join(WAYS))
    options = parser.parse_args()
    ways = options.ways.split(",")
    print(f"PyTorch {torch.__version__}, {torch.accelerator.current_accelerator()}")
    failed = 0
    for row in rows():
        if options.only not in row.title:
            continue
        best = limit(row)
        results: dict[str, list[tuple[float, float]]] = {way: [] for way in ways}
        for _ in range(options.rounds):
            for way in ways:
                batches = row.batches if way != "stock" else max(12, row.batches // 4)
                results[way].append(measure(row, way, batches))
        print(row.title)
        stock = None
        for way in ways:
            rate = statistics.median(rate for rate, _ in results[way])
            used = statistics.median(used for _, used in results[way])
            if way == "stock":
                stock = (rate, used)
            text = f"  {way:9} {rate:9.1f}/s {used * 1e3:8.3f} ms"
            if stock is not None and way != "stock":
                wanted = row.wanted[way == "in_place"]
                ratio = rate / stock[0]
                failed += ratio < wanted
                text += f"  {ratio:6.2f} x stock (wanted {wanted}), CPU {used / stock[1]:.3f}"
            if best is not None:
                text += f"  {rate / best:.2f} of the limit {best:.0f}/s"
            print(text, flush=True)
    torchpin.enable()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
