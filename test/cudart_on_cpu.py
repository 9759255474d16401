"""CUDA without a GPU: a CUDA build of PyTorch in which the CPU stands in for the driver and the runtime.

What PyTorch itself does for CUDA runs as it is: its allocators, streams, events and copies, hence
also what torchpin does with them. Kernels do nothing, so a test may copy to the device and back, and
compute only on the CPU. See ``test/cpp/cudart_on_cpu.cpp``.

A test process gets it by :func:`environment`; in that process the functions below tell the stand-in
what to do, under the names that ``torch_refdev`` has for the same things.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import pathlib
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from typing import Any

import torch

HERE = pathlib.Path(__file__).resolve().parent
SOURCE = HERE / "cpp" / "cudart_on_cpu.cpp"


def why_not() -> str | None:
    """What is missing here, or None."""
    if torch.version.cuda is None:
        return "this PyTorch is not built for CUDA"
    if _headers() is None:
        return "the headers of CUDA's runtime are not installed with this PyTorch"
    if any(pathlib.Path("/dev").glob("nvidia[0-9]*")):
        return "there is a GPU: run the tests on that (tools/gpu_check.sh)"
    return None


def _headers() -> pathlib.Path | None:
    packages = pathlib.Path(torch.__file__).resolve().parent.parent / "nvidia"
    for folder in ("cuda_runtime", "cu13"):
        if (packages / folder / "include" / "cuda_runtime_api.h").exists():
            return packages / folder / "include"
    return None


def library() -> pathlib.Path:
    """The shared library to preload; built at the first call for this PyTorch and source."""
    headers = _headers()
    assert headers is not None, why_not()
    options = ["-std=c++17", "-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-pthread"]
    # By the driver's name, so that whoever asks for the driver finds this one.
    options += ["-Wl,-soname,libcuda.so.1", f"-I{HERE / 'cpp'}", f"-isystem{headers}"]
    key = hashlib.sha256(" ".join(options).encode() + SOURCE.read_bytes()).hexdigest()[:16]
    folder = pathlib.Path(tempfile.gettempdir(), f"torchpin-tests-{os.getuid()}")
    folder.mkdir(exist_ok=True)
    built = folder / f"cudart_on_cpu-{key}.so"
    if not built.exists():
        # Written aside and renamed: another process may be loading it.
        draft = folder / f"draft-{os.getpid()}.so"
        compiler = os.environ.get("CXX", sysconfig.get_config_var("CXX").split()[0])
        subprocess.run([compiler, *options, str(SOURCE), "-o", str(draft)], check=True)
        draft.replace(built)
    return built


def environment() -> dict[str, str]:
    """The environment of a process in which the tests for "the accelerator" run on this one."""
    from common_pin import environment

    preload = " ".join([str(library()), os.environ.get("LD_PRELOAD", "")]).strip()
    return environment("cuda", LD_PRELOAD=preload)


# ---- in such a process


def is_preloaded() -> bool:
    return "cudart_on_cpu" in os.environ.get("LD_PRELOAD", "")


def _function(name: str, result: type, *arguments: type) -> ctypes._NamedFuncPointer:
    function = getattr(ctypes.CDLL(None), f"cudart_on_cpu_{name}")
    function.restype = result
    function.argtypes = arguments
    return function


def set_copy_delay(seconds: float) -> None:
    """How long each copy takes at least, in seconds."""
    _function("set_delay", ctypes.c_int, ctypes.c_double)(seconds)


@contextlib.contextmanager
def hold_copies() -> Iterator[None]:
    """Inside no copy is started; they wait in their streams."""
    hold = _function("hold", ctypes.c_int, ctypes.c_int)
    hold(1)
    try:
        yield
    finally:
        hold(0)


def set_locked_limit(nbytes: int | None) -> None:
    """Refuses to page-lock more than so many bytes in all; None: there is no limit."""
    _function("set_locked_limit", ctypes.c_int, ctypes.c_int64)(-1 if nbytes is None else nbytes)


def counters() -> dict[str, Any]:
    """``locked_bytes`` and ``contexts`` (devices) now, and ``pin_calls`` since the process began."""
    has_context = _function("has_context", ctypes.c_int, ctypes.c_int)
    return {
        "contexts": {device for device in range(2) if has_context(device)},
        "locked_bytes": _function("locked_bytes", ctypes.c_int64)(),
        "pin_calls": _function("lock_calls", ctypes.c_uint64)(),
    }


def main() -> int:
    """Runs pytest on the stand-in with the arguments given: ``python test/cudart_on_cpu.py FILE...``."""
    if reason := why_not():
        print(f"cudart_on_cpu: {reason}", file=sys.stderr)
        return 1
    return subprocess.call([sys.executable, "-m", "pytest", *sys.argv[1:]], env=environment())


if __name__ == "__main__":
    sys.exit(main())
