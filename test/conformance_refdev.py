"""What the conformance suite may ask of the driver of refdev: ``--adaptor conformance_refdev``.

The functions are described in ``torchpin/conformance/backend.py``; an adaptor for other hardware looks
like this one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch_refdev
from torch_refdev import hold_copies

__all__ = ["contexts", "hold_copies", "limit_locked", "locked_bytes", "slow_copies"]


@contextlib.contextmanager
def slow_copies() -> Iterator[None]:
    """Every copy begins a little late."""
    torch_refdev.set_copy_delay(0.002)
    try:
        yield
    finally:
        torch_refdev.set_copy_delay(0)


def locked_bytes() -> int:
    """Bytes of host memory that the driver has page-locked."""
    return int(torch_refdev.counters()["locked_bytes"])


def contexts() -> set[int]:
    """Devices that have a context in this process."""
    return set(torch_refdev.counters()["contexts"])


def limit_locked(nbytes: int | None) -> None:
    """Page-locking beyond ``nbytes`` is refused; None: no limit."""
    torch_refdev.set_locked_limit(nbytes)
