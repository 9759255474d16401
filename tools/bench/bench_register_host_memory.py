"""Page-locking in place through torchpin against the bare call of the driver, on refdev.

Prints microseconds for one registration and its undoing, medians of alternating rounds, and their
ratio, for tensors as ``torch.zeros`` makes them (they do not begin on a page boundary) and for
memory that does.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch
import torch_refdev
import torchpin

KIB = 1024
ROUNDS = 60


def microseconds(work: Callable[[], None]) -> float:
    """Wall time of one call."""
    start = time.perf_counter()
    work()
    return (time.perf_counter() - start) * 1e6


def main() -> None:
    """Measures and prints the table."""
    print(f"PyTorch {torch.__version__}")
    print(f"{'bytes':>12}{'aligned':>9}{'bare':>12}{'torchpin':>12}{'ratio':>8}")
    for nbytes in (64 * KIB, 1024 * KIB, 16 * 1024 * KIB, 128 * 1024 * KIB):
        for aligned in (False, True):
            whole = torch.ones(nbytes + 4096, dtype=torch.uint8)
            offset = -whole.data_ptr() % 4096 if aligned else 0
            tensor = whole[offset : offset + nbytes]
            address = tensor.data_ptr()

            def bare(address: int = address, nbytes: int = nbytes) -> None:
                torch_refdev.host_register(address, nbytes)
                torch_refdev.host_unregister(address)

            def ours(tensor: torch.Tensor = tensor) -> None:
                torchpin.register_host_memory(tensor).unregister()

            times: dict[Callable[[], None], list[float]] = {bare: [], ours: []}
            for _ in range(ROUNDS):
                for way, results in times.items():
                    results.append(microseconds(way))
            base, mine = (statistics.median(results) for results in times.values())
            print(f"{nbytes:>12}{aligned!s:>9}{base:>12.1f}{mine:>12.1f}{mine / base:>8.2f}")


if __name__ == "__main__":
    main()
