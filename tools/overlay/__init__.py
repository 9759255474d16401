"""torchpin: pin memory is pinned for the current accelerator.

A patch to the installed PyTorch's pin-memory internals and DataLoader, active from ``import torch``
on. ``python -m torchpin`` prints what is active; ``TORCHPIN=0`` in the environment leaves PyTorch as
it is.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError as _NotFound
from importlib.metadata import version as _version

from torchpin import _overlay
from torchpin._overlay import ActivationError

try:
    __version__ = _version("torchpin")
except _NotFound:  # run from a checkout that was never installed
    __version__ = "0+unknown"

__all__ = ["ActivationError", "disable", "enable", "is_enabled"]


def enable() -> bool:
    """Switches torchpin on, as ``import torch`` does by itself.

    Returns:
        True if it is on now; False where the environment says ``TORCHPIN=0``, which wins.

    Raises:
        ActivationError: on another system than Linux, on a PyTorch outside the supported range, or
            if the extension was built for another PyTorch. PyTorch is then as it was.
    """
    return _overlay.enable()


def disable() -> None:
    """Switches torchpin off: modules, functions and kernels are the base's own objects again.

    Iterators of a DataLoader that are under way go on as they were made.
    """
    _overlay.disable()


def is_enabled() -> bool:
    """Whether torchpin is on in this process."""
    return _overlay.is_enabled()
