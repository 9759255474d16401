"""Builds the extension with CMake against the installed PyTorch and lays the tree into the package.

Everything else about the distribution stands in pyproject.toml.
"""

from __future__ import annotations

import importlib.util
import os
import pathlib
import shutil
import subprocess
import sys
import sysconfig
from typing import ClassVar

ROOT = pathlib.Path(__file__).resolve().parent


def load(path: str):
    """The module at ``path`` in this checkout."""
    name = pathlib.Path(path).stem
    spec = importlib.util.spec_from_file_location(name, ROOT / path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


try:
    from setuptools import Command, Extension, setup
    from setuptools.command.bdist_wheel import bdist_wheel  # noqa: F401  (setuptools 70.1)
    from setuptools.command.build_ext import build_ext
    from setuptools.command.build_py import build_py
    from setuptools.command.editable_wheel import editable_wheel
except ImportError as error:
    raise SystemExit(
        f"torchpin: setuptools 70.1 or newer is needed to build ({error}). "
        "Run: pip install 'setuptools>=70.1,<82' cmake ninja"
    ) from None

base = load("tools/base_probe.py").probe()
bases = load("tools/overlay/bases.py")
# One for each PyTorch and Python: what one build leaves behind must not get into another's wheel.
BUILD = f"build/torch-{base.version}-{sysconfig.get_config_var('SOABI')}"
START_UP = "torchpin.pth"
START_UP_LINE = (
    "import os, importlib.util; "
    "os.environ.get('TORCHPIN', '1') != '0' and importlib.util.find_spec('torchpin') and "
    "importlib.import_module('torchpin._startup').install()\n"
)


def tree_files() -> list[tuple[pathlib.Path, str]]:
    """Files of the tree and the place of each inside the package.

    The Python that takes its place under ``torch``, and the headers that backends include.
    """
    files = [
        (path, f"tree/{path.relative_to(ROOT)}") for path in sorted(ROOT.glob("torch/**/*.py"))
    ]
    for top in ("aten/src", "c10"):
        for path in sorted((ROOT / top).rglob("*.h")):
            relative = path.relative_to(ROOT / "aten/src" if top == "aten/src" else ROOT)
            files.append((path, f"include/{relative}"))
    return files


def needs_start_up_file() -> bool:
    return not bases.autoloads_backends(base.version)


class BuildTree(build_py):
    """Adds the tree and, where ``import torch`` calls nobody, the start-up file."""

    def run(self) -> None:
        if self.editable_mode:
            super().run()
            return
        # A file that is gone from the source has to go here too.
        shutil.rmtree(pathlib.Path(self.build_lib, "torchpin"), ignore_errors=True)
        super().run()
        for source, place in tree_files():
            target = pathlib.Path(self.build_lib, "torchpin", place)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, target)
        if needs_start_up_file():
            pathlib.Path(self.build_lib, START_UP).write_text(START_UP_LINE)


class BuildExtension(build_ext):
    """Runs CMake in a folder that is kept, one for each PyTorch, so that a rebuild is short."""

    def run(self) -> None:
        cmake = shutil.which("cmake")
        if cmake is None:
            raise SystemExit("torchpin: cmake was not found. Run: pip install cmake ninja")
        compiler = os.environ.get("CXX") or next(
            filter(shutil.which, ("c++", "g++", "clang++")), None
        )
        if compiler is None or shutil.which(compiler.split()[0]) is None:
            raise SystemExit(
                "torchpin: no C++ compiler was found. Install one (Debian and Ubuntu: "
                "apt install g++), or name it in the environment variable CXX."
            )
        folder = ROOT / BUILD
        generator = ["-G", "Ninja"] if shutil.which("ninja") else []
        configure = [cmake, *generator, "-S", str(ROOT), "-B", str(folder)]
        self._call([*configure, f"-DPython_EXECUTABLE={sys.executable}"])
        jobs = os.environ.get("MAX_JOBS") or str(len(os.sched_getaffinity(0)))
        self._call([cmake, "--build", str(folder), "--parallel", jobs])
        if not self.editable_mode:
            target = pathlib.Path(self.build_lib, "torchpin")
            self._call([cmake, "--install", str(folder), "--prefix", str(target)])

    def _call(self, command: list[str]) -> None:
        print("+", *command, flush=True)
        status = subprocess.call(command)
        if status != 0:
            raise SystemExit(f"torchpin: {' '.join(command[:2])} ... failed with status {status}")


class EditableWheel(editable_wheel):
    """An editable install has its own list of files, so the start-up file goes in as data."""

    def run(self) -> None:
        if needs_start_up_file():
            path = ROOT / "build" / START_UP
            path.parent.mkdir(exist_ok=True)
            path.write_text(START_UP_LINE)
            purelib = pathlib.Path(sysconfig.get_path("purelib")).relative_to(sys.prefix)
            self.distribution.data_files = [(str(purelib), [str(path.relative_to(ROOT))])]
        super().run()


class Clean(Command):
    """Removes everything that was built."""

    user_options: ClassVar[list] = []

    def initialize_options(self) -> None:
        pass

    def finalize_options(self) -> None:
        pass

    def run(self) -> None:
        shutil.rmtree(ROOT / "build", ignore_errors=True)


(ROOT / BUILD).mkdir(parents=True, exist_ok=True)
packages = ["torchpin"] + [
    "torchpin." + ".".join(path.parent.relative_to(ROOT / "tools/overlay").parts)
    for path in sorted((ROOT / "tools/overlay").glob("*/**/__init__.py"))
]
setup(
    version="0.1.0",
    # The extension works with the PyTorch it was built against and with no other.
    install_requires=[f"torch=={base.version.partition('+')[0]}"],
    package_dir={"torchpin": "tools/overlay"},
    packages=packages,
    package_data={"torchpin": ["py.typed", "*.pyi"]},
    ext_modules=[Extension("torchpin._C", sources=[])],
    # Metadata in the root of the checkout would be found by every Python that is started there, and
    # its entry points too, even where torchpin is not installed.
    options={"build": {"build_base": f"{BUILD}/python"}, "egg_info": {"egg_base": BUILD}},
    cmdclass={
        "build_py": BuildTree,
        "build_ext": BuildExtension,
        "editable_wheel": EditableWheel,
        "clean": Clean,
    },
)
