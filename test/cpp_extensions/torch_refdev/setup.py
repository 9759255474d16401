"""Builds the extension against the PyTorch of this environment.

Each release of PyTorch gets a build folder of its own, so that one source tree
serves several environments and only what changed is compiled again.
"""

import os
from pathlib import Path

# Only the compiler settings of PyTorch are needed here, no backend.
os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"

import torch
from setuptools import setup
from torch.utils.cpp_extension import BuildExtension, CppExtension

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
os.environ.setdefault("MAX_JOBS", "2")
os.chdir(HERE)

setup(
    ext_modules=[
        CppExtension(
            "torch_refdev._C",
            sorted(str(path) for path in Path("csrc").glob("*.cpp")),
            depends=sorted(str(path) for path in Path("csrc").glob("*.h")),
            extra_compile_args=[
                "-O2",
                "-g0",
                "-Wall",
                "-fvisibility=hidden",
                # Headers that torchpin installs for backends, taken from this
                # checkout. After PyTorch's own folders: ours share their names.
                f"-I{ROOT / 'aten' / 'src'}",
                f"-I{ROOT}",
            ],
        )
    ],
    cmdclass={"build_ext": BuildExtension},
    options={
        "build": {"build_base": f"build/torch-{torch.__version__}"},
        "egg_info": {"egg_base": "build"},
    },
)
