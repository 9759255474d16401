"""The conformance suite passes on refdev, and on a broken refdev it fails in the right place.

Each test runs pytest on ``torchpin.conformance`` in a process of its own, as a vendor does, and looks
at what it reports: which tests failed, and which hook they name.
"""

from __future__ import annotations

import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import time
import unittest
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass, field
from typing import Any

from common_pin import BASE, environment, run_process, run_script
from torch.testing._internal.common_utils import TestCase, run_tests
from torchpin.conformance.fresh import run_fresh, step
from torchpin.conformance.requirement import Hook, Nonconformance, require

_REFDEV = ("--accelerator", "refdev", "--import", "torch_refdev")
_ADAPTOR = ("--adaptor", "conformance_adaptor")


@dataclass
class Report:
    """What a run of the suite came to."""

    status: int
    output: str
    passed: set[str] = field(default_factory=set)
    failed: dict[str, str] = field(default_factory=dict)
    """Names of tests, with what they said."""
    skipped: dict[str, str] = field(default_factory=dict)

    @property
    def failed_functions(self) -> set[str]:
        return {name.partition("[")[0] for name in self.failed}


def run_suite(*arguments: str, broken: str = "", seconds: float = 280, **changes: str) -> Report:
    """Runs the suite with these arguments on a refdev with these faults."""
    with tempfile.TemporaryDirectory(prefix="torchpin-conformance-") as folder:
        results = pathlib.Path(folder, "results.xml")
        command = [sys.executable, "-m", "pytest", "--pyargs", "torchpin.conformance", *arguments]
        done = run_process(
            [*command, "-p", "no:cacheprovider", f"--junitxml={results}"],
            env=environment("refdev", broken, **changes),
            status=None,
            timeout=seconds,
            cwd=folder,
        )
        report = Report(done.returncode, done.stdout + done.stderr)
        if not results.exists():
            return report
        for case in ElementTree.parse(results).getroot().iter("testcase"):
            name = case.get("name", "")
            # What was said to the terminal about a failure, besides its traceback.
            said = "\n".join(case.itertext()) + "".join(part.get("message", "") for part in case)
            if case.find("failure") is not None or case.find("error") is not None:
                report.failed[name] = said
            elif case.find("skipped") is not None:
                report.skipped[name] = said
            else:
                report.passed.add(name)
        return report


class TestConformingBackend(TestCase):
    def test_refdev_passes_whole(self) -> None:
        report = run_suite(*_REFDEV, *_ADAPTOR, "--require-depth", "3")
        self.assertEqual(report.failed, {}, report.output)
        self.assertEqual(report.status, 0, report.output)
        there_is_no = set()
        if BASE < (2, 12):
            there_is_no.add("test_functions_of_torch_accelerator_work")
        if BASE < (2, 5):
            # These know pinned memory by its storage and cannot be asked about an address.
            there_is_no.add("test_any_address_in_pinned_memory_is_pinned")
            there_is_no.add("test_copies_of_other_libraries_views_are_recorded")
        not_tried = {name.partition("[")[0] for name in report.skipped}
        self.assertEqual(not_tried, there_is_no, report.output)
        for depth in (1, 2, 3):
            self.assertRegex(report.output, rf"depth {depth} .* works: \d+ tests passed")
        self.assertIn("accelerator: refdev, 2 devices", report.output)

    def test_without_an_adaptor_copies_are_kept_in_flight_all_the_same(self) -> None:
        report = run_suite(*_REFDEV, "-k", "test_copies.py or test_is_pinned_waits")
        self.assertEqual((report.status, report.failed), (0, {}), report.output)
        self.assertEqual(report.skipped, {}, report.output)
        self.assertIn("adaptor: none", report.output)
        broken = run_suite(
            *_REFDEV,
            "-k",
            "not_reused_before or captured",
            broken="forget_events,async_pageable",
        )
        self.assertEqual(broken.status, 1, broken.output)
        self.assertEqual(
            broken.failed_functions,
            {
                "test_pinned_memory_is_not_reused_before_its_copy",
                "test_pinned_memory_is_not_reused_before_copies_of_other_streams",
                "test_target_of_a_copy_to_the_host_is_not_reused_before_it",
                "test_ordinary_memory_is_captured_before_the_call_returns",
                "test_views_of_ordinary_memory_are_captured_too",
            },
            broken.output,
        )


class TestBrokenBackend(TestCase):
    """One fault each; of the tests that are chosen, exactly those fail that are named."""

    def _check(self, broken: str, chosen: str, failing: dict[str, str]) -> Report:
        report = run_suite(*_REFDEV, *_ADAPTOR, "-k", chosen, broken=broken)
        self.assertEqual(report.failed_functions, set(failing), report.output)
        for name, said in report.failed.items():
            hook = failing[name.partition("[")[0]]
            self.assertIn(f"responsible: {hook}", said)
            for part in ("expected: ", "seen: "):
                self.assertIn(part, said)
        self.assertEqual(report.status, 1 if failing else 0, report.output)
        self.assertGreater(len(report.passed), 5, report.output)
        return report

    def test_copies_that_are_not_reported(self) -> None:
        self._check(
            "forget_events",
            # Without those that are about timing: they may fail or not.
            "(test_copies.py and not many_sizes) or test_devices or dropped",
            dict.fromkeys(
                (
                    "test_pinned_memory_is_not_reused_before_its_copy",
                    "test_pinned_memory_is_not_reused_before_copies_of_other_streams",
                    "test_target_of_a_copy_to_the_host_is_not_reused_before_it",
                    "test_copy_to_a_device_that_is_not_current_keeps_the_memory",
                    "test_copy_on_a_current_device_other_than_the_first_keeps_the_memory",
                    "test_memory_that_two_devices_copy_is_kept_for_both",
                    "test_batches_that_are_dropped_after_an_asynchronous_copy_arrive",
                ),
                Hook.REPORT,
            ),
        )

    def test_recognition_of_exact_addresses_only(self) -> None:
        failing = {"test_any_address_in_pinned_memory_is_pinned": Hook.IS_PINNED}
        # Nobody asks the hooks on 2.3 and 2.4.
        self._check(
            "exact_start_only", "test_pinning and not questions", failing if BASE >= (2, 5) else {}
        )

    def test_ordinary_memory_read_late(self) -> None:
        self._check(
            "async_pageable",
            "test_copies.py and not many_sizes and not types_and_layouts",
            dict.fromkeys(
                (
                    "test_ordinary_memory_is_captured_before_the_call_returns",
                    "test_views_of_ordinary_memory_are_captured_too",
                ),
                Hook.STAGING,
            ),
        )

    def test_memory_that_never_comes_back(self) -> None:
        self._check(
            "leak",
            "(test_leaks and not workers and not 2) or view_of",
            dict.fromkeys(
                (
                    "test_pinning_copying_and_freeing_leaks_nothing",
                    "test_batches_leak_nothing",
                ),
                Hook.DELETER,
            ),
        )


class TestDiagnosis(TestCase):
    """A backend that cannot be tested is one failure, which says what is missing."""

    def _check(self, *arguments: str, seen: str, hook: str, broken: str = "") -> None:
        report = run_suite(*arguments, broken=broken)
        self.assertEqual(report.status, 1, report.output)
        self.assertEqual(set(report.failed), {"test_backend_is_complete"}, report.output)
        self.assertEqual((report.passed, report.skipped), (set(), {}), report.output)
        said = report.failed["test_backend_is_complete"]
        self.assertRegex(said, rf"seen: .*{seen}")
        self.assertIn(f"responsible: {hook}", said)
        self.assertIn(
            "No test was run, because the backend cannot be tested as it is", said + report.output
        )

    def test_no_hooks(self) -> None:
        hook = "at::RegisterPrivateUse1HooksInterface"
        self._check(*_REFDEV, broken="no_hooks", seen="has registered no hooks", hook=hook)

    def test_hooks_without_an_allocator(self) -> None:
        seen = "supply no pinned-memory allocator"
        self._check(*_REFDEV, broken="no_allocator", seen=seen, hook=Hook.ALLOCATOR)

    @unittest.skipIf(BASE < (2, 10), "hooks in Python came with 2.10")
    def test_hooks_in_python_only(self) -> None:
        seen = "hooks written in Python cannot"
        self._check(*_REFDEV, broken="python_hooks", seen=seen, hook=Hook.ALLOCATOR)

    def test_null_allocator(self) -> None:
        seen = "returned null"
        self._check(*_REFDEV, broken="null_allocator", seen=seen, hook=Hook.ALLOCATOR)

    def test_plain_allocator(self) -> None:
        seen = "returned the ordinary CPU allocator"
        self._check(*_REFDEV, broken="plain_allocator", seen=seen, hook=Hook.ALLOCATOR)

    def test_device_module_without_functions(self) -> None:
        seen = r"has no function is_available\(\)"
        self._check(*_REFDEV, broken="no_module_functions", seen=seen, hook=Hook.MODULE)

    def test_another_accelerator_than_the_one_named(self) -> None:
        arguments = ("--accelerator", "cuda", "--import", "torch_refdev")
        hook = "the registration of 'cuda' as an accelerator"
        self._check(*arguments, seen="it is 'refdev'", hook=hook)

    def test_module_that_cannot_be_imported(self) -> None:
        arguments = ("--accelerator", "refdev", "--import", "no_such_backend")
        self._check(*arguments, seen="No module named 'no_such_backend'", hook=Hook.START)


class TestDepths(TestCase):
    """Which depths a backend claims goes by the type of an error, not by its words."""

    def _not_offered(self, broken: str, before: str = "") -> dict[str, str]:
        done = run_script(
            f"""
            import json, torch, torch_refdev
            from torchpin.conformance import diagnosis
            {before}
            print(json.dumps(diagnosis._not_offered()))
            """,
            broken=broken,
        )
        found: dict[str, str] = json.loads(done.stdout)
        return found

    def test_all_are_offered(self) -> None:
        self.assertEqual(self._not_offered(""), {})

    def test_refusing_driver_offers_what_it_refuses(self) -> None:
        self.assertEqual(self._not_offered("", "torch_refdev.set_locked_limit(0)"), {})

    def test_neither_is_offered(self) -> None:
        found = self._not_offered("no_allocator,no_host_allocator")
        self.assertEqual(sorted(found), ["2", "3"])
        self.assertIn("HostMemoryCache", found["2"])
        self.assertIn("HostMemoryHooks", found["3"])


class TestReporting(TestCase):
    def test_depths_that_are_not_offered_are_reported_or_fail(self) -> None:
        with tempfile.TemporaryDirectory(prefix="torchpin-conformance-") as folder:
            # As a backend that offers the first depth only.
            pathlib.Path(folder, "shallow.py").write_text(
                "import dataclasses\n"
                "from torchpin.conformance import plugin\n"
                "diagnose = plugin.diagnose\n"
                "why = {2: 'it has no cache', 3: 'it locks nothing'}\n"
                "plugin.diagnose = lambda options: dataclasses.replace(\n"
                "    diagnose(options), not_offered=why)\n"
            )
            path = os.pathsep.join([folder, environment()["PYTHONPATH"]])
            arguments = (*_REFDEV, "-p", "shallow", "-k", "test_host_cache or test_register")
            report = run_suite(*arguments, PYTHONPATH=path)
            self.assertEqual((report.status, report.failed, report.passed), (0, {}, set()))
            self.assertGreater(len(report.skipped), 10)
            for said in report.skipped.values():
                self.assertRegex(
                    said, "depth (2 not offered: it has no cache|3 not offered: it locks)"
                )
            self.assertRegex(report.output, "depth 2 .* not offered: it has no cache")
            self.assertRegex(report.output, "depth 3 .* not offered: it locks nothing")

            report = run_suite(*arguments, "--require-depth", "2", PYTHONPATH=path)
            self.assertEqual((report.status, report.passed), (1, set()))
            for said in report.failed.values():
                self.assertIn("depth 2 is required but not offered: it has no cache", said)
            for said in report.skipped.values():
                self.assertIn("depth 3 not offered: it locks nothing", said)
            self.assertTrue(report.failed and report.skipped)

    def test_accelerator_has_to_be_named(self) -> None:
        report = run_suite()
        self.assertEqual(report.status, 4)
        self.assertIn("torchpin.conformance needs --accelerator NAME", report.output)

    def test_other_runs_of_pytest_are_left_alone(self) -> None:
        with tempfile.TemporaryDirectory(prefix="torchpin-conformance-") as folder:
            # A project may have options of the same names.
            pathlib.Path(folder, "conftest.py").write_text(
                "def pytest_addoption(parser):\n"
                "    parser.addoption('--accelerator')\n"
                "    parser.addoption('--adaptor')\n"
            )
            pathlib.Path(folder, "test_nothing.py").write_text(
                "import sys\n"
                "def test_nothing(pytestconfig):\n"
                "    assert pytestconfig.getoption('accelerator') == 'mine'\n"
                "    assert 'torchpin.conformance.plugin' not in sys.modules\n"
            )
            done = run_process(
                [sys.executable, "-m", "pytest", "-W", "error", "--accelerator", "mine"],
                env=environment("refdev"),
                cwd=folder,
            )
            self.assertIn("1 passed", done.stdout)


# ---- run in fresh processes by the tests below


def _fail(_: Any) -> None:
    require(False, Hook.COPY, "two", "three")


def _raise(_: Any) -> None:
    step("dividing")
    raise ZeroDivisionError("by nothing")


def _crash(_: Any) -> None:
    step("crashing")
    os.kill(os.getpid(), signal.SIGSEGV)


def _crash_at_exit(_: Any) -> int:
    import atexit

    atexit.register(os._exit, 7)
    return 1


def _hang(_: Any) -> None:
    step("hanging")
    # A child that holds the output open must not make the parent wait for it.
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"])
    time.sleep(1000)


class TestFreshProcesses(TestCase):
    def _run(self, function: Any, seconds: float = 100) -> Any:
        from torchpin.conformance.backend import Options

        options = Options("refdev", ("torch_refdev",))
        env = {**options.to_environment(), "PYTHONPATH": environment()["PYTHONPATH"]}
        return run_fresh(env, function, Hook.START, "all goes well", seconds)

    def _seen(self, function: Any, seconds: float = 100) -> tuple[str, str]:
        with self.assertRaises(Nonconformance) as caught:
            self._run(function, seconds)
        return caught.exception.hook, caught.exception.seen

    def test_whatever_happens_there_is_reported(self) -> None:
        self.assertEqual(self._seen(_fail), (Hook.COPY, "three"))
        hook, seen = self._seen(_raise)
        self.assertEqual(hook, Hook.START)
        self.assertTrue(seen.startswith("while dividing: ZeroDivisionError: by nothing"), seen)
        _, seen = self._seen(_crash)
        self.assertTrue(seen.startswith("while crashing: it was ended by SIGSEGV"), seen)
        _, seen = self._seen(_crash_at_exit)
        self.assertTrue(seen.startswith("while ending the process: it ended with status 7"), seen)
        _, seen = self._seen(_hang, seconds=15)
        self.assertTrue(re.match(r"while hanging: it was not done after 15 seconds", seen), seen)


if __name__ == "__main__":
    run_tests()
