"""The accelerator under test, through what every accelerator has: PyTorch's API and its device module.

Two things a test of pinned memory needs are no part of either: copies that stay in flight for as long
as the test wants, and a look at what the driver has done. Where an *adaptor* is given (``--adaptor
MODULE``) they come from it. It is a module that has some of these functions, all optional:

- ``hold_copies()``: context manager; no copy is carried out before it is left.
- ``slow_copies()``: context manager; every copy in it takes its time, and may be waited for.
- ``locked_bytes()``: bytes of host memory that the driver has page-locked.
- ``contexts()``: indices of the devices that have been started in this process.
- ``limit_locked(nbytes)``: page-locking beyond it is refused; None: no limit.

Without one, copies are kept in flight by a queue of big copies in front of them, and what needs the
driver's own word is measured by what the system knows: resident memory, descriptors, threads.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from types import ModuleType
from typing import Any, Final

import torch
from torchpin.conformance.requirement import Hook, Nonconformance, not_tried

_VARIABLE: Final = "TORCHPIN_CONFORMANCE"
"""Carries the options to processes that the suite starts."""
_SECONDS_IN_FLIGHT: Final = 0.3
_QUEUED_BYTES: Final = 32 << 20


@dataclass(frozen=True)
class Options:
    """What the command line says about the accelerator."""

    accelerator: str
    imports: tuple[str, ...] = ()
    adaptor: str | None = None

    def to_environment(self) -> dict[str, str]:
        """The environment of a process that shall test the same accelerator."""
        return {**os.environ, _VARIABLE: json.dumps(asdict(self))}

    @classmethod
    def from_environment(cls) -> Options:
        """The options of a process that the suite has started."""
        values = json.loads(os.environ[_VARIABLE])
        return cls(**{**values, "imports": tuple(values["imports"])})


class Backend:
    """The accelerator. Making one imports its modules and starts no device."""

    def __init__(self, options: Options) -> None:
        for module in options.imports:
            importlib.import_module(module)
        self.name: Final = options.accelerator
        self.adaptor: Final = importlib.import_module(options.adaptor) if options.adaptor else None

    @property
    def module(self) -> ModuleType:
        """The device module, ``torch.NAME``."""
        module: ModuleType = getattr(torch, self.name)
        return module

    def ability(self, name: str) -> Callable[..., Any] | None:
        """The adaptor's function of this name, if it has one."""
        return getattr(self.adaptor, name, None)

    # ---- devices

    @property
    def device_count(self) -> int:
        return int(self.module.device_count())

    def require_devices(self, count: int) -> None:
        """Ends the test if there are fewer."""
        if self.device_count < count:
            not_tried(f"there is only {self.device_count} {self.name} device")

    def device(self, index: int | None = None) -> torch.device:
        return torch.device(self.name) if index is None else torch.device(self.name, index)

    def set_device(self, index: int) -> None:
        self.module.set_device(index)

    @contextlib.contextmanager
    def on_device(self, index: int) -> Iterator[None]:
        """The calling thread's device is ``index`` within the block."""
        before = self.module.current_device()
        self.set_device(index)
        try:
            yield
        finally:
            self.set_device(before)

    def synchronize(self) -> None:
        """Waits for everything on all devices."""
        for index in range(self.device_count):
            if hasattr(self.module, "synchronize"):
                self.module.synchronize(index)
            else:
                torch.accelerator.synchronize(index)

    def new_stream(self) -> Any:
        """A stream of the current device; ends the test if there is no such thing."""
        if not hasattr(self.module, "Stream") or not hasattr(self.module, "stream"):
            not_tried(f"torch.{self.name} has no Stream and stream")
        return self.module.Stream()

    def on_stream(self, stream: Any) -> contextlib.AbstractContextManager[Any]:
        manager: contextlib.AbstractContextManager[Any] = self.module.stream(stream)
        return manager

    def current_stream(self, index: int | None = None) -> Any:
        """The current stream of a device, the current one by default; None if nobody can tell."""
        source: Any = self.module
        if not hasattr(source, "current_stream"):
            source = getattr(torch, "accelerator", None)
        if source is None:
            return None
        return source.current_stream() if index is None else source.current_stream(index)

    def is_running(self, index: int | None = None) -> bool | None:
        """Whether the current stream of a device has work to do; None if nobody can tell."""
        stream = self.current_stream(index)
        return None if stream is None else not stream.query()

    # ---- copies that stay in flight

    @contextlib.contextmanager
    def _occupied(self, index: int | None, amount: int) -> Iterator[None]:
        """The current stream has work for a while, or for as long as the adaptor holds it."""
        hold = self.ability("hold_copies")
        if hold is not None:
            with hold():
                yield
            return
        source = torch.empty(_QUEUED_BYTES, dtype=torch.uint8, pin_memory=True)
        target = torch.empty_like(source, device=self.device(index))
        target.copy_(source)
        self.synchronize()
        begin = time.perf_counter()
        target.copy_(source)
        self.synchronize()
        one_copy = max(time.perf_counter() - begin, 1e-5)
        try:
            for _ in range(min(int(amount * _SECONDS_IN_FLIGHT / one_copy) + 1, 1000)):
                target.copy_(source, non_blocking=True)
        except Exception as error:
            raise Nonconformance(
                Hook.COPY,
                "a copy from pinned memory can be started with non_blocking=True",
                f"{type(error).__name__}: {error}",
            ) from error
        yield

    def while_copies_are_in_flight(
        self, scenario: Callable[[], Callable[[], None]], index: int | None = None
    ) -> None:
        """Runs ``scenario`` while the copies that it starts cannot finish, then what it returned.

        The second function is called when all devices are idle. If the copies were finished while the
        scenario ran, which says nothing, it is run again behind more work; if that does not help, the
        test ends as not tried.

        Args:
            scenario: starts copies on the current stream, of device ``index`` where that is given.
                Must not wait for the device.
            index: the device; the current one by default.
        """
        for amount in (1, 4, 16):
            with self._occupied(index, amount):
                verify = scenario()
                held = self.ability("hold_copies") is not None
                was_running = held or self.is_running(index) is not False
            self.synchronize()
            verify()
            if was_running:
                return
        not_tried("copies are finished before the call that starts them returns")

    @contextlib.contextmanager
    def slow_copies(self) -> Iterator[None]:
        """Copies take their time where the adaptor can see to that."""
        slow = self.ability("slow_copies")
        with slow() if slow is not None else contextlib.nullcontext():
            yield

    # ---- what is held

    def locked_bytes(self) -> int | None:
        """Page-locked host memory, as far as anybody counts it."""
        ask = self.ability("locked_bytes")
        if ask is not None:
            return int(ask())
        return None

    def contexts(self) -> set[int] | None:
        """Devices that were started in this process, as far as anybody knows."""
        ask = self.ability("contexts")
        return None if ask is None else set(ask())


def resident_bytes() -> int:
    """Memory of this process that is in RAM; page-locked memory always is."""
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def descriptors() -> list[str]:
    """What the open descriptors of this process refer to."""
    targets = []
    for name in os.listdir("/proc/self/fd"):
        # The descriptor of the listing itself is gone.
        with contextlib.suppress(OSError):
            targets.append(os.readlink(f"/proc/self/fd/{name}"))
    return sorted(targets)


def threads() -> int:
    """Number of threads of this process, of whatever library."""
    return len(os.listdir("/proc/self/task"))
