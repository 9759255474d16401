"""A backend without a line of C++ that has pinned host memory."""

from __future__ import annotations

import torch
import torchpin

NAME = "mydev"

locked: dict[int, int] = {}
"""Stands for the vendor's driver, which would be reached by ctypes: bytes by address."""


def page_lock(address: int, nbytes: int) -> bool:
    """Tells the driver to page-lock memory. Both numbers are multiples of the page size.

    Returns False if the driver refuses.
    """
    locked[address] = nbytes
    return True


def unlock(address: int, nbytes: int) -> None:
    """Undoes one call of the above, with the same numbers."""
    del locked[address]


class Module:
    """What PyTorch and torchpin ask of ``torch.mydev``."""

    @staticmethod
    def is_available() -> bool:
        return True

    @staticmethod
    def current_device() -> int:
        return 0

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


def load() -> None:
    """Makes ``mydev`` the accelerator of this process."""
    setup = getattr(
        torch.utils.backend_registration, "_setup_privateuseone_for_python_backend", None
    )
    if setup is not None:
        # From 2.10 on: name, device module, and a device guard, which a pin thread needs.
        setup(rename=NAME, backend_module=Module())
    else:
        torch.utils.rename_privateuse1_backend(NAME)
        torch._register_device_module(NAME, Module)
    torchpin.register_host_memory_functions(page_lock, unlock)
