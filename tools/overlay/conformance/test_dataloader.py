"""Depth 1: a DataLoader with ``pin_memory=True`` and no other argument about pinning."""

from __future__ import annotations

import multiprocessing
import threading
import time
import warnings
from typing import Any, Final

import pytest
import torch
from torch.utils.data import DataLoader, Dataset
from torchpin.conformance.backend import Backend
from torchpin.conformance.requirement import Hook, require, responsible
from torchpin.conformance.test_copies import Verify, arrives

_LENGTH: Final = 24
_BATCH: Final = 2
_EPOCHS: Final = 2
_SECONDS: Final = 30


class Samples(Dataset[Any]):
    """Sample ``index`` is an image of that value and the value itself."""

    def __init__(self, numbers: int = 1000) -> None:
        self.numbers = numbers

    def __len__(self) -> int:
        return _LENGTH

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"image": torch.full((self.numbers,), float(index)), "label": index}


_KINDS: Final[dict[str, dict[str, Any]]] = {
    "in_this_process": {"num_workers": 0},
    "forked_workers": {"num_workers": 2, "multiprocessing_context": "fork"},
    "persistent_forked_workers": {
        "num_workers": 2,
        "multiprocessing_context": "fork",
        "persistent_workers": True,
    },
    "persistent_spawned_workers": {
        "num_workers": 2,
        "multiprocessing_context": "spawn",
        "persistent_workers": True,
    },
}


@responsible(Hook.LOADER)
@pytest.mark.parametrize("kind", _KINDS)
def test_batches_are_pinned_and_arrive(backend: Backend, kind: str) -> None:
    """Batches are pinned whole, in order, epoch after epoch, and copies of them arrive."""
    before = set(threading.enumerate()), set(multiprocessing.active_children())
    loader = DataLoader(Samples(), batch_size=_BATCH, pin_memory=True, **_KINDS[kind])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for epoch in range(_EPOCHS):
            labels = []
            for batch in loader:
                for name, tensor in batch.items():
                    require(
                        tensor.is_pinned(),
                        Hook.LOADER,
                        f"{name!r} of a batch of epoch {epoch} is pinned",
                        "is_pinned() is False",
                    )
                arrived = batch["image"].to(backend.device(), non_blocking=True).cpu()
                same = torch.equal(arrived[:, 0], batch["label"].float())
                require(same, Hook.COPY, "a batch arrives", "other values")
                labels += batch["label"].tolist()
            require(
                labels == list(range(_LENGTH)), Hook.LOADER, "batches come in order", f"{labels}"
            )
    about_pinning = [str(warning.message) for warning in caught if "pin" in str(warning.message)]
    require(
        not about_pinning,
        Hook.LOADER,
        "nothing is said about pinned memory where all is well",
        about_pinning[:1],
    )
    del loader, batch
    _require_nothing_left(before)


def _require_nothing_left(before: tuple[set[Any], set[Any]]) -> None:
    deadline = time.monotonic() + _SECONDS
    while time.monotonic() < deadline:
        left = {
            *(set(threading.enumerate()) - before[0]),
            *(set(multiprocessing.active_children()) - before[1]),
        }
        if not left:
            return
        time.sleep(0.05)
    require(False, Hook.LOADER, "threads and workers of a loader end with it", f"{left} remain")


@responsible(Hook.REPORT)
@pytest.mark.parametrize("kind", ["in_this_process", "forked_workers"])
def test_batches_that_are_dropped_after_an_asynchronous_copy_arrive(
    backend: Backend, kind: str
) -> None:
    """The usual training loop, with copies that are late: each batch arrives as it was."""
    loader = DataLoader(Samples(20_000), batch_size=_BATCH, pin_memory=True, **_KINDS[kind])

    def scenario() -> Verify:
        targets = []
        for batch in loader:
            targets.append(batch["image"].to(backend.device(), non_blocking=True))
            del batch

        def verify() -> None:
            for number, target in enumerate(targets):
                for row in range(_BATCH):
                    arrives(
                        target[row],
                        float(number * _BATCH + row),
                        Hook.REPORT,
                        f"batch {number}, dropped while its copy is in flight, arrives as it was",
                    )

        return verify

    backend.while_copies_are_in_flight(scenario)
