"""torchpin: pin memory is pinned for the current accelerator.

A patch to the installed PyTorch's pin-memory internals and DataLoader, active from ``import torch``
on. ``python -m torchpin`` prints what is active; ``TORCHPIN=0`` in the environment leaves PyTorch as
it is.

Because of the entry point of ``torchpin.conformance`` pytest would rewrite the assertions here, and
warn where this module is imported before pytest is: PYTEST_DONT_REWRITE.
"""

# Imported whenever Python starts on releases that need the start-up file, so nothing is imported
# here before it is asked for.
from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchpin._overlay import ActivationError as ActivationError

    __version__: str

__all__ = ["ActivationError", "disable", "enable", "is_enabled"]


def __getattr__(name: str) -> Any:
    if name == "ActivationError":
        from torchpin._overlay import ActivationError

        return ActivationError
    if name == "__version__":
        from importlib.metadata import version

        return version("torchpin")
    raise AttributeError(f"module 'torchpin' has no attribute {name!r}")


def enable() -> bool:
    """Switches torchpin on, as ``import torch`` does by itself.

    Returns:
        True if it is on now; False where the environment says ``TORCHPIN=0``, which wins.

    Raises:
        ActivationError: on another system than Linux, on a PyTorch outside the supported range, or
            if the extension was built for another PyTorch. PyTorch is then as it was.
    """
    from torchpin import _overlay

    return _overlay.enable()


def disable() -> None:
    """Switches torchpin off: modules, functions and kernels are the base's own objects again.

    Iterators of a DataLoader that are under way and have workers go on as they were made; without
    workers their next batches are pinned the base's way.
    """
    from torchpin import _overlay

    _overlay.disable()


def is_enabled() -> bool:
    """Whether torchpin is on in this process."""
    from torchpin import _overlay

    return _overlay.is_enabled()
