"""What the conformance suite may ask of the driver: ``--adaptor conformance_adaptor``.

For refdev, and for CUDA where the CPU stands in for the GPU.

The functions are described in ``torchpin/conformance/backend.py``; an adaptor for other hardware looks
like this one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import cudart_on_cpu

if cudart_on_cpu.is_preloaded():
    driver: Any = cudart_on_cpu
else:
    import torch_refdev as driver

hold_copies = driver.hold_copies

__all__ = ["contexts", "hold_copies", "limit_locked", "locked_bytes", "slow_copies"]


@contextlib.contextmanager
def slow_copies() -> Iterator[None]:
    """Every copy begins a little late."""
    driver.set_copy_delay(0.002)
    try:
        yield
    finally:
        driver.set_copy_delay(0)


def locked_bytes() -> int:
    """Bytes of host memory that the driver has page-locked."""
    return int(driver.counters()["locked_bytes"])


def contexts() -> set[int]:
    """Devices that have a context in this process."""
    return set(driver.counters()["contexts"])


def limit_locked(nbytes: int | None) -> None:
    """Page-locking beyond ``nbytes`` is refused; None: no limit."""
    driver.set_locked_limit(nbytes)
