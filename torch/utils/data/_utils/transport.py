"""Batches of DataLoader workers in shared slots that are used again and again.

Native code is ``torch/csrc/Transport.cpp`` over ``c10/core/SharedSlots.h``; here is what happens around
it, in the order in which it happens:

- main process, ``_BaseDataLoaderIter.__init__``: :func:`prepare` makes the slots of an iterator and
  hides them in the collate function, the one thing that travels to every worker whatever the start
  method;
- main process, ``_reset``: :func:`before_first_indices` takes a thread out of the way of the indices;
- worker, ``_worker_loop``: :func:`enter_worker` takes them out again and puts a :class:`_WorkerQueue`
  in front of the result queue, which packs every batch;
- worker, ``default_collate``: :func:`typed_storage_new_shared` answers its request for shared memory;
- main process, pin thread: :func:`unpack`;
- main process, ``_shutdown_workers``: :func:`close`.

A batch that cannot travel in a slot (none is free, too large, no memory) goes the way of the base, with
a note of the reason. No function here waits for anything.
"""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import multiprocessing
import multiprocessing.synchronize
import os
import pickle
import time
import weakref
from collections.abc import Callable
from multiprocessing import reduction
from multiprocessing.reduction import ForkingPickler
from typing import Any, Final, Literal

import torch
from torch._utils import ExceptionWrapper
from torch.utils.data._utils.collate import collate, default_collate, default_collate_fn_map
from torch.utils.data._utils.direct_queue import DirectQueue
from torchpin import _C

__all__ = ["Stats", "close", "prepare", "stats", "transport", "unpack"]

Mode = Literal["auto", "in_place", "copy", "off"]
_MODES: Final = ("auto", "in_place", "copy", "off")
_ENVIRONMENT: Final = "TORCHPIN_TRANSPORT"
_ATTRIBUTE: Final = "transport"
_DEFAULT: Final = "auto"

_MAX_SLOT_BYTES: Final = 8 << 30
_FEW_BYTES: Final = 16 << 20
"""Free slots that have no more together are kept, however many batches are pinned."""
_MAX_REFUSALS: Final = 3
"""After so many page-locks that were refused an iterator goes on in copy mode."""

# As Delivery in Transport.cpp.
_IN_PLACE: Final = 1
_KEPT_BY_WORKER: Final = 2
_LOCK_REFUSED: Final = 3
_MOVED: Final = 4
_WHY_COPIED: Final = {
    _KEPT_BY_WORKER: "kept_by_worker",
    _LOCK_REFUSED: "lock_refused",
    _MOVED: "enough_locked",
}


# ---- which mode


def _checked(mode: str, where: str) -> str:
    if mode not in _MODES:
        raise ValueError(f"{where} is {mode!r}; expected one of {', '.join(map(repr, _MODES))}")
    return mode


_mode: str | None = None


class transport:
    """Chooses how batches come from the workers of every DataLoader with ``pin_memory=True``.

    ``torchpin.transport("copy")`` holds from then on, ``with torchpin.transport("copy"):`` for the
    iterators that are made inside. The environment variable ``TORCHPIN_TRANSPORT`` says what holds
    before; an attribute ``transport`` of a DataLoader wins over both for that loader.

    Args:
        mode: ``"in_place"``: the workers write into page-locked memory and the batch is that memory;
            ``"copy"``: one copy, into the accelerator's own pinned memory; ``"auto"``: in place where
            that is safe, else copy; ``"off"``: as PyTorch without torchpin.

    Raises:
        ValueError: for any other mode.
    """

    def __init__(self, mode: Mode) -> None:
        global _mode
        self._before = _mode
        _mode = _checked(mode, "transport mode")

    def __enter__(self) -> transport:
        return self

    def __exit__(self, *_: object) -> None:
        global _mode
        _mode = self._before


def mode_of(loader: Any) -> str:
    """What was chosen for a loader, or with None for those that say nothing themselves.

    Raises:
        ValueError: if what was written there is no mode.
    """
    own = getattr(loader, _ATTRIBUTE, None)
    if isinstance(own, str):
        return _checked(own, f"DataLoader.{_ATTRIBUTE}")
    if _mode is not None:
        return _mode
    return _checked(
        os.environ.get(_ENVIRONMENT) or _DEFAULT, f"environment variable {_ENVIRONMENT}"
    )


# ---- what is counted


class Stats:
    """What the transport did, for one iterator or for the process.

    Attributes:
        batches: batches that arrived in a slot.
        bytes: their bytes in slots.
        in_place: how many of them were delivered without a copy.
        stock_batches: batches that took the base's way as a whole, by reason.
        stock_tensors: tensors that took the base's way inside a batch that arrived in a slot.
        copied_instead: batches that were copied although in place was chosen, by reason.
        refused_bytes: bytes that the accelerator refused to pin.
        wait_for_workers_seconds: time that the pin thread waited for the next batch.
        unpack_seconds: time that it spent making tensors of what arrived, copies included.
        pin_seconds: time that it spent pinning what had not arrived pinned.
        loop_wait_seconds: time that the training loop waited in ``next``. Large beside the time that an
            epoch takes: the loader is the bottleneck; small: the rest of the loop is.
        wait_for_consumer_seconds: time that the training loop spent on its batches, between the end of
            one ``next`` and the begin of the following one; the loader is ahead then, and waits.
    """

    def __init__(self) -> None:
        self.batches = 0
        self.bytes = 0
        self.in_place = 0
        self.stock_batches: dict[str, int] = {}
        self.stock_tensors = 0
        self.copied_instead: dict[str, int] = {}
        self.refused_bytes = 0
        self.wait_for_workers_seconds = 0.0
        self.unpack_seconds = 0.0
        self.pin_seconds = 0.0
        self.loop_wait_seconds = 0.0
        self.wait_for_consumer_seconds = 0.0

    def as_dict(self) -> dict[str, Any]:
        """All counts by name."""
        return {
            name: dict(value) if isinstance(value, dict) else value
            for name, value in vars(self).items()
        }

    def __repr__(self) -> str:
        inside = ", ".join(f"{name}={value!r}" for name, value in vars(self).items())
        return f"{type(self).__name__}({inside})"


total: Final = Stats()
"""Everything in this process."""


def stats(iterator: Any = None) -> dict[str, Any]:
    """What the transport did so far: in this process, or for one iterator of a DataLoader.

    Returns:
        The counts of :class:`Stats` by name: ``batches``, ``bytes``, ``in_place``, ``stock_batches`` and
        ``copied_instead`` by reason, ``stock_tensors``, ``refused_bytes``, and seconds. For an iterator also ``mode`` (what was chosen), ``why_copy`` (why it is not in place, or None),
        ``locked_bytes``, and ``slots``: their number, how many are in use, the most that were ever, the
        bytes they keep resident, and what was refused.

    Raises:
        ValueError: for an iterator whose batches do not come in slots.
    """
    if iterator is None:
        return total.as_dict()
    made = getattr(iterator, "_transport", None)
    if made is None:
        raise ValueError(
            f"{type(iterator).__name__} has no slots; they are made for pin_memory=True, num_workers > 0 "
            "and a transport mode other than 'off'"
        )
    return {
        **made.stats.as_dict(),
        "mode": made.mode,
        "why_copy": made.why_copy,
        "locked_bytes": 0 if made.pinned is None else made.pinned.locked_bytes(),
        "slots": made.slots.stats(),
    }


# ---- what travels

# Plain tuples: they can be unpickled whether or not this module is in place then, and cost least. A batch
# of a user's that begins with one of these strings would have to be meant to.
_IN_SLOT: Final = "\0torch.slots: in slot"
"""``(_IN_SLOT, key, message)``: a batch in a slot of the iterator with that key."""
_STOCK_WAY: Final = "\0torch.slots: stock way"
"""``(_STOCK_WAY, key, reason, batch)``: a batch that travels as the base sends it, and why."""


def _kind(data: Any) -> str | None:
    if type(data) is tuple and len(data) in (3, 4) and type(data[0]) is str:
        return data[0]
    return None


# ---- the main process


class _Transport:
    """The slots of one iterator, in the main process."""

    def __init__(self, workers: int, under_way: int, slots: int, mode: str) -> None:
        self.key = next(_keys)
        self.under_way = under_way
        self.mode = mode
        self.slots = _C._SharedSlots(workers, slots, _MAX_SLOT_BYTES)
        self.pinned: Any = None
        self.why_copy: str | None = "mode" if mode == "copy" else None
        self.refusals = 0
        self.loop_waits = False
        self.next_began = 0.0
        self.next_ended: float | None = None
        self.stats = Stats()
        self.workers = workers
        self.gone: set[int] = set()
        _transports[self.key] = self

    def choose(self) -> None:
        """Decides between in place and copy: in the pin thread, where the accelerator may start."""
        why: str = _C._why_not_in_place()
        if why:
            self.why_copy = why
        else:
            # With the one that the training loop has.
            self.pinned = _C._PinnedSlots(self.slots, self.under_way + 1)

    def count(self, size: int, stock: int, refused: int, delivery: int, seconds: float) -> None:
        for counts in (total, self.stats):
            counts.batches += 1
            counts.bytes += size
            counts.stock_tensors += stock
            counts.refused_bytes += refused
            counts.unpack_seconds += seconds
            if delivery == _IN_PLACE:
                counts.in_place += 1
            elif delivery in _WHY_COPIED:
                reason = _WHY_COPIED[delivery]
                counts.copied_instead[reason] = counts.copied_instead.get(reason, 0) + 1
        if delivery == _LOCK_REFUSED:
            self.refusals += 1
            if self.refusals == _MAX_REFUSALS:
                self.pinned = None
                self.why_copy = "the accelerator refused to page-lock slots"

    def clear_gone(self) -> None:
        """Takes back what dead workers held; the ones that are still ending are tried again."""
        self.gone = {w for w in self.gone if not self.slots.reclaim(w + 1, False)}


_keys: Final = itertools.count()
_transports: Final[weakref.WeakValueDictionary[int, _Transport]] = weakref.WeakValueDictionary()


class _Done:
    """The event by which the main process ends its workers, on both sides.

    ``is_set`` of the event itself takes a lock that all processes share. A worker that is killed in there
    leaves it taken, and then neither the other workers can ask nor can the main process set the event.
    """

    def __init__(self, event: Any, slots: Any) -> None:
        self._event = event
        self._slots = slots

    def __getattr__(self, name: str) -> Any:
        return getattr(self._event, name)

    def set(self) -> None:
        self._slots.end()
        self._event.set()

    def is_set(self) -> bool:
        # Should the main process have set the event alone: when it asks so itself it unsets the event
        # for a moment, so that this by itself would not do.
        return self._slots.is_ending() or not self._event._flag._semlock._is_zero()


def _done(event: Any, slots: Any) -> Any:
    usual = type(event) is multiprocessing.synchronize.Event
    return _Done(event, slots) if usual and hasattr(event, "_flag") else event


class _Carrier:
    """A collate function with slots behind it, on its way to a worker.

    Under ``fork`` the object itself arrives. ``spawn`` and ``forkserver`` pickle it while the process
    is being started, when a descriptor can go along.
    """

    def __init__(self, collate_fn: Callable[..., Any], key: int, slots: Any) -> None:
        self.collate_fn = collate_fn
        self.key = key
        self.slots = slots

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.collate_fn(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return _carrier, (self.collate_fn, self.key, reduction.DupFd(self.slots.fd()))


def _carrier(collate_fn: Callable[..., Any], key: int, descriptor: Any) -> _Carrier:
    return _Carrier(collate_fn, key, _C._SharedSlots.attach(descriptor.detach()))


def prepare(iterator: Any, loader: Any) -> None:
    """Makes the slots of a new iterator, before its workers start."""
    if not iterator._pin_memory:
        return
    try:
        mode = mode_of(loader)
    except ValueError:
        # The base's __del__ asks for it, and would complain about an iterator that has not got so far.
        iterator._shutdown = True
        raise
    if mode == "off":
        return
    *_, own_kernels, _ = _C._pin_target(initialize=False)
    if own_kernels:
        # A backend that pins by kernels of its own is asked for each batch, not passed by.
        return
    if iterator._num_workers <= 0:
        if iterator._collate_fn is default_collate:
            iterator._collate_fn = _collate_pinned
        return
    # As many batches as the base lets the workers have under way, what the training loop holds (this
    # batch, and the one before until its name is bound again), two more whose copies to the accelerator
    # are still running, and some that data sets keep. Slots that are never needed take no memory.
    workers = iterator._num_workers
    slots = workers * (loader.prefetch_factor + 4) + 4
    try:
        made = _Transport(workers, workers * loader.prefetch_factor, min(slots, 1024), mode)
    except RuntimeError:
        _count_stock(None, "no_slots")
        return
    iterator._transport = made
    iterator._collate_fn = _Carrier(iterator._collate_fn, made.key, made.slots)


def before_first_indices(iterator: Any) -> None:
    """An epoch begins: from the first on, what goes to the workers needs neither thread nor lock."""
    made = getattr(iterator, "_transport", None)
    if made is not None:
        iterator._workers_done_event = _done(iterator._workers_done_event, made.slots)
        iterator._index_queues = [
            queue if isinstance(queue, DirectQueue) else DirectQueue(queue)
            for queue in iterator._index_queues
        ]


def started(iterator: Any) -> None:
    """The workers of an iterator have started: gives it its own collate function back."""
    carrier = iterator._collate_fn
    if isinstance(carrier, _Carrier):
        iterator._collate_fn = carrier.collate_fn


def worker_gone(iterator: Any, worker_id: int) -> None:
    """A worker has ended or is about to: what it still held is taken back once it is dead."""
    made = getattr(iterator, "_transport", None)
    if made is not None:
        made.gone.add(worker_id)


def close(iterator: Any) -> None:
    """The workers of an iterator are gone: gives memory back that no batch uses."""
    made = getattr(iterator, "_transport", None)
    if made is None:
        return
    for worker in range(made.workers):
        made.slots.reclaim(worker + 1, True)
    if made.pinned is not None:
        made.pinned.give_back()
    else:
        made.slots.trim_free_slots()


def _collate_pinned(batch: Any) -> Any:
    """``default_collate`` without workers: stacks tensors into pinned memory, so that none is copied
    again."""
    return collate(batch, collate_fn_map={**default_collate_fn_map, torch.Tensor: _stack_pinned})


def _stack_pinned(batch: Any, *, collate_fn_map: Any = None) -> Any:
    element = batch[0]
    plain = type(element) is torch.Tensor and element.layout == torch.strided
    if plain and element.device.type == "cpu" and not any(t.requires_grad for t in batch):
        shape = (len(batch), *element.shape)
        with contextlib.suppress(RuntimeError):
            # A wrong shape among the batch is for the base to report, and so is a refusal to pin.
            place = torch.empty(shape, dtype=element.dtype, pin_memory=True)
            return torch.stack(batch, 0, out=place)
    return default_collate_fn_map[torch.Tensor](batch, collate_fn_map=collate_fn_map)


def _count_stock(made: _Transport | None, reason: str) -> None:
    for counts in (total,) if made is None else (total, made.stats):
        counts.stock_batches[reason] = counts.stock_batches.get(reason, 0) + 1


def next_begins(iterator: Any) -> None:
    """The training loop asks for a batch."""
    made = getattr(iterator, "_transport", None)
    if made is None:
        return
    made.loop_waits = True
    made.next_began = time.perf_counter()
    if made.next_ended is not None:
        seconds = made.next_began - made.next_ended
        made.stats.wait_for_consumer_seconds += seconds
        total.wait_for_consumer_seconds += seconds
        # What lies between two epochs is not spent on a batch.
        made.next_ended = None


def next_ends(iterator: Any) -> None:
    """The training loop has its batch."""
    made = getattr(iterator, "_transport", None)
    if made is None:
        return
    made.loop_waits = False
    made.next_ended = time.perf_counter()
    seconds = made.next_ended - made.next_began
    made.stats.loop_wait_seconds += seconds
    total.loop_wait_seconds += seconds


def spent(made: _Transport | None, waited: float, pinned: float) -> None:
    """Counts what the pin thread did beside unpacking."""
    for counts in (total,) if made is None else (total, made.stats):
        counts.wait_for_workers_seconds += waited
        counts.pin_seconds += pinned


def owner(data: Any) -> _Transport | None:
    """Whose batch came out of the workers' queue."""
    return _transports.get(data[1]) if _kind(data) in (_IN_SLOT, _STOCK_WAY) else None


def unpack(data: Any, waiting: Callable[[], int]) -> tuple[Any, bool]:
    """The batch behind what came out of the workers' queue, and whether it is pinned as a whole.

    Whole means that there is nothing in it but plain data and tensors that are pinned already.

    Args:
        data: what a worker put into the queue.
        waiting: says how many batches are pinned that the training loop has not taken yet.

    Raises:
        Exception: whatever unpickling the user's objects raises.
    """
    kind = _kind(data)
    if kind == _IN_SLOT:
        _, key, message = data
        return _unpack(key, message, waiting)
    if kind == _STOCK_WAY:
        _, key, reason, batch = data
        _count_stock(_transports.get(key), reason)
        return batch, False
    return data, False


def _make_array(sizes: tuple[int, ...], dtype: str, fortran: bool) -> tuple[Any, int]:
    import numpy

    array = numpy.empty(sizes, dtype, "F" if fortran else "C")
    return array, array.__array_interface__["data"][0]


def _unpack(key: int, message: bytes, waiting: Callable[[], int]) -> tuple[Any, bool]:
    made = _transports.get(key)
    if made is None:
        raise RuntimeError("a batch arrived after the slots of its iterator were gone")
    if made.pinned is None and made.why_copy is None:
        made.choose()
    begin = time.perf_counter()
    objects, body, others, stock, size, refused, delivery = _C._unpack(
        made.slots, made.pinned, message, _make_array
    )
    data = pickle.loads(body, buffers=objects)
    # The list has a reference to everything in the batch.
    del objects
    made.count(size, stock, refused, delivery, time.perf_counter() - begin)
    if delivery != _IN_PLACE:
        # Where the loop is slow, the batches that wait for it are in pinned memory. With a slot kept for
        # each as well, more would be held than in stock PyTorch, where the worker's memory of a batch
        # ends with it. A loop that is not slow has taken the last one meanwhile, or is about to.
        pinned = waiting() - made.loop_waits
        made.slots.trim_to(max(made.under_way - pinned, 1), _FEW_BYTES)
    if made.gone:
        made.clear_gone()
    # Processes forked meanwhile, such as the workers of another loader, keep what they inherited.
    made.slots.reap_guests()
    return data, others == 0 and refused == 0


# ---- the worker

_packer: Any = None
_slots: Any = None
"""Of this process, if it is a worker with slots."""
_collating = False
"""Whether a batch is being collated. What a data set collates for itself, perhaps to keep it, is no
part of a batch yet and stays out of the slot."""


def _take_apart(array: Any) -> tuple[int, int, tuple[int, ...], bool, str] | bool:
    """Address, bytes, shape, order and dtype of an array that can be copied as bytes.

    Otherwise whether there may be tensors in it. What has the other byte order is left to numpy's
    own pickling, which turns it into the machine's: programs may rely on that without knowing it,
    since ``torch.from_numpy`` takes no other.
    """
    dtype = array.dtype
    if dtype.hasobject:
        return True
    flags = array.flags
    if (
        dtype.names is not None
        or not dtype.isnative
        or dtype.kind not in "biufcmMSU"
        or dtype.metadata is not None
        or not flags.forc
    ):
        return False
    return (
        array.__array_interface__["data"][0],
        array.nbytes,
        array.shape,
        bool(flags.fnc),
        dtype.str,
    )


class _Pickler(ForkingPickler):
    """The pickler of the base's queues, with tensors and arrays out of line."""

    reducer_override: Any


class _WorkerQueue:
    """The result queue of a worker; what is put into it is packed first."""

    def __init__(self, queue: Any, key: int, slots: Any) -> None:
        self._queue = DirectQueue(queue)
        self._key = key
        self._packer = _C._Packer(slots)
        try:
            import numpy

            array_type: Any = numpy.ndarray
        except ImportError:
            array_type = None
        buffer = pickle.PickleBuffer(bytearray(1))
        self._reduce = self._packer.make_reduce(_C._identity, buffer, array_type, _take_apart)
        self._stays_in_band = self._packer.make_buffer_callback(buffer)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._queue, name)

    def put(self, item: tuple[Any, Any]) -> None:
        index, data = item
        self._queue.put((index, self._packed(data)))

    def _packed(self, data: Any) -> Any:
        if data is None or isinstance(
            data, (ExceptionWrapper, torch.utils.data._utils.worker._IterableDatasetStopIteration)
        ):
            self._packer.abandon()
            return data
        try:
            return self._pack(data)
        except Exception:
            # Whatever cannot be pickled is reported by the base, as ever.
            self._packer.abandon()
            return data

    def _pack(self, data: Any) -> Any:
        packer = self._packer
        if not packer.begin():
            return _STOCK_WAY, self._key, "no_free_slot", data
        whole = True
        while True:
            stream = io.BytesIO()
            pickler = _Pickler(stream, 5, True, self._stays_in_band)
            pickler.reducer_override = self._reduce
            pickler.dump(data)
            if packer.is_empty():
                packer.abandon()
                return data if whole else (_STOCK_WAY, self._key, "too_large", data)
            message = packer.finish(stream.getvalue())
            if message is NotImplemented:
                whole = False
                continue
            if message is None:
                packer.abandon()
                return _STOCK_WAY, self._key, "too_large", data
            return _IN_SLOT, self._key, message


def enter_worker(queue: Any, collate_fn: Any, worker_id: int) -> Any:
    """The result queue that a worker is to use."""
    global _packer, _slots
    _packer = _slots = None
    if not isinstance(collate_fn, _Carrier) or not collate_fn.slots.adopt(worker_id + 1):
        return queue
    packing = _WorkerQueue(queue, collate_fn.key, collate_fn.slots)
    _packer, _slots = packing._packer, collate_fn.slots
    return packing


def watch_parent(watchdog: Any) -> None:
    """Tells a worker's watchdog who the main process is.

    The base asks who the parent is, which is somebody else already if the main process was killed while
    the worker started.
    """
    if _packer is None or not hasattr(watchdog, "manager_pid"):
        return
    method = getattr(multiprocessing.current_process(), "_start_method", None)
    parent = multiprocessing.parent_process()
    # The parent of a process that forkserver made is the server, which ends with the main process.
    if parent is not None and (method or multiprocessing.get_start_method()) != "forkserver":
        watchdog.manager_pid = parent.pid


def own_collate_fn(collate_fn: Any) -> Any:
    """The collate function that a worker is to use: the user's own, inside of what marks its calls."""
    if not isinstance(collate_fn, _Carrier):
        return collate_fn
    own = collate_fn.collate_fn
    if _packer is None:
        return own

    def marked(data: Any) -> Any:
        global _collating
        _collating = True
        try:
            return own(data)
        finally:
            _collating = False

    return marked


def own_done_event(done_event: Any) -> Any:
    """The event that a worker is to ask whether it is to end."""
    return done_event if _slots is None else _done(done_event, _slots)


def typed_storage_new_shared(base: Callable[..., Any]) -> Callable[..., Any]:
    """``TypedStorage._new_shared`` that takes memory from the slot which the worker fills."""

    @functools.wraps(base)
    def _new_shared(self: Any, size: int, *, device: Any = None) -> Any:
        if _collating and (device is None or torch.device(device).type == "cpu"):
            memory = _packer.new_shared(size * self._element_size())
            if memory is not None:
                return torch.TypedStorage(
                    wrap_storage=memory.untyped_storage(), dtype=self.dtype, _internal=True
                )
        return base(self, size, device=device)

    return _new_shared
