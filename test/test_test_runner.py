"""What ``make test`` says at its end, and which environments it can make."""

from __future__ import annotations

import pathlib
import sys
import tempfile

from torch.testing._internal.common_utils import TestCase, run_tests

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "tools"))

import make_env
import run_tests as runner

REPORT = """<?xml version="1.0" encoding="utf-8"?>
<testsuites><testsuite name="pytest" errors="1" failures="1" skipped="1" tests="6">
<testcase classname="a" name="good"/>
<testcase classname="a" name="with_subtests"><system-out>text</system-out></testcase>
<testcase classname="a" name="with_subtests"/>
<testcase classname="a" name="bad"><failure message="no"/></testcase>
<testcase classname="b" name="bad"><error message="no"/></testcase>
<testcase classname="b" name="absent"><skipped message="why"/></testcase>
</testsuite></testsuites>
"""


class TestSummary(TestCase):
    def test_errors_count_as_failed_and_subtests_as_one(self) -> None:
        outcome = runner.Outcome("2.13.0")
        with tempfile.TemporaryDirectory() as folder:
            report = pathlib.Path(folder, "report.xml")
            report.write_text(REPORT)
            runner._count(report, outcome)
        self.assertEqual((outcome.passed, outcome.failed, outcome.skipped), (2, 2, 1))

    def test_a_run_without_tests_is_no_good_run(self) -> None:
        self.assertEqual(runner._trouble(5, runner.Outcome("2.13.0")), "no test ran")
        self.assertEqual(runner._trouble(0, runner.Outcome("2.13.0")), "no test ran")
        self.assertIsNone(runner._trouble(0, runner.Outcome("2.13.0", passed=1)))

    def test_a_crash_is_named(self) -> None:
        trouble = runner._trouble(-11, runner.Outcome("2.13.0", passed=1))
        self.assertEqual(trouble, "pytest was ended by signal 11 (SIGSEGV)")

    def test_an_environment_that_cannot_be_made_is_a_failure(self) -> None:
        outcome = runner.run("1.13.1", [])
        self.assertEqual(outcome.failed, 1)
        self.assertIn("no such base: '1.13.1'", str(outcome))


class TestBases(TestCase):
    def test_oldest_default_and_newest_are_declared(self) -> None:
        declared = make_env.declared_bases()
        self.assertEqual(declared[0], "2.3.1")
        self.assertIn(make_env.DEFAULT_BASE, declared)
        for base in declared:
            self.assertIn(f"torch=={base}\n", make_env._requirements_of(base)[0])

    def test_a_release_between_takes_the_requirements_of_the_one_before(self) -> None:
        text, newest = make_env._requirements_of("2.5.1")
        self.assertIn("torch==2.5.1\n", text)
        self.assertIn("numpy<2\n", text)
        self.assertEqual(newest, "3.12")

    def test_default_base_is_in_the_plain_environment(self) -> None:
        self.assertEqual(make_env.environment(make_env.DEFAULT_BASE).name, ".venv")
        self.assertEqual(make_env.environment("2.3.1").name, ".venv-2.3.1")


if __name__ == "__main__":
    run_tests()
