"""Runs the test suite on one or several bases and ends in a summary.

For each base the environment is brought up to date first. The summary has a line for each base and
one for all of them. The exit status is 0 only if tests ran on every base and none failed.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import pathlib
import shlex
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass

import make_env

# A single test takes seconds. One that hangs must not take the whole run with it.
SECONDS_FOR_ONE_TEST = 300
SECONDS_FOR_ONE_BASE = 30 * 60


@dataclass
class Outcome:
    """What running the suite on one base came to."""

    base: str
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    seconds: float = 0.0
    trouble: str | None = None

    def __str__(self) -> str:
        text = f"PyTorch {self.base}: {self.passed} passed, {self.failed} failed"
        text += f", {self.skipped} skipped ({self.seconds:.0f} s)"
        return f"{text}: {self.trouble}" if self.trouble else text


def _count(report: pathlib.Path, outcome: Outcome) -> None:
    """Adds the numbers of a JUnit report to ``outcome``.

    The attributes of the report count subtests as tests; pytest's own summary does not.
    """
    verdicts: dict[tuple[str | None, str | None], set[str]] = {}
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        verdict = verdicts.setdefault((case.get("classname"), case.get("name")), set())
        verdict.update(child.tag for child in case)
    for verdict in verdicts.values():
        if verdict & {"failure", "error"}:
            outcome.failed += 1
        elif "skipped" in verdict:
            outcome.skipped += 1
        else:
            outcome.passed += 1


def _trouble(status: int, outcome: Outcome) -> str | None:
    """Why the run does not count as a good one though no test failed, or None."""
    if status < 0:
        return f"pytest was ended by signal {-status} ({signal.Signals(-status).name})"
    if status == 5 or (status == 0 and outcome.passed == 0):
        return "no test ran"
    if status > 1:
        return f"pytest ended with status {status}"
    return None


def run(base: str, arguments: list[str]) -> Outcome:
    """Runs the suite on ``base``; ``arguments`` go to pytest."""
    outcome = Outcome(base)
    started = time.monotonic()
    print(f"\n== PyTorch {base}: environment", flush=True)
    try:
        make_env.make(base, ["test"])
    except make_env.EnvironmentFailure as error:
        outcome.failed, outcome.trouble = 1, str(error)
        return outcome
    report = make_env.ROOT / "build" / "test-results" / f"torch-{base}.xml"
    report.parent.mkdir(parents=True, exist_ok=True)
    report.unlink(missing_ok=True)
    command = [str(make_env.python(base)), "-m", "pytest", f"--junitxml={report}"]
    command += [f"--timeout={SECONDS_FOR_ONE_TEST}", "--durations=8", *arguments]
    print(f"\n== PyTorch {base}: tests", flush=True)
    # In a process group of its own: whatever a test leaves behind ends with it.
    process = subprocess.Popen(
        command,
        cwd=make_env.ROOT,
        stdin=subprocess.DEVNULL,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        start_new_session=True,
    )
    try:
        status = process.wait(SECONDS_FOR_ONE_BASE)
    except subprocess.TimeoutExpired:
        outcome.failed += 1
        outcome.trouble = f"not done after {SECONDS_FOR_ONE_BASE // 60} minutes"
        status = 1
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    outcome.seconds = time.monotonic() - started
    if report.exists():
        _count(report, outcome)
    outcome.trouble = outcome.trouble or _trouble(status, outcome)
    if outcome.trouble and outcome.failed == 0:
        outcome.failed = 1
    return outcome


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    parser.add_argument(
        "bases",
        nargs="*",
        metavar="BASE",
        help=f"releases of PyTorch [{' '.join(make_env.TEST_BASES)}]",
    )
    parser.add_argument(
        "--all", action="store_true", help="every base with requirements of its own"
    )
    parser.add_argument("--pytest", default="", metavar="ARGUMENTS", help="arguments for pytest")
    options = parser.parse_args()
    # Asked to end, end what was started too: `finally` sees to it.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    bases = make_env.declared_bases() if options.all else options.bases
    outcomes = [run(base, shlex.split(options.pytest)) for base in bases or make_env.TEST_BASES]
    print("\n== Summary")
    for outcome in outcomes:
        print(outcome)
    passed, failed, skipped = (
        sum(getattr(outcome, name) for outcome in outcomes)
        for name in ("passed", "failed", "skipped")
    )
    print(f"{passed} passed, {failed} failed, {skipped} skipped", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
