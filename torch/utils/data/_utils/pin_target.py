"""What a DataLoader pins for: the current accelerator, or nothing and one warning.

Called through the seams in ``DataLoader.__init__`` and ``_BaseDataLoaderIter.__init__``. Everything
is decided before the workers start and without starting the accelerator: a process that is about to
fork must not have done that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch._pin_deprecation import warn_at_caller

if TYPE_CHECKING:
    from torch.utils.data.dataloader import DataLoader

_WARNED = "_pin_memory_warned"


class _WithoutRequest:
    """A DataLoader as it would be without ``pin_memory``; everything else is the loader's own."""

    pin_memory = False
    pin_memory_device = ""

    def __init__(self, loader: DataLoader[Any]) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


def check_arguments(loader: DataLoader[Any]) -> None:
    """Deprecates ``pin_memory_device`` at the line that made the loader."""
    device = loader.pin_memory_device
    if device:
        warn_at_caller(
            "pin_memory_device is deprecated and ignored: memory is pinned for the current "
            f"accelerator. Leave pin_memory_device={str(device)!r} out.",
            DeprecationWarning,
            once_per_site=True,
        )


def without_request(loader: DataLoader[Any]) -> DataLoader[Any]:
    """The loader as the base's own decision about pinning shall see it."""
    if loader.pin_memory or loader.pin_memory_device:
        return _WithoutRequest(loader)  # type: ignore[return-value]
    return loader


def what_is_missing() -> tuple[str | None, str | None]:
    """The current accelerator's type and why it cannot be pinned for, each None where not.

    Starts nothing. The C++ side knows the hooks; the device module of a PrivateUse1 backend is
    Python, so it is looked at here.
    """
    from torchpin import _C

    name, lack, reason, *_ = _C._pin_target(initialize=False)
    if name is None:
        return None, reason
    if lack != "nothing":
        return name, reason
    module = getattr(torch, name, None)
    if module is None:
        return name, (
            f"the backend {name!r} has registered no device module; it has to call "
            f"torch._register_device_module({name!r}, module)"
        )
    for function in ("is_available", "current_device"):
        # torch.xpu, torch.cuda and their kin have both; the pin thread needs the second.
        if not callable(getattr(module, function, None)):
            return name, (
                f"the device module torch.{name} has no function {function}(); the backend has "
                "to add it"
            )
    if not module.is_available():
        return name, f"torch.{name}.is_available() is False"
    return name, None


def configure(iterator: Any, loader: DataLoader[Any]) -> None:
    """Sets ``_pin_memory`` and ``_pin_memory_device`` of a new iterator.

    Warns once in the life of a loader, at the user's line, if it asks for pinned memory that is not
    to be had.
    """
    if isinstance(loader, _WithoutRequest):
        loader = loader._loader
    iterator._pin_memory = False
    iterator._pin_memory_device = None
    if not loader.pin_memory:
        return
    from torch.utils.data._utils import pin_memory

    accelerator, missing = what_is_missing()
    if missing is None:
        iterator._pin_memory = True
        assert accelerator is not None
        iterator._pin_memory_device = pin_memory.LoaderDevice.of(loader, accelerator)
    elif not getattr(loader, _WARNED, False):
        setattr(loader, _WARNED, True)
        warn_at_caller(
            "'pin_memory' argument is set as true, but batches stay in ordinary memory: "
            f"{missing}.",
            UserWarning,
        )
