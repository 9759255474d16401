"""Builds the extension against the PyTorch of this environment.

Each release of PyTorch gets a build folder of its own, so that one source tree
serves several environments and only what changed is compiled again.
"""

import os
from pathlib import Path

import torch
from setuptools import setup
from torch.utils.cpp_extension import BuildExtension, CppExtension

HERE = Path(__file__).parent
os.environ.setdefault("MAX_JOBS", "2")
os.chdir(HERE)

setup(
    ext_modules=[
        CppExtension(
            "torch_refdev._C",
            sorted(str(path) for path in Path("csrc").glob("*.cpp")),
            depends=sorted(str(path) for path in Path("csrc").glob("*.h")),
            extra_compile_args=["-O2", "-g0", "-Wall", "-fvisibility=hidden"],
        )
    ],
    cmdclass={"build_ext": BuildExtension},
    options={
        "build": {"build_base": f"build/torch-{torch.__version__}"},
        "egg_info": {"egg_base": "build"},
    },
)
