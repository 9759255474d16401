"""Pins the batches of a DataLoader for the current accelerator.

Two functions, which the base looks up in this module whenever it uses them:

- :func:`pin_memory` pins one batch, whatever it consists of, in one walk and one native call;
- :func:`_pin_memory_loop` is the thread between the workers and the training loop.

The walk is ``torch/csrc/PinBatch.cpp``; how it takes objects of all kinds apart is
``pin_containers.py``. Here is what both need around them: what is said to the user about tensors that
were not pinned, and how an error gets from the thread to the training loop.

What the thread promises:

- It runs on the device that was current where the iterator was made, and starts no other.
- Whatever is raised in it (taking an item from the queue, selecting the device, pinning) is raised
  by the training loop's next step, with its own type; the thread goes on until it is told to stop.
- It holds no lock while it pins, and imports nothing: a process may be forked meanwhile.
"""

from __future__ import annotations

import atexit
import contextlib
import queue
import threading
import time
import types
import weakref
from typing import Any, Final, NamedTuple, NoReturn

import torch
import torch.multiprocessing
from torch._pin_deprecation import warn_at_caller
from torch._utils import ExceptionWrapper, KeyErrorMessage
from torchpin import _C

from . import MP_STATUS_CHECK_INTERVAL, transport
from .direct_queue import DirectQueue
from .pin_containers import IMMUTABLE, expand, kind_of_type, register_pin_function

__all__ = [
    "LoaderDevice",
    "RefusalCount",
    "pin_memory",
    "refused",
    "register_pin_function",
    "set_pin_threads",
]


def pin_memory(data: Any, device: str | torch.device | None = None) -> Any:
    """``data`` with all its tensors in memory that is pinned for the current accelerator.

    Containers keep their types and are left as they are; what holds no tensor that has to be pinned
    comes back as the same object. Tensors keep everything but the address of their data, and what
    shares a storage in ``data`` shares one afterwards. See "Batches of your own classes" in the
    documentation for what is a container and what to do for one's own.

    Tensors that the accelerator refuses to pin, or all of them if there is none, are delivered in
    ordinary memory, counted in :data:`refused`, with a warning the first time.

    Args:
        data: the batch.
        device: ignored. The DataLoader passes a :class:`LoaderDevice` here, which remembers that it
            was warned.

    Raises:
        Exception: what an object's own ``pin_memory()``, or a function given to
            ``torchpin.register_pin_function``, raises.
    """
    if type(data) in IMMUTABLE:
        return data
    result, _, refusals = _C._pin_batch(data, False, kind_of_type, expand, _missed, _resisted)
    if refusals is not None:
        _count(refusals, device)
    return result


def set_pin_threads(threads: int) -> None:
    """Sets how many threads copy the large tensors of a batch into pinned memory.

    One, unless set: a batch is pinned behind the back of the training loop, and each further thread
    takes a core from it, from the workers and from PyTorch's operators. Worth it where cores are idle
    and the loop waits for large batches that have to be copied; it makes no difference to tensors of
    less than 4 MiB, nor to batches that arrive in place. See "Batches of your own classes" in the
    documentation for measurements.

    Holds for all loaders of this process, also those that run already.

    Args:
        threads: from 1 to 16; a tensor takes one for each 2 MiB at most.

    Raises:
        ValueError: for any other number.
    """
    _C._set_pin_threads(threads)


# ---- what is said about tensors that stay where they are


class RefusalCount:
    """How many tensors were delivered unpinned because the accelerator refused.

    Attributes:
        tensors: their number.
        bytes: their size, in bytes.
        warned: whether the user has been told.
    """

    def __init__(self) -> None:
        self.tensors = 0
        self.bytes = 0
        self.warned = False

    def __repr__(self) -> str:
        return f"{type(self).__name__}(tensors={self.tensors}, bytes={self.bytes})"


refused: Final = RefusalCount()
"""All refusals in this process."""


class LoaderDevice(str):
    """The type of the accelerator, with the refusals of the one loader that pins for it.

    The base hands what is in ``_pin_memory_device`` of an iterator, a string, to both functions of
    this module and to nobody else. So it carries what belongs to a loader and outlives its iterators.
    """

    refusals: RefusalCount

    @classmethod
    def of(cls, loader: Any, accelerator: str) -> LoaderDevice:
        """The device to be stored in an iterator of ``loader``."""
        self = cls(accelerator)
        self.refusals = vars(loader).setdefault("_pin_memory_refused", RefusalCount())
        return self


_named: dict[str, weakref.WeakSet[type]] = {
    "missed": weakref.WeakSet(),
    "resisted": weakref.WeakSet(),
}
"""Types that were warned about, by what was wrong."""


def _warn_once(what: str, obj: Any, message: str) -> None:
    kind = type(obj)
    if kind in _named[what]:
        return
    # A warning that is turned into an error is raised every time.
    warn_at_caller(message, UserWarning)
    _named[what].add(kind)


def _advice(kind: type) -> str:
    return (
        f"Make {kind.__qualname__} a dataclass, give it a method pin_memory(), or register a function: "
        f"torchpin.register_pin_function({kind.__qualname__}, function)."
    )


def _missed(obj: Any, path: str, reason: str | None) -> None:
    kind = type(obj)
    name = f"{kind.__module__}.{kind.__qualname__}"
    if reason is not None:
        message = f"{path} of type {name} stays in ordinary memory: {reason}"
    else:
        message = (
            f"{path} is a tensor in an object of type {name}, which pin_memory does not know: it stays "
            f"in ordinary memory. {_advice(kind)}"
        )
    _warn_once("missed", obj, message)


def _resisted(obj: Any, path: str, error: BaseException) -> None:
    kind = type(obj)
    _warn_once(
        "resisted",
        obj,
        f"{path} of type {kind.__module__}.{kind.__qualname__} cannot be rebuilt around pinned tensors "
        f"({type(error).__name__}: {error}): it is delivered as it was, in ordinary memory. "
        f"{_advice(kind)}",
    )


def _held(held: int | None) -> str:
    """What this process holds, for the message about a refusal."""
    if held is not None:
        return f"{held} bytes are held by the host allocator"
    with contextlib.suppress(OSError), open("/proc/self/status") as status:
        for line in status:
            name, _, value = line.partition(":")
            kilobytes = value.split()[0] if value.split() else "0"
            if name in ("VmLck", "VmPin") and kilobytes != "0":
                return f"{int(kilobytes) * 1024} bytes of this process are locked"
    return "how much is held is not known"


def _count(refusals: tuple[int, int, int, str, int | None], device: Any) -> None:
    tensors, size, asked, reason, held = refusals
    counts = [refused]
    if isinstance(device, LoaderDevice):
        counts.append(device.refusals)
    for count in counts:
        count.tensors += tensors
        count.bytes += size
    if counts[-1].warned:
        return
    warn_at_caller(
        f"Tensors of a batch stay in ordinary memory: {asked} bytes could not be pinned ({reason}); "
        f"{_held(held)}. Training goes on, transfers to the accelerator are slower, and later batches "
        "are tried again. Smaller batches, a smaller prefetch_factor or a higher limit for locked "
        "memory (ulimit -l) help.",
        UserWarning,
    )
    counts[-1].warned = True


# ---- errors on their way to the training loop


class PinThreadError(ExceptionWrapper):
    """An exception of the pin thread, to be raised by the training loop.

    As the wrapper that carries the errors of workers, but the thread shares this process: so also an
    exception whose class cannot be made from a message keeps its type, its arguments and its
    attributes.
    """

    def __init__(self, where: str, error: BaseException) -> None:
        super().__init__(  # type: ignore[no-untyped-call]
            (type(error), error, error.__traceback__), where=where
        )
        self._arguments = error.args
        self._attributes = dict(_attributes_of(error))
        self._errno = getattr(error, "errno", None)

    def reraise(self) -> NoReturn:
        raise self._exception()

    def _exception(self) -> BaseException:
        kind: Any = self.exc_type
        message = f"Caught {kind.__name__} {self.where}.\nOriginal {self.exc_msg}"
        if issubclass(kind, (StopIteration, StopAsyncIteration)):
            # Would end the epoch as if all were well.
            return RuntimeError(message)
        if kind is KeyError:
            return KeyError(KeyErrorMessage(message))
        with contextlib.suppress(Exception):
            error: BaseException = kind(message)
            if type(error) is kind and message in str(error):
                error.__dict__.update(self._attributes)
                if isinstance(error, OSError):
                    # Kept outside of __dict__; with strerror set too, the message would be lost.
                    error.errno = self._errno
                return error
        with contextlib.suppress(Exception):
            return self._look_alike(kind, message)
        return RuntimeError(message)

    def _look_alike(self, kind: Any, message: str) -> BaseException:
        """An instance of a class that differs from ``kind`` in its text only."""
        body = {"__str__": lambda _: message, "__module__": kind.__module__}
        derived = type(kind.__name__, (kind,), body)
        derived.__qualname__ = kind.__qualname__
        error: BaseException = derived.__new__(derived, *self._arguments)
        # Fields that C classes keep outside of __dict__ are set by their own __init__; no __init__ of
        # the user's is run.
        for base in kind.__mro__:
            init = vars(base).get("__init__")
            if isinstance(init, types.WrapperDescriptorType):
                with contextlib.suppress(TypeError):
                    init(error, *self._arguments)
                break
        error.args = self._arguments
        error.__dict__.update(self._attributes)
        return error


def _attributes_of(error: BaseException) -> dict[str, Any]:
    attributes = dict(getattr(error, "__dict__", {}))
    attributes.pop("__notes__", None)
    return attributes


class _Undelivered:
    """Stands in the queue for an item that nobody knows the number of."""

    def __init__(self, error: PinThreadError) -> None:
        self.error = error
        self.taken = False


def _raise_at_get(out_queue: queue.Queue[Any]) -> None:
    """Makes ``get`` of the queue raise what an :class:`_Undelivered` holds.

    There the training loop expects an exception of the other process: it looks whether a worker has
    died or the process is out of file descriptors, just as it does without pinning.
    """
    items = out_queue.queue

    def get() -> Any:
        item = items.popleft()
        if isinstance(item, _Undelivered):
            item.taken = True
            item.error.reraise()
        return item

    # The method that queue.Queue means to be overridden; called with the queue's lock held.
    out_queue._get = get  # type: ignore[method-assign]


# ---- the thread

_TAKEN_POLL_SECONDS: Final = 0.05


def _hand_over(
    error: PinThreadError, out_queue: queue.Queue[Any], done_event: threading.Event
) -> None:
    """Lets the training loop raise ``error``, and waits until it has.

    A queue that is broken raises at once each time; so no second error is fetched before somebody
    wants it.
    """
    _raise_at_get(out_queue)
    undelivered = _Undelivered(error)
    out_queue.put(undelivered)
    while not undelivered.taken and not done_event.wait(_TAKEN_POLL_SECONDS):
        pass


class _Running(NamedTuple):
    """A pin thread that has not ended."""

    thread: threading.Thread
    in_queue: DirectQueue
    done_event: threading.Event


_running: Final[set[_Running]] = set()
_leaving = False


def _end_threads() -> None:
    """Ends the pin threads of iterators that live to the end of the program.

    The interpreter ends threads that want its lock when it has gone, from within whatever they are
    doing. Those that come back from C++ just then cannot be ended: the process would be aborted.
    """
    global _leaving
    _leaving = True
    # In a forked child none is alive.
    alive = [running for running in _running if running.thread.is_alive()]
    for running in alive:
        running.done_event.set()
        # One that sleeps wakes up. If it cannot be put there is something to read already.
        running.in_queue.put_at_once((None, None))
    for running in alive:
        running.thread.join(2 * MP_STATUS_CHECK_INTERVAL)


atexit.register(_end_threads)


def _pin_memory_loop(
    in_queue: Any,
    out_queue: queue.Queue[Any],
    device_id: int | None,
    done_event: threading.Event,
    device: str | None,
) -> None:
    # This thread only copies bytes; without it the operators of a user's own pin_memory() would take
    # the cores of the training loop.
    torch.set_num_threads(1)
    if hasattr(torch.multiprocessing, "_set_thread_name"):
        torch.multiprocessing._set_thread_name("pt_data_pin")
    where = f"in pin memory thread for device {device_id}"
    in_queue = DirectQueue(in_queue)
    running = _Running(threading.current_thread(), in_queue, done_event)
    _running.add(running)
    try:
        if not _leaving:
            _run(in_queue, out_queue, device_id, done_event, device, where)
    finally:
        _running.discard(running)


def _run(
    in_queue: DirectQueue,
    out_queue: queue.Queue[Any],
    device_id: int | None,
    done_event: threading.Event,
    device: str | None,
    where: str,
) -> None:
    try:
        _C._select_pin_device(-1 if device_id is None else device_id)
    except BaseException as error:
        failure = PinThreadError(where, error)
        while not done_event.is_set():
            _hand_over(failure, out_queue, done_event)
        return
    while not done_event.is_set():
        # A call for each item, so that no object of one is kept while the next is waited for.
        _one_item(in_queue, out_queue, done_event, device, where)


def _one_item(
    in_queue: Any,
    out_queue: queue.Queue[Any],
    done_event: threading.Event,
    device: str | None,
    where: str,
) -> None:
    began = time.perf_counter()
    try:
        index, data = in_queue.get(timeout=MP_STATUS_CHECK_INTERVAL)
    except queue.Empty:
        return
    except BaseException as error:
        _hand_over(PinThreadError(where, error), out_queue, done_event)
        return
    if not done_event.is_set() and not isinstance(data, ExceptionWrapper):
        retired = refusals = None
        waited, owner = time.perf_counter() - began, transport.owner(data)
        try:
            data, whole = transport.unpack(data, out_queue.qsize)
            began = time.perf_counter()
            if not whole:
                # The walk lets go of the originals before they are freed: the assignment drops the
                # last Python object that holds them, release() the memory, without the GIL.
                data, retired, refusals = _C._pin_batch(
                    data, True, kind_of_type, expand, _missed, _resisted
                )
            if retired is not None:
                retired.release()
            if refusals is not None:
                _count(refusals, device)
            transport.spent(owner, waited, time.perf_counter() - began)
        except BaseException as error:
            data = PinThreadError(where, error)
    while not done_event.is_set():
        try:
            out_queue.put((index, data), timeout=MP_STATUS_CHECK_INTERVAL)
            return
        except queue.Full:
            continue
