"""The server that measures: ``python -m torchpin.bench.measure JSON``.

One line of JSON on the standard input is a request, one line on what was the standard output is the
answer. The server imports torch and the modules it was told and does nothing else itself, because it
forks for every request: threads, a device context or page-locked memory of its own would reach all
measurements. It ends with its input.
"""

from __future__ import annotations

import ctypes
import importlib
import json
import multiprocessing
import os
import resource
import signal
import sys
import time
from collections.abc import Iterator
from multiprocessing import connection
from typing import Any, Final

_PR_SET_PDEATHSIG: Final = 1
_TICK_SECONDS: Final = 0.0005
_LEAST_BATCHES: Final = 6
_PAUSE_BATCHES: Final = 4
_PAUSE_SECONDS: Final = 0.4


def _end_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def _accelerator() -> dict[str, Any]:
    """The current accelerator, as torchpin sees it."""
    import torch
    from torch.utils.data._utils import pin_target

    name, missing = pin_target.what_is_missing()
    module: Any = getattr(torch, name or "", None)
    device = ""
    if hasattr(module, "get_device_name"):
        device = str(module.get_device_name(0))
    return {"accelerator": name or "", "device": device, "missing": missing or ""}


def _describe(request: dict[str, Any]) -> dict[str, Any]:
    import torch
    import torchpin
    from torchpin import _overlay

    if not torchpin.is_enabled():
        raise RuntimeError(f"torchpin is off: {_overlay.why_off()}")
    versions = {"torch": torch.__version__, "torchpin": torchpin.__version__}
    return {**versions, **_accelerator()}


def _counts() -> dict[str, Any]:
    """What the transport has counted so far in this process."""
    import torchpin

    if not torchpin.is_enabled():
        return {}
    from torch.utils.data._utils import transport

    counts: dict[str, Any] = transport.total.as_dict()
    return counts


def _difference(after: dict[str, Any], before: dict[str, Any]) -> dict[str, Any]:
    result: dict[str, Any] = {}
    for name, value in after.items():
        if isinstance(value, dict):
            result[name] = _difference(value, before.get(name, {}))
        elif isinstance(value, (int, float)):
            result[name] = value - before.get(name, 0)
    return result


def _leaves(batch: Any) -> Iterator[Any]:
    import torch
    from torchpin.bench import loads

    for value in loads.values_of(batch):
        if isinstance(value, torch.Tensor):
            yield value
        else:
            yield from _leaves(value)


class _Consumer:
    """A training loop that only takes batches, and copies them if it is told to."""

    def __init__(self, batches: Iterator[Any], copy_to: str) -> None:
        self.batches = batches
        self.copy_to = copy_to
        self.taken = 0
        self.longest_pause = 0.0

    def take(self) -> Any:
        """Takes a batch, which is to be dropped at once."""
        self.taken += 1
        batch = next(self.batches)
        if self.copy_to:
            for tensor in _leaves(batch):
                tensor.to(self.copy_to, non_blocking=True)
        return batch

    def wait_for_copies(self) -> None:
        if self.copy_to:
            import torch

            getattr(torch, self.copy_to).synchronize()

    def take_and_tick(self, seconds: float) -> None:
        """Takes a batch, runs Python for ``seconds``, drops the batch; notes how long it stood still.

        While it waits for a batch it has nothing to do, so of that only the time it spent computing
        counts.
        """
        begin = time.thread_time()
        batch = next(self.batches)
        self.longest_pause = max(self.longest_pause, time.thread_time() - begin)
        end = time.perf_counter() + seconds
        before = time.perf_counter()
        while before < end:
            time.sleep(_TICK_SECONDS)
            now = time.perf_counter()
            self.longest_pause = max(self.longest_pause, now - before - _TICK_SECONDS)
            before = now
        del batch
        self.longest_pause = max(self.longest_pause, time.perf_counter() - before)


def _measure(request: dict[str, Any]) -> dict[str, Any]:
    """Takes batches: some to warm up, then those that count, then some to find pauses."""
    from torchpin.bench import cases, ways

    case = cases.Case.from_json(request["case"])
    settings = request["settings"]
    accelerator = str(request["accelerator"])
    batches = ways.batches(request["way"], case, request["folder"], accelerator)
    consumer = _Consumer(batches, accelerator if settings["copy"] else "")

    leaves = list(_leaves(consumer.take()))
    about = {
        "tensors": len(leaves),
        "bytes": sum(leaf.numel() * leaf.element_size() for leaf in leaves),
        "pinned": bool(accelerator) and all(leaf.is_pinned() for leaf in leaves),
    }
    del leaves
    # All that was made ahead while the workers started has to be gone. What begins an epoch and what
    # ends it belong together.
    started = time.perf_counter()
    epoch = case.epoch or 1
    least = settings["warmup"] or case.workers * case.prefetch + 2
    warm = 0.2 * settings["seconds"]
    while (
        consumer.taken < least
        or time.perf_counter() - started < warm
        or consumer.taken % epoch != 0
    ):
        consumer.take()
    consumer.wait_for_copies()

    before, taken = _counts(), consumer.taken
    begin, cpu = time.perf_counter(), time.process_time()
    while True:
        consumer.take()
        count = consumer.taken - taken
        if count % epoch != 0:
            continue
        if settings["batches"]:
            if count >= settings["batches"]:
                break
        elif count >= _LEAST_BATCHES and time.perf_counter() - begin >= settings["seconds"]:
            break
    consumer.wait_for_copies()
    seconds, cpu = time.perf_counter() - begin, time.process_time() - cpu
    counted = _difference(_counts(), before)

    # Long enough for the next batch to be made and pinned meanwhile.
    tick = min(max(0.004, 1.5 * seconds / count), 1.0)
    begin = time.perf_counter()
    paused = 0
    while request["way"] != cases.LIMIT and (
        paused < _PAUSE_BATCHES or time.perf_counter() - begin < _PAUSE_SECONDS
    ):
        consumer.take_and_tick(tick)
        paused += 1
    return {
        **about,
        "batches": count,
        "seconds": seconds,
        "cpu_seconds": cpu,
        "pause_seconds": consumer.longest_pause if paused else None,
        "counted": counted,
    }


def _images(request: dict[str, Any]) -> dict[str, Any]:
    from torchpin.bench import cases, loads

    loads.make_images(cases.Case.from_json(request["case"]), request["folder"])
    return {}


_ACTIONS: Final = {"describe": _describe, "measure": _measure, "images": _images}


def _reason(error: BaseException) -> str:
    """The error in one line; of a traceback that came from a worker, the last line."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    return lines[0] if len(lines) == 1 else lines[-1].strip()


def _send(channel: int, answer: dict[str, Any]) -> None:
    os.write(channel, json.dumps(answer).encode() + b"\n")


def _answer(sender: connection.Connection[Any, Any], request: dict[str, Any]) -> None:
    """The forked process: answers one request."""
    _end_with_parent()
    try:
        answer = _ACTIONS[request["action"]](request)
    except Exception as error:
        answer = {"failed": _reason(error)}
    sender.send(answer)


def _raise_descriptor_limit() -> None:
    """A batch of many tensors needs more than the usual 1024 on the stock way."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 65536 if hard == resource.RLIM_INFINITY else min(hard, 65536)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def main() -> None:
    """Serves until the input ends."""
    _end_with_parent()
    channel = os.dup(1)
    os.dup2(2, 1)
    _raise_descriptor_limit()
    try:
        import torch  # noqa: F401

        for module in json.loads(sys.argv[1])["modules"]:
            importlib.import_module(module)
    except Exception as error:
        _send(channel, {"failed": f"{type(error).__name__}: {_reason(error)}"})
        return
    _send(channel, {})
    fork = multiprocessing.get_context("fork")
    for line in sys.stdin:
        receiver, sender = fork.Pipe(duplex=False)
        process = fork.Process(target=_answer, args=(sender, json.loads(line)))
        process.start()
        process.join()
        if process.exitcode == 0 and receiver.poll():
            _send(channel, receiver.recv())
        else:
            _send(channel, {"failed": f"the process ended with status {process.exitcode}"})
        receiver.close()
        sender.close()


if __name__ == "__main__":
    main()
