"""The extension module. What it offers is for torchpin itself and declared in torch/csrc/torchpin.h."""

from typing import Any

def __getattr__(name: str) -> Any: ...
