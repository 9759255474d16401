"""The seam table: where torchpin meets the functions and methods of the base.

One row per place, without logic: the logic lives in the whole files under ``torch/``. Two programs
read it: the runtime in ``_overlay.py``, which wraps the functions, and the exporter, which writes the
lines into a checkout of PyTorch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from torchpin.bases import NEWEST, OLDEST

Release = tuple[int, int]


@dataclass(frozen=True)
class WholeFile:
    """A file that is added to the base, or takes the place of the base's file of the same path."""

    module: str
    reason: str

    @property
    def path(self) -> str:
        """Path in the repository and in PyTorch's."""
        return self.module.replace(".", "/") + ".py"


@dataclass(frozen=True)
class Seam:
    """One call at the start or at the end of a function of the base.

    ``arguments`` are names of the function's own parameters. A seam with ``rebinds`` is an
    assignment: what the call returns takes the place of that parameter for the rest of the function.
    """

    function: str
    """``module:Class.function`` of the base."""
    at: Literal["start", "end"]
    call: str
    """``module:function`` of a whole file."""
    arguments: tuple[str, ...]
    reason: str
    rebinds: str | None = None
    since: Release = OLDEST
    until: Release = NEWEST


@dataclass(frozen=True)
class Method:
    """A method whose body is in C, or whose default argument changes, replaced whole.

    ``maker`` is called with the base's method and returns the one that takes its place.
    """

    owner: str
    """``module:Class`` of the base."""
    name: str
    maker: str
    """``module:function`` of a whole file."""
    reason: str
    since: Release = OLDEST
    until: Release = NEWEST


WHOLE_FILES: Final = (
    WholeFile("torch._pin_deprecation", "the deprecated device argument, in one place"),
    WholeFile("torch.cuda._host_registration", "how CUDA page-locks memory that exists"),
    WholeFile("torch.utils.data._utils.pin_target", "what a loader pins for, and whether it can"),
    WholeFile("torch.utils.data._utils.pin_containers", "how objects of all kinds are taken apart"),
    WholeFile("torch.utils.data._utils.direct_queue", "small messages go straight into the pipe"),
    WholeFile("torch.utils.data._utils.transport", "batches of workers arrive in reusable slots"),
    WholeFile(
        "torch.utils.data._utils.pin_memory",
        "pins a batch in one native call, and carries errors to the training loop; replaces",
    ),
)

_DATALOADER = "torch.utils.data.dataloader"
_TARGET = "torch.utils.data._utils.pin_target"
_WORKER = "torch.utils.data._utils.worker"
_TRANSPORT = "torch.utils.data._utils.transport"
_DEPRECATION = "torch._pin_deprecation"

SEAMS: Final = (
    Seam(
        f"{_DATALOADER}:DataLoader.__init__",
        "end",
        f"{_TARGET}:check_arguments",
        ("self",),
        "pin_memory_device is deprecated where it is given, not where the loader is iterated",
    ),
    Seam(
        f"{_DATALOADER}:_BaseDataLoaderIter.__init__",
        "start",
        f"{_TARGET}:without_request",
        ("loader",),
        "the base decides by CUDA up to 2.6, warns at every epoch, and fails on a backend whose "
        "device module lacks is_available",
        rebinds="loader",
    ),
    Seam(
        f"{_DATALOADER}:_BaseDataLoaderIter.__init__",
        "end",
        f"{_TARGET}:configure",
        ("self", "loader"),
        "decides instead: the current accelerator, or plain batches and one warning",
    ),
    Seam(
        f"{_DATALOADER}:_BaseDataLoaderIter.__init__",
        "end",
        f"{_TRANSPORT}:prepare",
        ("self", "loader"),
        "makes the slots that the workers will fill, before they start",
    ),
    Seam(
        f"{_DATALOADER}:_MultiProcessingDataLoaderIter.__init__",
        "end",
        f"{_TRANSPORT}:started",
        ("self",),
        "the collate function has brought the slots to the workers",
    ),
    Seam(
        f"{_DATALOADER}:_MultiProcessingDataLoaderIter._reset",
        "start",
        f"{_TRANSPORT}:before_first_indices",
        ("self",),
        "a thread for each worker would write what is a few hundred bytes",
    ),
    Seam(
        f"{_DATALOADER}:_MultiProcessingDataLoaderIter._next_data",
        "start",
        f"{_TRANSPORT}:next_begins",
        ("self",),
        "how long the training loop waits for batches",
    ),
    Seam(
        f"{_DATALOADER}:_MultiProcessingDataLoaderIter._next_data",
        "end",
        f"{_TRANSPORT}:next_ends",
        ("self",),
        "how long the training loop waits for batches",
    ),
    Seam(
        f"{_DATALOADER}:_MultiProcessingDataLoaderIter._mark_worker_as_unavailable",
        "end",
        f"{_TRANSPORT}:worker_gone",
        ("self", "worker_id"),
        "what an ended worker kept in slots is taken back",
    ),
    Seam(
        f"{_DATALOADER}:_MultiProcessingDataLoaderIter._shutdown_workers",
        "end",
        f"{_TRANSPORT}:close",
        ("self",),
        "memory of slots is given back when the workers are gone",
    ),
    Seam(
        f"{_WORKER}:_worker_loop",
        "start",
        f"{_TRANSPORT}:enter_worker",
        ("data_queue", "collate_fn", "worker_id"),
        "what a worker puts into its queue is packed into a slot",
        rebinds="data_queue",
    ),
    Seam(
        f"{_WORKER}:_worker_loop",
        "start",
        f"{_TRANSPORT}:own_collate_fn",
        ("collate_fn",),
        "the slots came with the collate function",
        rebinds="collate_fn",
    ),
    Seam(
        f"{_WORKER}:_worker_loop",
        "start",
        f"{_TRANSPORT}:own_done_event",
        ("done_event",),
        "a worker that is killed while it asks whether to end would leave a lock taken that the main "
        "process waits for",
        rebinds="done_event",
    ),
    Seam(
        f"{_WORKER}:ManagerWatchdog.__init__",
        "end",
        f"{_TRANSPORT}:watch_parent",
        ("self",),
        "a worker that starts up after the main process was killed would take whatever adopted it for "
        "the main process, and keep the slots for ever",
    ),
)

METHODS: Final = (
    Method(
        "torch:Tensor",
        "pin_memory",
        f"{_DEPRECATION}:tensor_pin_memory",
        "the device argument is deprecated and ignored",
    ),
    Method(
        "torch:Tensor",
        "is_pinned",
        f"{_DEPRECATION}:tensor_is_pinned",
        "the device argument is deprecated and ignored",
    ),
    Method(
        "torch:UntypedStorage",
        "pin_memory",
        f"{_DEPRECATION}:storage_pin_memory",
        "the default means CUDA up to 2.12",
    ),
    Method(
        "torch:UntypedStorage",
        "is_pinned",
        f"{_DEPRECATION}:storage_is_pinned",
        "the default means CUDA up to 2.12",
    ),
    Method(
        "torch:TypedStorage",
        "pin_memory",
        f"{_DEPRECATION}:storage_pin_memory",
        "the default means CUDA up to 2.12",
    ),
    Method(
        "torch:TypedStorage",
        "is_pinned",
        f"{_DEPRECATION}:storage_is_pinned",
        "the default means CUDA up to 2.12",
    ),
    Method(
        "torch:TypedStorage",
        "_new_shared",
        f"{_TRANSPORT}:typed_storage_new_shared",
        "default_collate asks here for the shared memory that it stacks into",
    ),
)
