"""Building, what a wheel holds, and what is left after an uninstall.

The compiler runs only where the build folder of this PyTorch is not up to date.
"""

from __future__ import annotations

import email
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from typing import ClassVar

import torch
from common_pin import BASE, HERE
from torch.testing._internal.common_utils import TestCase, run_tests

ROOT = HERE.parent
AUTOLOADS = BASE >= (2, 5)


def run(
    *command: str, cwd: pathlib.Path = ROOT, **changes: str
) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **changes}
    environment.pop("CXX", None)
    # The tools of the environment, whether or not it was activated.
    scripts = str(pathlib.Path(sys.executable).parent)
    environment["PATH"] = changes.get("PATH", scripts + os.pathsep + environment.get("PATH", ""))
    return subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=600
    )


def lines_of_error(done: subprocess.CompletedProcess[str]) -> list[str]:
    """The lines on both outputs that begin as torchpin's own errors do."""
    return [
        line
        for line in (done.stdout + done.stderr).splitlines()
        if re.match(r"\s*torchpin: ", line)
    ]


class TestErrors(TestCase):
    """One clear sentence, no traceback, before anything is compiled."""

    def build(self, torch_package: str | None = None, **changes: str):
        with tempfile.TemporaryDirectory() as folder:
            if torch_package is not None:
                pathlib.Path(folder, "torch").mkdir()
                pathlib.Path(folder, "torch", "__init__.py").write_text(torch_package)
                changes["PYTHONPATH"] = folder
            command = [sys.executable, "setup.py", "-q", "build", "--build-base", folder]
            done = run(*command, **changes)
        self.assertNotEqual(done.returncode, 0)
        self.assertNotIn("Traceback", done.stderr)
        found = lines_of_error(done)
        self.assertEqual(len(found), 1, msg=done.stdout + done.stderr)
        return found[0]

    def test_no_torch(self):
        message = self.build("raise ImportError('there is none')")
        self.assertIn("PyTorch is not installed", message)
        self.assertIn("pip install torch", message)

    def test_release_outside_the_range(self):
        for version in ("2.2.2+cu121", "2.16.0", "1.13.1", "3.0.0"):
            message = self.build(f"__version__ = {version!r}")
            self.assertIn(f"PyTorch {version} is outside the supported range 2.3 to 2.15", message)

    def test_no_compiler(self):
        with tempfile.TemporaryDirectory() as tools:
            for name in ("cmake", "ninja"):
                found = shutil.which(name, path=str(pathlib.Path(sys.executable).parent))
                found = found or shutil.which(name)
                self.assertIsNotNone(found, msg=f"{name} is needed to build")
                pathlib.Path(tools, name).symlink_to(str(found))
            message = self.build(PATH=tools)
            self.assertIn("no C++ compiler was found", message)
            self.assertIn("CXX", message)

    def test_no_cmake(self):
        with tempfile.TemporaryDirectory() as tools:
            message = self.build(PATH=tools)
        self.assertIn("cmake was not found", message)
        self.assertIn("pip install cmake", message)


class TestWheel(TestCase):
    folder: ClassVar[tempfile.TemporaryDirectory[str]]
    wheel: ClassVar[pathlib.Path]

    @classmethod
    def setUpClass(cls):
        super().setUpClass()
        cls.folder = tempfile.TemporaryDirectory()
        command = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check", "wheel"]
        command += ["--no-build-isolation", "--no-deps", "-w", cls.folder.name, str(ROOT)]
        done = run(*command, cwd=pathlib.Path(cls.folder.name))
        assert done.returncode == 0, done.stdout + done.stderr
        [cls.wheel] = pathlib.Path(cls.folder.name).glob("*.whl")

    @classmethod
    def tearDownClass(cls):
        cls.folder.cleanup()
        super().tearDownClass()

    def test_what_it_holds(self):
        with zipfile.ZipFile(self.wheel) as archive:
            names = set(archive.namelist())
            info = next(name for name in names if name.endswith(".dist-info/METADATA"))
            metadata = email.message_from_bytes(archive.read(info))
            entry_points = archive.read(info.replace("METADATA", "entry_points.txt")).decode()
            built_for = archive.read("torchpin/built_for.txt").decode().strip()
        self.assertEqual(built_for, torch.__version__)
        self.assertIn("torchpin = torchpin._autoload:autoload", entry_points)
        # Each of these for one release and no other, and PyTorch is never installed over.
        self.assertIn(f"torch=={torch.__version__.partition('+')[0]}", metadata["Requires-Dist"])
        self.assertEqual(metadata["License"] or metadata["License-Expression"], "BSD-3-Clause")

        self.assertIn("torchpin/py.typed", names)
        self.assertEqual(len([n for n in names if re.fullmatch(r"torchpin/_C\..*\.so", n)]), 1)
        tree = {str(path.relative_to(ROOT)) for path in ROOT.glob("torch/**/*.py")}
        self.assertEqual({n[len("torchpin/tree/") :] for n in names if "/tree/" in n}, tree)
        headers = {
            str(path.relative_to(ROOT / "aten/src")) for path in ROOT.glob("aten/src/**/*.h")
        }
        headers |= {str(path.relative_to(ROOT)) for path in ROOT.glob("c10/**/*.h")}
        self.assertEqual(
            {n[len("torchpin/include/") :] for n in names if "/include/" in n}, headers
        )
        modules = {
            str(path.relative_to(ROOT / "tools/overlay"))
            for path in ROOT.glob("tools/overlay/**/*.py")
        }
        self.assertLessEqual({f"torchpin/{name}" for name in modules}, names)
        self.assertEqual("torchpin.pth" in names, not AUTOLOADS)
        # Nothing beside the package, and above all nothing under "torch".
        top = {name.partition("/")[0] for name in names}
        allowed = {"torchpin", info.partition("/")[0]} | (set() if AUTOLOADS else {"torchpin.pth"})
        self.assertEqual(top, allowed)

    def test_uninstall_leaves_nothing(self):
        with tempfile.TemporaryDirectory() as folder:
            place = pathlib.Path(folder, "venv")
            done = run(sys.executable, "-m", "venv", "--without-pip", str(place))
            self.assertEqual(done.returncode, 0, msg=done.stderr)

            def files() -> set[str]:
                return {str(path) for path in place.rglob("*")}

            before = files()
            pip = [sys.executable, "-m", "pip", "-q", "--disable-pip-version-check"]
            pip += ["--python", str(place)]
            done = run(*pip, "install", "--no-deps", "--no-index", str(self.wheel))
            self.assertEqual(done.returncode, 0, msg=done.stderr)
            installed = files() - before
            self.assertTrue(any(name.endswith("torchpin/__init__.py") for name in installed))
            # Running it leaves compiled files, which must go too. There is no PyTorch there.
            python = str(place / "bin" / "python")
            code = "import torchpin; print(torchpin.is_enabled())"
            done = run(python, "-c", code, cwd=pathlib.Path(folder))
            self.assertEqual((done.stdout, done.stderr), ("False\n", ""))
            done = run(python, "-m", "torchpin", cwd=pathlib.Path(folder))
            self.assertEqual(done.returncode, 1)
            self.assertIn("PyTorch cannot be imported", done.stderr)
            done = run(*pip, "uninstall", "-y", "torchpin")
            self.assertEqual(done.returncode, 0, msg=done.stderr)
            self.assertEqual(files() - before, set())

    def test_extension_carries_no_path_of_this_machine(self):
        with zipfile.ZipFile(self.wheel) as archive:
            name = next(n for n in archive.namelist() if re.fullmatch(r"torchpin/_C\..*\.so", n))
            binary = archive.read(name)
        self.assertNotIn(str(ROOT).encode(), binary)


if __name__ == "__main__":
    run_tests()
