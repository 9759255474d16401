"""Builds test/cpp/shared_slots_test.cpp and runs its cases.

The slots of the transport know nothing of PyTorch, so that neither torch nor torchpin is needed here:
a C++ compiler is all.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCES = [ROOT / "test/cpp/shared_slots_test.cpp", ROOT / "c10/core/SharedSlots.cpp"]

CASES = [
    "life",
    "worker_keeps",
    "choice",
    "memory",
    "trim_to",
    "bound",
    "no_memory",
    "limits",
    "attach",
    "reclaim",
    "fork",
    "no_column",
    "outlives",
]


def build(target: Path, *flags: str) -> Path:
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    assert compiler, "a C++ compiler is needed, as for building torchpin itself"
    command = [compiler, "-std=c++17", "-g", "-Wall", "-Wextra", "-Werror", *flags]
    subprocess.run(
        [*command, f"-I{ROOT}", *map(str, SOURCES), "-o", str(target), "-pthread"], check=True
    )
    return target


def run(program: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(program), *arguments], capture_output=True, text=True, timeout=120, check=False
    )


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("slots") / "slots", "-O2")


@pytest.mark.parametrize("case", CASES)
def test_case(program: Path, case: str) -> None:
    result = run(program, case)
    assert result.returncode == 0, result.stderr


def test_workers_killed_at_random_lose_nothing(program: Path) -> None:
    result = run(program, "kills", "400")
    assert result.returncode == 0, result.stderr + result.stdout


def test_the_kill_test_notices_a_slot_that_is_reused_too_early(program: Path) -> None:
    result = run(program, "kills_careless", "400")
    assert result.returncode == 1
    assert "is_filled" in result.stderr


def test_no_data_race_under_thread_sanitizer(tmp_path: Path) -> None:
    program = build(tmp_path / "slots_tsan", "-O1", "-fsanitize=thread")
    result = run(program, "threads", "1500")
    assert result.returncode == 0, result.stderr
    assert "WARNING: ThreadSanitizer" not in result.stderr


def test_no_memory_error_under_address_and_undefined_sanitizers(tmp_path: Path) -> None:
    program = build(tmp_path / "slots_asan", "-O1", "-fsanitize=address,undefined")
    for case in (["life"], ["choice"], ["memory"], ["fork"], ["reclaim"], ["kills", "60"]):
        result = run(program, *case)
        assert result.returncode == 0, result.stderr
        assert "runtime error" not in result.stderr


def users_of(inode: str) -> list[str]:
    """Processes that have the memfd of that inode open or mapped."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            lines = (process / "maps").read_text().splitlines()
        except OSError:
            continue
        if any("memfd:torch-slots" in line and line.split()[4] == inode for line in lines):
            found.append(process.name)
    return found


def test_nothing_is_left_of_a_main_process_that_is_killed(program: Path) -> None:
    main = subprocess.Popen([str(program), "orphan"], stdout=subprocess.PIPE, text=True)
    assert main.stdout is not None
    inode = main.stdout.readline().strip()
    # The file has no name (st_nlink is 0, see the case "memory"): it lives as long as a process
    # that has it, and no longer.
    assert str(main.pid) in users_of(inode)
    assert len(users_of(inode)) == 2
    main.send_signal(signal.SIGKILL)
    main.wait()
    main.stdout.close()
    deadline = time.monotonic() + 10
    while users_of(inode) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert users_of(inode) == []
