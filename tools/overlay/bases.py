"""What differs from one release of PyTorch to the next, as far as Python is concerned.

The one place with release numbers on the Python side. Elsewhere the code reads as if there were one
PyTorch. Imports nothing of PyTorch, so that the build can ask it too.
"""

from __future__ import annotations

import re
from typing import Final

OLDEST: Final = (2, 3)
"""The oldest supported release: at::getAccelerator() exists in C++, nothing else does."""

NEWEST: Final = (2, 15)
"""The newest release that torchpin was tried on."""


def parse(version: str) -> tuple[int, int]:
    """Major and minor number of a release such as ``"2.13.0+cpu"``.

    Raises:
        ValueError: if the text does not begin with two numbers.
    """
    match = re.match(r"(\d+)\.(\d+)", version)
    if match is None:
        raise ValueError(f"not a PyTorch version: {version!r}")
    return int(match[1]), int(match[2])


def why_unsupported(version: str) -> str | None:
    """Why torchpin stays off on this release, in one sentence, or None where it works."""
    low, high = (".".join(map(str, release)) for release in (OLDEST, NEWEST))
    if not OLDEST <= parse(version) <= NEWEST:
        return f"PyTorch {version} is outside the supported range {low} to {high}"
    return None


def cxx_standard(version: str) -> int:
    """The C++ standard that the headers of this release need."""
    return 20 if parse(version) >= (2, 12) else 17


def autoloads_backends(version: str) -> bool:
    """Whether ``import torch`` calls the entry points of the group ``torch.backends``."""
    return parse(version) >= (2, 5)


def binds_get_accelerator(version: str) -> bool:
    """Whether ``torch._C._get_accelerator`` exists."""
    return parse(version) >= (2, 4)
