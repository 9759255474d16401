"""The ``device`` argument of ``pin_memory`` and ``is_pinned``: deprecated, then ignored.

Host memory is pinned for the current accelerator, so the argument says nothing any more. It is still
accepted, as a string, a ``torch.device`` or an index, because programs pass it.

The category is ``DeprecationWarning`` and the text begins as the base's own deprecation of the same
arguments does from 2.5 on: filters that programs have today keep matching.
"""

from __future__ import annotations

import functools
import pathlib
import sys
import warnings
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch

_INTERNAL = tuple(
    str(pathlib.Path(package.__file__).parent) + "/"
    for package in (torch, sys.modules.get("torchpin"))
    if package is not None and package.__file__ is not None
)


def _caller() -> FrameType:
    """The innermost frame that belongs neither to PyTorch nor to torchpin."""
    frame: FrameType | None = sys._getframe(1)
    outermost = sys._getframe(1)
    while frame is not None:
        outermost = frame
        filename = frame.f_code.co_filename
        if not filename.startswith((*_INTERNAL, "<frozen ")):
            return frame
        frame = frame.f_back
    return outermost


def warn_at_caller(message: str, category: type[Warning], once_per_site: bool = False) -> None:
    """Warns at the line of the user's code that led here, however deep the call.

    With ``once_per_site`` a line that has been warned about stays silent under the filter
    ``always`` too, until the filters change. An ``error`` filter raises every time.
    """
    frame = _caller()
    registry = frame.f_globals.setdefault("__warningregistry__", {})
    warnings.warn_explicit(
        message,
        category,
        frame.f_code.co_filename,
        frame.f_lineno,
        module=frame.f_globals.get("__name__"),
        registry=registry,
    )
    if once_per_site:
        # The key by which the warnings module itself remembers a line it has warned about.
        registry[(message, category, frame.f_lineno)] = True


def ignore_device(function: str, device: Any) -> None:
    """Deprecates a ``device`` that was given to ``function``.

    Raises:
        RuntimeError, TypeError: as ``torch.device(device)``, if it names no device.
    """
    torch.device(device)
    warn_at_caller(
        f"The argument 'device' of {function}() is deprecated and ignored: memory is pinned for "
        "the current accelerator. Leave it out.",
        DeprecationWarning,
        once_per_site=True,
    )


@functools.cache
def _tensor_methods() -> dict[str, Any]:
    from torchpin import _C

    methods: dict[str, Any] = _C._tensor_methods(
        lambda name, device: ignore_device(f"Tensor.{name}", device)
    )
    return methods


def tensor_pin_memory(_base: Any) -> Any:
    """``Tensor.pin_memory`` without its device argument."""
    return _tensor_methods()["pin_memory"]


def tensor_is_pinned(_base: Any) -> Any:
    """``Tensor.is_pinned`` without its device argument."""
    return _tensor_methods()["is_pinned"]


def _without_device(base: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(base)
    def method(self: Any, device: Any = None) -> Any:
        if device is not None:
            ignore_device(f"{type(self).__name__}.{base.__name__}", device)
        return base(self, None)

    return method


def storage_pin_memory(base: Callable[..., Any]) -> Callable[..., Any]:
    """``UntypedStorage.pin_memory`` or ``TypedStorage.pin_memory`` for the current accelerator."""
    return _without_device(base)


def storage_is_pinned(base: Callable[..., Any]) -> Callable[..., Any]:
    """``UntypedStorage.is_pinned`` or ``TypedStorage.is_pinned`` for the current accelerator."""
    return _without_device(base)
