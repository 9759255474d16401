"""The device arguments of pin_memory and is_pinned: accepted, deprecated once per line, ignored."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from typing import Any

import torch
from common_pin import ACCELERATOR, Samples, run_script
from torch.testing._internal.common_utils import (
    TestCase,
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
    subtest,
)
from torch.utils.data import DataLoader

THIS_FILE = __file__


def line() -> int:
    """The number of the line that calls this."""
    return sys._getframe(1).f_lineno


def our_warnings(caught: list[warnings.WarningMessage]) -> list[warnings.WarningMessage]:
    return [w for w in caught if "deprecated and ignored" in str(w.message)]


class recorded:
    """Collects torchpin's deprecations, under the filter that hides none."""

    def __init__(self, action: Any = "always") -> None:
        self.action = action

    def __enter__(self) -> list[warnings.WarningMessage]:
        self._catch = warnings.catch_warnings(record=True)
        self._caught: Any = self._catch.__enter__()
        warnings.simplefilter(self.action)
        self.found: list[warnings.WarningMessage] = []
        return self.found

    def __exit__(self, *exc_info: Any) -> None:
        self._catch.__exit__(*exc_info)
        self.found.extend(our_warnings(self._caught))


def tensor() -> torch.Tensor:
    return torch.arange(6.0)


def untyped() -> torch.UntypedStorage:
    return torch.arange(6, dtype=torch.uint8).untyped_storage()


def typed() -> torch.TypedStorage:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.arange(6.0).storage()


OWNERS = {"Tensor": tensor, "UntypedStorage": untyped, "TypedStorage": typed}
ROWS = [
    subtest((owner, method), name=f"{owner}_{method}")
    for owner in OWNERS
    for method in ("pin_memory", "is_pinned")
]

DEVICES = [
    "cuda",
    "cuda:0",
    "cpu",
    "xpu",
    ACCELERATOR,
    f"{ACCELERATOR}:0",
    torch.device("cuda"),
    torch.device("cuda", 3),
    torch.device("cpu"),
    torch.device(ACCELERATOR, 1),
]


class TestMethods(TestCase):
    @parametrize("owner,method", ROWS)
    def test_each_spelling_is_accepted_ignored_and_deprecated(self, owner: str, method: str):
        value = OWNERS[owner]()
        pinned = value.pin_memory()
        for device in DEVICES:
            for call in (
                lambda o, d: getattr(o, method)(d),
                lambda o, d: getattr(o, method)(device=d),
            ):
                for subject, is_pinned in ((value, False), (pinned, True)):
                    with recorded() as found:
                        result = call(subject, device)
                    self.assertEqual(len(found), 1, msg=f"{device!r}: {found}")
                    self.assertIs(found[0].category, DeprecationWarning)
                    self.assertEqual(found[0].filename, THIS_FILE)
                    if method == "is_pinned":
                        self.assertIs(result, is_pinned, msg=repr(device))
                    else:
                        self.assertTrue(result.is_pinned(), msg=repr(device))
                        self.assertEqual(list(result), list(value))

    @parametrize("owner,method", ROWS)
    def test_text_begins_as_that_of_the_base(self, owner: str, method: str):
        with recorded() as found:
            getattr(OWNERS[owner](), method)("cuda")
        self.assertEqual(
            str(found[0].message),
            f"The argument 'device' of {owner}.{method}() is deprecated and ignored: memory is "
            "pinned for the current accelerator. Leave it out.",
        )

    @parametrize("owner,method", ROWS)
    def test_at_the_users_line_and_once_for_each(self, owner: str, method: str):
        function = getattr(OWNERS[owner](), method)
        for action in ("always", "default", "once", "module"):
            with recorded(action) as found:
                for _ in range(5):
                    _, here = function("cuda"), line()
                if action in ("always", "default"):
                    _, there = function("cuda"), line()
            expected = [here, there] if action in ("always", "default") else [here]
            self.assertEqual([w.lineno for w in found], expected, msg=action)

    @parametrize("owner,method", ROWS)
    def test_nothing_is_said_without_a_device(self, owner: str, method: str):
        value = OWNERS[owner]()
        with recorded() as found:
            getattr(value, method)()
            getattr(value, method)(None)
            getattr(value, method)(device=None)
        self.assertEqual(found, [])

    @parametrize("owner,method", ROWS)
    def test_error_filter_raises_at_every_call(self, owner: str, method: str):
        value = OWNERS[owner]()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            warnings.filterwarnings("error", "The argument 'device' of", DeprecationWarning)
            for _ in range(3):
                with self.assertRaisesRegex(DeprecationWarning, "is deprecated and ignored"):
                    getattr(value, method)("cuda")
            # And it is no other exception's cause or context.
            getattr(value, method)()

    @parametrize("owner,method", ROWS)
    def test_ignored_by_a_filter_that_ignores(self, owner: str, method: str):
        with recorded("ignore") as found:
            getattr(OWNERS[owner](), method)("cuda")
        self.assertEqual(found, [])

    @parametrize("owner,method", ROWS)
    def test_what_names_no_device_raises_as_torch_device_does(self, owner: str, method: str):
        value = OWNERS[owner]()
        for wrong in ("nonsense", "cuda:x", "cuda:-2", "", 1.5, [], object()):
            with self.assertRaises((RuntimeError, TypeError)) as expected:
                torch.device(wrong)  # type: ignore[call-overload]
            with recorded() as found, self.assertRaises(type(expected.exception)):
                getattr(value, method)(wrong)
            self.assertEqual(found, [], msg=repr(wrong))

    @parametrize("method", ["pin_memory", "is_pinned"])
    def test_other_mistakes_are_worded_by_the_base(self, method: str):
        value = tensor()
        base = getattr(torch._C.TensorBase, method)
        self.assertIsNot(base, getattr(torch.Tensor, method))
        calls: list[Callable[[Any], Any]] = [
            lambda f: f(value, "cuda", "cuda"),
            lambda f: f(value, "cuda", device="cuda"),
            lambda f: f(value, devise="cuda"),
            lambda f: f(value, device=None, more=1),
            lambda f: f(value, None, None),
            lambda f: f(),
            lambda f: f(1),
            lambda f: f(None, "cuda"),
        ]
        for index, call in enumerate(calls):
            with self.assertRaises(TypeError) as expected:
                call(base)
            with recorded() as found, self.assertRaises(TypeError) as actual:
                call(getattr(torch.Tensor, method))
            self.assertEqual(str(actual.exception), str(expected.exception), msg=str(index))
            self.assertEqual(found, [])

    def test_library_between_user_and_torch_is_the_caller(self):
        # A library of somebody else's is user code as far as PyTorch is concerned.
        library = compile("def pin(t): return t.pin_memory('cuda')", "/somewhere/lib.py", "exec")
        names: dict[str, Any] = {"__name__": "lib"}
        exec(library, names)
        with recorded() as found:
            for _ in range(3):
                names["pin"](tensor())
        self.assertEqual([(w.filename, w.lineno) for w in found], [("/somewhere/lib.py", 1)])

    def test_filter_by_the_users_module(self):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("ignore")
            warnings.filterwarnings("always", category=DeprecationWarning, module=__name__)
            tensor().is_pinned("cuda")
        self.assertEqual(len(our_warnings(caught)), 1)

    def test_storage_reached_through_a_tensor_is_the_same(self):
        with recorded() as found:
            self.assertTrue(tensor().pin_memory().untyped_storage().is_pinned("cuda"))
        self.assertEqual(len(found), 1)


class TestTorchFunction(TestCase):
    def test_subclass_sees_the_method_it_was_called_through_and_no_device(self):
        seen: list[Any] = []

        class Subclass(torch.Tensor):
            @classmethod
            def __torch_function__(cls, func, types, args=(), kwargs=None):
                seen.append((func, len(args), dict(kwargs or {})))
                return super().__torch_function__(func, types, args, kwargs or {})

        value = tensor().as_subclass(Subclass)
        seen.clear()
        with recorded() as found:
            pinned, first = value.pin_memory("cuda"), line()
            yes, second = value.pin_memory().is_pinned(device="cuda"), line()
            self.assertTrue(yes)
        self.assertIs(type(pinned), Subclass)
        methods = [
            call for call in seen if call[0] in (torch.Tensor.pin_memory, torch.Tensor.is_pinned)
        ]
        self.assertEqual(len(methods), 3)
        self.assertEqual([w.lineno for w in found], [first, second])

    def test_mode_sees_it_too(self):
        from torch.overrides import TorchFunctionMode

        seen: list[Any] = []

        class Mode(TorchFunctionMode):
            def __torch_function__(self, func, types, args=(), kwargs=None):
                seen.append(func)
                return func(*args, **(kwargs or {}))

        value = tensor()
        with recorded() as found, Mode():
            value.pin_memory("cuda")
        self.assertIn(torch.Tensor.pin_memory, seen)
        self.assertEqual(len(found), 1)

    def test_what_is_no_tensor_but_has_torch_function(self):
        class Alike:
            @classmethod
            def __torch_function__(cls, func, types, args=(), kwargs=None):
                return func

        # Alike is not a tensor, so the method is not found on it; it is reached as a function.
        base = torch._C.TensorBase.is_pinned
        try:
            expected = base(Alike())
        except TypeError as error:
            with self.assertRaises(TypeError) as actual:
                torch.Tensor.is_pinned(Alike())
            self.assertEqual(str(actual.exception), str(error))
        else:
            self.assertIs(torch.Tensor.is_pinned(Alike()), expected)


class TestLoader(TestCase):
    def test_pin_memory_device_is_deprecated_at_the_line_that_made_the_loader(self):
        for device in (ACCELERATOR, f"{ACCELERATOR}:0", "cuda", "cuda:7", torch.device("cuda", 0)):
            with recorded() as found:
                arguments = {"pin_memory": True, "pin_memory_device": device}
                loader, here = DataLoader(Samples(), **arguments), line()
                for batch, _ in loader:
                    self.assertTrue(batch.is_pinned())
            self.assertEqual([(w.filename, w.lineno) for w in found], [(THIS_FILE, here)])
            self.assertIs(found[0].category, DeprecationWarning)
            self.assertEqual(loader.pin_memory_device, device)
        self.assertExpectedInline(
            str(found[0].message).replace(repr(str(device)), "'DEVICE'"),
            """pin_memory_device is deprecated and ignored: memory is pinned for the current accelerator. Leave pin_memory_device='DEVICE' out.""",
        )

    def test_without_pin_memory_it_is_deprecated_and_nothing_is_pinned(self):
        with recorded() as found:
            loader = DataLoader(Samples(), pin_memory_device=ACCELERATOR)
            [batch for batch, _ in loader if batch.is_pinned()]
            self.assertFalse(next(iter(loader))[0].is_pinned())
        self.assertEqual(len(found), 1)

    def test_once_for_each_line(self):
        with recorded() as found:
            for _ in range(4):
                DataLoader(Samples(), pin_memory=True, pin_memory_device="cuda")
            DataLoader(Samples(), pin_memory=True, pin_memory_device="cuda")
        self.assertEqual(len(found), 2)

    def test_subclass_in_user_code(self):
        class Loader(DataLoader):
            def __init__(self, dataset):
                super().__init__(dataset, pin_memory=True, pin_memory_device="cuda")

        with recorded() as found:
            Loader(Samples())
        self.assertEqual([w.filename for w in found], [THIS_FILE])

    def test_not_said_without_the_argument(self):
        with recorded() as found:
            DataLoader(Samples(), pin_memory=True)
            DataLoader(Samples(), pin_memory=True, pin_memory_device="")
        self.assertEqual(found, [])

    @parametrize("num_workers", [0, 2])
    def test_loader_itself_uses_no_deprecated_argument(self, num_workers: int):
        # Of any kind, nor does it raise another warning; with "error" the pin thread would pass
        # it on as an exception.
        loader = DataLoader(Samples(), batch_size=2, pin_memory=True, num_workers=num_workers)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            # Of Python 3.12: the fork of a process that has threads, which pytest may have.
            warnings.filterwarnings("default", "This process", DeprecationWarning)
            for _ in range(2):
                batches = list(loader)
                self.assertTrue(all(batch.is_pinned() for batch, _ in batches))
                self.assertEqual(torch.cat([index for _, index in batches]), torch.arange(8))


class TestCommandLine(TestCase):
    def test_filters_of_the_command_line(self):
        source = """
            import torch
            t = torch.ones(2)
            for _ in range(3):
                t.is_pinned("cuda")
            print("reached")
            """
        # DeprecationWarning is shown by default in __main__ only, and that is where this is.
        shown = run_script(source, accelerator=None)
        self.assertEqual(shown.stderr.count("DeprecationWarning"), 1)
        self.assertIn("script.py:4: DeprecationWarning: The argument 'device'", shown.stderr)
        always = run_script(source, accelerator=None, flags=["-W", "always"])
        self.assertEqual(always.stderr.count("DeprecationWarning"), 1)
        silent = run_script(source, accelerator=None, flags=["-W", "ignore::DeprecationWarning"])
        self.assertEqual(silent.stderr, "")
        error = run_script(source, accelerator=None, flags=["-W", "error"], status=1)
        self.assertNotIn("reached", error.stdout)
        self.assertIn('script.py", line 4', error.stderr)
        self.assertIn("\nDeprecationWarning: The argument 'device'", error.stderr)


instantiate_parametrized_tests(TestMethods)
instantiate_parametrized_tests(TestLoader)

if __name__ == "__main__":
    run_tests()
