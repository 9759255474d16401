"""The Python half of the example backends: a name, a device module, and the library with the hooks.

    python build.py 2                        # writes backend_depth2.so
    python -c 'import backend; backend.load("backend_depth2.so")'

A real backend is a package that does this when it is imported, and names itself in the entry-point
group ``torch.backends``, so that PyTorch 2.5 and newer import it on their own.
"""

from __future__ import annotations

import torch

NAME = "mydev"


class Module:
    """What PyTorch and torchpin ask of ``torch.mydev``."""

    # These two are what torchpin needs.
    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def current_device() -> int:
        return 0

    # These four are what PyTorch needs: the pin thread of a DataLoader selects the device, and a
    # worker seeds all of them.
    @staticmethod
    def device_count() -> int:
        return 1

    @staticmethod
    def set_device(device: int) -> None:
        pass

    @staticmethod
    def _is_in_bad_fork() -> bool:
        return False

    @staticmethod
    def manual_seed_all(seed: int) -> None:
        pass


def load(library: str | None) -> None:
    """Makes ``mydev`` the accelerator of this process.

    Args:
        library: path of the library with the hooks; None for a backend without C++.
    """
    torch.utils.rename_privateuse1_backend(NAME)
    torch._register_device_module(NAME, Module)
    if library is not None:
        torch.ops.load_library(library)
