"""Activation on releases whose ``import torch`` calls nobody (2.3 and 2.4).

``torchpin.pth`` imports this module when Python starts, so it has to be small and must not import
anything large. It waits for ``torch`` to be imported and calls the autoload function as that ends,
where later releases call it themselves.
"""

from __future__ import annotations

import importlib.util
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType


class _AfterImport(Loader):
    """Runs the real loader of ``torch``, then the autoload function."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # The module must not remember this loader: importlib.resources and inspect ask it for more
        # than a Loader offers.
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        from torchpin._autoload import autoload

        autoload()


class _TorchFinder(MetaPathFinder):
    """Finds ``torch`` once, by asking the finders after it, and then leaves ``sys.meta_path``."""

    def find_spec(
        self, fullname: str, path: object = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname != "torch":
            return None
        # Out of the way first: find_spec below walks sys.meta_path again.
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _AfterImport(spec.loader)
        return spec


def install() -> None:
    """Waits for ``torch``; does nothing if it is there already, or if torchpin is installed twice."""
    if "torch" in sys.modules or any(isinstance(f, _TorchFinder) for f in sys.meta_path):
        return
    sys.meta_path.insert(0, _TorchFinder())
