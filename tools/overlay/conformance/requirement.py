"""What the suite requires: the check that every test is made of, and the parts that can be at fault.

A failure names what was expected, what was seen and which hook of the backend is responsible, so that
its author need not read the test.
"""

from __future__ import annotations

from typing import Final, NoReturn

import pytest


class Hook:
    """The parts of a backend that this suite tries, as failures name them."""

    ALLOCATOR: Final = "getPinnedMemoryAllocator of the hooks"
    IS_PINNED: Final = (
        "isPinnedPtr of the hooks, which has to be true for every address in pinned memory and for no "
        "other (PyTorch 2.3 and 2.4: raw_deleter of the pinned-memory allocator)"
    )
    DELETER: Final = (
        "the deleter of the memory that getPinnedMemoryAllocator of the hooks hands out"
    )
    REPORT: Final = (
        "the copy kernel: it has to report every copy in flight from or to host memory, with "
        "at::getHostAllocator(type)->record_event(ptr, ctx, stream) (before PyTorch 2.8 to the "
        "backend's pinned-memory allocator), and the allocator has to wait for the event"
    )
    STAGING: Final = (
        "the copy kernel: a non-blocking copy from memory that is not pinned has to read it before "
        "the call returns"
    )
    COPY: Final = "the copy kernel (aten::_copy_from and aten::copy_)"
    DEVICES: Final = "the device guard (c10::impl::DeviceGuardImplInterface) and the copy kernel"
    MODULE: Final = "the device module (torch._register_device_module)"
    START: Final = "the lazy initialisation of the backend (its hooks and its device module)"
    FORK: Final = "the handling of fork by the pinned-memory allocator and the runtime"
    EXIT: Final = "the tear-down of the runtime at exit, and the deleter of pinned memory"
    THREADS: Final = "the thread safety of the pinned-memory allocator and of the copy kernel"
    LOADER: Final = "the device module and getPinnedMemoryAllocator, as the pin thread uses them"
    CACHE: Final = "the pinned-memory allocator, as at::pin::HostMemoryCache"
    STATISTICS: Final = "visit_stats of the pinned-memory allocator (at::pin::HostMemoryCache)"
    LIMITS: Final = "set_limits of the pinned-memory allocator (at::pin::HostMemoryCache)"
    REGISTER: Final = "register_host_memory of the hooks (at::pin::HostMemoryHooks)"
    UNREGISTER: Final = "unregister_host_memory of the hooks (at::pin::HostMemoryHooks)"


class Nonconformance(AssertionError):
    """A requirement that the backend does not meet."""

    def __init__(self, hook: str, expected: str, seen: str) -> None:
        super().__init__(hook, expected, seen)
        self.hook = hook
        self.expected = expected
        self.seen = seen

    def __str__(self) -> str:
        return f"expected: {self.expected}\nseen: {self.seen}\nresponsible: {self.hook}"


def require(condition: object, hook: str, expected: str, seen: object) -> None:
    """Raises :class:`Nonconformance` unless ``condition`` holds."""
    __tracebackhide__ = True
    if not condition:
        raise Nonconformance(hook, expected, str(seen))


def not_tried(reason: str) -> NoReturn:
    """Ends a test that this machine or backend gives no opportunity for, and says so."""
    pytest.skip(f"not tried: {reason}")


def depth(number: int) -> pytest.MarkDecorator:
    """Marks tests of what a backend offers at this depth; 1 where there is no mark."""
    return pytest.mark.depth(number)


def responsible(hook: str) -> pytest.MarkDecorator:
    """Marks a test with the hook to be named when it ends in an exception of somebody else's."""
    return pytest.mark.responsible(hook)
