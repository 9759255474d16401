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
    from torch.utils.data._utils.pin_containers import (
        register_pin_function as register_pin_function,
    )
    from torch.utils.data._utils.pin_memory import set_pin_threads as set_pin_threads
    from torch.utils.data._utils.transport import stats as stats
    from torch.utils.data._utils.transport import transport as transport
    from torchpin._overlay import ActivationError as ActivationError
    from torchpin.host_memory import HostMemoryRegistration as HostMemoryRegistration
    from torchpin.host_memory import empty_host_cache as empty_host_cache
    from torchpin.host_memory import host_memory_stats as host_memory_stats
    from torchpin.host_memory import max_host_memory as max_host_memory
    from torchpin.host_memory import record_host_memory_use as record_host_memory_use
    from torchpin.host_memory import register_host_memory as register_host_memory
    from torchpin.host_memory import (
        register_host_memory_functions as register_host_memory_functions,
    )
    from torchpin.host_memory import (
        reset_accumulated_host_memory_stats as reset_accumulated_host_memory_stats,
    )
    from torchpin.host_memory import reset_peak_host_memory_stats as reset_peak_host_memory_stats
    from torchpin.host_memory import unregister_host_memory as unregister_host_memory

    __version__: str

_HOST_MEMORY = (
    "HostMemoryRegistration",
    "empty_host_cache",
    "host_memory_stats",
    "max_host_memory",
    "record_host_memory_use",
    "register_host_memory",
    "register_host_memory_functions",
    "reset_accumulated_host_memory_stats",
    "reset_peak_host_memory_stats",
    "unregister_host_memory",
)

_BATCHES = {
    "register_pin_function": "torch.utils.data._utils.pin_containers",
    "set_pin_threads": "torch.utils.data._utils.pin_memory",
    "stats": "torch.utils.data._utils.transport",
    "transport": "torch.utils.data._utils.transport",
}

__all__ = [
    "ActivationError",
    "disable",
    "enable",
    "include_paths",
    "is_enabled",
    *_HOST_MEMORY,
    *_BATCHES,
]


def __getattr__(name: str) -> Any:
    if name == "ActivationError":
        from torchpin._overlay import ActivationError

        return ActivationError
    if name in _HOST_MEMORY:
        from torchpin import host_memory

        # Kept: to come here again takes as long as to page-lock some pages.
        return globals().setdefault(name, getattr(host_memory, name))
    if name in _BATCHES:
        from torchpin import _overlay

        return getattr(_overlay.whole_file(_BATCHES[name]), name)
    if name == "__version__":
        from importlib.metadata import version

        return version("torchpin")
    raise AttributeError(f"module 'torchpin' has no attribute {name!r}")


def include_paths() -> list[str]:
    """Folders with the headers for backends, as ``torch.utils.cpp_extension.include_paths``.

    For the compiler, after PyTorch's own. Also right for an editable install, which has no folder
    ``torchpin/include``. Neither PyTorch nor the extension is loaded.
    """
    from torchpin import _overlay

    return _overlay.include_paths()


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
