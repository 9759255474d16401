"""The device module ``torch.refdev``, shaped like ``torch.cuda``."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import torch

from . import _C

_Device = torch.device | str | int | None

# torch.Stream and torch.Event can be made for any accelerator from 2.5 on.
_GENERIC_STREAMS = hasattr(torch, "Event") and hasattr(torch.Stream, "synchronize")


def is_available() -> bool:
    """Always true; touches nothing."""
    return True


def is_initialized() -> bool:
    return bool(_C.initialized())


def init() -> None:
    """Initialises the driver; no device gets a context by that.

    Raises :class:`RuntimeError` in a process forked from an initialised one.
    """
    _C.init()


_lazy_init = init


def _is_in_bad_fork() -> bool:
    return bool(_C.in_bad_fork())


def device_count() -> int:
    return int(_C.device_count())


def current_device() -> int:
    """Index of the calling thread's device; touches nothing."""
    return int(_C.current_device())


def _index(device: _Device) -> int:
    if device is None:
        return current_device()
    if isinstance(device, int):
        return current_device() if device < 0 else device
    device = torch.device(device)
    if device.type != "refdev":
        raise ValueError(f"expected a refdev device, got {device}")
    return current_device() if device.index is None else device.index


def set_device(device: _Device) -> None:
    """Selects the calling thread's device; touches nothing."""
    _C.select_device(_index(device))


class device:
    """Context manager that selects a device for the calling thread."""

    def __init__(self, device: _Device) -> None:
        self.idx = _index(device)
        self.prev_idx = -1

    def __enter__(self) -> device:
        self.prev_idx = current_device()
        _C.select_device(self.idx)
        return self

    def __exit__(self, *_: object) -> None:
        _C.select_device(self.prev_idx)


def _exchange_device(index: int) -> int:
    before = current_device()
    if index >= 0:
        _C.select_device(index)
    return before


_maybe_exchange_device = _exchange_device


def get_device_name(device: _Device = None) -> str:
    return f"Reference accelerator {_index(device)}"


def synchronize(device: _Device = None) -> None:
    """Waits for all streams of a device, if it has a context."""
    _C.synchronize_device(_index(device))


def empty_cache() -> None:
    """Device memory has no cache that keeps other processes out."""


def memory_allocated(device: _Device = None) -> int:
    """Bytes of device memory in use, each block rounded up to 512."""
    return int(_C.bytes_in_use(_index(device)))


class _Stream(torch.Stream):
    """As :class:`torch.Stream` of later releases."""

    def __new__(
        cls,
        device: _Device = None,
        priority: int = 0,
        *,
        stream_id: int | None = None,
        device_index: int | None = None,
        device_type: int | None = None,
    ) -> _Stream:
        return super().__new__(
            cls,
            stream_id=_C.new_stream() if stream_id is None else stream_id,
            device_index=_index(device) if device_index is None else device_index,
            device_type=_privateuse1(),
        )

    def query(self) -> bool:
        return bool(_C.query_stream(self.device_index, self.stream_id))

    def synchronize(self) -> None:
        _C.synchronize_stream(self.device_index, self.stream_id)

    def record_event(self, event: Any = None) -> Any:
        event = _Event() if event is None else event
        event.record(self)
        return event

    def wait_event(self, event: Any) -> None:
        event.wait(self)

    def wait_stream(self, stream: Any) -> None:
        self.wait_event(stream.record_event())


class _Event:
    """As :class:`torch.Event` of later releases."""

    def __init__(self, device: _Device = None, enable_timing: bool = False, **_: Any) -> None:
        self._event = _C.Event()

    def record(self, stream: _Stream | None = None) -> None:
        stream = current_stream() if stream is None else stream
        self._event.record(stream.device_index, stream.stream_id)

    def wait(self, stream: _Stream | None = None) -> None:
        stream = current_stream() if stream is None else stream
        self._event.wait(stream.device_index, stream.stream_id)

    def query(self) -> bool:
        return bool(self._event.query())

    def synchronize(self) -> None:
        self._event.synchronize()

    def elapsed_time(self, end: _Event) -> float:
        """Milliseconds from this event to ``end``."""
        return float(self._event.elapsed_time(end._event))


Stream: Any = torch.Stream if _GENERIC_STREAMS else _Stream
Event: Any = torch.Event if _GENERIC_STREAMS else _Event


def _privateuse1() -> int:
    # c10::DeviceType::PrivateUse1, the same number in every release.
    return 20


def _stream(device_index: int, stream_id: int) -> Any:
    return Stream(stream_id=stream_id, device_index=device_index, device_type=_privateuse1())


def current_stream(device: _Device = None) -> Any:
    """The calling thread's stream for a device."""
    index = _index(device)
    return _stream(index, _C.current_stream(index))


def default_stream(device: _Device = None) -> Any:
    return _stream(_index(device), 0)


def set_stream(stream: Any) -> None:
    """Makes a stream, and its device, the calling thread's."""
    _C.select_device(stream.device_index)
    _C.set_current_stream(stream.device_index, stream.stream_id)


@contextlib.contextmanager
def stream(stream: Any) -> Iterator[None]:
    """Makes a stream, and its device, the calling thread's within the block."""
    if stream is None:
        yield
        return
    index_before = current_device()
    stream_before = _C.current_stream(stream.device_index)
    set_stream(stream)
    try:
        yield
    finally:
        _C.set_current_stream(stream.device_index, stream_before)
        _C.select_device(index_before)


def manual_seed(seed: int) -> None:
    _C.manual_seed(current_device(), int(seed) & (2**64 - 1))


def manual_seed_all(seed: int) -> None:
    for index in range(device_count()):
        _C.manual_seed(index, int(seed) & (2**64 - 1))


def seed() -> None:
    manual_seed(int.from_bytes(os.urandom(8), "little"))


def initial_seed() -> int:
    return int(_C.initial_seed(current_device()))


def get_rng_state(device: _Device = None) -> torch.Tensor:
    """State of the device's generator, a CPU tensor of bytes."""
    state: torch.Tensor = torch.ops.refdev.get_rng_state(_index(device))
    return state


def set_rng_state(state: torch.Tensor, device: _Device = None) -> None:
    torch.ops.refdev.set_rng_state(_index(device), state)


def get_amp_supported_dtype() -> list[torch.dtype]:
    return [torch.float16, torch.bfloat16]


__all__ = [
    "Event",
    "Stream",
    "_exchange_device",
    "_is_in_bad_fork",
    "_lazy_init",
    "_maybe_exchange_device",
    "current_device",
    "current_stream",
    "default_stream",
    "device",
    "device_count",
    "empty_cache",
    "get_amp_supported_dtype",
    "get_device_name",
    "get_rng_state",
    "init",
    "initial_seed",
    "is_available",
    "is_initialized",
    "manual_seed",
    "manual_seed_all",
    "memory_allocated",
    "seed",
    "set_device",
    "set_rng_state",
    "set_stream",
    "stream",
    "synchronize",
]
