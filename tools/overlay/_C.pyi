"""The extension module. What it offers is for torchpin itself and declared in torch/csrc/torchpin.h.

The exception is what users get into their hands:
"""

from collections.abc import Callable
from types import TracebackType
from typing import Any

class HostMemoryRegistration:
    """Memory that :func:`register_host_memory` has page-locked; a context manager that undoes it.

    Keeps neither the memory nor the object it belongs to alive.
    """

    def __init__(self, data: Any, nbytes: int, undo: Callable[[], Any] | None) -> None: ...
    @property
    def nbytes(self) -> int:
        """Bytes that this registration page-locks: 0 where they were pinned by other means."""

    def unregister(self) -> None:
        """Undoes this registration, once; calling it again does nothing."""

    def __enter__(self) -> Any: ...
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None: ...

def __getattr__(name: str) -> Any: ...
