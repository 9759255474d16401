"""The same programs under stock PyTorch and under torchpin.

Two processes run the same probes, one with ``TORCHPIN=0``. Each probe tells whether pinned memory
followed the accelerator. Under torchpin all of them must hold; under stock each must fail on the
releases that lack the thing and hold on the others. So a probe that would hold anywhere cannot pass
for a success of torchpin, and a release that has caught up is noticed.
"""

from __future__ import annotations

import functools
import json

from common_pin import BASE, run_script
from torch.testing._internal.common_utils import (
    TestCase,
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
)

NEVER = (99, 0)

# First release of PyTorch where the probe of that name holds without torchpin.
STOCK_HOLDS_SINCE = {
    "get_accelerator_is_bound": (2, 4),
    "tensor_pins_for_the_accelerator": (2, 5),
    "tensor_recognises_pinned_memory": (2, 5),
    "factory_memory_is_recognised": (2, 5),
    "untyped_storage_pins_for_the_accelerator": (2, 13),
    "typed_storage_pins_for_the_accelerator": (2, 13),
    "untyped_storage_recognises_pinned_memory": (2, 13),
    "typed_storage_recognises_pinned_memory": (2, 13),
    "loader_without_workers": (2, 7),
    "loader_with_workers": (2, 7),
    "loader_with_persistent_workers": (2, 7),
    "iterable_dataset": (2, 7),
    "pin_thread_runs_on_the_current_device": (2, 7),
    "pin_memory_device_with_an_index": (2, 7),
    "loader_is_silent": (2, 7),
    "device_argument_is_deprecated_once_for_a_line": NEVER,
    "pin_memory_device_is_deprecated_at_the_users_line": NEVER,
    "one_warning_in_the_life_of_a_loader": NEVER,
}

# Releases since then on which it does not: the loader of 2.9 and 2.10 passes on the device that it has
# just called deprecated, for every tensor.
STOCK_LOST = {"loader_is_silent": ((2, 9), (2, 10))}


def stock_holds(name: str) -> bool:
    return STOCK_HOLDS_SINCE[name] <= BASE and BASE not in STOCK_LOST.get(name, ())


PROBES = """
import contextlib, io, json, sys, warnings
import torch, torch_refdev
from torch.utils.data import DataLoader, IterableDataset

results = {}


def probe(function):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            holds, why = bool(function()), ""
        except Exception as error:
            holds, why = False, f"{type(error).__name__}: {error}"
    results[function.__name__] = [holds, why]


def locked(tensor):
    # The driver's answer, which no version of PyTorch has a part in.
    return torch_refdev.is_host_pinned(tensor.data_ptr())


class Numbers(IterableDataset):
    def __iter__(self):
        return iter(torch.arange(4.0))


@probe
def get_accelerator_is_bound():
    return torch._C._get_accelerator().type == "refdev"


@probe
def tensor_pins_for_the_accelerator():
    return locked(torch.ones(3).pin_memory())


# Memory that is pinned beyond doubt, whoever has to recognise it.
pinned = torch.ones(3, pin_memory=True)
assert locked(pinned)


@probe
def tensor_recognises_pinned_memory():
    return pinned.is_pinned() and not torch.ones(3).is_pinned()


@probe
def factory_memory_is_recognised():
    return torch.zeros(3, pin_memory=True).is_pinned()


@probe
def untyped_storage_pins_for_the_accelerator():
    return locked(torch.ones(3).untyped_storage().pin_memory())


@probe
def typed_storage_pins_for_the_accelerator():
    return locked(torch.ones(3).storage().pin_memory())


@probe
def untyped_storage_recognises_pinned_memory():
    return pinned.untyped_storage().is_pinned()


@probe
def typed_storage_recognises_pinned_memory():
    return pinned.storage().is_pinned()


@probe
def loader_without_workers():
    return all(map(locked, DataLoader(torch.arange(4.0), pin_memory=True)))


@probe
def loader_with_workers():
    return all(map(locked, DataLoader(torch.arange(4.0), num_workers=2, pin_memory=True)))


@probe
def loader_with_persistent_workers():
    loader = DataLoader(
        torch.arange(4.0), num_workers=1, persistent_workers=True, pin_memory=True
    )
    return all(map(locked, [*loader, *loader]))


@probe
def iterable_dataset():
    return all(map(locked, DataLoader(Numbers(), batch_size=2, pin_memory=True)))


class Located:
    # Pinned in the pin thread, so it tells what that thread's device is.
    def __init__(self, samples):
        self.device = None

    def pin_memory(self):
        self.device = torch.refdev.current_device()
        return self


@probe
def pin_thread_runs_on_the_current_device():
    torch.refdev.set_device(1)
    try:
        loader = DataLoader([1, 2], num_workers=1, pin_memory=True, collate_fn=Located)
        return [batch.device for batch in loader] == [1, 1]
    finally:
        torch.refdev.set_device(0)


@probe
def pin_memory_device_with_an_index():
    loader = DataLoader(
        torch.arange(4.0), num_workers=1, pin_memory=True, pin_memory_device="refdev:0"
    )
    return all(map(locked, loader))


@probe
def loader_is_silent():
    # Also where the device is named, which programs for older releases have to do.
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loader = DataLoader(torch.arange(4.0), pin_memory=True)
        if not loader_pins_unasked:
            loader.pin_memory_device = "refdev"
        pinned = all(map(locked, loader))
    return pinned and not caught


@probe
def device_argument_is_deprecated_once_for_a_line():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            pinned.is_pinned("refdev")
    return [w.filename for w in caught] == [__file__]


@probe
def pin_memory_device_is_deprecated_at_the_users_line():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loader = DataLoader(torch.arange(4.0), pin_memory=True, pin_memory_device="refdev")
        list(loader)
    return [w.filename for w in caught] == [__file__]


@probe
def one_warning_in_the_life_of_a_loader():
    torch.refdev.is_available = lambda: False
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loader = DataLoader(torch.arange(4.0), pin_memory=True)
        for _ in range(3):
            list(loader)
    return [w.filename for w in caught] == [__file__]


print(json.dumps(results))
""".replace("loader_pins_unasked", 'results["loader_without_workers"][0]')


@functools.cache
def results(torchpin: bool) -> dict[str, tuple[bool, str]]:
    done = run_script(PROBES, TORCHPIN=None if torchpin else "0")
    return {name: (holds, why) for name, (holds, why) in json.loads(done.stdout).items()}


class TestSideBySide(TestCase):
    def test_every_probe_is_accounted_for(self):
        self.assertEqual(sorted(results(True)), sorted(STOCK_HOLDS_SINCE))
        self.assertEqual(sorted(results(False)), sorted(STOCK_HOLDS_SINCE))

    @parametrize("name", list(STOCK_HOLDS_SINCE))
    def test_probe(self, name: str):
        holds, why = results(True)[name]
        self.assertTrue(holds, msg=f"under torchpin: {why}")
        holds, why = results(False)[name]
        self.assertEqual(holds, stock_holds(name), msg=f"under stock: {why}")

    def test_what_this_release_lacks(self):
        # The releases that the change was made for lack nearly everything.
        if BASE == (2, 3):
            expected = len(STOCK_HOLDS_SINCE)
        elif BASE == (2, 4):
            expected = len(STOCK_HOLDS_SINCE) - 1
        else:
            expected = sum(not stock_holds(name) for name in STOCK_HOLDS_SINCE)
        failing = [name for name, (holds, _) in results(False).items() if not holds]
        self.assertEqual(len(failing), expected, msg=str(failing))


instantiate_parametrized_tests(TestSideBySide)

if __name__ == "__main__":
    run_tests()
