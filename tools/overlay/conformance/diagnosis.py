"""Finds out, before any test runs, what the backend is: complete enough to be tested, and how deep.

Runs in a process of its own, since an incomplete backend may end it. What it finds missing is one
failure, with the advice that torchpin gives its users, in place of a failure of every test.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch
from torchpin.conformance.backend import Backend, Options
from torchpin.conformance.fresh import run_fresh, step
from torchpin.conformance.requirement import Hook, Nonconformance, require

DEPTHS: Final = {
    1: "pinned memory from the hooks",
    2: "caching host allocator: statistics and limits",
    3: "page-locking in place",
}

_HOOK_FOR_LACK: Final = {
    "pinned_memory": "the device type, which has no pinned memory",
    "hooks": "at::RegisterPrivateUse1HooksInterface, which the backend has to call",
    "allocator": Hook.ALLOCATOR,
    "null_allocator": Hook.ALLOCATOR,
    "plain_allocator": Hook.ALLOCATOR,
    "recognition": Hook.IS_PINNED,
}


@dataclass(frozen=True)
class Diagnosis:
    """What is known of the backend before the tests."""

    failure: Nonconformance | None
    """What keeps it from being tested at all."""
    torch: str = ""
    allocator: str = ""
    devices: int = 0
    not_offered: dict[int, str] | None = None
    """Depths that it does not claim, with the reason."""


def diagnose(options: Options) -> Diagnosis:
    """Tries the backend in a fresh process."""
    try:
        found = run_fresh(
            options.to_environment(),
            examine,
            Hook.START,
            f"the backend {options.accelerator!r} can be imported, started and used",
        )
    except Nonconformance as failure:
        return Diagnosis(failure)
    not_offered = {int(depth): reason for depth, reason in found.pop("not_offered").items()}
    return Diagnosis(None, not_offered=not_offered, **found)


def examine(backend: Backend) -> dict[str, Any]:
    """Raises what is missing, or tells what there is. Run in a fresh process."""
    import torchpin
    from torch.utils.data._utils import pin_target
    from torchpin import _C, _overlay

    require(
        torchpin.is_enabled(),
        "torchpin itself",
        "torchpin is switched on",
        f"it is off: {_overlay.why_off()}",
    )
    found, lack, *_ = _C._pin_target(initialize=False)
    require(
        found == backend.name,
        f"the registration of {backend.name!r} as an accelerator (with --import MODULE where PyTorch "
        "does not load the backend by itself)",
        f"the current accelerator is {backend.name!r}",
        "there is no accelerator" if found is None else f"it is {found!r}",
    )
    step("asking what the backend lacks")
    _, missing = pin_target.what_is_missing()
    require(
        missing is None,
        _HOOK_FOR_LACK.get(lack, Hook.MODULE),
        "the backend supplies pinned memory",
        missing,
    )
    for function in ("device_count", "set_device"):
        require(
            callable(getattr(backend.module, function, None)),
            Hook.MODULE,
            f"the device module has a function {function}()",
            f"torch.{backend.name} has no function {function}()",
        )
    step("starting the device")
    torch.empty(1, device=backend.device())
    step("allocating pinned memory for the first time")
    _, lack, reason, _, allocator = _C._pin_target(initialize=True)
    require(
        lack == "nothing",
        _HOOK_FOR_LACK.get(lack, Hook.ALLOCATOR),
        "the backend supplies pinned memory that it recognises",
        reason,
    )
    pinned = torch.arange(1000.0).pin_memory()
    step("copying pinned memory to the device and back")
    same = torch.equal(pinned.to(backend.device()).cpu(), pinned)
    require(same, Hook.COPY, "1000 numbers arrive and come back", "others came back")
    step("asking for the depths that it offers")
    return {
        "torch": torch.__version__,
        "allocator": allocator or "PyTorch's own",
        "devices": backend.device_count,
        "not_offered": _not_offered(),
    }


def _not_offered() -> dict[int, str]:
    """Depths that the backend does not claim. One that it claims and fails at is for the tests."""
    import torchpin

    missing = {}
    try:
        torchpin.max_host_memory()
    except NotImplementedError as error:
        missing[2] = _sentence(error)
    memory = torch.zeros(100_000)
    try:
        torchpin.register_host_memory(memory).unregister()
    except NotImplementedError as error:
        missing[3] = _sentence(error)
    except RuntimeError:
        pass  # A refusal, or worse: offered.
    return missing


def _sentence(error: Exception) -> str:
    return str(error).partition("\n")[0]
