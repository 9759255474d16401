"""``python -m torchpin bench``: what it refuses, what it computes, one real run, and how it ends.

How fast anything is is not tested; that is what the program itself is for.
"""

from __future__ import annotations

import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Iterator
from typing import Any

import pytest
from common_pin import ACCELERATOR, environment, run_process
from torchpin.bench import cases, command, report
from torchpin.bench.cases import Case, Field
from torchpin.bench.results import CaseResult, WayResult

BACKEND = "torch_refdev" if ACCELERATOR == "refdev" else "math"
"""A module to import first; up to 2.4 a backend is not loaded without."""
BENCH = [sys.executable, "-m", "torchpin", "bench"]


def measurement(rate: float, **more: Any) -> dict[str, Any]:
    """One measurement of ``rate`` batches per second."""
    return {
        "batches": 100,
        "seconds": 100 / rate,
        "cpu_seconds": 0.1,
        "pause_seconds": 0.003,
        "bytes": 1000,
        "tensors": 1,
        "pinned": True,
        "counted": {},
        **more,
    }


def result(**rates: list[float]) -> CaseResult:
    """A case with these batches per second, round by round."""
    case = Case("own", (Field((8,), "float32"),), 4, promised={"copy": 2.0})
    ways = {way: WayResult([measurement(rate) for rate in each]) for way, each in rates.items()}
    return CaseResult(case, ways)


# ---- what is refused


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--shape", "3,x,4"], "no shape"),
        (["--shape", "3,0"], "no shape"),
        (["--batch-size", "0"], "no whole number from 1"),
        (["--workers", "-1"], "no whole number from 0"),
        (["--seconds", "0"], "no number of seconds"),
        (["--mode", "fast"], "invalid choice"),
        (["--batch-size", "100000000"], "this machine has"),
        (["--preset", "quick", "--dtype", "int8"], "leave out --preset"),
        (["--sweep", "bytes", "--tensors", "3"], "leave out --preset and --sweep"),
        (["--latents", "--records", "list"], "leave out --records"),
        (["--decode", "--shape", "8"], "--shape 3,HEIGHT,WIDTH"),
        (["--plot", "picture.txt"], "must end in .svg"),
        (["--json", "no/such/folder/file.json"], "no folder"),
        (["--json", os.sep], "is a folder"),
    ],
)
def test_wrong_arguments_get_one_clear_message(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as refused:
        command.main(arguments)
    assert refused.value.code == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if "error: " in line]
    assert len(errors) == 1 and words in errors[0]


def test_a_picture_is_refused_without_matplotlib(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(SystemExit):
        command.main(["--plot", "picture.svg"])
    assert "pip install 'torchpin[bench]'" in capsys.readouterr().err


# ---- what is computed


def test_ratios_are_medians_over_rounds_that_belong_together() -> None:
    # The machine was slow in the second round; both were slow then.
    figures = result(stock=[100.0, 10.0, 100.0], copy=[300.0, 30.0, 200.0], limit=[1000.0] * 3)
    assert figures.ratio("copy", "stock") == pytest.approx(3.0)
    assert figures.ratio("copy", "limit") == pytest.approx(0.2)
    assert figures.ratio("in_place", "stock") is None


def test_how_batches_arrive_is_taken_from_counts() -> None:
    def arrival(way: str, **more: Any) -> str:
        return WayResult([measurement(10.0, **more)]).arrival(way)

    assert arrival("stock") == arrival("off") == "pinned"
    assert arrival("copy", pinned=False) == "not pinned"
    assert arrival("in_place", counted={"batches": 100, "in_place": 100}) == "in place"
    assert arrival("in_place", counted={"batches": 100, "in_place": 0}) == "copied"
    assert arrival("auto", counted={"batches": 3}) == "stock way"


def test_batches_that_took_the_stock_way_are_told() -> None:
    figures = result(stock=[1.0], copy=[2.0])
    figures.ways["copy"].measurements[0]["counted"] = {"stock_batches": {"no_free_slot": 7}}
    figures.ways["stock"].failed = "Bus error"
    assert [note.partition(", copy: ")[2] for note in figures.notes()] == [
        "",
        "of 100 batches took the stock way: 7 no_free_slot",
    ]
    assert figures.notes()[0].endswith("stock: Bus error")


@pytest.mark.parametrize("rich", [True, False])
def test_the_table_names_ways_and_promises(
    rich: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(report, "has_rich", lambda: rich)
    report.print_table([result(stock=[10.0, 12.0], copy=[33.0, 34.0], limit=[400.0, 400.0])])
    lines = capsys.readouterr().out.splitlines()
    assert "4×8 float32, 1 worker" in lines[1]
    line = next(line for line in lines if "torchpin, copy" in line)
    assert "33.5" in line and "3.07 (≥ 2)" in line


def test_every_case_of_presets_and_sweeps_survives_json() -> None:
    chosen = [*cases.project(), *cases.quick(), *cases.sweep("bytes"), *cases.sweep("tensors")]
    assert len({case.name for case in chosen}) == len(chosen) - len(cases.quick())
    for case in chosen:
        assert Case.from_json(json.loads(json.dumps(case.to_json()))) == case
        assert case.title
    assert [case.bytes for case in cases.sweep("bytes")] == [4096 * 4**step for step in range(9)]


# ---- real runs


@pytest.fixture
def scratch() -> Iterator[pathlib.Path]:
    """An empty folder for temporary files. Sockets lie there, so its path is short."""
    with tempfile.TemporaryDirectory(prefix="tp-") as folder:
        yield pathlib.Path(folder)


def test_a_run_measures_writes_and_leaves_nothing(
    tmp_path: pathlib.Path, scratch: pathlib.Path
) -> None:
    files = {name: tmp_path / f"out.{name}" for name in ("json", "markdown", "svg")}
    arguments = ["--shape", "3,8,8", "--batch-size", "4", "--workers", "1", "--decode", "--copy"]
    arguments += ["--mode", "copy", "--unpinned", "--rounds", "2", "--batches", "10"]
    arguments += ["--json", str(files["json"]), "--markdown", str(files["markdown"])]
    arguments += ["--plot", str(files["svg"]), "--import", BACKEND]
    done = run_process([*BENCH, *arguments], env=environment(ACCELERATOR, TMPDIR=str(scratch)))

    data = json.loads(files["json"].read_text())
    (case,) = data["cases"]
    ways = case["ways"]
    assert list(ways) == ["stock", "copy", "unpinned", "limit"]
    for name, way in ways.items():
        assert way["failed"] is None, (name, way)
        assert len(way["rounds"]) == 2
        assert all(one["batches"] == 10 and one["tensors"] == 2 for one in way["rounds"])
    assert ways["stock"]["to_stock"] == 1.0
    assert ways["copy"]["rounds"][0]["pinned"] and not ways["unpinned"]["rounds"][0]["pinned"]
    assert data["versions"]["accelerator"] in done.stdout
    assert "torchpin, copy" in done.stdout and "torchpin, copy" in files["markdown"].read_text()
    assert "torchpin, copy" in files["svg"].read_text()
    assert not list(scratch.iterdir())


def test_without_an_accelerator_it_says_what_that_means() -> None:
    arguments = ["--shape", "8", "--batch-size", "2", "--workers", "0", "--rounds", "1"]
    done = run_process([*BENCH, *arguments, "--batches", "5"], env=environment(None))
    assert "Nothing can be pinned here" in done.stderr
    assert "not pinned" in done.stdout


def processes_with(marker: str) -> list[int]:
    """Processes whose environment holds ``marker``."""
    found = []
    for folder in pathlib.Path("/proc").iterdir():
        if folder.name.isdecimal():
            try:
                if marker.encode() in (folder / "environ").read_bytes():
                    found.append(int(folder.name))
            except OSError:
                pass
    return found


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_ends_every_process(number: signal.Signals, scratch: pathlib.Path) -> None:
    marker = f"torchpin-{uuid.uuid4()}"
    env = environment(ACCELERATOR, TORCHPIN_TEST_MARKER=marker, TMPDIR=str(scratch))
    arguments = ["--shape", "8", "--workers", "2", "--seconds", "300", "--rounds", "1"]
    process = subprocess.Popen(
        [*BENCH, *arguments],
        env=env,
        stderr=subprocess.PIPE,
        text=True,
        # A shell starts what it puts in the background with SIGINT ignored, and that is inherited.
        preexec_fn=lambda: signal.signal(number, signal.SIG_DFL),
    )
    try:
        # The command, two servers, one measuring and its two workers.
        deadline = time.monotonic() + 60
        while len(processes_with(marker)) < 6:
            assert process.poll() is None and time.monotonic() < deadline, processes_with(marker)
            time.sleep(0.1)
        process.send_signal(number)
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == (130 if number == signal.SIGINT else 143), errors
    assert "Traceback" not in errors
    assert not processes_with(marker)
    assert not list(scratch.iterdir())
