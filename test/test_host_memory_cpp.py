"""Builds test/cpp/host_memory_test.cpp and runs its cases.

The cache of page-locked memory and the registry of page-locked ranges know nothing of PyTorch, so
that neither torch nor torchpin is needed here: a C++ compiler is all.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
SOURCE = ROOT / "test/cpp/host_memory_test.cpp"
SOURCES = [SOURCE, ROOT / "aten/src/ATen/HostMemoryRegistry.cpp"]
CASES = re.findall(r"^    \{\"(\w+)\",", SOURCE.read_text(), re.MULTILINE)
FAILING = ["careless_reuse"]
# The first fails on purpose, the second maps more than its shadow memory is good for, and the third
# forks while a thread allocates, see there.
NOT_FOR_ASAN = [*FAILING, "waste_of_one_block", "registry_fork_while_a_thread_works"]


def build(target: Path, *flags: str) -> Path:
    compiler = os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++")
    assert compiler, "a C++ compiler is needed, as for building torchpin itself"
    command = [compiler, "-std=c++17", "-g", "-Wall", "-Wextra", "-Werror", *flags]
    includes = [f"-I{ROOT}", f"-I{ROOT / 'aten/src'}"]
    command += [*includes, *map(str, SOURCES), "-o", str(target), "-pthread"]
    subprocess.run(command, check=True)
    return target


def run(program: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(program), *arguments], capture_output=True, text=True, timeout=300, check=False
    )


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("host_memory") / "host_memory", "-O2")


@pytest.fixture(scope="module")
def program_tsan(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("host_memory") / "tsan", "-O1", "-fsanitize=thread")


def test_every_case_is_run(program: Path) -> None:
    assert sorted(run(program).stdout.split()) == sorted(CASES)


@pytest.mark.parametrize("case", [case for case in CASES if case not in FAILING])
def test_case(program: Path, case: str) -> None:
    result = run(program, case)
    assert result.returncode == 0, result.stderr


def test_the_copies_notice_memory_that_is_reused_too_early(program: Path) -> None:
    # Up to the scheduler: a block is taken again while a copy still reads it, or it has been
    # unmapped by then and the copy crashes, or all goes well.
    for _ in range(20):
        result = run(program, "careless_reuse")
        if result.returncode == 1:
            break
    assert result.returncode == 1
    assert "copy.ptr[at] == copy.key" in result.stderr


@pytest.mark.parametrize(
    "case",
    [
        "threads_and_delayed_copies",
        "fork_while_threads_work",
        "registry_threads",
    ],
)
def test_no_data_race_under_thread_sanitizer(program_tsan: Path, case: str) -> None:
    result = run(program_tsan, case)
    assert result.returncode == 0, result.stderr
    assert "WARNING: ThreadSanitizer" not in result.stderr


def test_no_memory_error_under_address_and_undefined_sanitizers(tmp_path: Path) -> None:
    # Fixtures leave with blocks still live, which is what a program does at its end.
    program = build(tmp_path / "host_memory_asan", "-O1", "-fsanitize=address,undefined")
    for case in CASES:
        if case not in NOT_FOR_ASAN:
            result = subprocess.run(
                [str(program), case],
                capture_output=True,
                text=True,
                timeout=300,
                check=False,
                env={**os.environ, "ASAN_OPTIONS": "detect_leaks=0"},
            )
            assert result.returncode == 0, case + "\n" + result.stderr
            assert "runtime error" not in result.stderr
