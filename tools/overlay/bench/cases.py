"""What is measured: one batch and the loader that makes it. Without torch, and fit for JSON."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, Literal

Records = Literal["list", "dict", "dataclass"]
Load = Literal["resident", "jpeg"]
Collate = Literal["default", "clone"]

RECORDS: Final = ("list", "dict", "dataclass")
START_METHODS: Final = ("fork", "spawn", "forkserver")
ITEM_BYTES: Final = {
    "float32": 4,
    "float64": 8,
    "float16": 2,
    "bfloat16": 2,
    "uint8": 1,
    "int8": 1,
    "int16": 2,
    "int32": 4,
    "int64": 8,
    "bool": 1,
}
"""The dtypes that can be asked for, and the bytes of one element."""

MiB: Final = 1 << 20

STOCK: Final = "stock"
UNPINNED: Final = "unpinned"
LIMIT: Final = "limit"
MODES: Final = ("auto", "in_place", "copy", "off")
RIVALS: Final = ("tensordict", "torchdata", "spdl")
WAYS: Final = (STOCK, *MODES, UNPINNED, *RIVALS, LIMIT)
"""The ways that batches can take, in the order in which they are shown."""


@dataclass(frozen=True)
class Field:
    """One tensor of a sample, that becomes one of the batch; shape ``()`` is a Python number."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]

    def __str__(self) -> str:
        return "×".join(map(str, self.shape)) or "1"


@dataclass(frozen=True)
class Case:
    """One batch and the loader that makes it.

    Attributes:
        name: a short name, without spaces.
        fields: the tensors of one sample.
        batch_size: samples in a batch.
        workers: processes that make batches; 0: the main process makes them.
        records: what a sample and a batch are.
        load: where samples come from: memory, or JPEG files that Pillow decodes.
        collate: ``"default"`` stacks samples; ``"clone"`` is a function that takes the one sample of a
            batch and clones its tensors.
        start_method: how workers start; empty: Python's default.
        distinct: so many samples lie in memory, and come again and again. One stays in the caches of
            the CPU, so that the loader is what is measured; many have to be fetched from memory, which
            all ways have in common.
        prefetch: batches that each worker makes ahead.
        epoch: batches of an epoch, after which the loader is iterated again and starts new workers; 0:
            one epoch without an end.
        ways: what to measure besides what the command line asks for.
        promised: least ratio to stock that the project promises, by way.
        sweep: ``"bytes"`` or ``"tensors"`` for a point of a cost curve.
        text: what to call it, where the description of the batch would not do.
    """

    name: str
    fields: tuple[Field, ...]
    batch_size: int
    workers: int = 1
    records: Records = "list"
    load: Load = "resident"
    collate: Collate = "default"
    start_method: str = ""
    prefetch: int = 2
    distinct: int = 1
    epoch: int = 0
    ways: tuple[str, ...] = ()
    promised: Mapping[str, float] = field(default_factory=dict)
    sweep: str = ""
    text: str = ""

    @property
    def bytes(self) -> int:
        """Bytes of the tensors of a batch."""
        return self.batch_size * sum(item.bytes for item in self.fields)

    @property
    def title(self) -> str:
        """The batch and the workers in a few words."""
        workers = f"{self.workers or 'no'} worker{'' if self.workers == 1 else 's'}"
        return f"{self.text or self._batch()}, {workers}"

    def _batch(self) -> str:
        groups: dict[tuple[str, str], int] = {}
        for item in self.fields:
            key = str(item), item.dtype
            groups[key] = groups.get(key, 0) + 1
        parts = [
            f"{f'{count} tensors of ' if count > 1 else ''}{self.batch_size}×{shape} {dtype}"
            for (shape, dtype), count in groups.items()
        ]
        return " + ".join(parts)

    def to_json(self) -> dict[str, Any]:
        return {
            **vars(self),
            "fields": [[list(item.shape), item.dtype] for item in self.fields],
            "ways": list(self.ways),
            "promised": dict(self.promised),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Case:
        fields = tuple(Field(tuple(shape), dtype) for shape, dtype in data["fields"])
        return cls(**{**data, "fields": fields, "ways": tuple(data["ways"])})


def own_case(
    shapes: Sequence[tuple[int, ...]],
    dtype: str,
    tensors: int,
    batch_size: int,
    workers: int,
    records: Records,
    start_method: str,
    prefetch: int,
    decode: bool,
    distinct: int,
) -> Case:
    """A case from the choices of the command line.

    Raises:
        ValueError: if the choices do not go together.
    """
    if decode:
        shape = shapes[0]
        if len(shapes) > 1 or tensors > 1 or len(shape) != 3 or shape[0] != 3:
            raise ValueError(
                "--decode makes one image for each sample: give one --shape 3,HEIGHT,WIDTH"
            )
    fields = tuple(Field(shape, dtype) for shape in shapes for _ in range(tensors))
    if decode:
        fields += (Field((), "int64"),)
    case = Case(
        "own",
        fields,
        batch_size,
        workers,
        records,
        "jpeg" if decode else "resident",
        start_method=start_method,
        prefetch=prefetch,
        distinct=distinct,
    )
    check_memory(case)
    return case


def check_memory(case: Case) -> None:
    """Raises ValueError if the batches under way would not fit into memory."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    # Samples in every worker, and of the batches a copy in shared and one in pinned memory.
    need = case.bytes * (max(1, case.workers) * (1 + 2 * case.prefetch) + 4)
    if need > total * 0.8:
        raise ValueError(
            f"batches of {case.bytes / MiB:.0f} MiB and {case.workers} workers need about "
            f"{need / MiB:.0f} MiB, this machine has {total / MiB:.0f} MiB"
        )


_IMAGE: Final = Field((3, 224, 224), "float32")
_LABEL: Final = Field((), "int64")


def latents(workers: int = 2, **more: Any) -> Case:
    """What a fine-tuning run of a diffusion model loads when its latents are cached."""
    fields = (Field((4, 64, 64), "float32"), Field((77, 2048), "float32"), Field((2,), "int64"))
    text = "cached latents 4×(4×64×64, 77×2048 float32, size)"
    return Case("latents", fields, 4, workers, "dict", text=text, **more)


def project() -> list[Case]:
    """Every case for which the project promises something."""
    images = (_IMAGE, _LABEL)
    two = {"copy": 2.5, "in_place": 5.0}
    return [
        Case(
            "images",
            images,
            64,
            1,
            promised={"copy": 4.0, "in_place": 8.0},
            text="64×3×224×224 float32",
        ),
        Case("images-2", images, 64, 2, promised=two, text="64×3×224×224 float32"),
        Case(
            "small",
            (Field((3, 64, 64), "float32"), _LABEL),
            32,
            promised={"copy": 5.0, "in_place": 6.0},
            text="32×3×64×64 float32",
        ),
        Case(
            "fields",
            (Field((128,), "float32"),) * 40,
            32,
            records="dict",
            promised={"copy": 7.0, "in_place": 9.0},
            text="40 tensors of 32×128 float32",
        ),
        Case(
            "thousand",
            (Field((16,), "float32"),) * 1000,
            1,
            records="dict",
            collate="clone",
            promised={"copy": 5.0, "in_place": 5.0},
            text="dict of 1000 tensors of 16 float32",
        ),
        Case(
            "large",
            (Field((1024, 1024), "float32"),),
            100,
            ways=(UNPINNED,),
            text="400 MiB: 100×1024×1024 float32",
        ),
        Case(
            "jpeg",
            images,
            64,
            2,
            load="jpeg",
            promised={"copy": 1.2, "in_place": 1.2},
            text="JPEG decode to 64×3×224×224 float32",
        ),
        latents(promised={"copy": 4.0, "in_place": 6.0}),
        # What torchpin has to set up must not show where there is next to nothing to load,
        Case(
            "epoch",
            (Field((3, 32, 32), "float32"), _LABEL),
            8,
            2,
            epoch=10,
            promised={"copy": 0.95, "in_place": 0.95},
            text="epochs of 10 batches of 8×3×32×32 float32",
        ),
        # and without workers there are no slots: stacked into pinned memory.
        Case("alone", images, 64, 0, text="64×3×224×224 float32"),
    ]


def quick() -> list[Case]:
    """A first look: large images, many small tensors, cached latents."""
    chosen = {case.name: case for case in project()}
    return [chosen[name] for name in ("images", "fields", "latents")]


PRESETS: Final = {"project": project, "quick": quick}


def sweep(axis: str) -> list[Case]:
    """The points of a cost curve, over ``"bytes"`` per batch or ``"tensors"`` per batch."""
    if axis == "bytes":
        # 16 samples in one tensor: 4 KiB to 256 MiB.
        return [
            Case(
                f"bytes-{16 << shift}",
                (Field(((1 << shift) // 4,), "float32"),),
                16,
                sweep="bytes",
            )
            for shift in range(8, 25, 2)
        ]
    if axis == "tensors":
        return [
            Case(
                f"tensors-{count}",
                (Field((128,), "float32"),) * count,
                32,
                records="dict",
                sweep="tensors",
            )
            for count in (1, 3, 10, 30, 100, 300, 1000)
        ]
    raise ValueError(f"no such sweep: {axis!r}; expected 'bytes' or 'tensors'")
