"""The ways that batches can take: each makes an endless iterator of batches for a case.

stock, torchpin's modes and ``unpinned`` are the same DataLoader; what differs is the environment of the
process. The other libraries are given the same dataset and collate function, each the way its own
documentation pins memory.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
from torch.utils.data import DataLoader
from torchpin.bench import cases, loads
from torchpin.bench.cases import Case

_PIN_THREADS: Final = 4


def _loader(case: Case, dataset: Any, accelerator: str, pin_memory: bool = True) -> Iterator[Any]:
    several: dict[str, Any] = {
        "prefetch_factor": case.prefetch,
        "multiprocessing_context": case.start_method or None,
    }
    loader = DataLoader(
        dataset,
        batch_size=case.batch_size,
        num_workers=case.workers,
        collate_fn=loads.collate_of(case),
        pin_memory=pin_memory,
        **(several if case.workers else {}),
    )
    return _epochs(loader) if case.epoch else iter(loader)


def _epochs(loader: DataLoader[Any]) -> Iterator[Any]:
    while True:
        yield from loader


def _unpinned(case: Case, dataset: Any, accelerator: str) -> Iterator[Any]:
    return _loader(case, dataset, accelerator, pin_memory=False)


def _limit(case: Case, dataset: Any, accelerator: str) -> Iterator[Any]:
    """Stacks into the same memory again and again, in this process: no loader can be faster."""
    torch.set_num_threads(1)
    samples = [loads.values_of(dataset[index]) for index in range(case.batch_size)]
    columns = [
        [torch.as_tensor(value) for value in column] for column in zip(*samples, strict=True)
    ]
    if case.collate == "clone":
        targets = [torch.empty_like(column[0]) for column in columns]
        while True:
            for target, column in zip(targets, columns, strict=True):
                target.copy_(column[0])
            yield targets
    targets = [torch.stack(column) for column in columns]
    while True:
        for target, column in zip(targets, columns, strict=True):
            torch.stack(column, out=target)
        yield targets


def _tensordict(case: Case, dataset: Any, accelerator: str) -> Iterator[Any]:
    from tensordict import TensorDict

    for batch in _loader(case, dataset, accelerator, pin_memory=False):
        tensors = {str(number): value for number, value in enumerate(loads.values_of(batch))}
        yield TensorDict(tensors, batch_size=[]).pin_memory(num_threads=_PIN_THREADS)
        # Held here, the batch would live on while the next one is waited for.
        del batch, tensors


class _Fetch:
    """What a worker of torchdata does: a list of indices becomes a batch."""

    def __init__(self, case: Case, dataset: Any) -> None:
        self.case = case
        self.dataset = dataset

    def __call__(self, indices: list[int]) -> Any:
        torch.set_num_threads(1)
        return loads.collate_of(self.case)([self.dataset[index] for index in indices])


def _index_lists(size: int) -> Iterator[list[int]]:
    first = 0
    while True:
        yield list(range(first, first + size))
        first += size


class _IndexLists:
    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[list[int]]:
        return _index_lists(self.size)


def _torchdata(case: Case, dataset: Any, accelerator: str) -> Iterator[Any]:
    from torchdata import nodes

    node = nodes.ParallelMapper(
        nodes.IterableWrapper(_IndexLists(case.batch_size)),
        _Fetch(case, dataset),
        num_workers=case.workers,
        method="process",
        multiprocessing_context=case.start_method or None,
        snapshot_frequency=1 << 30,
    )
    pinned = nodes.PinMemory(node, pin_memory_device=accelerator, snapshot_frequency=1 << 30)
    return iter(nodes.Loader(pinned))


class _CollateInOneThread:
    """A collate function for workers that nobody has told to use one thread, as PyTorch and
    :class:`_Fetch` do: on few cores the threads of several workers stand in each other's way."""

    def __init__(self, case: Case) -> None:
        self.case = case

    def __call__(self, samples: list[Any]) -> Any:
        torch.set_num_threads(1)
        return loads.collate_of(self.case)(samples)


def _spdl(case: Case, dataset: Any, accelerator: str) -> Iterator[Any]:
    from spdl.dataloader import get_pytorch_dataloader

    return iter(
        get_pytorch_dataloader(
            dataset,
            batch_size=case.batch_size,
            num_workers=case.workers,
            collate_fn=_CollateInOneThread(case),
            pin_memory=True,
            multiprocessing_context=case.start_method or None,
            prefetch_factor=case.prefetch,
            in_order=True,
        )
    )


_MAKERS: Final[dict[str, Callable[[Case, Any, str], Iterator[Any]]]] = {
    cases.STOCK: _loader,
    **dict.fromkeys(cases.MODES, _loader),
    cases.UNPINNED: _unpinned,
    cases.LIMIT: _limit,
    "tensordict": _tensordict,
    "torchdata": _torchdata,
    "spdl": _spdl,
}


def batches(way: str, case: Case, folder: str, accelerator: str) -> Iterator[Any]:
    """An endless iterator of batches.

    Args:
        way: one of ``cases.WAYS``.
        case: what to make.
        folder: where the images of the case are.
        accelerator: type of the current accelerator, or an empty string.

    Raises:
        ImportError: if the library of that way is not installed.
    """
    return _MAKERS[way](case, loads.dataset_of(case, folder), accelerator)
