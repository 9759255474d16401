"""Runs cases: one server for each environment, the ways of a case in turn, nothing left behind."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import pathlib
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from torchpin.bench import cases
from torchpin.bench.cases import Case
from torchpin.bench.results import CaseResult, WayResult

_PR_SET_CHILD_SUBREAPER: Final = 36
_START_SECONDS: Final = 120
_LONGEST_FOLDER: Final = 107 - len("/torchpin-bench-01234567/pymp-01234567/listener-01234567")


class BenchFailure(Exception):
    """The benchmark cannot go on; the message says why."""


@dataclass(frozen=True)
class Settings:
    """How long to measure.

    Attributes:
        rounds: measurements of each way of each case.
        seconds: length of one measurement, if ``batches`` is 0.
        batches: length of one measurement.
        warmup: batches before it; 0: as many as are made ahead, and a few.
        copy: copy every batch to the accelerator.
    """

    rounds: int = 5
    seconds: float = 1.0
    batches: int = 0
    warmup: int = 0
    copy: bool = False


@contextlib.contextmanager
def adopting_orphans() -> Iterator[None]:
    """Makes processes whose parent dies children of this one, so that their end can be waited for."""
    libc = ctypes.CDLL(None)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        libc.prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


class _Server:
    """A process of ``torchpin.bench.measure`` and all that it starts, in a group of their own."""

    def __init__(self, mode: str, modules: Sequence[str], folder: str) -> None:
        self._log = pathlib.Path(folder, f"{mode}.log")
        environ = {**os.environ, "TMPDIR": folder, "TORCHPIN": "1", "TORCHPIN_TRANSPORT": mode}
        if mode == cases.STOCK:
            environ["TORCHPIN"] = "0"
            del environ["TORCHPIN_TRANSPORT"]
        arguments = json.dumps({"modules": list(modules)})
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "torchpin.bench.measure", arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=environ,
                bufsize=0,
                start_new_session=True,
            )
        self._ready = False

    def _read(self, seconds: float) -> dict[str, Any]:
        output = self._process.stdout
        assert output is not None
        line = b""
        deadline = time.monotonic() + seconds
        while not line.endswith(b"\n"):
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([output], [], [], left)[0]:
                raise TimeoutError
            part = output.read(1 << 16)
            if not part:
                raise EOFError
            line += part
        answer: dict[str, Any] = json.loads(line)
        return answer

    def _death(self) -> str:
        """How the server ended, which is not for it to do."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(5)
        lines = self._log.read_text(errors="replace").strip().splitlines()
        last = f": {lines[-1]}" if lines else ""
        return f"the measuring process ended with status {self._process.returncode}{last}"

    def wait_until_ready(self) -> None:
        """Returns when torch is imported.

        Raises:
            BenchFailure: if that fails.
        """
        if self._ready:
            return
        try:
            answer = self._read(_START_SECONDS)
        except TimeoutError:
            raise BenchFailure(f"import torch took more than {_START_SECONDS} s") from None
        except EOFError:
            raise BenchFailure(self._death()) from None
        if "failed" in answer:
            raise BenchFailure(answer["failed"])
        self._ready = True

    def ask(self, request: dict[str, Any], seconds: float) -> dict[str, Any]:
        """The answer to a request; ``{"failed": reason, "lost": True}`` if there will be none."""
        self.wait_until_ready()
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            return self._read(seconds)
        except TimeoutError:
            return {"failed": f"no result within {seconds:.0f} s", "lost": True}
        except (EOFError, BrokenPipeError):
            return {"failed": self._death(), "lost": True}

    def kill(self) -> None:
        """Ends every process of the group and waits until the last one is gone."""
        group = self._process.pid
        with contextlib.suppress(ProcessLookupError):
            os.killpg(group, signal.SIGKILL)
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            if stream is not None:
                stream.close()
        # Orphans of the group are ours now, see adopting_orphans.
        with contextlib.suppress(ChildProcessError):
            while True:
                os.waitpid(-group, 0)


class Runner:
    """Keeps the servers; a context manager that leaves no process and no file behind."""

    def __init__(self, modules: Sequence[str], settings: Settings) -> None:
        self._modules = modules
        self._settings = settings
        self._servers: dict[str, _Server] = {}
        self._exit = contextlib.ExitStack()
        self.accelerator = ""

    def __enter__(self) -> Runner:
        with contextlib.ExitStack() as stack:
            stack.enter_context(adopting_orphans())
            # Holds the temporary files of all servers, which may be killed before they remove them.
            # Workers have sockets there, and the path of a socket ends at 107 bytes: in a longer one
            # the stock way would hang.
            short = len(tempfile.gettempdir()) <= _LONGEST_FOLDER
            folder = tempfile.TemporaryDirectory(
                prefix="torchpin-bench-", dir=None if short else "/tmp", ignore_cleanup_errors=True
            )
            self._folder = stack.enter_context(folder)
            stack.callback(self._kill_servers)
            self._exit = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        # A second Ctrl-C must not interrupt what the first one asked for.
        before = signal.getsignal(signal.SIGINT)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        try:
            self._exit.close()
        finally:
            signal.signal(signal.SIGINT, before)

    def _kill_servers(self) -> None:
        while self._servers:
            self._servers.popitem()[1].kill()

    def _server(self, way: str) -> _Server:
        mode = way if way in cases.MODES else cases.STOCK
        if mode not in self._servers:
            self._servers[mode] = _Server(mode, self._modules, self._folder)
        return self._servers[mode]

    def _ask(self, way: str, request: dict[str, Any], seconds: float) -> dict[str, Any]:
        answer = self._server(way).ask(request, seconds)
        if answer.get("lost"):
            mode = way if way in cases.MODES else cases.STOCK
            self._servers.pop(mode).kill()
        return answer

    def describe(self, mode: str) -> dict[str, Any]:
        """Versions and accelerator, as torchpin in this mode sees them.

        Raises:
            BenchFailure: if torchpin is off.
        """
        answer = self._ask(mode, {"action": "describe"}, _START_SECONDS)
        if "failed" in answer:
            raise BenchFailure(answer["failed"])
        self.accelerator = "" if answer["missing"] else answer["accelerator"]
        return answer

    def run(
        self,
        case: Case,
        ways: Sequence[str],
        progress: Callable[[str, int], None] = lambda text, done: None,
    ) -> CaseResult:
        """Measures a case by all ways, in turn, as many rounds as the settings say.

        Args:
            case: what to measure.
            ways: names from ``cases.WAYS``; one that fails is not tried again.
            progress: called with what is being done, and how many measurements are done by now that
                were not before.
        """
        result = CaseResult(case, {way: WayResult() for way in ways})
        folder = pathlib.Path(self._folder, case.name)
        folder.mkdir(exist_ok=True)
        for way in ways:  # import torch takes seconds: all at the same time
            self._server(way)
        for way in ways:
            self._server(way).wait_until_ready()
        request = {"action": "images", "case": case.to_json(), "folder": str(folder)}
        if case.load == "jpeg":
            answer = self._ask(cases.STOCK, request, 60)
            for measured in result.ways.values():
                measured.failed = answer.get("failed", "")
        for number in range(self._settings.rounds):
            # The first of a round is not always the same one.
            for way in ways if number % 2 == 0 else reversed(ways):
                measured = result.ways[way]
                progress(f"{case.title}: {way}", 0)
                if not measured.failed:
                    answer = self._ask(way, self._request(case, way, folder), self._patience(case))
                    measured.failed = answer.get("failed", "")
                    if not measured.failed:
                        measured.add(answer)
                progress(f"{case.title}: {way}", 1)
        return result

    def _request(self, case: Case, way: str, folder: pathlib.Path) -> dict[str, Any]:
        return {
            "action": "measure",
            "case": case.to_json(),
            "way": way,
            "folder": str(folder),
            "accelerator": self.accelerator,
            "settings": asdict(self._settings),
        }

    def _patience(self, case: Case) -> float:
        """Seconds after which a measurement is given up: ten times slower than a slow machine."""
        batches = self._settings.batches + self._settings.warmup + 40
        return 60 + 10 * self._settings.seconds + batches * (0.05 + case.bytes / 50e6)
