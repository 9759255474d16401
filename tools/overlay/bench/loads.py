"""Datasets and collate functions, the same for every way. Workers import this under ``spawn`` too."""

from __future__ import annotations

import io
import os
import pathlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.utils.data import Dataset, default_collate
from torchpin.bench.cases import Case, Field

SAMPLES: Final = 1 << 40
"""Length of the datasets where a case has no epochs: a measurement ends by time or by a number of
batches, not before."""

_IMAGES: Final = 64


@dataclass
class Record:
    """A sample or a batch as an object of the user's own."""

    tensors: list[Any]


def _as_record(case: Case, values: list[Any]) -> Any:
    if case.records == "dataclass":
        return Record(values)
    if case.records == "dict":
        return {f"field_{number}": value for number, value in enumerate(values)}
    return values


def values_of(record: Any) -> list[Any]:
    """The tensors of a sample or a batch, whatever its kind."""
    if isinstance(record, Record):
        return record.tensors
    return list(record.values()) if hasattr(record, "values") else list(record)


def _value(field: Field, number: int) -> Any:
    if field.shape:
        return torch.full(field.shape, number % 2, dtype=getattr(torch, field.dtype))
    return number


class Resident(Dataset[Any]):
    """Samples that lie in memory: what remains is the work of the loader.

    They are made where they are first asked for, so that no start method has to send them.
    """

    def __init__(self, case: Case) -> None:
        self.case = case
        self.samples: list[Any] = []

    def __len__(self) -> int:
        return self.case.epoch * self.case.batch_size or SAMPLES

    def __getitem__(self, index: int) -> Any:
        if not self.samples:
            self.samples = [
                _as_record(self.case, [_value(field, number) for field in self.case.fields])
                for number in range(self.case.distinct)
            ]
        return self.samples[index % len(self.samples)]


class Jpegs(Dataset[Any]):
    """Decodes JPEG files with Pillow to floating point tensors of the case's first field."""

    def __init__(self, case: Case, folder: str) -> None:
        self.case = case
        self.files = sorted(str(path) for path in pathlib.Path(folder).glob("*.jpg"))

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> Any:
        from PIL import Image

        field = self.case.fields[0]
        with Image.open(self.files[index % len(self.files)]) as image:
            pixels = bytearray(image.convert("RGB").tobytes())
        data = torch.frombuffer(pixels, dtype=torch.uint8).view(*field.shape[1:], 3)
        picture = data.permute(2, 0, 1).to(getattr(torch, field.dtype)).div(255)
        return _as_record(self.case, [picture.contiguous(), index % 1000])


def make_images(case: Case, folder: str) -> None:
    """Writes the JPEG files that :class:`Jpegs` reads: smooth shapes with some noise."""
    from PIL import Image

    height, width = case.fields[0].shape[1:]
    for number in range(_IMAGES):
        shapes = Image.frombytes("RGB", (16, 12), os.urandom(16 * 12 * 3))
        grain = Image.effect_noise((width, height), 40).convert("RGB")
        image = Image.blend(shapes.resize((width, height), Image.Resampling.BICUBIC), grain, 0.15)
        stream = io.BytesIO()
        image.save(stream, "JPEG", quality=90)
        pathlib.Path(folder, f"{number:03}.jpg").write_bytes(stream.getvalue())


def dataset_of(case: Case, folder: str) -> Resident | Jpegs:
    """The dataset of a case; ``folder`` holds its images."""
    return Jpegs(case, folder) if case.load == "jpeg" else Resident(case)


def collate_records(samples: list[Record]) -> Record:
    """Stacks the tensors of dataclasses; ``default_collate`` does not know them."""
    return Record(default_collate([sample.tensors for sample in samples]))


def clone_sample(samples: list[Any]) -> Any:
    """The trivial collate function: the one sample, with tensors of its own."""
    (sample,) = samples
    if isinstance(sample, Record):
        return Record([value.clone() for value in sample.tensors])
    if isinstance(sample, dict):
        return {name: value.clone() for name, value in sample.items()}
    return [value.clone() for value in sample]


def collate_of(case: Case) -> Callable[[list[Any]], Any]:
    """The collate function of a case."""
    if case.collate == "clone":
        return clone_sample
    return collate_records if case.records == "dataclass" else default_collate
