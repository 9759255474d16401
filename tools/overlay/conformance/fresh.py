"""Runs one function of the suite in a process of its own.

For everything that depends on what a process has done before: whether a device was started, by which
thread, before or after a fork; and for whatever may end the process. The function gets the
:class:`Backend` and may report the step that it is at, so that a crash has a place.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable
from typing import Any, Final

from torchpin.conformance.requirement import Nonconformance

_SECONDS: Final = 120
_LOG = "TORCHPIN_CONFORMANCE_LOG"


def step(text: str) -> None:
    """Notes what the process is about to do."""
    _write({"step": text})


def _write(record: dict[str, Any]) -> None:
    path = os.environ.get(_LOG)
    if path is not None:
        with open(path, "a") as log:
            log.write(json.dumps(record) + "\n")


def run_fresh(
    environment: dict[str, str],
    function: Callable[..., Any],
    hook: str,
    expected: str,
    seconds: float = _SECONDS,
) -> Any:
    """What ``function`` returns in a fresh process, which has to be fit for JSON.

    Args:
        environment: of the process, see :meth:`Options.to_environment`.
        function: of a module of this suite, by its name.
        hook: responsible if the process ends in another way than by returning.
        expected: what the process shall do, for the same case.
        seconds: after which it is ended.

    Raises:
        Nonconformance: what was raised in the process, or how it ended instead.
    """
    with tempfile.NamedTemporaryFile("r", prefix="torchpin-conformance-") as log:
        command = [
            sys.executable,
            "-c",
            "from torchpin.conformance import fresh; fresh.main()",
            f"{function.__module__}:{function.__qualname__}",
        ]
        process = subprocess.Popen(
            command,
            env={**environment, _LOG: log.name},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        ending = None
        try:
            output, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            # With everything that it has forked, which holds the pipe open.
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
            ending = f"it was not done after {seconds} seconds"
        records = [json.loads(line) for line in log]
    place = next((record["step"] for record in reversed(records) if "step" in record), "starting")
    for record in records:
        if "failure" in record:
            raise Nonconformance(*record["failure"])
        if "error" in record:
            raise Nonconformance(hook, expected, f"while {place}: {record['error']}")
    if ending is None and process.returncode < 0:
        ending = f"it was ended by {signal.Signals(-process.returncode).name}"
    elif ending is None and process.returncode > 0:
        ending = f"it ended with status {process.returncode}"
    result = [record["result"] for record in records if "result" in record]
    if ending is None and result:
        return result[0]
    tail = "\n".join(output.strip().splitlines()[-15:])
    raise Nonconformance(hook, expected, f"while {place}: {ending}\n{tail}".rstrip())


def main() -> None:
    """What the process runs; its argument is ``module:function``."""
    module, _, name = sys.argv[1].partition(":")
    try:
        from torchpin.conformance.backend import Backend, Options

        function = getattr(importlib.import_module(module), name)
        step("importing torch and the backend")
        _write({"result": function(Backend(Options.from_environment()))})
    except Nonconformance as failure:
        _write({"failure": failure.args})
        sys.exit(1)
    except BaseException as error:
        line = "".join(traceback.format_exception_only(type(error), error)).strip()
        _write({"error": f"{line.splitlines()[0]}\n{traceback.format_exc()}"})
        sys.exit(1)
    step("ending the process")
