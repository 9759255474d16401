"""Host memory of the accelerator through ``torchpin``: statistics, cap, cache, page-locking in place.

Also pinned memory for backends that are written in Python. The allocator itself, the registry and
their behaviour in threads and forked processes are tested in C++, see test_host_memory_cpp.py.
"""

from __future__ import annotations

import gc
import mmap
import multiprocessing
import os
import signal
import textwrap
import unittest
import weakref
from unittest import mock

import numpy as np
import torch
import torchpin
from common_pin import ACCELERATOR, BASE, DRIVER, run_script
from torch.testing._internal.common_utils import TestCase, run_tests
from torch.utils.data._utils.pin_memory import pin_memory

MIB = 1 << 20
ON_REFDEV = ACCELERATOR == "refdev"
# The allocator of the base for CUDA reports from 2.7 on.
HAS_STATS = ON_REFDEV or BASE >= (2, 7)
OutOfMemoryError = getattr(torch, "OutOfMemoryError", torch.cuda.OutOfMemoryError)

if ON_REFDEV:
    import torch_refdev


def pinned_empty(nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)


@unittest.skipIf(not HAS_STATS, "this PyTorch counts nothing for CUDA")
class StatisticsTest(TestCase):
    def setUp(self) -> None:
        super().setUp()
        gc.collect()
        pinned_empty(1)
        torchpin.empty_host_cache()

    def test_keys_and_sums(self) -> None:
        before = torchpin.host_memory_stats()
        held = pinned_empty(3 * MIB)
        during = torchpin.host_memory_stats()
        for name in ("active_bytes", "active_requests", "allocated_bytes", "allocations"):
            for part in ("current", "peak", "allocated", "freed"):
                self.assertIn(f"{name}.{part}", during)
            self.assertEqual(
                during[f"{name}.current"], during[f"{name}.allocated"] - during[f"{name}.freed"]
            )
            self.assertGreater(during[f"{name}.current"], before[f"{name}.current"])
        for name in ("host_alloc_time", "host_free_time"):
            for part in ("total", "max", "min", "count", "avg"):
                self.assertIn(f"{name}.{part}", during)
        self.assertEqual(during["num_host_alloc"], before["num_host_alloc"] + 1)
        self.assertEqual(list(during), sorted(during))
        del held
        torchpin.empty_host_cache()
        after = torchpin.host_memory_stats()
        self.assertEqual(after["allocated_bytes.current"], before["allocated_bytes.current"])
        self.assertGreater(after["num_host_free"], before["num_host_free"])

    def test_peaks_are_reset(self) -> None:
        pinned_empty(2 * MIB)
        torchpin.empty_host_cache()
        self.assertGreaterEqual(torchpin.host_memory_stats()["allocated_bytes.peak"], 2 * MIB)
        torchpin.reset_peak_host_memory_stats()
        stats = torchpin.host_memory_stats()
        self.assertEqual(stats["allocated_bytes.peak"], stats["allocated_bytes.current"])
        torchpin.reset_accumulated_host_memory_stats()
        self.assertEqual(torchpin.host_memory_stats()["allocated_bytes.allocated"], 0)

    def test_base_function_agrees(self) -> None:
        if hasattr(torch, "accelerator") and hasattr(torch.accelerator, "empty_host_cache"):
            # It does nothing before the device has a context.
            torch.ones(1).to(ACCELERATOR)
            pinned_empty(2 * MIB)
            before = torchpin.host_memory_stats()["allocated_bytes.current"]
            torch.accelerator.empty_host_cache()
            after = torchpin.host_memory_stats()["allocated_bytes.current"]
            self.assertLessEqual(after, before - 2 * MIB)
        else:
            self.assertLess(BASE, (2, 12))

    @unittest.skipIf(not ON_REFDEV, "PyTorch's allocator for CUDA rounds up to powers of two")
    def test_waste(self) -> None:
        generator = torch.Generator().manual_seed(0)
        before = torch_refdev.counters()["locked_bytes"]
        live: list[torch.Tensor] = []
        peak_live = peak_locked = 0
        for size in torch.randint(1, 4 * MIB, (400,), generator=generator).tolist():
            if len(live) == 16:
                live.pop(0)
            live.append(pinned_empty(size))
            peak_live = max(peak_live, sum(tensor.numel() for tensor in live))
            peak_locked = max(peak_locked, torch_refdev.counters()["locked_bytes"] - before)
        self.assertLessEqual(peak_locked / peak_live, 1.13)
        torchpin.empty_host_cache()
        locked = torch_refdev.counters()["locked_bytes"] - before
        self.assertLessEqual(locked / sum(tensor.numel() for tensor in live), 1.13)
        live.clear()
        torchpin.empty_host_cache()
        self.assertEqual(torch_refdev.counters()["locked_bytes"], before)


class CapTest(TestCase):
    @unittest.skipIf(not ON_REFDEV, "PyTorch's allocator for CUDA has no cap")
    def test_cap(self) -> None:
        self.assertIsNone(torchpin.max_host_memory())
        torchpin.empty_host_cache()
        held = torchpin.host_memory_stats()["allocated_bytes.current"]
        try:
            self.assertEqual(torchpin.max_host_memory(held + 4 * MIB), held + 4 * MIB)
            first = pinned_empty(3 * MIB)
            with self.assertRaises(OutOfMemoryError) as raised:
                pinned_empty(2 * MIB)
            text = str(raised.exception)
            for part in (str(2 * MIB), str(held + 4 * MIB), "ulimit -l"):
                self.assertIn(part, text)
            del first
            # What is unused makes room.
            self.assertTrue(pinned_empty(4 * MIB).is_pinned())
            with self.assertRaises(ValueError):
                torchpin.max_host_memory(-1)
        finally:
            torchpin.max_host_memory(None)
        self.assertIsNone(torchpin.max_host_memory())

    @unittest.skipIf(DRIVER is None, "there is no way to make a GPU's driver refuse")
    def test_refused_batches_take_what_is_unused(self) -> None:
        torchpin.empty_host_cache()
        unused = [pinned_empty(MIB // 2) for _ in range(8)]
        del unused  # They stay page-locked in the cache, all together too small for what follows.
        locked = DRIVER.counters()["locked_bytes"]
        DRIVER.set_locked_limit(locked + 6 * MIB)
        try:
            batch = pin_memory([torch.ones(2 * MIB), torch.ones(8)])
            self.assertTrue(all(tensor.is_pinned() for tensor in batch))
            self.assertLess(DRIVER.counters()["locked_bytes"], locked + 6 * MIB)
        finally:
            DRIVER.set_locked_limit(None)
        self.assertEqual(batch, [torch.ones(2 * MIB), torch.ones(8)])

    @unittest.skipIf(ON_REFDEV, "the allocator of refdev can be capped")
    def test_no_cap(self) -> None:
        with self.assertRaisesRegex(NotImplementedError, "A cap of 1048576 bytes .* has no cap"):
            torchpin.max_host_memory(MIB)

    def test_allocator_that_has_no_cap(self) -> None:
        done = run_script(
            """
            import torch, torch_refdev, torchpin
            for arguments in ((1 << 20,), (None,), ()):
                try:
                    torchpin.max_host_memory(*arguments)
                except NotImplementedError as error:
                    print(str(error).partition(" was asked for, but ")[0], "HostMemoryCache" in str(error))
            """,
            broken="null_allocator,no_host_allocator",
        )
        self.assertExpectedInline(
            done.stdout,
            """\
A cap of 1048576 bytes on page-locked host memory True
No cap on page-locked host memory True
The cap on page-locked host memory True
""",
        )

    def test_environment(self) -> None:
        run_script(
            """
            import torch, torch_refdev, torchpin
            torch.empty(1, pin_memory=True)
            assert torchpin.max_host_memory() == 3 << 19, torchpin.max_host_memory()
            """,
            TORCHPIN_MAX_HOST_MEMORY="1.5M",
        )
        output = run_script(
            """
            import torch, torch_refdev, torchpin
            torch.empty(1, pin_memory=True)
            assert torchpin.max_host_memory() is None
            """,
            TORCHPIN_MAX_HOST_MEMORY="much",
        )
        self.assertIn("TORCHPIN_MAX_HOST_MEMORY is 'much'", output.stderr)


class RegisterTest(TestCase):
    """Page-locking in place, on whatever accelerator there is."""

    def setUp(self) -> None:
        super().setUp()
        gc.collect()
        self.before = self.registered()

    @staticmethod
    def registered() -> tuple[int, int]:
        """Ranges registered, and bytes locked for them."""
        ranges, nbytes = torchpin._C._host_memory_registered()
        if ON_REFDEV:
            locked = DRIVER.counters()["locked_bytes"]
            return ranges, locked - torchpin.host_memory_stats()["allocated_bytes.current"]
        return ranges, nbytes

    def assert_nothing_left(self) -> None:
        gc.collect()
        self.assertEqual(self.registered(), self.before)

    def test_context(self) -> None:
        tensor = torch.arange(100_000)
        address = tensor.data_ptr()
        self.assertFalse(tensor.is_pinned())
        with torchpin.register_host_memory(tensor) as same:
            self.assertIs(same, tensor)
            self.assertTrue(tensor.is_pinned())
            self.assertTrue(tensor[10:20].is_pinned())
            self.assertTrue(tensor.untyped_storage().is_pinned())
            self.assertEqual(tensor.pin_memory().data_ptr(), address)
            there = tensor.to(ACCELERATOR, non_blocking=True)
            self.assertEqual(there.cpu(), torch.arange(100_000))
        self.assertFalse(tensor.is_pinned())
        self.assertEqual(tensor.data_ptr(), address)
        self.assertEqual(tensor, torch.arange(100_000))
        self.assert_nothing_left()

    def test_is_counted(self) -> None:
        tensor = torch.zeros(50_000)
        first = torchpin.register_host_memory(tensor)
        second = torchpin.register_host_memory(tensor)
        first.unregister()
        first.unregister()
        self.assertTrue(tensor.is_pinned())
        self.assertTrue(torchpin.unregister_host_memory(tensor))
        self.assertFalse(tensor.is_pinned())
        self.assertFalse(torchpin.unregister_host_memory(tensor))
        second.unregister()
        self.assert_nothing_left()

    def test_goes_with_its_memory(self) -> None:
        tensor = torch.zeros(500_000)
        registration = torchpin.register_host_memory(tensor)
        self.assertNotEqual(self.registered(), self.before)
        view = tensor[1000:]
        del tensor
        self.assertTrue(view.is_pinned())
        del view
        self.assert_nothing_left()
        registration.unregister()

    def test_memory_that_is_replaced(self) -> None:
        tensor = torch.zeros(1000)
        torchpin.register_host_memory(tensor)
        tensor.resize_(1_000_000)
        self.assertFalse(tensor.is_pinned())
        self.assert_nothing_left()

    def test_address_used_again(self) -> None:
        for i in range(50):
            tensor = torch.full((300_000,), i, dtype=torch.int32)
            self.assertFalse(tensor.is_pinned())
            torchpin.register_host_memory(tensor)
            self.assertTrue(tensor.is_pinned())
            self.assertEqual(tensor.to(ACCELERATOR, non_blocking=True).cpu(), tensor)
            del tensor
        self.assert_nothing_left()

    def test_part_of_a_storage(self) -> None:
        whole = torch.zeros(64 * 1024, dtype=torch.uint8)
        part = whole[16 * 1024 : 32 * 1024]
        with torchpin.register_host_memory(part):
            self.assertTrue(part.is_pinned())
            self.assertTrue(part[100:].is_pinned())
            self.assertFalse(whole.is_pinned())
            self.assertIs(pin_memory(part), part)
        # From the first byte on: a driver is asked about an address, not about a range.
        with torchpin.register_host_memory(whole[:4096]):
            self.assertTrue(whole[:4096].is_pinned())
            self.assertFalse(whole.is_pinned() or whole[100:].is_pinned())
            pinned = whole.pin_memory()
            self.assertTrue(pinned.is_pinned())
            self.assertNotEqual(pinned.data_ptr(), whole.data_ptr())
        self.assert_nothing_left()

    @unittest.skipIf(not ON_REFDEV, "only refdev counts calls of its driver")
    def test_calls_of_the_driver(self) -> None:
        whole = torch.zeros(100 * 4096, dtype=torch.uint8)
        start = -whole.data_ptr() % 4096
        aligned = whole[start : start + 64 * 4096]
        pinned_empty(1)  # whether the backend recognises its memory is tried once
        # The driver counts who uses a page, so that one that other memory may share is no call of its
        # own. For drivers of whole pages see host_memory_test.cpp.
        for tensor in (aligned, aligned[5:], aligned[5:-5]):
            before = torch_refdev.counters()
            torchpin.register_host_memory(tensor).unregister()
            after = torch_refdev.counters()
            self.assertEqual(after["pin_calls"] - before["pin_calls"], 1)
            self.assertEqual(after["unpin_calls"] - before["unpin_calls"], 1)
        self.assert_nothing_left()

    @unittest.skipIf(not ON_REFDEV, "what CUDA does with two ranges in a page is its own affair")
    def test_neighbours_in_one_page(self) -> None:
        whole = torch.zeros(5 * 4096, dtype=torch.uint8)
        # On a page boundary, to know who shares what.
        start = -whole.data_ptr() % 4096
        left = whole[start : start + 4096 + 1000]
        right = whole[start + 4096 + 1000 : start + 3 * 4096]
        first = torchpin.register_host_memory(left)
        second = torchpin.register_host_memory(right)
        self.assertTrue(left.is_pinned() and right.is_pinned())
        first.unregister()
        self.assertTrue(right.is_pinned())
        self.assertFalse(left.is_pinned())
        self.assertTrue(torch_refdev.is_host_pinned(right.data_ptr()))
        second.unregister()
        self.assertFalse(torch_refdev.is_host_pinned(right.data_ptr()))
        self.assert_nothing_left()

    def test_shared_memory(self) -> None:
        tensor = torch.arange(100_000).share_memory_()
        address = tensor.data_ptr()
        torchpin.register_host_memory(tensor)
        self.assertTrue(tensor.is_pinned() and tensor.is_shared())
        self.assertEqual(tensor.data_ptr(), address)
        context = multiprocessing.get_context("fork")
        process = context.Process(target=tensor.__setitem__, args=(5, 77))
        process.start()
        process.join()
        self.assertEqual(process.exitcode, 0)
        self.assertEqual(tensor[4:7], torch.tensor([4, 77, 6]))
        # Sent elsewhere it is the same memory still.
        kind, arguments = torch.multiprocessing.reductions.reduce_storage(tensor.untyped_storage())
        self.assertIsNotNone(kind)
        self.assertEqual(tensor.data_ptr(), address)
        del arguments, tensor, process
        self.assert_nothing_left()

    def test_buffers(self) -> None:
        array = np.arange(100_000)
        with torchpin.register_host_memory(array):
            self.assertTrue(torch.from_numpy(array).is_pinned())
        self.assertFalse(torch.from_numpy(array).is_pinned())
        torchpin.register_host_memory(array[10:])
        self.assertTrue(torch.from_numpy(array[10:]).is_pinned())
        del array
        self.assert_nothing_left()

        data = bytearray(200_000)
        torchpin.register_host_memory(data)
        with self.assertRaises(BufferError):
            data.extend(b"more")
        self.assertTrue(torch.frombuffer(data, dtype=torch.uint8).is_pinned())
        self.assertTrue(torchpin.unregister_host_memory(data))
        self.assertFalse(torchpin.unregister_host_memory(data))
        data.extend(b"more")

        with mmap.mmap(-1, MIB) as mapped, torchpin.register_host_memory(mapped):
            tensor = torch.frombuffer(mapped, dtype=torch.uint8)
            self.assertTrue(tensor.is_pinned())
            del tensor
        self.assert_nothing_left()

    def test_memory_that_is_pinned_already(self) -> None:
        tensor = torch.ones(1000).pin_memory()
        with torchpin.register_host_memory(tensor) as same:
            self.assertIs(same, tensor)
        self.assertTrue(tensor.is_pinned())
        self.assert_nothing_left()

    def test_nothing_to_lock(self) -> None:
        for empty in (torch.empty(0), torch.empty(3, 0), bytearray()):
            torchpin.register_host_memory(empty).unregister()
        self.assert_nothing_left()

    def test_what_cannot_be_locked(self) -> None:
        for tensor in (torch.ones(2, device="meta"), torch.eye(3).to_sparse()):
            with self.assertRaisesRegex(ValueError, "only dense CPU tensors"):
                torchpin.register_host_memory(tensor)
        with self.assertRaises(TypeError):
            torchpin.register_host_memory("text")

    @unittest.skipIf(DRIVER is None, "there is no way to make a GPU's driver refuse")
    def test_refusal(self) -> None:
        tensor = torch.zeros(MIB)
        DRIVER.set_locked_limit(DRIVER.counters()["locked_bytes"] + 8192)
        try:
            with self.assertRaisesRegex(RuntimeError, "Cannot page-lock 4194304 bytes"):
                torchpin.register_host_memory(tensor)
        finally:
            DRIVER.set_locked_limit(None)
        self.assertFalse(tensor.is_pinned())
        self.assert_nothing_left()
        # The device has no error pending.
        self.assertEqual(torch.ones(3).to(ACCELERATOR).cpu(), torch.ones(3))

    @unittest.skipIf(DRIVER is None, "needs a copy that is held back")
    def test_copies_read_it_directly(self) -> None:
        tensor = torch.zeros(1000)
        with torchpin.register_host_memory(tensor):
            with DRIVER.hold_copies():
                there = tensor.to(ACCELERATOR, non_blocking=True)
                tensor.fill_(7)
            self.assertEqual(there.cpu(), torch.full((1000,), 7.0))

    def test_copies_in_flight_are_waited_for(self) -> None:
        """Memory may be written to, or used for something else, once it is not registered any more."""
        numbers = 4 * MIB  # mapped by itself: freed memory is gone, and an address comes again
        if DRIVER is not None:
            DRIVER.set_copy_delay(0.02)
        try:
            for way in ("unregister", "by data", "freed", "replaced", "array"):
                tensor = torch.full((numbers,), 3.0)
                data = tensor.numpy() if way == "array" else tensor
                registration = torchpin.register_host_memory(data)
                there = torch.empty(numbers, device=ACCELERATOR)
                for _ in range(3):
                    there.copy_(tensor, non_blocking=True)
                if way in ("unregister", "array"):
                    registration.unregister()
                elif way == "by data":
                    torchpin.unregister_host_memory(data)
                elif way == "replaced":
                    tensor.resize_(2 * numbers)
                elif way == "freed":
                    del tensor, data
                    tensor = data = torch.empty(numbers)
                tensor.fill_(-1.0)
                self.assertEqual(there.cpu(), torch.full((numbers,), 3.0), msg=way)
                del tensor, data, registration

            back = torch.zeros(numbers)
            registration = torchpin.register_host_memory(back)
            back.copy_(there, non_blocking=True)
            registration.unregister()
            self.assertEqual(back, torch.full((numbers,), 3.0))
        finally:
            if DRIVER is not None:
                DRIVER.set_copy_delay(0)
        self.assert_nothing_left()

    def test_cuda_is_waited_for_unless_a_graph_is_captured(self) -> None:
        # What is asked of CUDA, without a GPU: to wait is an error while a graph is captured.
        from torch.cuda import _host_registration

        calls: list[str] = []
        capturing = False

        def answer(name: str, value: object = None) -> mock.Mock:
            return mock.Mock(side_effect=lambda *args: calls.append(f"{name}{args}") or value)

        cudart = mock.Mock(cudaHostUnregister=answer("cudaHostUnregister", 0))
        with (
            mock.patch.object(torch.cuda, "is_current_stream_capturing", lambda: capturing),
            mock.patch.object(torch.cuda, "device_count", lambda: 3),
            mock.patch.object(torch.cuda, "synchronize", answer("synchronize")),
            mock.patch.object(torch.cuda, "cudart", lambda: cudart),
            mock.patch.object(
                torch._C, "_cuda_hasPrimaryContext", lambda device: device != 1, create=True
            ),
        ):
            _host_registration.unlock(4096, 8192)
            waited = ["synchronize(0,)", "synchronize(2,)"]
            self.assertEqual(calls, [*waited, "cudaHostUnregister(4096,)"])
            calls.clear()
            capturing = True
            _host_registration.unlock(4096, 8192)
            self.assertEqual(calls, ["cudaHostUnregister(4096,)"])

    def test_registration_is_an_object(self) -> None:
        tensor = torch.zeros(1000)
        registration = torchpin.register_host_memory(tensor)
        self.assertIsInstance(registration, torchpin.HostMemoryRegistration)
        self.assertEqual(registration.nbytes, 4000)
        self.assertEqual(repr(registration), "<HostMemoryRegistration of 4000 bytes>")
        with registration as same:
            self.assertIs(same, tensor)
        self.assertEqual(repr(registration), "<HostMemoryRegistration of 4000 bytes, undone>")
        storage = tensor.untyped_storage()
        with torchpin.register_host_memory(storage) as same:
            self.assertIs(same, storage)
            self.assertTrue(tensor.is_pinned())
        # It keeps nothing alive, also in a circle with what it stands for.
        tensor.registration = torchpin.register_host_memory(tensor)
        gone = weakref.ref(tensor)
        del tensor, storage, same
        gc.collect()
        self.assertIsNone(gone())
        self.assert_nothing_left()

    def test_forked_child(self) -> None:
        tensor = torch.zeros(100_000)
        registration = torchpin.register_host_memory(tensor)
        child = os.fork()
        if child == 0:
            status = 1
            try:
                pinned = torchpin._C._host_memory_registered()[0]
                registration.unregister()
                del tensor
                gc.collect()
                status = 0 if pinned == 0 else 2
            finally:
                os._exit(status)
        self.assertEqual(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), 0)
        self.assertTrue(tensor.is_pinned())
        registration.unregister()
        self.assert_nothing_left()


PYTHON_BACKEND = """
import ctypes, sys, warnings
import torch, torchpin

locked = {}
events = []

def page_lock(address, nbytes):
    assert address % 4096 == 0 and nbytes % 4096 == 0
    if sum(locked.values()) + nbytes > LIMIT:
        return False
    locked[address] = nbytes

def unlock(address, nbytes):
    assert locked.pop(address) == nbytes

class Module:
    @staticmethod
    def is_available(): return True
    @staticmethod
    def device_count(): return 1
    @staticmethod
    def current_device(): return 0
    @staticmethod
    def set_device(index): pass
    @staticmethod
    def _is_in_bad_fork(): return False
    @staticmethod
    def is_initialized(): return True
    @staticmethod
    def manual_seed_all(seed): pass

LIMIT = 1 << 30
# What PyTorch offers to such backends from 2.10 on: hooks and a device guard.
setup = getattr(
    torch.utils.backend_registration, "_setup_privateuseone_for_python_backend", None
)
if setup is not None:
    setup(rename="pydev", backend_module=Module())
else:
    torch.utils.rename_privateuse1_backend("pydev")
    torch._register_device_module("pydev", Module)
"""


class PythonBackendTest(TestCase):
    """A backend without a line of C++."""

    def test_pinning(self) -> None:
        run_script(
            PYTHON_BACKEND
            + """
try:
    torch.ones(3).pin_memory()
except RuntimeError as error:
    assert "pydev" in str(error), error
else:
    raise AssertionError("pinned without functions")

torchpin.register_host_memory_functions(page_lock, unlock)
tensor = torch.arange(1000.0)
pinned = tensor.pin_memory()
assert torch.equal(pinned, tensor) and pinned.is_pinned() and not tensor.is_pinned()
assert pinned.pin_memory() is pinned and pinned[5:].is_pinned()
assert any(a <= pinned.data_ptr() < a + n for a, n in locked.items())
assert torch.empty(10, pin_memory=True).is_pinned()

stats = torchpin.host_memory_stats()
assert stats["allocated_bytes.current"] == sum(locked.values()), stats
del pinned
torchpin.empty_host_cache()
assert not locked and torchpin.host_memory_stats()["allocated_bytes.current"] == 0
with torchpin.register_host_memory(tensor):
    assert tensor.is_pinned() and sum(locked.values()) == 4096 * len(locked)
assert not locked and not tensor.is_pinned()

LIMIT = 1 << 20
try:
    torch.zeros(1 << 20).pin_memory()
except torch._C._OutOfMemoryError if hasattr(torch._C, "_OutOfMemoryError") else RuntimeError as error:
    assert "the driver refused" in str(error), error
else:
    raise AssertionError("pinned beyond the limit")
LIMIT = 1 << 30

def broken(address, nbytes):
    raise KeyError("no such driver")
torchpin.register_host_memory_functions(broken, unlock)
try:
    torch.zeros(1 << 20).pin_memory()
except RuntimeError as error:
    assert "page-lock function" in str(error) and "no such driver" in str(error), error
else:
    raise AssertionError("pinned by a broken function")
for wrong in ((page_lock, None), (None, unlock)):
    try:
        torchpin.register_host_memory_functions(*wrong)
    except TypeError:
        pass
    else:
        raise AssertionError(wrong)
torchpin.register_host_memory_functions(page_lock, unlock)

from torch.utils.data import DataLoader, TensorDataset
data = TensorDataset(torch.arange(64.0).reshape(16, 4))
warnings.simplefilter("error")
# Without a device guard a pin thread cannot select a device, on any PyTorch.
for workers in (0, 2) if setup is not None else (0,):
    batches = [batch for (batch,) in DataLoader(data, batch_size=4, pin_memory=True, num_workers=workers)]
    assert all(batch.is_pinned() for batch in batches)
    assert torch.equal(torch.cat(batches), data.tensors[0])
kept = torch.ones(10).pin_memory()  # freed when the interpreter is gone
""",
            accelerator=None,
        )

    def test_events(self) -> None:
        run_script(
            PYTHON_BACKEND
            + """
class Event:
    done = False

def record_event(stream):
    assert isinstance(stream, torch.Stream), stream
    events.append(Event())
    return events[-1]

torchpin.register_host_memory_functions(
    page_lock, unlock, record_event=record_event, query_event=lambda event: event.done
)
stream = torch.Stream(stream_id=3, device_index=0, device_type=20)
pinned = torch.ones(100_000).pin_memory()
address = pinned.data_ptr()
assert torchpin.record_host_memory_use(pinned[50:], stream)
assert not torchpin.record_host_memory_use(torch.ones(3), stream)
del pinned
assert len(events) == 1
other = torch.ones(100_000).pin_memory()
assert other.data_ptr() != address
del other
second = torch.ones(100_000).pin_memory()
assert second.data_ptr() != address
events[0].done = True
assert torch.ones(100_000).pin_memory().data_ptr() == address
""",
            accelerator=None,
        )


class StandInTest(TestCase):
    EMPTY = """
    import torch, torch_refdev
    torch.ones(3).to("refdev")
    if hasattr(torch, "accelerator") and hasattr(torch.accelerator, "empty_host_cache"):
        torch._C._accelerator_emptyHostCache()
        torch.accelerator.empty_host_cache()
    print("alive")
    """

    def test_empty_host_cache_of_any_backend(self) -> None:
        ways = ["", "null_allocator", "no_hooks", "no_allocator", "plain_allocator"]
        for broken in [*ways, "python_hooks"] if BASE >= (2, 10) else ways:
            for allocator in ("", ",no_host_allocator"):
                done = run_script(
                    textwrap.dedent(self.EMPTY)
                    + textwrap.dedent(
                        """
                        import torchpin
                        torchpin.empty_host_cache()
                        torchpin.host_memory_stats()
                        torchpin.reset_peak_host_memory_stats()
                        """
                    ),
                    broken=broken + allocator,
                )
                self.assertEqual(done.stdout, "alive\n", msg=broken + allocator)

    def test_empty_host_cache_of_stock(self) -> None:
        """What torchpin is measured by: these releases do not survive it."""
        crashes = (2, 12) <= BASE <= (2, 14)
        done = run_script(
            self.EMPTY, broken="no_host_allocator", status=None, TORCHPIN="0", timeout=60
        )
        self.assertEqual(done.returncode, -signal.SIGSEGV if crashes else 0, msg=done.stderr)

    def test_stand_in_hands_on_to_the_allocator_of_the_hooks(self) -> None:
        run_script(
            """
            import torch, torch_refdev, torchpin
            MIB = 1 << 20
            def held():
                return torchpin.host_memory_stats()["allocated_bytes.current"]
            # Reports of copies arrive where they belong.
            source = torch.full((MIB,), 1.0).pin_memory()
            address = source.data_ptr()
            with torch_refdev.hold_copies():
                there = source.to("refdev", non_blocking=True)
                del source
                other = torch.full((MIB,), 2.0).pin_memory()
                assert other.data_ptr() != address
            assert there.cpu().eq(1).all()
            del other
            torch.refdev.synchronize()
            assert held() >= 4 * MIB
            if hasattr(torch, "accelerator") and hasattr(torch.accelerator, "empty_host_cache"):
                torch.accelerator.empty_host_cache()
            else:
                torchpin.empty_host_cache()
            assert held() == 0, held()
            """,
            broken="no_host_allocator",
        )

    def test_backend_without_hooks(self) -> None:
        run_script(
            PYTHON_BACKEND
            + """
if hasattr(torch._C, "_accelerator_emptyHostCache"):
    torch._C._accelerator_emptyHostCache()
torchpin.empty_host_cache()
assert torchpin.host_memory_stats() == {}
try:
    torchpin.register_host_memory(torch.ones(3))
except RuntimeError as error:
    assert "register_host_memory_functions" in str(error), error
else:
    raise AssertionError("registered")
""",
            accelerator=None,
        )

    def test_no_accelerator(self) -> None:
        run_script(
            """
            import torch, torchpin
            torchpin.empty_host_cache()
            torchpin.reset_peak_host_memory_stats()
            for call in (
                lambda: torchpin.max_host_memory(1 << 20),
                lambda: torchpin.register_host_memory(torch.ones(3)),
                lambda: torchpin.register_host_memory_functions(print, print),
            ):
                try:
                    call()
                except RuntimeError as error:
                    print(error)
                else:
                    raise AssertionError(call)
            """,
            accelerator=None,
        )


if __name__ == "__main__":
    run_tests()
