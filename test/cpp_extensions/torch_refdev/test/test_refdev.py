"""The reference accelerator behaves like hardware where host memory is concerned.

Nothing here needs torchpin: the file also runs with ``TORCHPIN=0`` (then with
``pytest --noconftest``). What would end the process, or needs a fresh one, runs
in a subprocess.
"""

import ctypes
import gc
import mmap
import multiprocessing
import os
import signal
import subprocess
import sys
import textwrap
import threading
import unittest

import torch
import torch_refdev
from torch.testing._internal.common_utils import TestCase, run_tests

BASE = tuple(int(part) for part in torch.__version__.split(".")[:2])


def run_script(source: str, broken: str = "", status: int = 0, **variables: str) -> str:
    """Runs a script in a fresh process that has torch and refdev; returns its output."""
    env = {**os.environ, "TORCH_REFDEV_BREAK": broken, **variables}
    script = "import os, sys, time, torch, torch_refdev\n" + textwrap.dedent(source)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script],
        env=env,
        capture_output=True,
        text=True,
        timeout=120,
    )
    if done.returncode != status:
        raise AssertionError(
            f"status {done.returncode}, expected {status}\n{done.stdout}\n{done.stderr}"
        )
    return done.stdout


def pinned(*size: int, value: float = 0.0) -> torch.Tensor:
    """Pinned by the factory functions, which ask the hooks on every release."""
    return torch.empty(*size, pin_memory=True).fill_(value)


class RefdevTestCase(TestCase):
    def setUp(self) -> None:
        super().setUp()
        self._restore()
        torch_refdev.reset_counters()

    def tearDown(self) -> None:
        self._restore()
        super().tearDown()

    def _restore(self) -> None:
        torch_refdev.set_copy_delay(0)
        torch_refdev.set_copy_bandwidth(None)
        torch_refdev.set_locked_limit(None)
        torch.refdev.set_device(0)
        for index in range(torch.refdev.device_count()):
            torch.refdev.set_stream(torch.refdev.default_stream(index))
            torch.refdev.synchronize(index)
        torch.refdev.set_device(0)


class TestCopies(RefdevTestCase):
    def test_copy_from_pinned_is_in_flight_when_the_call_returns(self):
        source = pinned(1000, value=1)
        with torch_refdev.hold_copies():
            target = source.to("refdev", non_blocking=True)
            self.assertEqual(torch_refdev.counters()["copies_in_flight"], 1)
            self.assertFalse(torch.refdev.current_stream().query())
        torch.refdev.synchronize()
        self.assertEqual(torch_refdev.counters()["copies_in_flight"], 0)
        self.assertEqual(torch_refdev.counters()["copies_direct"], 1)
        self.assertEqual(target.cpu(), torch.ones(1000))

    def test_writing_the_source_too_early_corrupts_the_target(self):
        source = pinned(1000, value=1)
        with torch_refdev.hold_copies():
            target = source.to("refdev", non_blocking=True)
            source.fill_(2)
        self.assertEqual(target.cpu(), torch.full((1000,), 2.0))

    def test_pageable_source_is_captured_before_the_call_returns(self):
        source = torch.ones(1000)
        with torch_refdev.hold_copies():
            target = source.to("refdev", non_blocking=True)
            source.fill_(2)
            self.assertEqual(torch_refdev.counters()["copies_in_flight"], 1)
        self.assertEqual(torch_refdev.counters()["copies_staged"], 1)
        self.assertEqual(target.cpu(), torch.ones(1000))

    def test_source_that_is_only_partly_locked_is_staged(self):
        memory = mmap.mmap(-1, 4 * mmap.PAGESIZE)
        source = torch.frombuffer(memory, dtype=torch.uint8)
        source.fill_(1)
        torch_refdev.host_register(source.data_ptr(), 2 * mmap.PAGESIZE)
        try:
            with torch_refdev.hold_copies():
                whole = source.to("refdev", non_blocking=True)
                half = source[: 2 * mmap.PAGESIZE].to("refdev", non_blocking=True)
                source.fill_(2)
        finally:
            torch_refdev.host_unregister(source.data_ptr())
        self.assertEqual(whole.cpu(), torch.ones_like(source))
        self.assertEqual(half.cpu(), torch.full_like(half.cpu(), 2))

    def test_copy_to_pinned_is_asynchronous(self):
        source = torch.ones(1000).to("refdev")
        target = pinned(1000)
        with torch_refdev.hold_copies():
            target.copy_(source, non_blocking=True)
            self.assertEqual(torch_refdev.counters()["copies_in_flight"], 1)
            self.assertEqual(target, torch.zeros(1000))
        torch.refdev.synchronize()
        self.assertEqual(target, torch.ones(1000))

    def test_copy_to_pageable_is_finished_when_the_call_returns(self):
        source = torch.ones(1000).to("refdev")
        torch_refdev.set_copy_delay(0.01)
        target = torch.zeros(1000).copy_(source, non_blocking=True)
        self.assertEqual(target, torch.ones(1000))

    def test_blocking_copy_is_finished_when_the_call_returns(self):
        torch_refdev.set_copy_delay(0.01)
        source = pinned(1000, value=1)
        target = source.to("refdev")
        self.assertTrue(torch.refdev.current_stream().query())
        source.fill_(2)
        self.assertEqual(target.cpu(), torch.ones(1000))

    def test_delay_and_bandwidth_keep_copies_in_flight(self):
        # So long that no load of the machine can hide it, and never waited for.
        for setting in ("set_copy_delay(3600)", "set_copy_bandwidth(1)"):
            run_script(
                f"""
                source = torch.ones(1000, pin_memory=True)
                torch_refdev.{setting}
                source.to("refdev", non_blocking=True)
                assert torch_refdev.counters()["copies_in_flight"] == 1
                assert not torch.refdev.current_stream().query()
                """
            )
        source = pinned(1000, value=1)
        torch_refdev.set_copy_delay(0.01)
        target = source.to("refdev", non_blocking=True)
        self.assertEqual(target.cpu(), torch.ones(1000))

    def test_waiting_for_a_copy_that_the_thread_holds_raises(self):
        source = pinned(10)
        with torch_refdev.hold_copies():
            target = source.to("refdev", non_blocking=True)
            with self.assertRaisesRegex(RuntimeError, "holds itself"):
                torch.refdev.synchronize()
            with self.assertRaisesRegex(RuntimeError, "holds itself"):
                target.cpu()
        torch.refdev.synchronize()

    def test_another_thread_waits_for_held_copies(self):
        source = pinned(10, value=1)
        results = []
        with torch_refdev.hold_copies():
            target = source.to("refdev", non_blocking=True)
            thread = threading.Thread(target=lambda: results.append(target.cpu()))
            thread.start()
            thread.join(0.2)
            self.assertTrue(thread.is_alive())
        thread.join(60)
        self.assertEqual(results[0], torch.ones(10))

    def test_layouts_and_types_survive(self):
        grid = torch.arange(24.0).reshape(2, 3, 4)
        views = {
            "transposed": grid.transpose(0, 2),
            "strided": grid[:, ::2, 1:],
            "expanded": torch.arange(3.0).expand(4, 3),
            "channels_last": torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last),
            "scalar": torch.tensor(3.0),
            "empty": torch.empty(0, 3),
            "conjugated": torch.randn(3, dtype=torch.complex64).conj(),
            "negative": torch.randn(3, dtype=torch.complex64).conj().imag,
            "bool": torch.tensor([True, False]),
            "half": torch.randn(5).half(),
        }
        for name, view in views.items():
            with self.subTest(name):
                moved = view.to("refdev")
                self.assertEqual(moved.cpu(), view)
                self.assertEqual(moved.to(torch.complex128).cpu(), view.to(torch.complex128))
                out = torch.empty_like(view).t() if view.dim() == 2 else torch.empty_like(view)
                shaped = view.t() if view.dim() == 2 else view
                self.assertEqual(out.copy_(moved.t() if view.dim() == 2 else moved), shaped)

    def test_target_layouts(self):
        source = torch.arange(12.0).reshape(3, 4)
        target = torch.zeros(4, 6, device="refdev")
        target.t()[1:4].copy_(source, non_blocking=True)
        expected = torch.zeros(4, 6)
        expected.t()[1:4].copy_(source)
        self.assertEqual(target.cpu(), expected)
        host = torch.zeros(8, 3)
        host[::2].copy_(source.to("refdev").t())
        self.assertEqual(host[::2], source.t())

    def test_copies_of_a_stream_keep_their_order(self):
        sources = [pinned(100, value=i) for i in range(20)]
        target = torch.empty(100, device="refdev")
        snapshots = []
        with torch_refdev.hold_copies():
            for source in sources:
                target.copy_(source, non_blocking=True)
                snapshots.append(target.clone())
        for i, snapshot in enumerate(snapshots):
            self.assertEqual(snapshot.cpu(), torch.full((100,), float(i)))

    def test_device_memory_is_not_used_again_before_its_copies(self):
        source = pinned(1 << 16, value=1)
        other = pinned(1 << 16, value=2)
        side = torch.refdev.Stream()
        with torch_refdev.hold_copies():
            dropped = torch.empty(1 << 16, device="refdev")
            dropped.copy_(source, non_blocking=True)
            address = dropped.data_ptr()
            del dropped
            with torch.refdev.stream(side):
                kept = torch.empty(1 << 16, device="refdev")
                self.assertNotEqual(kept.data_ptr(), address)
                kept.copy_(other, non_blocking=True)
        torch.refdev.synchronize()
        self.assertEqual(kept.cpu(), other)


class TestHostMemory(RefdevTestCase):
    def test_every_address_of_a_pinned_block_counts(self):
        tensor = pinned(10000)
        for address in (tensor.data_ptr(), tensor[1:].data_ptr(), tensor[-1:].data_ptr()):
            self.assertTrue(torch_refdev.is_host_pinned(address))
        self.assertFalse(torch_refdev.is_host_pinned(torch.ones(10000).data_ptr()))
        if BASE >= (2, 5):
            self.assertTrue(tensor.is_pinned())
            self.assertTrue(tensor[17:].is_pinned())
            self.assertFalse(torch.ones(10000).is_pinned())

    def test_tensor_pin_memory(self):
        if BASE < (2, 5) and os.environ.get("TORCHPIN") == "0":
            with self.assertRaises((RuntimeError, NotImplementedError)):
                torch.ones(3).pin_memory()
            return
        tensor = torch.arange(10.0).pin_memory()
        self.assertTrue(torch_refdev.is_host_pinned(tensor.data_ptr()))
        self.assertEqual(tensor, torch.arange(10.0))

    def test_host_memory_in_use_by_a_copy_is_not_given_out(self):
        for stream in (torch.refdev.current_stream(), torch.refdev.Stream()):
            with torch.refdev.stream(stream), torch_refdev.hold_copies():
                source = pinned(50000, value=1)
                address = source.data_ptr()
                target = source.to("refdev", non_blocking=True)
                del source
                reused = pinned(50000, value=2)
                self.assertNotEqual(reused.data_ptr(), address)
            stream.synchronize()
            self.assertEqual(target.cpu(), torch.ones(50000))
        self.assertEqual(torch_refdev.counters()["host_use_reports"], 2)

    def test_host_memory_is_reused_after_the_copy(self):
        torch_refdev.empty_pinned_cache()
        source = pinned(50000, value=1)
        address = source.data_ptr()
        target = source.to("refdev", non_blocking=True)
        torch.refdev.synchronize()
        del source
        calls = torch_refdev.counters()["pin_calls"]
        self.assertEqual(pinned(50000).data_ptr(), address)
        self.assertEqual(torch_refdev.counters()["pin_calls"], calls)
        self.assertEqual(target.cpu(), torch.ones(50000))

    def test_views_report_their_use_too(self):
        source = pinned(60000, value=1)
        part = source[30000:]
        with torch_refdev.hold_copies():
            target = part.to("refdev", non_blocking=True)
            address = source.data_ptr()
            del source, part
            self.assertNotEqual(pinned(60000, value=2).data_ptr(), address)
        self.assertEqual(target.cpu(), torch.ones(30000))

    def test_counters_add_up(self):
        torch_refdev.empty_pinned_cache()
        before = torch_refdev.counters()
        tensor = pinned(1 << 20)
        during = torch_refdev.counters()
        self.assertEqual(during["pin_calls"], before["pin_calls"] + 1)
        self.assertGreaterEqual(during["locked_bytes"] - before["locked_bytes"], 4 << 20)
        del tensor
        torch_refdev.empty_pinned_cache()
        after = torch_refdev.counters()
        self.assertEqual(after["locked_bytes"], before["locked_bytes"])
        self.assertEqual(after["locked_ranges"], before["locked_ranges"])
        self.assertEqual(after["unpin_calls"], before["unpin_calls"] + 1)

    def test_limit_refuses_and_recovers(self):
        torch_refdev.empty_pinned_cache()
        torch_refdev.set_locked_limit(torch_refdev.counters()["locked_bytes"] + (1 << 20))
        kept = pinned(1 << 16)
        with self.assertRaisesRegex(RuntimeError, str(4 << 20)):
            torch.empty(1 << 20, pin_memory=True)
        self.assertGreaterEqual(torch_refdev.counters()["pin_refusals"], 1)
        torch_refdev.set_locked_limit(None)
        self.assertEqual(pinned(1 << 20).numel(), 1 << 20)
        self.assertEqual(kept, torch.zeros(1 << 16))

    def test_register_in_place(self):
        memory = mmap.mmap(-1, 8 * mmap.PAGESIZE)
        tensor = torch.frombuffer(memory, dtype=torch.uint8)
        begin = tensor.data_ptr()
        torch_refdev.host_register(begin, 4 * mmap.PAGESIZE)
        try:
            self.assertTrue(torch_refdev.is_host_pinned(begin + 4 * mmap.PAGESIZE - 1))
            self.assertFalse(torch_refdev.is_host_pinned(begin + 4 * mmap.PAGESIZE))
            for start, size in (
                (begin, 1),
                (begin + mmap.PAGESIZE, 8),
                (begin + 3 * mmap.PAGESIZE, 2 * mmap.PAGESIZE),
            ):
                with self.assertRaisesRegex(RuntimeError, "page-locked already"):
                    torch_refdev.host_register(start, size)
            torch_refdev.host_register(begin + 4 * mmap.PAGESIZE, mmap.PAGESIZE)
            torch_refdev.host_unregister(begin + 4 * mmap.PAGESIZE)
        finally:
            torch_refdev.host_unregister(begin)
        self.assertFalse(torch_refdev.is_host_pinned(begin))
        with self.assertRaisesRegex(RuntimeError, "no page-locked host memory"):
            torch_refdev.host_unregister(begin)
        torch_refdev.host_register(begin, 8 * mmap.PAGESIZE)
        torch_refdev.host_unregister(begin)

    def test_pages_are_what_is_locked(self):
        memory = mmap.mmap(-1, 3 * mmap.PAGESIZE)
        begin = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()

        def locked():
            return (torch_refdev.counters()["locked_bytes"] - before) // mmap.PAGESIZE

        before = torch_refdev.counters()["locked_bytes"]
        torch_refdev.host_register(begin + 100, 100)
        self.assertEqual(locked(), 1)
        # Ranges may share a page, which is locked once, until the last of them goes.
        torch_refdev.host_register(begin + 1000, mmap.PAGESIZE)
        self.assertEqual(locked(), 2)
        torch_refdev.host_register(begin + 300, 100)
        self.assertEqual(locked(), 2)
        for address, is_locked in ((0, False), (99, False), (100, True), (200, False), (399, True)):
            self.assertEqual(torch_refdev.is_host_pinned(begin + address), is_locked)
        torch_refdev.host_unregister(begin + 1000)
        self.assertEqual(locked(), 1)
        self.assertTrue(torch_refdev.is_host_pinned(begin + 350))
        self.assertFalse(torch_refdev.is_host_pinned(begin + mmap.PAGESIZE))
        torch_refdev.host_unregister(begin + 100)
        self.assertEqual(locked(), 1)
        torch_refdev.host_unregister(begin + 300)
        self.assertEqual(locked(), 0)
        self.assertFalse(torch_refdev.is_host_pinned(begin + 350))

    def test_mlock_follows_who_uses_a_page(self):
        memory = mmap.mmap(-1, 2 * mmap.PAGESIZE)
        begin = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()

        def locked_by_system():
            with open("/proc/self/status") as status:
                (line,) = (line for line in status if line.startswith("VmLck:"))
            return int(line.split()[1]) * 1024 - before

        before = 0
        before = locked_by_system()
        torch_refdev.host_register(begin + 8, 100)
        if locked_by_system() == 0:
            torch_refdev.host_unregister(begin + 8)
            self.skipTest("this process may not lock memory")
        torch_refdev.host_register(begin + 108, mmap.PAGESIZE)
        self.assertEqual(locked_by_system(), 2 * mmap.PAGESIZE)
        torch_refdev.host_unregister(begin + 108)
        self.assertEqual(locked_by_system(), mmap.PAGESIZE)
        torch_refdev.host_unregister(begin + 8)
        self.assertEqual(locked_by_system(), 0)

    def test_what_is_not_mapped_cannot_be_registered(self):
        memory = mmap.mmap(-1, mmap.PAGESIZE)
        address = torch.frombuffer(memory, dtype=torch.uint8).data_ptr()
        gc.collect()
        memory.close()
        with self.assertRaisesRegex(RuntimeError, "invalid value"):
            torch_refdev.host_register(address, 64 * mmap.PAGESIZE)

    def test_unregister_waits_for_copies(self):
        memory = mmap.mmap(-1, mmap.PAGESIZE)
        source = torch.frombuffer(memory, dtype=torch.uint8)
        source.fill_(1)
        torch_refdev.host_register(source.data_ptr(), mmap.PAGESIZE)
        with torch_refdev.hold_copies():
            target = source.to("refdev", non_blocking=True)
            with self.assertRaisesRegex(RuntimeError, "holds itself"):
                torch_refdev.host_unregister(source.data_ptr())
        torch_refdev.host_unregister(source.data_ptr())
        source.fill_(2)
        self.assertEqual(target.cpu(), torch.ones_like(source))

    def test_lock_of_the_system_is_not_pinning(self):
        tensor = torch.ones(5000)
        libc = ctypes.CDLL(None, use_errno=True)
        address = ctypes.c_void_p(tensor.data_ptr())
        self.assertEqual(libc.mlock(address, ctypes.c_size_t(20000)), 0)
        try:
            self.assertFalse(torch_refdev.is_host_pinned(tensor.data_ptr()))
        finally:
            libc.munlock(address, ctypes.c_size_t(20000))


class TestDevices(RefdevTestCase):
    def test_device_memory_faults_when_the_cpu_touches_it(self):
        for access in ("ctypes.string_at(address, 1)", "ctypes.memset(address, 0, 1)"):
            run_script(
                f"""
                import ctypes
                address = torch.ones(10, device="refdev").data_ptr()
                {access}
                """,
                status=-signal.SIGSEGV,
            )

    def test_two_devices(self):
        self.assertEqual(torch.refdev.device_count(), 2)
        a = torch.arange(6.0, device="refdev:0")
        b = torch.arange(6.0, device="refdev:1")
        self.assertEqual((a.device.index, b.device.index), (0, 1))
        self.assertEqual(a.to("refdev:1").cpu(), b.cpu())
        self.assertEqual((b + a.to("refdev:1")).device.index, 1)
        transposed = torch.arange(6.0).reshape(2, 3).to("refdev:0").t()
        self.assertEqual(transposed.to("refdev:1").cpu(), transposed.cpu())

    def test_copy_between_devices_waits_for_both(self):
        source = pinned(1000, value=1)
        with torch_refdev.hold_copies():
            first = source.to("refdev:0", non_blocking=True)
            second = first.to("refdev:1", non_blocking=True)
            self.assertFalse(torch.refdev.current_stream(1).query())
        self.assertEqual(second.cpu(), torch.ones(1000))

    def test_current_device_belongs_to_the_thread(self):
        torch.refdev.set_device(1)
        seen = []
        thread = threading.Thread(target=lambda: seen.append(torch.refdev.current_device()))
        thread.start()
        thread.join()
        self.assertEqual(seen, [0])
        self.assertEqual(torch.ones(1, device="refdev").device.index, 1)
        with torch.refdev.device(0):
            self.assertEqual(torch.ones(1, device="refdev").device.index, 0)
        self.assertEqual(torch.refdev.current_device(), 1)
        with self.assertRaisesRegex(RuntimeError, "no device 7|there is no device"):
            torch.refdev.set_device(7)

    def test_context_comes_with_the_first_touch(self):
        run_script(
            """
            import threading
            assert not torch.refdev.is_initialized()
            torch.refdev.set_device(1)
            torch.refdev.synchronize()
            assert torch_refdev.counters()["contexts"] == set()
            torch.empty(3, pin_memory=True)
            assert torch_refdev.counters()["contexts"] == {1}
            ids = []
            def work():
                ids.append(threading.get_native_id())
                torch.empty(3, device="refdev:0")
            thread = threading.Thread(target=work)
            thread.start(); thread.join()
            seen = torch_refdev.counters()
            assert seen["contexts"] == {0, 1}
            assert seen["touches"] == {0: set(ids), 1: {threading.get_native_id()}}, seen
            """
        )

    def test_questions_initialise_nothing(self):
        run_script(
            """
            torch.ones(3).is_pinned()
            assert torch.refdev.is_available() and torch.refdev.device_count() == 2
            torch.refdev.current_device(); torch_refdev.is_host_pinned(12345)
            torch.refdev._is_in_bad_fork()
            assert not torch.refdev.is_initialized()
            torch.refdev.init()
            assert torch.refdev.is_initialized()
            assert torch_refdev.counters()["contexts"] == set()
            """,
            TORCHPIN="0",
        )

    def test_out_of_device_memory(self):
        with self.assertRaisesRegex(RuntimeError, "out of memory.*17179869184 bytes"):
            torch.empty(17 << 30, dtype=torch.uint8, device="refdev")
        self.assertEqual(torch.ones(2, device="refdev").cpu(), torch.ones(2))

    def test_device_memory_comes_back(self):
        before = torch.refdev.memory_allocated()
        for _ in range(50):
            torch.empty(1 << 30, dtype=torch.uint8, device="refdev")
        gc.collect()
        self.assertEqual(torch.refdev.memory_allocated(), before)


class TestStreams(RefdevTestCase):
    def test_streams_are_independent(self):
        side = torch.refdev.Stream()
        source = pinned(10, value=1)
        with torch_refdev.hold_copies():
            source.to("refdev", non_blocking=True)
            self.assertTrue(side.query())
            self.assertFalse(torch.refdev.current_stream().query())
            side.synchronize()

    def test_stream_context(self):
        side = torch.refdev.Stream(device="refdev:1")
        with torch.refdev.stream(side):
            self.assertEqual(torch.refdev.current_stream().stream_id, side.stream_id)
            self.assertEqual(torch.refdev.current_device(), 1)
        self.assertEqual(torch.refdev.current_device(), 0)
        self.assertEqual(torch.refdev.current_stream(1).stream_id, 0)

    def test_events_order_streams(self):
        side = torch.refdev.Stream()
        source = pinned(1000, value=3)
        with torch_refdev.hold_copies():
            target = source.to("refdev", non_blocking=True)
            event = torch.refdev.Event()
            event.record(torch.refdev.current_stream())
            self.assertFalse(event.query())
            side.wait_event(event)
            with torch.refdev.stream(side):
                clone = target.clone()
            with self.assertRaisesRegex(RuntimeError, "holds itself"):
                event.synchronize()
        event.synchronize()
        self.assertTrue(event.query())
        side.synchronize()
        self.assertEqual(clone.cpu(), torch.full((1000,), 3.0))

    def test_wait_stream_and_record_event(self):
        side = torch.refdev.Stream()
        with torch_refdev.hold_copies():
            pinned(10).to("refdev", non_blocking=True)
            side.wait_stream(torch.refdev.current_stream())
            self.assertFalse(side.record_event().query())
        torch.refdev.synchronize()
        self.assertTrue(side.query())

    def test_elapsed_time_of_a_delayed_copy(self):
        begin = torch.refdev.Event(enable_timing=True)
        end = torch.refdev.Event(enable_timing=True)
        torch_refdev.set_copy_delay(0.02)
        stream = torch.refdev.current_stream()
        begin.record(stream)
        pinned(10).to("refdev", non_blocking=True)
        end.record(stream)
        end.synchronize()
        self.assertGreaterEqual(begin.elapsed_time(end), 20)

    def test_recorded_stream_keeps_memory(self):
        side = torch.refdev.Stream()
        with torch_refdev.hold_copies():
            block = torch.empty(1 << 16, device="refdev")
            address = block.data_ptr()
            block.record_stream(side)
            with torch.refdev.stream(side):
                pinned(1 << 16).to("refdev", non_blocking=True)
            del block
            self.assertNotEqual(torch.empty(1 << 16, device="refdev").data_ptr(), address)
        torch.refdev.synchronize()

    @unittest.skipIf(BASE < (2, 6), "torch.accelerator came with 2.6")
    def test_accelerator_interface(self):
        self.assertEqual(torch.accelerator.current_accelerator().type, "refdev")
        torch.accelerator.set_device_index(1)
        self.assertEqual(torch.refdev.current_device(), 1)
        self.assertEqual(torch.accelerator.current_stream().device.index, 1)
        torch.accelerator.synchronize()


class TestOperators(RefdevTestCase):
    def test_making_and_viewing(self):
        x = torch.zeros(4, 6, device="refdev")
        self.assertEqual(x.view(3, 8).data_ptr(), x.data_ptr())
        x[1:3, ::2] = 5
        expected = torch.zeros(4, 6)
        expected[1:3, ::2] = 5
        self.assertEqual(x.cpu(), expected)
        self.assertEqual(x.t().unfold(0, 2, 2).cpu(), expected.t().unfold(0, 2, 2))
        self.assertEqual(
            x.as_strided((2, 2), (1, 7), 3).cpu(), expected.as_strided((2, 2), (1, 7), 3)
        )
        self.assertEqual(torch.full((3,), 2.5, device="refdev").cpu(), torch.full((3,), 2.5))
        self.assertEqual(torch.arange(5, device="refdev").cpu(), torch.arange(5))

    def test_resizing_keeps_elements(self):
        x = torch.arange(6.0, device="refdev")
        x.resize_(20)
        self.assertEqual(x[:6].cpu(), torch.arange(6.0))
        y = torch.empty(0, device="refdev")
        y.set_(x.untyped_storage(), 2, (2, 2), (2, 1))
        self.assertEqual(y.cpu(), torch.tensor([[2.0, 3.0], [4.0, 5.0]]))
        x.untyped_storage().resize_(8)
        self.assertEqual(x.untyped_storage().nbytes(), 8)
        y.set_()
        self.assertEqual(y.numel(), 0)
        torch.add(torch.ones(3, device="refdev"), 1, out=y)
        self.assertEqual(y.cpu(), torch.full((3,), 2.0))

    def test_item_and_repr(self):
        x = torch.tensor([1.5, -2.0], device="refdev:1")
        self.assertEqual(x.sum().item(), -0.5)
        self.assertIn("device='refdev:1'", repr(x))
        self.assertIn("1.5", repr(x))

    def test_work_of_the_fallback_is_in_stream_order(self):
        source = pinned(100, value=4)
        torch_refdev.set_copy_delay(0.05)
        target = source.to("refdev", non_blocking=True)
        self.assertEqual((target * 2 + 1).sum().item(), 900)

    def test_random_numbers_follow_the_devices_generator(self):
        torch.refdev.manual_seed(7)
        state = torch.refdev.get_rng_state()
        first = torch.randn(5, device="refdev")
        torch.rand(100)
        second = torch.randn(5, device="refdev")
        torch.refdev.set_rng_state(state)
        self.assertEqual(torch.randn(5, device="refdev").cpu(), first.cpu())
        torch.randn(3)
        self.assertEqual(torch.randn(5, device="refdev").cpu(), second.cpu())
        torch.manual_seed(3)
        third = torch.randn(5, device="refdev:1").cpu()
        torch.manual_seed(3)
        self.assertEqual(torch.randn(5, device="refdev:1").cpu(), third)
        generator = torch.Generator(device="refdev")
        generator.manual_seed(1)
        fourth = torch.randn(5, device="refdev", generator=generator).cpu()
        generator.manual_seed(1)
        self.assertEqual(torch.randn(5, device="refdev", generator=generator).cpu(), fourth)

    def test_training_step_matches_the_cpu(self):
        def losses(device: str) -> list[float]:
            torch.manual_seed(0)
            model = torch.nn.Sequential(
                torch.nn.Conv2d(1, 4, 3, padding=1),
                torch.nn.ReLU(),
                torch.nn.MaxPool2d(2),
                torch.nn.Flatten(),
                torch.nn.Linear(64, 10),
            ).to(device)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
            data = torch.randn(32, 1, 8, 8, generator=torch.Generator().manual_seed(1))
            labels = torch.randint(0, 10, (32,), generator=torch.Generator().manual_seed(2))
            result = []
            for _ in range(5):
                x = data.to(device, non_blocking=True)
                y = labels.to(device, non_blocking=True)
                loss = torch.nn.functional.cross_entropy(model(x), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                result.append(loss.item())
            return result

        on_cpu = losses("cpu")
        self.assertLess(on_cpu[-1], on_cpu[0])
        for device in ("refdev", "refdev:1"):
            self.assertEqual(losses(device), on_cpu, atol=1e-4, rtol=1e-4)

    @unittest.skipIf(BASE < (2, 4), "before 2.4 autocast asks a backend for five functions")
    def test_autocast_is_accepted(self):
        x = torch.ones(2, 2, device="refdev")
        with torch.autocast("refdev", dtype=torch.bfloat16):
            self.assertEqual((x @ x).cpu(), torch.full((2, 2), 2.0))

    def test_backward_touches_only_its_device(self):
        run_script(
            """
            x = torch.randn(4, device="refdev:0", requires_grad=True)
            (x * x).sum().backward()
            assert torch.equal(x.grad.cpu(), 2 * x.detach().cpu())
            assert torch_refdev.counters()["contexts"] == {0}
            # Threads of the autograd engine that are still starting when the interpreter ends abort
            # the process, with any accelerator and without torchpin.
            time.sleep(1)
            """
        )

    def test_saving_and_loading(self):
        import io

        buffer = io.BytesIO()
        torch.save({"w": torch.arange(4.0, device="refdev:1")}, buffer)
        buffer.seek(0)
        self.assertEqual(torch.load(buffer, weights_only=False)["w"].device.type, "refdev")
        buffer.seek(0)
        loaded = torch.load(buffer, map_location="cpu", weights_only=False)
        self.assertEqual(loaded["w"], torch.arange(4.0))


class TestProcesses(RefdevTestCase):
    def test_forked_child_of_an_initialised_process_is_refused(self):
        run_script(
            """
            device = torch.ones(3, device="refdev")
            kept = torch.empty(3, pin_memory=True)
            pid = os.fork()
            if pid == 0:
                status = 1
                try:
                    assert torch.refdev._is_in_bad_fork() and not torch.refdev.is_initialized()
                    assert torch.refdev.is_available() and torch.refdev.current_device() == 0
                    assert not torch_refdev.is_host_pinned(kept.data_ptr())
                    for use in (
                        lambda: torch.ones(3, device="refdev"),
                        lambda: torch.ones(3).to("refdev"),
                        lambda: device.cpu(),
                        lambda: torch.empty(3, pin_memory=True),
                        lambda: torch.refdev.synchronize(),
                        lambda: torch.refdev.init(),
                    ):
                        try:
                            use()
                        except RuntimeError as error:
                            assert "Cannot re-initialize refdev in forked subprocess" in str(error)
                        else:
                            raise AssertionError("not refused")
                    status = 0
                except BaseException:
                    import traceback
                    traceback.print_exc()
                finally:
                    os._exit(status)
            assert os.waitpid(pid, 0)[1] == 0
            assert device.sum().item() == 3
            """
        )

    def test_forked_child_of_a_process_that_is_not_initialised(self):
        run_script(
            """
            pid = os.fork()
            if pid == 0:
                ok = torch.ones(3, device="refdev").sum().item() == 3
                os._exit(0 if ok and torch.refdev.is_initialized() else 1)
            assert os.waitpid(pid, 0)[1] == 0
            assert not torch.refdev.is_initialized()
            assert torch.ones(3, device="refdev").sum().item() == 3
            """
        )

    def test_child_frees_nothing_of_its_parent(self):
        run_script(
            """
            import gc
            kept = torch.ones(10000, pin_memory=True)
            device = torch.full((10000,), 2.0, device="refdev")
            before = torch_refdev.counters()["locked_bytes"]
            pid = os.fork()
            if pid == 0:
                del kept, device
                gc.collect()
                os._exit(0)
            assert os.waitpid(pid, 0)[1] == 0
            assert torch_refdev.counters()["locked_bytes"] == before
            assert torch_refdev.is_host_pinned(kept.data_ptr())
            assert kept.sum().item() == 10000
            again = torch.zeros(10000, device="refdev")
            assert device.sum().item() == 20000
            """
        )

    def test_fork_while_copies_run(self):
        run_script(
            """
            torch_refdev.set_copy_delay(0.001)
            source = torch.ones(10000, pin_memory=True)
            for _ in range(20):
                for _ in range(10):
                    source.to("refdev", non_blocking=True)
                pid = os.fork()
                if pid == 0:
                    del source
                    torch.ones(100).add_(1)
                    os._exit(0)
                assert os.waitpid(pid, 0)[1] == 0
            assert source.to("refdev").sum().item() == 10000
            """
        )

    def test_workers_that_do_not_touch_the_device(self):
        torch.ones(1, device="refdev")
        dataset = torch.utils.data.TensorDataset(torch.arange(8.0))
        loader = torch.utils.data.DataLoader(
            dataset,
            batch_size=2,
            num_workers=2,
            multiprocessing_context=multiprocessing.get_context("fork"),
        )
        self.assertEqual(torch.cat([batch for (batch,) in loader]), torch.arange(8.0))

    def test_exit_with_copies_in_flight(self):
        for keep in ("torch_refdev.set_copy_delay(3600)", "torch_refdev._C.hold_copies()"):
            run_script(
                f"""
                import threading
                source = torch.ones(100000, pin_memory=True)
                {keep}
                targets = [source.to("refdev", non_blocking=True) for _ in range(10)]
                targets.append(torch.empty(10, 10, device="refdev").t().clone())
                side = torch.refdev.Stream()
                side.wait_stream(torch.refdev.current_stream())
                waiter = threading.Thread(target=lambda: torch.refdev.synchronize(), daemon=True)
                waiter.start()
                assert torch_refdev.counters()["copies_in_flight"] == 10
                print("reached the end")
                """
            )


class TestBroken(RefdevTestCase):
    """The switches of ``TORCH_REFDEV_BREAK`` break what they name, and only that."""

    def _works_otherwise(self, broken: str, source: str, **variables: str) -> None:
        run_script(
            textwrap.dedent(source) + "\nassert torch.ones(3).to('refdev').sum().item() == 3\n",
            broken=broken,
            TORCHPIN="0",
            **variables,
        )

    def test_no_pinned_memory(self):
        for broken in ("no_hooks", "no_allocator"):
            with self.subTest(broken):
                self._works_otherwise(
                    broken,
                    """
                    try:
                        torch.empty(3, pin_memory=True)
                    except RuntimeError as error:
                        print(error)
                    else:
                        raise AssertionError("pinned")
                    """,
                )

    @unittest.skipIf(BASE < (2, 10), "hooks in Python came with 2.10")
    def test_python_hooks(self):
        self._works_otherwise(
            "python_hooks",
            """
            try:
                torch.empty(3, pin_memory=True)
            except RuntimeError as error:
                print(error)
            else:
                raise AssertionError("pinned")
            """,
        )

    def test_null_allocator(self):
        self._works_otherwise("null_allocator", "")

    def test_plain_allocator(self):
        self._works_otherwise(
            "plain_allocator",
            """
            tensor = torch.empty(3, pin_memory=True)
            assert not torch_refdev.is_host_pinned(tensor.data_ptr())
            """,
        )

    def test_no_module_functions(self):
        self._works_otherwise(
            "no_module_functions",
            """
            assert not hasattr(torch.refdev, "is_available")
            assert not hasattr(torch.refdev, "current_device")
            assert torch.refdev.device_count() == 2
            """,
        )

    def test_forget_events(self):
        self._works_otherwise(
            "forget_events",
            """
            with torch_refdev.hold_copies():
                source = torch.ones(50000, pin_memory=True)
                address = source.data_ptr()
                target = source.to("refdev", non_blocking=True)
                del source
                reused = torch.full((50000,), 2.0, pin_memory=True)
                assert reused.data_ptr() == address
            assert target.sum().item() == 100000
            """,
        )

    def test_exact_start_only(self):
        self._works_otherwise(
            "exact_start_only",
            """
            from torch_refdev._C import hooks_is_pinned
            tensor = torch.empty(5000, pin_memory=True)
            assert hooks_is_pinned(tensor.data_ptr())
            assert not hooks_is_pinned(tensor[7:].data_ptr())
            assert not hooks_is_pinned(torch.ones(3).data_ptr())
            assert torch_refdev.is_host_pinned(tensor[7:].data_ptr())
            """,
        )

    def test_async_pageable(self):
        self._works_otherwise(
            "async_pageable",
            """
            source = torch.ones(1000)
            with torch_refdev.hold_copies():
                target = source.to("refdev", non_blocking=True)
                source.fill_(2)
            assert target.sum().item() == 2000
            """,
        )

    def test_leak(self):
        self._works_otherwise(
            "leak",
            """
            before = torch_refdev.counters()["locked_bytes"]
            for _ in range(5):
                torch.empty(1 << 18, pin_memory=True)
            torch_refdev.empty_pinned_cache()
            assert torch_refdev.counters()["locked_bytes"] - before >= 5 << 20
            """,
        )

    def test_own_kernels(self):
        for broken in ("own_kernels", "own_backend_select"):
            with self.subTest(broken):
                self._works_otherwise(
                    broken,
                    """
                    device = ("refdev",) if torch.__version__ < "2.5" else ()
                    tensor = torch.ones(1000).pin_memory(*device)
                    assert tensor.is_pinned(*device) and tensor.sum().item() == 1000
                    seen = torch_refdev.counters()
                    assert seen["own_pin_memory_calls"] >= 1 and seen["own_is_pinned_calls"] >= 1
                    """,
                )


if __name__ == "__main__":
    run_tests()
