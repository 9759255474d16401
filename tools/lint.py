"""Checks formatting, style and types of everything in the tree that is ours.

Four tools, all of them run whatever the ones before found. mypy is the one that needs help: the
folder ``torch`` of this repository holds parts of the package ``torch`` and would hide the rest of it.
So mypy looks at a copy of the installed package, made of links, in which our files lie at their
places, as they do when torchpin is active.
"""

from __future__ import annotations

import importlib.metadata
import os
import pathlib
import re
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent
STAGE = ROOT / "build" / "lint"
ACCELERATOR = "test/cpp_extensions/torch_refdev/torch_refdev"
CXX_FOLDERS = ("aten", "c10", "docs", "torch", "test")
PYTHON_FILES = ("setup.py", "tools", "test", "torch", "docs")


def _cxx_files() -> list[str]:
    files = (
        path.relative_to(ROOT)
        for folder in CXX_FOLDERS
        for path in (ROOT / folder).rglob("*")
        if path.suffix in {".h", ".cpp"}
    )
    return [str(file) for file in sorted(files) if "build" not in file.parts]


def _overlay(ours: pathlib.Path, base: pathlib.Path, target: pathlib.Path) -> None:
    """Makes ``target`` the folder ``base`` with the Python files of ``ours`` laid over it."""
    target.mkdir()
    mine = {path.name: path for path in ours.iterdir() if path.is_dir() or path.suffix == ".py"}
    theirs = {path.name: path for path in base.iterdir()} if base.is_dir() else {}
    for name, path in {**theirs, **mine}.items():
        if name in mine and path.is_dir():
            _overlay(path, base / name, target / name)
        else:
            (target / name).symlink_to(path)


def _mypy() -> int:
    """Runs mypy on the whole files, the runtime, the tools and the reference accelerator."""
    base = pathlib.Path(str(importlib.metadata.distribution("torch").locate_file("torch")))
    shutil.rmtree(STAGE, ignore_errors=True)
    STAGE.mkdir(parents=True)
    _overlay(ROOT / "torch", base, STAGE / "torch")
    (STAGE / "torchpin").symlink_to(ROOT / "tools" / "overlay")
    (STAGE / "tools").symlink_to(ROOT / "tools")
    (STAGE / "torch_refdev").symlink_to(ROOT / ACCELERATOR)

    files = [str(path.relative_to(ROOT)) for path in sorted((ROOT / "torch").rglob("*.py"))]
    for package in ("torchpin", "torch_refdev"):
        inside = sorted((STAGE / package).resolve().rglob("*.py"))
        start = (STAGE / package).resolve()
        files += [f"{package}/{path.relative_to(start)}" for path in inside]
    files += [f"tools/{path.name}" for path in sorted((ROOT / "tools").glob("*.py"))]
    files += [f"tools/bench/{path.name}" for path in sorted((ROOT / "tools/bench").glob("*.py"))]
    command = [sys.executable, "-m", "mypy", "--config-file", str(ROOT / "pyproject.toml")]
    command += ["--cache-dir", str(ROOT / ".mypy_cache"), "--python-executable", sys.executable]
    command += ["--explicit-package-bases", "--no-error-summary", *files]
    environ = {**os.environ, "MYPYPATH": f"{STAGE}{os.pathsep}{ROOT / 'tools'}"}
    result = subprocess.run(
        command, cwd=STAGE, env=environ, stdout=subprocess.PIPE, text=True, check=False
    )
    if result.returncode > 1:  # not findings, but mypy itself in trouble
        print(result.stdout, end="", flush=True)
        return result.returncode
    # PyTorch's own files lie beside ours and are judged too; that is not our business.
    found = [line for line in result.stdout.splitlines() if line.partition(":")[0] in files]
    for line in found:
        line = re.sub("^torchpin/", "tools/overlay/", line)
        print(re.sub("^torch_refdev/", f"{ACCELERATOR}/", line), flush=True)
    return 1 if found else 0


def _run(name: str, *arguments: str) -> int:
    """Runs a tool of this environment in the root of the repository."""
    program = pathlib.Path(sys.executable).parent / name
    return subprocess.run([str(program), *arguments], cwd=ROOT, check=False).returncode


def main() -> int:
    files = [name for name in PYTHON_FILES if (ROOT / name).exists()]
    checks = {
        "clang-format": lambda: _run("clang-format", "--dry-run", "-Werror", *_cxx_files()),
        "ruff check": lambda: _run("ruff", "check", *files),
        "ruff format": lambda: _run("ruff", "format", "--check", *files),
        "mypy": _mypy,
    }
    failed = []
    for name, check in checks.items():
        print(f"== {name}", flush=True)
        if check() != 0:
            failed.append(name)
    print(f"lint: {'failed: ' + ', '.join(failed) if failed else 'all checks passed'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
