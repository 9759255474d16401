"""Tells what a build against the installed PyTorch needs: versions, folders, ABI.

Called by setup.py and CMakeLists.txt. Ends with one sentence and status 1 where torchpin cannot be
built: no PyTorch, or a release outside the range of ``tools/overlay/bases.py``.
"""

from __future__ import annotations

import importlib.util
import os
import pathlib
import sys
from dataclasses import dataclass

# Nothing that is installed may change the PyTorch that is looked at.
os.environ["TORCHPIN"] = "0"
os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"

HERE = pathlib.Path(__file__).resolve().parent


@dataclass(frozen=True)
class Base:
    """The installed PyTorch as a compiler sees it."""

    version: str
    cxx_standard: int
    cxx11_abi: int
    include_dirs: tuple[str, ...]
    library_dir: str


def _bases() -> object:
    """The module tools/overlay/bases.py, without importing the package around it."""
    spec = importlib.util.spec_from_file_location("bases", HERE / "overlay" / "bases.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def probe() -> Base:
    """Looks at the installed PyTorch.

    Raises:
        SystemExit: with one sentence, if there is none or its release is not supported.
    """
    if not sys.platform.startswith("linux"):
        raise SystemExit(f"torchpin: Linux only, this is {sys.platform}")
    try:
        import torch
    except ImportError as error:
        raise SystemExit(
            f"torchpin: PyTorch is not installed for {sys.executable} ({error}). Install it first "
            "(pip install torch), then build with: pip install --no-build-isolation ."
        ) from None
    bases = _bases()
    refusal = bases.why_unsupported(torch.__version__)  # type: ignore[attr-defined]
    if refusal:
        raise SystemExit(f"torchpin: {refusal}")
    root = pathlib.Path(torch.__file__).parent
    return Base(
        version=torch.__version__,
        cxx_standard=bases.cxx_standard(torch.__version__),  # type: ignore[attr-defined]
        cxx11_abi=int(torch._C._GLIBCXX_USE_CXX11_ABI),
        include_dirs=(
            str(root / "include"),
            str(root / "include" / "torch" / "csrc" / "api" / "include"),
        ),
        library_dir=str(root / "lib"),
    )


def main() -> None:
    base = probe()
    print(f'set(BASE_VERSION "{base.version}")')
    print(f"set(BASE_CXX_STANDARD {base.cxx_standard})")
    print(f"set(BASE_CXX11_ABI {base.cxx11_abi})")
    print(f'set(BASE_INCLUDE_DIRS "{";".join(base.include_dirs)}")')
    print(f'set(BASE_LIBRARY_DIR "{base.library_dir}")')


if __name__ == "__main__":
    main()
