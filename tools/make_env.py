"""Makes the environment of a base: ``.venv`` for the default one, ``.venv-VERSION`` for another.

An environment holds one release of PyTorch and, built against it, torchpin and the reference
accelerator. Everything comes from the package index that pip is set up with; the machine needs
Python with venv and a C++ compiler. What is up to date is left alone, so that every make target can
begin with this program. It uses the standard library only, and may be imported.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import os
import pathlib
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator

ROOT = pathlib.Path(__file__).resolve().parent.parent
REQUIREMENTS = ROOT / "tools" / "requirements"
REFERENCE_ACCELERATOR = ROOT / "test" / "cpp_extensions" / "torch_refdev"

DEFAULT_BASE = "2.13.0"
TEST_BASES = ("2.3.1", DEFAULT_BASE)
"""The oldest base and the default one: what ``make test`` runs on."""

# What of the tree goes into torchpin. The rest can change without a rebuild.
_SOURCES = (
    "aten",
    "c10",
    "torch",
    "tools/overlay",
    "tools/base_probe.py",
    "CMakeLists.txt",
    "pyproject.toml",
    "setup.py",
)
_PRODUCTS = {"build", "dist", "__pycache__"}
_SUFFIXES = {".c", ".cpp", ".h", ".in", ".pth", ".py", ".pyi", ".toml", ".txt", ".typed"}


class EnvironmentFailure(Exception):
    """An environment cannot be made; the message says what to do."""


def declared_bases() -> list[str]:
    """The releases that have a file of requirements, oldest first: what ``make test-all`` runs on."""
    names = (path.stem.removeprefix("torch-") for path in REQUIREMENTS.glob("torch-*.txt"))
    return sorted(names, key=_numbers)


def environment(base: str) -> pathlib.Path:
    """The folder of the environment of ``base``, which may not exist yet."""
    return ROOT / (".venv" if base == DEFAULT_BASE else f".venv-{base}")


def python(base: str) -> pathlib.Path:
    """The Python of the environment of ``base``."""
    return environment(base) / "bin" / "python"


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version))


def _say(text: str) -> None:
    print(f"make_env: {text}", flush=True)


def _files(paths: Iterable[pathlib.Path]) -> Iterator[pathlib.Path]:
    for path in paths:
        if path.is_file():
            yield path
            continue
        for file in sorted(path.rglob("*")):
            inside = file.relative_to(path).parts
            if file.suffix in _SUFFIXES and not _PRODUCTS.intersection(inside):
                yield file


def _digest(paths: Iterable[pathlib.Path], *texts: str) -> str:
    """A number for the contents of files, of files in folders, and of texts."""
    digest = hashlib.sha256()
    for text in texts:
        digest.update(text.encode() + b"\0")
    for file in _files(paths):
        digest.update(str(file.relative_to(ROOT)).encode() + b"\0")
        digest.update(file.read_bytes() + b"\0")
    return digest.hexdigest()


def _requirements_of(base: str) -> tuple[str, str | None]:
    """What to install for a base, and the newest Python there is for it where that is known.

    A release without a file of its own takes the file of the one before it, with its own number.
    """
    known = [other for other in declared_bases() if _numbers(other) <= _numbers(base)]
    if not known or not re.fullmatch(r"\d+\.\d+\.\d+", base):
        raise EnvironmentFailure(
            f"no such base: {base!r}. Known: {', '.join(declared_bases())}; others between the "
            "first and the last of these work too, written like them."
        )
    text = (REQUIREMENTS / f"torch-{known[-1]}.txt").read_text()
    newest = re.search(r"^# newest Python: (\d+\.\d+)$", text, re.MULTILINE)
    text = re.sub(r"^torch==.*$", f"torch=={base}", text, flags=re.MULTILINE)
    return text, newest[1] if newest else None


def _interpreter(base: str, newest: str | None) -> str:
    """A Python that has wheels of ``base``: the running one if it is not too new."""
    if newest is None or sys.version_info[:2] <= _numbers(newest):
        return sys.executable
    major, minor = _numbers(newest)
    names = [f"python{major}.{number}" for number in range(minor, 9, -1)]
    for name in names:
        path = shutil.which(name)
        # Run it: a version manager leaves programs of this name that only say what is missing.
        if path is None:
            continue
        command = [path, "-c", "import ensurepip, venv"]
        if subprocess.run(command, stderr=subprocess.DEVNULL).returncode == 0:
            return path
    raise EnvironmentFailure(
        f"PyTorch {base} has no wheel for Python {sys.version_info[0]}.{sys.version_info[1]}; "
        f"none of {', '.join(names)} was found. Install one of them, or test another base, for "
        f"example: make test BASE={DEFAULT_BASE}"
    )


def _call(command: list[str], what: str, path: str = os.environ.get("PATH", os.defpath)) -> None:
    """Runs a command without an input; its output is shown as it comes."""
    environ = {**os.environ, "PATH": path}
    status = subprocess.run(command, cwd=ROOT, stdin=subprocess.DEVNULL, env=environ).returncode
    if status != 0:
        raise EnvironmentFailure(f"{what} failed with status {status}")


def _pip(base: str, arguments: list[str], what: str) -> None:
    command = [str(python(base)), "-m", "pip", "--disable-pip-version-check", "--no-input"]
    # The tools that build are called by name, so those of the environment have to be found first.
    path = f"{environment(base) / 'bin'}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    _call([*command, "install", "--quiet", *arguments], what, path)


class _Stamps:
    """Remembers in the environment what was done there, one file for each step."""

    def __init__(self, base: str) -> None:
        self._folder = environment(base) / "stamps"

    def get(self, step: str) -> str:
        path = self._folder / step
        return path.read_text() if path.exists() else ""

    def set(self, step: str, value: str) -> None:
        self._folder.mkdir(exist_ok=True)
        (self._folder / step).write_text(value)

    def unset(self, step: str) -> None:
        """Before a step begins, so that one which is broken off is done again."""
        (self._folder / step).unlink(missing_ok=True)


@contextlib.contextmanager
def _one_at_a_time(base: str) -> Iterator[None]:
    """Keeps two programs from installing into one environment at the same time."""
    path = ROOT / "build" / f"{environment(base).name.lstrip('.')}.lock"
    path.parent.mkdir(exist_ok=True)
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _make_venv(base: str, newest: str | None) -> None:
    folder = environment(base)
    if (folder / "bin" / "pip").exists():
        return
    _say(f"making {folder.name}")
    interpreter = _interpreter(base, newest)
    try:
        _call([interpreter, "-m", "venv", "--clear", str(folder)], "python -m venv")
    except EnvironmentFailure as error:
        raise EnvironmentFailure(
            f"{error}. On Debian and Ubuntu it needs a package: apt install python3-venv"
        ) from None


def _install_requirements(base: str, text: str, groups: set[str], stamps: _Stamps) -> None:
    """The base and the tools of ``groups``, together, so that no tool can change the base."""
    installed = set(stamps.get("groups").split())
    groups = groups | installed
    files = [REQUIREMENTS / f"{group}.txt" for group in sorted(groups)]
    # All groups, since one can name another.
    digest = _digest(
        sorted(set(REQUIREMENTS.glob("*.txt")) - set(REQUIREMENTS.glob("torch-*"))), text
    )
    if stamps.get("requirements") == digest and installed == groups:
        return
    _say(
        f"installing PyTorch {base} and {', '.join(sorted(groups))} tools into "
        f"{environment(base).name} (a CUDA build of PyTorch takes several minutes)"
    )
    for step in ("requirements", "groups"):
        stamps.unset(step)
    stamps.set("base.txt", text)
    listed = ["-r", str(environment(base) / "stamps" / "base.txt")]
    for file in files:
        listed += ["-r", str(file)]
    _pip(base, listed, "pip install")
    stamps.set("requirements", digest)
    stamps.set("groups", " ".join(sorted(groups)))


def _install_built(base: str, step: str, folder: pathlib.Path, digest: str) -> None:
    stamps = _Stamps(base)
    if stamps.get(step) == digest:
        return
    _say(f"building {step} against PyTorch {base}")
    stamps.unset(step)
    _pip(base, ["--no-build-isolation", "--no-deps", str(folder)], f"the build of {step}")
    stamps.set(step, digest)


def make(base: str = DEFAULT_BASE, groups: Iterable[str] = (), build: bool = True) -> None:
    """Brings the environment of ``base`` up to date.

    Args:
        base: a release such as ``"2.13.0"``.
        groups: names of files in ``tools/requirements`` to install besides ``build``: ``demo``,
            ``test``, ``lint``, ``docs``. What was installed before stays.
        build: whether to build torchpin and the reference accelerator.

    Raises:
        EnvironmentFailure: if a step fails; the output of that step was printed.
    """
    started = time.monotonic()
    text, newest = _requirements_of(base)
    with _one_at_a_time(base):
        _make_venv(base, newest)
        stamps = _Stamps(base)
        _install_requirements(base, text, {"build", *groups}, stamps)
        if build:
            sources = [ROOT / source for source in _SOURCES]
            _install_built(base, "torchpin", ROOT, _digest(sources, text))
            accelerator = [REFERENCE_ACCELERATOR, *sorted(ROOT.glob("aten/**/*.h"))]
            accelerator += sorted(ROOT.glob("c10/**/*.h"))
            digest = _digest(accelerator, text)
            _install_built(base, "torch_refdev", REFERENCE_ACCELERATOR, digest)
    seconds = time.monotonic() - started
    if seconds > 2:
        _say(f"{environment(base).name} is ready ({seconds:.0f} s)")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0] if __doc__ else None)
    parser.add_argument("--base", default=DEFAULT_BASE, help="a release of PyTorch [%(default)s]")
    parser.add_argument(
        "--with",
        dest="groups",
        metavar="GROUP",
        action="append",
        default=[],
        help="a file of tools/requirements without its ending; can be given several times",
    )
    parser.add_argument("--no-build", action="store_true", help="do not build torchpin")
    options = parser.parse_args()
    try:
        make(options.base, options.groups, build=not options.no_build)
    except EnvironmentFailure as error:
        print(f"make_env: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
