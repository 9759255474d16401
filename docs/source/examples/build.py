"""Builds an example backend against the PyTorch and torchpin of this environment.

    python build.py DEPTH [TARGET]

It is one call of the compiler. What a backend needs for it: the include folders of PyTorch and, for
the depths 2 and 3, after them those of torchpin; the C++ standard and the ABI of that PyTorch; and
its libraries, which are loaded already when the backend is.
"""

from __future__ import annotations

import os
import pathlib
import subprocess
import sys

# Only the settings of PyTorch are needed here, and no backend.
os.environ.setdefault("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")

HERE = pathlib.Path(__file__).resolve().parent


def command(depth: int, target: str) -> list[str]:
    """The call of the compiler."""
    import torch
    import torchpin

    base = pathlib.Path(torch.__file__).parent
    includes = [base / "include", base / "include/torch/csrc/api/include"]
    includes += [pathlib.Path(folder) for folder in torchpin.include_paths()]
    release = tuple(int(part) for part in torch.__version__.split(".")[:2])
    return [
        os.environ.get("CXX", "c++"),
        f"-std=c++{20 if release >= (2, 12) else 17}",
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}",
        *("-O0", "-Wall", "-fPIC", "-shared", "-fvisibility=hidden"),
        # As system headers, so that a backend sees warnings about its own code only.
        *(f"-isystem{folder}" for folder in includes),
        str(HERE / f"backend_depth{depth}" / "backend.cpp"),
        *("-o", target),
        *(f"-L{base / 'lib'}", "-ltorch_cpu", "-lc10"),
    ]


if __name__ == "__main__":
    depth = int(sys.argv[1])
    target = sys.argv[2] if len(sys.argv) > 2 else f"backend_depth{depth}.so"
    subprocess.run(command(depth, target), check=True)
