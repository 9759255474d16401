"""Queues between processes without what takes longer than the message.

``multiprocessing.Queue.put`` leaves the writing to a thread, since a pipe may be full and whoever puts is
not to wait. That thread is started at the first message, has to be woken for each, and shares the
interpreter lock with a main thread that is busy: for a message of a few hundred bytes all of that takes
longer than the writing. A pipe that can be written to at all takes ``PIPE_BUF`` bytes, in one piece and
without waiting. And ``multiprocessing.Queue.get`` with a timeout makes a selector for each message.
"""

from __future__ import annotations

import multiprocessing.queues
import queue
import select
from multiprocessing.reduction import ForkingPickler
from typing import Any, Final

__all__ = ["DirectQueue"]

_AT_ONCE: Final = select.PIPE_BUF - 4
"""Bytes of a message, less those of the length that goes before it."""
_PARTS: Final = (
    "_buffer",
    "_closed",
    "_notempty",
    "_reader",
    "_rlock",
    "_sem",
    "_thread",
    "_wlock",
    "_writer",
)


class DirectQueue:
    """A queue of :mod:`multiprocessing`, in one of its processes; all but ``put`` and ``get`` is its own.

    What is put arrives in that order, also where some of it went to the queue's thread: a worker's notice
    that its data set is exhausted makes the DataLoader forget the batches that have not arrived.

    Args:
        queue: the queue. One of another class, or of a Python that makes them in another way, is used as
            it is.
    """

    def __init__(self, queue: Any) -> None:
        self._queue = queue
        self._usual = type(queue) is multiprocessing.queues.Queue and all(
            hasattr(queue, part) for part in _PARTS
        )
        self._writable = select.poll()
        self._readable = select.poll()
        if self._usual:
            self._writable.register(queue._writer.fileno(), select.POLLOUT)
            self._readable.register(queue._reader.fileno(), select.POLLIN)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._queue, name)

    def put(self, item: Any) -> None:
        if not self.put_at_once(item):
            self._queue.put(item)

    def _all_written(self) -> bool:
        """Whether the queue's thread has written all that was left to it."""
        queue = self._queue
        if queue._thread is None:
            return True
        with queue._notempty:
            # It waits for more only when it is done with what it took out last.
            return not queue._buffer and bool(getattr(queue._notempty, "_waiters", None))

    def get(self, timeout: float) -> Any:
        """As ``get`` of the queue; ``timeout`` in seconds."""
        source = self._queue
        if not self._usual or source._closed:
            return source.get(timeout=timeout)
        if not source._rlock.acquire(True, timeout):
            raise queue.Empty
        try:
            if not self._readable.poll(1000 * timeout):
                raise queue.Empty
            message = source._reader.recv_bytes()
            source._sem.release()
        finally:
            source._rlock.release()
        return ForkingPickler.loads(message)

    def put_at_once(self, item: Any) -> bool:
        """Puts the item, unless that would take waiting or a thread; says whether it has."""
        target = self._queue
        if not self._usual or target._closed or not self._all_written():
            return False
        try:
            message = ForkingPickler.dumps(item)
        except Exception:
            # For the thread to report, as ever.
            return False
        if len(message) > _AT_ONCE or not target._wlock.acquire(False):
            return False
        try:
            if self._writable.poll(0) != [(target._writer.fileno(), select.POLLOUT)]:
                return False
            if not target._sem.acquire(False):
                return False
            try:
                target._writer.send_bytes(message)
            except OSError:
                # So little is written whole or not at all.
                target._sem.release()
                return False
        finally:
            target._wlock.release()
        return True
