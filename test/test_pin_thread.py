"""The pin thread: its device, its errors, its end, and what a forked child inherits of it."""

from __future__ import annotations

import errno
import gc
import multiprocessing
import multiprocessing.reduction
import os
import pathlib
import queue
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
import unittest.mock
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from common_pin import ACCELERATOR, Samples, accelerator_module, environment, run_script
from torch._utils import ExceptionWrapper
from torch.testing._internal.common_utils import (
    TestCase,
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
)
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torch.utils.data._utils import pin_memory as module
from torch.utils.data._utils.pin_memory import PinThreadError
from torchpin import _C


class TwoArguments(Exception):
    """Cannot be made from a message."""

    def __init__(self, code: int, detail: str) -> None:
        super().__init__(f"{detail} ({code})")
        self.code = code
        self.detail = detail


class Silent(Exception):
    """Drops the message that it is made from."""

    def __str__(self) -> str:
        return "silent"


def raise_it(error: BaseException) -> Any:
    raise error


class Unpicklable:
    """Raises where it is unpickled."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __reduce__(self) -> Any:
        return raise_it, (self.error,)


class WithDescriptor:
    """Brings an open file along, as tensors in shared memory do."""

    def __reduce__(self) -> Any:
        return take_descriptor, (multiprocessing.reduction.DupFd(0),)


def take_descriptor(descriptor: Any) -> int:
    os.close(descriptor.detach())
    return 1


class RaisesInPin:
    """Raises where it is pinned."""

    def __init__(self, make: Callable[[], BaseException]) -> None:
        self.make = make

    def pin_memory(self) -> Any:
        raise self.make()


class CountsThreads:
    """Pinned, it is the number of threads that operators take."""

    def pin_memory(self) -> int:
        return torch.get_num_threads()


class At(Dataset):
    """Tensors, and something else at index 2."""

    def __init__(self, item: Any) -> None:
        self.item = item

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Any:
        return self.item if index == 2 else torch.full((3,), float(index))


class DiesAt(At):
    def __getitem__(self, index: int) -> Any:
        if index == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


class StreamAt(IterableDataset):
    def __init__(self, item: Any) -> None:
        self.item = item

    def __iter__(self) -> Any:
        yield torch.zeros(1)
        yield self.item


def identity(value: Any) -> Any:
    return value


def pin_threads() -> list[threading.Thread]:
    return [
        thread
        for thread in threading.enumerate()
        if getattr(thread, "_target", None) is module._pin_memory_loop
    ]


def take_all(dataset: Any, pin_memory: bool = True, **options: Any) -> tuple[int, Any, float]:
    """Batches before the error, the error, and the seconds that it took to come."""
    count = 0
    last = time.monotonic()
    try:
        loader = DataLoader(
            dataset, batch_size=None, collate_fn=identity, pin_memory=pin_memory, **options
        )
        for _ in loader:
            count += 1
            last = time.monotonic()
    except BaseException as error:
        # Without the frames, which keep the iterator alive.
        return count, error.with_traceback(None), time.monotonic() - last
    return count, None, time.monotonic() - last


KINDS: dict[str, Callable[[], BaseException]] = {
    "lookup": lambda: LookupError("text of it"),
    "key": lambda: KeyError("text of it"),
    "two arguments": lambda: TwoArguments(7, "text of it"),
    "unicode": lambda: UnicodeDecodeError("utf8", b"a", 0, 1, "text of it"),
    "os": lambda: FileNotFoundError(2, "text of it", "name"),
    "silent": Silent,
    "type": lambda: TypeError("text of it"),
    "exit": lambda: SystemExit("text of it"),
}


def make_lookup() -> BaseException:
    return LookupError("text of it")


@instantiate_parametrized_tests
class TestErrors(TestCase):
    def tearDown(self) -> None:
        gc.collect()
        deadline = time.monotonic() + 10
        while (pin_threads() or multiprocessing.active_children()) and time.monotonic() < deadline:
            time.sleep(0.01)
        self.assertEqual(pin_threads(), [])
        self.assertEqual(multiprocessing.active_children(), [])
        super().tearDown()

    def check(self, error: BaseException, like: BaseException, text: str = "text of it") -> None:
        self.assertIsInstance(error, type(like))
        self.assertEqual(type(error).__name__, type(like).__name__)
        self.assertIn(text, str(error))
        self.assertIn("in pin memory thread for device", str(error))
        self.assertIn("Traceback (most recent call last)", str(error))

    @parametrize("name", sorted(KINDS))
    def test_error_of_an_own_pin_memory(self, name: str) -> None:
        like = KINDS[name]()
        with unittest.mock.patch.object(RaisesInPin, "pin_memory", lambda self: raise_it(like)):
            count, error, seconds = take_all(At(RaisesInPin(make_lookup)), num_workers=1)
        self.assertEqual(count, 2)
        self.check(error, like, "Silent" if name == "silent" else "text of it")
        self.assertLess(seconds, 4.5)  # the status check that used to find out takes five

    def test_its_arguments_and_attributes_arrive(self) -> None:
        like = TwoArguments(7, "text of it")
        with unittest.mock.patch.object(RaisesInPin, "pin_memory", lambda self: raise_it(like)):
            error = take_all(At(RaisesInPin(make_lookup)), num_workers=1)[1]
        self.assertEqual((error.code, error.detail), (7, "text of it"))
        like = FileNotFoundError(2, "text of it", "name")
        with unittest.mock.patch.object(RaisesInPin, "pin_memory", lambda self: raise_it(like)):
            error = take_all(At(RaisesInPin(make_lookup)), num_workers=1)[1]
        self.assertEqual(error.errno, 2)

    def test_stop_iteration_does_not_end_the_epoch_in_silence(self) -> None:
        with unittest.mock.patch.object(
            RaisesInPin, "pin_memory", lambda self: raise_it(StopIteration("text of it"))
        ):
            _, error, _ = take_all(At(RaisesInPin(make_lookup)), num_workers=1)
        self.check(error, RuntimeError())
        self.assertIn("StopIteration", str(error))

    @parametrize("name", ["lookup", "key", "two arguments", "unicode", "os"])
    def test_item_that_cannot_be_unpickled(self, name: str) -> None:
        if name == "two arguments":
            # Its own pickling fails already: made on arrival.
            item = Unpicklable(None)  # type: ignore[arg-type]
            item.__class__.__reduce__ = lambda self: (raise_two_arguments, ())  # type: ignore[method-assign]
        else:
            item = Unpicklable(KINDS[name]())
        try:
            for dataset, options in ((At(item), {}), (StreamAt(item), {})):
                plain_count, plain, _ = take_all(dataset, False, num_workers=1, **options)
                count, error, seconds = take_all(dataset, True, num_workers=1, **options)
                self.assertEqual(count, plain_count)
                self.check(error, plain)
                self.assertLess(seconds, 4.5)
        finally:
            if name == "two arguments":
                Unpicklable.__reduce__ = _reduce  # type: ignore[method-assign]

    def test_error_with_persistent_workers_and_timeout(self) -> None:
        item = Unpicklable(LookupError("text of it"))
        _, error, seconds = take_all(At(item), num_workers=1, persistent_workers=True, timeout=30)
        self.check(error, LookupError())
        self.assertLess(seconds, 4.5)

    def test_epochs_go_on_after_an_error(self) -> None:
        loader = DataLoader(
            At(Unpicklable(LookupError("text of it"))), batch_size=None, collate_fn=identity,
            num_workers=1, pin_memory=True,
        )  # fmt: skip
        for _ in range(3):
            iterator = iter(loader)
            self.assertTrue(next(iterator).is_pinned() and next(iterator).is_pinned())
            with self.assertRaises(LookupError):
                next(iterator)
            del iterator

    def test_device_that_cannot_be_selected(self) -> None:
        def refuse(index: int) -> None:
            raise RuntimeError(f"text of it {index}")

        with unittest.mock.patch.object(_C, "_select_pin_device", refuse):
            for options in ({}, {"persistent_workers": True}):
                count, error, seconds = take_all(At(1), num_workers=1, **options)
                self.assertEqual(count, 0)
                self.check(error, RuntimeError())
                self.assertLess(seconds, 4.5)

    def test_device_out_of_range(self) -> None:
        index = accelerator_module().device_count()
        done, out = threading.Event(), queue.Queue()
        thread = threading.Thread(
            target=module._pin_memory_loop, args=(queue.Queue(), out, index, done, ACCELERATOR)
        )
        thread.start()
        try:
            with self.assertRaisesRegex(RuntimeError, f"in pin memory thread for device {index}"):
                out.get(timeout=30)
        finally:
            done.set()
            thread.join()

    def test_lost_file_descriptor(self) -> None:
        def lost(*_: Any) -> int:
            raise RuntimeError("received 0 items of ancdata: text of it")

        with unittest.mock.patch("multiprocessing.reduction.recv_handle", lost):
            plain = take_all(At(WithDescriptor()), False, num_workers=1)[1]
            _, error, seconds = take_all(At(WithDescriptor()), True, num_workers=1)
        self.check(error, plain)
        self.assertLess(seconds, 4.5)

    def test_no_file_descriptors_left(self) -> None:
        def none_left(*_: Any) -> int:
            raise OSError(errno.EMFILE, "Too many open files")

        # The training loop looks whether that is so, and says what can be done.
        with (
            unittest.mock.patch("multiprocessing.reduction.recv_handle", none_left),
            unittest.mock.patch("tempfile.NamedTemporaryFile", none_left),
        ):
            plain = take_all(At(WithDescriptor()), False, num_workers=1)[1]
            error = take_all(At(WithDescriptor()), True, num_workers=1)[1]
        self.assertIs(type(error), type(plain))
        self.assertIn("ulimit -n", str(error))
        self.assertEqual(str(error), str(plain))

    def test_error_of_a_worker_passes_unchanged(self) -> None:
        class Bad(At):
            def __getitem__(self, index: int) -> Any:
                return raise_it(TwoArguments(7, "text of it")) if index == 2 else 1

        plain = take_all(Bad(1), False, num_workers=1)[1]
        error = take_all(Bad(1), True, num_workers=1)[1]
        self.assertIs(type(error), type(plain))
        self.assertIn("in DataLoader worker process 0", str(error))
        self.assertNotIn("in pin memory thread", str(error))

    def test_killed_worker_is_reported_as_without_pinning(self) -> None:
        error = take_all(DiesAt(1), True, num_workers=1)[1]
        self.assertIsInstance(error, RuntimeError)
        self.assertIn("DataLoader worker (pid", str(error))

    def test_broken_queue_raises_once_for_each_time_somebody_asks(self) -> None:
        class Broken:
            calls = 0

            def get(self, timeout: float) -> Any:
                self.calls += 1
                raise OSError("handle is closed")

        broken, out, done = Broken(), queue.Queue(), threading.Event()
        thread = threading.Thread(
            target=module._pin_memory_loop, args=(broken, out, 0, done, ACCELERATOR)
        )
        thread.start()
        try:
            for _ in range(3):
                with self.assertRaisesRegex(OSError, "handle is closed"):
                    out.get(timeout=30)
            self.assertLessEqual(out.qsize(), 1)
            self.assertLessEqual(broken.calls, 4)
        finally:
            done.set()
            thread.join()

    def test_wrapper_is_one_that_the_base_knows(self) -> None:
        try:
            raise ValueError("x")
        except ValueError as caught:
            wrapper = PinThreadError("in pin memory thread for device 0", caught)
        self.assertIsInstance(wrapper, ExceptionWrapper)
        with self.assertRaisesRegex(ValueError, "in pin memory thread for device 0"):
            wrapper.reraise()


_reduce = Unpicklable.__reduce__


def raise_two_arguments() -> Any:
    raise TwoArguments(7, "text of it")


class TestEnd(TestCase):
    def test_abandoned_iterator_leaves_nothing(self) -> None:
        iterator = iter(DataLoader(Samples(64), num_workers=2, pin_memory=True))
        next(iterator)
        started = time.monotonic()
        del iterator
        gc.collect()
        self.assertEqual(pin_threads(), [])
        self.assertLess(time.monotonic() - started, 4.5)

    def test_originals_are_gone_when_the_batch_is_delivered(self) -> None:
        class Held:
            """Counts in this process."""

            alive = 0

            def __init__(self) -> None:
                Held.alive += 1

            def __del__(self) -> None:
                Held.alive -= 1

            def pin_memory(self) -> str:
                return "pinned"

        source, out, done = queue.Queue(), queue.Queue(), threading.Event()
        thread = threading.Thread(
            target=module._pin_memory_loop, args=(source, out, 0, done, ACCELERATOR)
        )
        thread.start()
        try:
            for index in range(3):
                source.put((index, [Held(), torch.ones(4)]))
                found = out.get(timeout=30)
                self.assertEqual(found[0], index)
                self.assertEqual(found[1][0], "pinned")
                self.assertTrue(found[1][1].is_pinned())
                self.assertEqual(Held.alive, 0)
        finally:
            done.set()
            source.put((None, None))
            thread.join()

    def test_memory_of_a_batch_is_let_go_of_without_the_interpreter(self) -> None:
        """Dropping the objects frees nothing yet: the memory goes in a call of its own."""
        freed = threading.Event()
        seen: list[bool] = []
        pin_batch = _C._pin_batch

        class Watched:
            def __init__(self, retired: Any) -> None:
                self.retired = retired

            def release(self) -> None:
                seen.append(freed.is_set())
                self.retired.release()
                seen.append(freed.is_set())

        def watching(*arguments: Any) -> Any:
            result, retired, refusals = pin_batch(*arguments)
            return result, Watched(retired), refusals

        def sample() -> torch.Tensor:
            array = np.ones(1000)
            weakref.finalize(array, freed.set)
            return torch.from_numpy(array)

        source, out, done = queue.Queue(), queue.Queue(), threading.Event()
        source.put((0, {"x": [sample()]}))
        thread = threading.Thread(
            target=module._pin_memory_loop, args=(source, out, 0, done, ACCELERATOR)
        )
        with unittest.mock.patch.object(_C, "_pin_batch", watching):
            thread.start()
            try:
                found = out.get(timeout=30)[1]
            finally:
                done.set()
                source.put((None, None))
                thread.join()
        self.assertTrue(found["x"][0].is_pinned())
        self.assertEqual(seen, [False, True])

    def test_operators_in_the_thread_take_one_core(self) -> None:
        before = torch.get_num_threads()
        torch.set_num_threads(2)
        try:
            loader = DataLoader(
                At(CountsThreads()), batch_size=None, num_workers=1, pin_memory=True
            )
            self.assertEqual(list(loader)[2], 1)
            self.assertEqual(torch.get_num_threads(), 2)
        finally:
            torch.set_num_threads(before)


DEVICES = """
    import threading
    import torch
    import torch_refdev
    from torch.utils.data import DataLoader

    data = [torch.full((4,), float(i)) for i in range(8)]

    def threads_of(index):
        return set(torch_refdev.counters()["touches"][index])

    # Nothing is started by a loader that is made, nor by one without tensors.
    assert torch_refdev.counters()["contexts"] == set()
    list(DataLoader(["a", "b"], num_workers=1, pin_memory=True))
    assert torch_refdev.counters()["contexts"] == set(), torch_refdev.counters()

    # The current device of the code that makes the iterator counts, and no other is touched.
    torch.refdev.set_device(1)
    loader = DataLoader(data, num_workers=1, pin_memory=True)
    iterator = iter(loader)
    torch.refdev.set_device(0)
    for batch in iterator:
        assert batch.is_pinned()
    assert threads_of(0) == set(), torch_refdev.counters()
    assert 0 not in torch_refdev.counters()["contexts"], torch_refdev.counters()

    # A context that is there is used; the thread selects its device.
    torch.ones(1, device="refdev:1")
    torch.refdev.set_device(1)
    seen = []

    class Own:
        def pin_memory(self):
            seen.append((threading.current_thread() is threading.main_thread(),
                         torch.refdev.current_device()))
            return 1

    class Records(torch.utils.data.Dataset):
        def __len__(self):
            return 2

        def __getitem__(self, index):
            return Own()

    list(DataLoader(Records(), batch_size=None, num_workers=1, pin_memory=True))
    assert seen == [(False, 1), (False, 1)], seen
    assert torch.refdev.current_device() == 1
    print("done")
"""

FORK = """
    import os
    import sys
    import threading
    import time

    import torch
    import torch_refdev
    from torch.utils.data import DataLoader, Dataset
    from torch.utils.data._utils import pin_memory as module

    inside = threading.Event()
    go_on = threading.Event()


    class Slow:
        # The first pin of the thread is under way for as long as the test wants.
        def pin_memory(self):
            inside.set()
            go_on.wait(60)
            return self


    class Records(Dataset):
        def __len__(self):
            return 4

        def __getitem__(self, index):
            return {"slow": Slow() if index == 0 else 1, "x": torch.ones(1 << 20)}


    def child():
        # All of ours that could wait for somebody who is not there any more.
        found = module.pin_memory({"a": [1, (2, "x")], "s": {3}, "d": Slow})
        assert found["a"] == [1, (2, "x")]
        module.register_pin_function(Records, lambda records: "registered")
        assert module.pin_memory([Records()]) == ["registered"]
        total = 0
        for batch in DataLoader(list(range(8)), batch_size=2, num_workers=1):
            total += int(batch.sum())
        assert total == 28
        # The accelerator does not work here; whatever it says, it must not wait.
        try:
            module.pin_memory([torch.ones(3)])
        except RuntimeError as error:
            assert "forked" in str(error), error


    def fork_and_wait():
        pid = os.fork()
        if pid == 0:
            import faulthandler
            faulthandler.dump_traceback_later(40, exit=True)
            try:
                child()
            except BaseException:
                import traceback
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


    iterator = iter(
        DataLoader(Records(), batch_size=None, num_workers=1, pin_memory=True)
    )
    assert inside.wait(60)
    assert fork_and_wait() == 0
    go_on.set()
    assert next(iterator)["x"].is_pinned()

    # And at random moments of pinning for real.
    stop = threading.Event()

    def keep_pinning():
        batch = [torch.ones(1 << 16) for _ in range(50)]
        while not stop.is_set():
            module.pin_memory(batch)

    thread = threading.Thread(target=keep_pinning, daemon=True)
    thread.start()
    for _ in range(4):
        time.sleep(0.003)
        assert fork_and_wait() == 0
    stop.set()
    thread.join()
    print("done")
"""


# What the thread is in the middle of when the program ends: a batch takes it long, the workers are ahead.
LEAVE = """
    import sys
    import torch
    import torch_refdev
    from torch.utils.data import DataLoader, Dataset

    class Images(Dataset):
        def __len__(self):
            return 1 << 40

        def __getitem__(self, index):
            return torch.ones(3, 224, 224)

    iterator = iter(DataLoader(Images(), batch_size=32, num_workers=2, pin_memory=True))
    batches = [next(iterator) for _ in range(4)]
    assert batches[0].is_pinned()
    if "error" in sys.argv:
        raise KeyError("of the program")
    if "go on" in sys.argv:
        print("ready", flush=True)
        for _ in iterator:
            pass
"""


RESTORE = """
import runpy, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
del sys.argv[0]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


class TestExit(TestCase):
    def test_program_that_leaves_in_the_middle_of_an_epoch(self) -> None:
        for mode in ("off", "copy", "auto"):
            for _ in range(3):
                found = self._run(mode)
                self.assertEqual((found.returncode, found.stderr), (0, ""))

    def test_error_in_the_middle_of_an_epoch(self) -> None:
        found = self._run("copy", "error")
        self.assertEqual(found.returncode, 1)
        self.assertTrue(found.stderr.endswith("KeyError: 'of the program'\n"), found.stderr)

    def test_interrupt_in_the_middle_of_an_epoch(self) -> None:
        """By Ctrl-C, which goes to the workers too: one traceback, and no process is left."""
        for mode in ("off", "copy", "auto"):
            for _ in range(3):
                found = self._run(mode, "go on")
                self.assertEqual(found.returncode, -signal.SIGINT)
                self.assertEqual(found.stderr.count("Traceback"), 1, found.stderr)
                self.assertTrue(found.stderr.endswith("\nKeyboardInterrupt\n"), found.stderr)

    def _run(self, mode: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        with tempfile.TemporaryDirectory(prefix="torchpin-test-") as folder:
            script = pathlib.Path(folder, "script.py")
            script.write_text(textwrap.dedent(LEAVE).lstrip("\n"))
            process = subprocess.Popen(
                # A shell starts what it puts in the background with SIGINT ignored, which is inherited.
                [sys.executable, "-c", RESTORE, str(script), *arguments],
                env=environment(TORCHPIN_TRANSPORT=mode),
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
            if "go on" in arguments:
                assert process.stdout is not None
                self.assertEqual(process.stdout.readline(), "ready\n")
                os.killpg(process.pid, signal.SIGINT)
            # Ends when the last process that can write into the pipes has ended.
            output, errors = process.communicate(timeout=120)
            return subprocess.CompletedProcess(process.args, process.returncode, output, errors)


class TestDeviceAndFork(TestCase):
    def test_device_of_the_iterator_and_no_other(self) -> None:
        self.assertIn("done", run_script(DEVICES).stdout)

    def test_child_forked_while_the_thread_pins(self) -> None:
        self.assertIn("done", run_script(FORK, timeout=300).stdout)


if __name__ == "__main__":
    run_tests()
