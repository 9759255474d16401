"""The pytest side of the suite: options, the diagnosis at the start, depths, the report at the end.

Loaded only in runs that ask for the suite, see ``__init__.py``.
"""

from __future__ import annotations

import faulthandler
import os
from collections import Counter
from collections.abc import Generator, Iterator
from typing import Any, Final

import pytest
from torchpin.conformance.backend import Backend, Options
from torchpin.conformance.diagnosis import DEPTHS, Diagnosis, diagnose
from torchpin.conformance.requirement import Hook, Nonconformance

_DIAGNOSIS_TEST: Final = "test_diagnosis.py"
_SECONDS_FOR_ONE_TEST: Final = 300
_session = pytest.StashKey["_Session"]()


class _Session:
    """What one run of the suite knows."""

    def __init__(self, options: Options, required_depth: int) -> None:
        self.options = options
        self.required_depth = required_depth
        self.diagnosis: Diagnosis | None = None
        self.backend: Backend | None = None
        self.outcomes: dict[int, Counter[str]] = {depth: Counter() for depth in DEPTHS}
        self.not_tried: dict[str, list[str]] = {}
        # Of the terminal: file descriptor 2 is captured while a test runs.
        self.stderr = os.dup(2)

    def not_offered(self, depth: int) -> str | None:
        """Why the backend does not offer a depth; None if it does."""
        assert self.diagnosis is not None
        return (self.diagnosis.not_offered or {}).get(depth)


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("torchpin.conformance", "conformance of an accelerator's pinned memory")
    group.addoption("--accelerator", metavar="NAME", help="the device type to be tested")
    group.addoption(
        "--import",
        dest="imports",
        metavar="MODULE",
        action="append",
        default=[],
        help="import this module first: the package of a backend that PyTorch does not load by "
        "itself (any backend up to 2.4)",
    )
    group.addoption(
        "--adaptor",
        metavar="MODULE",
        help="a module that can keep copies in flight and count what the driver does, see "
        "torchpin/conformance/backend.py",
    )
    group.addoption(
        "--require-depth",
        type=int,
        choices=sorted(DEPTHS),
        default=1,
        help="tests up to this depth fail where the backend does not offer it",
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "depth(number): the depth that a test is for")
    config.addinivalue_line(
        "markers", "responsible(hook): the hook to name in case of an exception"
    )
    name = config.getoption("accelerator")
    if not name:
        if config.getoption("help", default=False):
            return
        raise pytest.UsageError("torchpin.conformance needs --accelerator NAME, for example cuda")
    options = Options(name, tuple(config.getoption("imports")), config.getoption("adaptor"))
    config.stash[_session] = _Session(options, config.getoption("require_depth"))


def pytest_sessionstart(session: pytest.Session) -> None:
    run = session.config.stash[_session]
    run.diagnosis = diagnose(run.options)
    if run.diagnosis.failure is None:
        run.backend = Backend(run.options)


def pytest_report_header(config: pytest.Config) -> list[str]:
    run = config.stash[_session]
    assert run.diagnosis is not None
    if run.diagnosis.failure is not None:
        return [f"accelerator: {run.options.accelerator}, which cannot be tested"]
    devices = run.diagnosis.devices
    lines = [
        f"accelerator: {run.options.accelerator}, {devices} device{'s' if devices != 1 else ''}, "
        f"PyTorch {run.diagnosis.torch}",
        f"host allocator: {run.diagnosis.allocator}",
    ]
    if run.options.adaptor is None:
        lines.append("adaptor: none; copies are kept in flight by others in front of them")
    return lines


def _is_ours(item: pytest.Item) -> bool:
    return item.nodeid != "" and getattr(item, "module", None).__name__.startswith(__package__)  # type: ignore[union-attr]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    run = config.stash[_session]
    assert run.diagnosis is not None
    ours = [item for item in items if _is_ours(item)]
    first = [item for item in ours if item.path.name == _DIAGNOSIS_TEST]
    rest = [item for item in ours if item.path.name != _DIAGNOSIS_TEST]
    others = [item for item in items if not _is_ours(item)]
    if run.diagnosis.failure is not None:
        config.hook.pytest_deselected(items=rest)
        rest = []
    items[:] = first + rest + others


def _depth(item: pytest.Item) -> int:
    marker = item.get_closest_marker("depth")
    return int(marker.args[0]) if marker else 1


def pytest_runtest_setup(item: pytest.Item) -> None:
    if not _is_ours(item):
        return
    run = item.config.stash[_session]
    depth = _depth(item)
    reason = run.not_offered(depth)
    if reason is None:
        return
    if depth <= run.required_depth:
        pytest.fail(f"depth {depth} is required but not offered: {reason}", pytrace=False)
    pytest.skip(f"depth {depth} not offered: {reason}")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, Any, Any]:
    """A backend that hangs ends the run with the stacks of all threads."""
    run = item.config.stash[_session]
    faulthandler.dump_traceback_later(_SECONDS_FOR_ONE_TEST, file=run.stderr, exit=True)
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, Any, Any]:
    report: Any = yield
    if not _is_ours(item):
        return report
    run = item.config.stash[_session]
    error = call.excinfo.value if call.excinfo is not None else None
    if report.failed and call.excinfo is not None and isinstance(error, Nonconformance):
        report.longrepr = call.excinfo.getrepr(style="value")
        # The line of this test in the summary.
        report.longrepr.reprcrash.message = error.seen.partition("\n")[0]
    elif report.failed and error is not None and not isinstance(error, pytest.fail.Exception):
        marker = item.get_closest_marker("responsible")
        failure = Nonconformance(
            marker.args[0] if marker else Hook.ALLOCATOR,
            (item.obj.__doc__ or item.name).strip().splitlines()[0],  # type: ignore[attr-defined]
            f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}",
        )
        report.sections.append(("torchpin.conformance", str(failure)))
    if report.failed or report.when == "call" or report.skipped:
        run.outcomes[_depth(item)][report.outcome] += 1
    if isinstance(error, pytest.skip.Exception) and run.not_offered(_depth(item)) is None:
        run.not_tried.setdefault(str(error), []).append(item.name)
    return report


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    run = config.stash[_session]
    write = terminalreporter.write_line
    terminalreporter.section(f"torchpin.conformance: {run.options.accelerator}")
    assert run.diagnosis is not None
    if run.diagnosis.failure is not None:
        write("No test was run, because the backend cannot be tested as it is:")
        write(run.diagnosis.failure.seen.partition("\n")[0])
        return
    for depth, what in DEPTHS.items():
        write(f"depth {depth}  {what:<48}  {_verdict(run, depth)}")
    for reason, names in run.not_tried.items():
        write(f"{reason}: {', '.join(names)}")


def _verdict(run: _Session, depth: int) -> str:
    outcomes = run.outcomes[depth]
    reason = run.not_offered(depth)
    if reason is not None:
        return f"not offered: {reason}"
    if outcomes["failed"]:
        return f"broken: {outcomes['failed']} of {sum(outcomes.values())} tests failed"
    if not outcomes["passed"]:
        return "not run"
    not_tried = f", {outcomes['skipped']} not tried" if outcomes["skipped"] else ""
    return f"works: {outcomes['passed']} tests passed{not_tried}"


@pytest.fixture
def backend(request: pytest.FixtureRequest) -> Iterator[Backend]:
    """The accelerator, idle before and after the test, with its first device current."""
    backend = request.config.stash[_session].backend
    assert backend is not None
    backend.set_device(0)
    backend.synchronize()
    yield backend
    backend.set_device(0)
    backend.synchronize()


@pytest.fixture
def options(request: pytest.FixtureRequest) -> Options:
    """The options of this run, for processes that are started."""
    return request.config.stash[_session].options


@pytest.fixture
def diagnosis(request: pytest.FixtureRequest) -> Diagnosis:
    """What was found before the tests."""
    found = request.config.stash[_session].diagnosis
    assert found is not None
    return found
