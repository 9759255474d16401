"""Switching torchpin on and off: what it replaces, what it gives back, and what a fault may cost.

Nothing here pins memory. Each test is a fresh process without an accelerator, because ``import
torch`` is what is tested.
"""

from __future__ import annotations

import os
import pathlib
import sys
import sysconfig
import tempfile

import torch
from common_pin import BASE, environment, run_process, run_script
from torch.testing._internal.common_utils import TestCase, run_tests

AUTOLOADS = BASE >= (2, 5)

# state() tells every object that can be reached as an attribute of a module of torch or of a class
# of such a module, and who answers for the operators that have to do with pinning. It knows nothing
# of the table of seams: whatever is replaced and not given back shows.
STATE = """
import sys, types

ABSENT = object()
OPERATORS = ("aten::is_pinned", "aten::_pin_memory", "aten::empty.memory_format", "aten::empty_strided")

def state():
    import torch
    found, seen = {}, set()
    for name, module in sorted(sys.modules.items()):
        if name == "torch" or name.startswith("torch."):
            found[name, ""] = module
            if not isinstance(module, types.ModuleType):
                continue
            for key, value in list(vars(module).items()):
                if key == "__warningregistry__":
                    continue
                found[name, key] = value
                # isinstance() would ask some of them for __class__, which they deprecate.
                if issubclass(type(value), type) and value not in seen:
                    if not str(value.__module__).startswith("torch"):
                        continue
                    seen.add(value)
                    for attribute, inner in list(vars(value).items()):
                        # A cache of the abstract base class machinery, a dictionary that each look
                        # at makes anew, and the like.
                        if attribute in ("_abc_impl", "__dict__", "__weakref__"):
                            continue
                        found[name, key + "." + attribute] = inner
    for operator in OPERATORS:
        found["operator", operator] = torch._C._dispatch_dump(operator)
    return found

def changes(before, after):
    keys = sorted(before.keys() | after.keys())
    different = []
    for key in keys:
        a, b = before.get(key, ABSENT), after.get(key, ABSENT)
        if a is not b and not (key[0] == "operator" and a == b):
            different.append(":".join(key))
    return different
"""

PURELIB = sysconfig.get_path("purelib")


class TestSwitch(TestCase):
    def test_disable_gives_back_every_object_and_enable_puts_it_in_place_again(self):
        run_script(
            STATE
            + """
import os
import torch, torch.utils.data, torch.multiprocessing
stock = state()
assert changes(stock, state()) == [], changes(stock, state())

os.environ["TORCHPIN"] = "1"
import torchpin
assert not torchpin.is_enabled()
for round in range(3):
    assert torchpin.enable() is True
    assert torchpin.is_enabled()
    assert torchpin.enable() is True
    replaced = changes(stock, state())
    for place in (
        "torch:_pin_deprecation",
        "torch:Tensor.pin_memory",
        "torch:Tensor.is_pinned",
        "torch.utils.data.dataloader:_BaseDataLoaderIter.__init__",
        "torch._pin_deprecation:",
        "torch.utils.data._utils.pin_memory:",
        "operator:aten::is_pinned",
    ):
        assert place in replaced, (round, place, replaced)
    torchpin.disable()
    assert not torchpin.is_enabled()
    torchpin.disable()
    assert changes(stock, state()) == [], (round, changes(stock, state()))
""",
            accelerator=None,
            TORCHPIN="0",
        )

    def test_off_by_environment_is_stock_to_the_object(self):
        # The names and the places of definition of everything in torch, here and in a Python that
        # never looks into the folder's start-up files nor at entry points.
        report = (
            STATE
            + """
import hashlib, json, os
import torch, torch.utils.data

def place(value):
    if type(value) is types.FunctionType:
        code = value.__code__
        return [code.co_filename, code.co_firstlineno, value.__qualname__]
    return type(value).__name__

assert not os.path.exists("/proc/self/maps") or "torchpin" not in open("/proc/self/maps").read()
assert "torchpin._C" not in sys.modules
print(json.dumps(
    [[*key, place(value) if key[0] != "operator" else value] for key, value in state().items()]
))
"""
        )
        off = run_script(report, accelerator=None, TORCHPIN="0")
        untouched = run_script(
            f"import sys; sys.path.append({PURELIB!r})\n" + report,
            accelerator=None,
            flags=["-S"],
            TORCH_DEVICE_BACKEND_AUTOLOAD="0",
            TORCHPIN=None,
        )
        self.assertEqual(off.stderr, "")
        self.assertEqual(off.stdout, untouched.stdout)

    def test_off_means_off_whatever_is_called(self):
        run_script(
            """
            import os, torch, torchpin
            assert not torchpin.is_enabled()
            assert torchpin.enable() is False
            assert not torchpin.is_enabled()
            assert "torchpin._C" not in __import__("sys").modules
            os.environ["TORCHPIN"] = ""
            assert torchpin.enable() is True
            """,
            accelerator=None,
            TORCHPIN="0",
        )

    def test_on_without_a_word(self):
        # Under -W error any warning, of torchpin's or of the dispatcher's, would end the process.
        for source in ("import torch, torchpin", "import torchpin, torch"):
            done = run_script(
                source + "\nassert torchpin.is_enabled()", accelerator=None, flags=["-W", "error"]
            )
            self.assertEqual((done.stdout, done.stderr), ("", ""))

    def test_importing_torchpin_imports_no_torch_and_enable_does(self):
        run_script(
            """
            import sys, torchpin
            assert "torch" not in sys.modules
            assert torchpin.is_enabled() is False
            assert torchpin.enable() is True
            import torch
            assert torch.Tensor.pin_memory is not torch._C.TensorBase.pin_memory
            """,
            accelerator=None,
        )

    def test_autoload_switched_off_for_all_backends(self):
        # Up to 2.4 PyTorch does not know the variable, and torchpin has a start-up file instead.
        run_script(
            f"""
            import torch, torchpin
            assert torchpin.is_enabled() is {not AUTOLOADS}
            assert torchpin.enable() is True
            assert torchpin.is_enabled()
            """,
            accelerator=None,
            TORCH_DEVICE_BACKEND_AUTOLOAD="0",
        )

    def test_children_have_it_too(self):
        run_script(
            """
            import multiprocessing, os, torch, torchpin

            def child(queue):
                queue.put((torchpin.is_enabled(), torch.Tensor.pin_memory.__doc__))

            if __name__ == "__main__":
                for method in ("spawn", "fork"):
                    context = multiprocessing.get_context(method)
                    queue = context.SimpleQueue()
                    process = context.Process(target=child, args=(queue,))
                    process.start()
                    assert queue.get() == (True, torch.Tensor.pin_memory.__doc__), method
                    process.join()
                    assert process.exitcode == 0
            """,
            accelerator=None,
        )

    def test_threads_switch_it_on_and_off_at_once(self):
        run_script(
            STATE
            + """
import os, random, threading
import torch, torch.utils.data, torchpin
stock = state()
os.environ["TORCHPIN"] = "1"
start = threading.Barrier(8)
def work():
    start.wait()
    for _ in range(20):
        random.choice([torchpin.enable, torchpin.disable])()
threads = [threading.Thread(target=work) for _ in range(8)]
[t.start() for t in threads]
[t.join() for t in threads]
torchpin.disable()
assert changes(stock, state()) == [], changes(stock, state())
""",
            accelerator=None,
            TORCHPIN="0",
        )

    def test_what_is_replaced_still_looks_like_the_original(self):
        run_script(
            """
            import copy, inspect, os
            import torch
            from torch.utils.data import DataLoader

            def look():
                loader = copy.copy(DataLoader([1, 2, 3]))
                return (
                    str(inspect.signature(DataLoader)),
                    str(inspect.signature(DataLoader.__init__)),
                    inspect.getsource(DataLoader.__init__),
                    DataLoader.__init__.__qualname__,
                    DataLoader.__init__.__doc__,
                    sorted(vars(loader)),
                    list(DataLoader([1, 2, 3])),
                    torch.Tensor.pin_memory.__name__,
                    torch.Tensor.is_pinned.__name__,
                    torch.overrides.is_tensor_method_or_property(torch.Tensor.pin_memory),
                    torch.Tensor.is_pinned in torch.overrides.get_testing_overrides(),
                    torch.overrides.resolve_name(torch.Tensor.pin_memory),
                    str(inspect.signature(torch.UntypedStorage.is_pinned).parameters["device"].name),
                    torch.UntypedStorage.is_pinned.__qualname__,
                    torch.utils.data._utils.pin_memory.pin_memory.__name__,
                )

            stock = look()
            # Keyed by method objects, and cached by PyTorch for the life of the process.
            for function in vars(torch.overrides).values():
                getattr(function, "cache_clear", lambda: None)()
            os.environ["TORCHPIN"] = "1"
            import torchpin
            assert torchpin.enable()
            for a, b in zip(stock, look()):
                assert a == b, (a, b)
            """,
            accelerator=None,
            TORCHPIN="0",
        )


class TestFaults(TestCase):
    """Whatever goes wrong, ``import torch`` works and PyTorch is as it was."""

    def test_release_outside_the_range(self):
        done = run_script(
            """
            import warnings
            import torchpin.bases
            torchpin.bases.OLDEST, torchpin.bases.NEWEST = (9, 0), (9, 1)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                import torch
            assert not torchpin.is_enabled()
            assert "torchpin._C" not in __import__("sys").modules
            assert torch.Tensor.pin_memory is torch._C.TensorBase.pin_memory
            [warning] = caught
            assert warning.category is RuntimeWarning
            print(str(warning.message).replace(torch.__version__, "VERSION"))
            try:
                torchpin.enable()
            except torchpin.ActivationError as error:
                print(str(error).replace(torch.__version__, "VERSION"))
            """,
            accelerator=None,
        )
        self.assertExpectedInline(
            done.stdout,
            """\
torchpin stays off, stock PyTorch works as before: PyTorch VERSION is outside the supported range 9.0 to 9.1
PyTorch VERSION is outside the supported range 9.0 to 9.1
""",
        )

    def test_each_stage_of_activation_broken_on_purpose(self):
        done = run_script(
            STATE
            + """
import os, pathlib, shutil, tempfile, types, warnings
from unittest import mock
import torch, torch.utils.data
stock = state()
os.environ["TORCHPIN"] = "1"
from torchpin import ActivationError, _autoload, _overlay, is_enabled, seams
import torchpin

temporary = tempfile.TemporaryDirectory()
folder = pathlib.Path(temporary.name)
real_tree = _overlay.tree()
suffix = __import__("sysconfig").get_config_var("EXT_SUFFIX")

def tree_with(name, text):
    place = folder / name.rpartition("/")[2]
    shutil.copytree(real_tree / "torch", place / "torch")
    (place / name).write_text(text)
    return place

def extension_for(version):
    place = folder / f"extension-{version}"
    place.mkdir()
    (place / "built_for.txt").write_text(version + chr(10))
    (place / f"_C{suffix}").write_bytes(b"not a library")
    return place

def last(rows):
    # After everything else was put in place.
    return (*rows, *broken_rows)

def fail(*args, **kwargs):
    raise ZeroDivisionError("on purpose")

other_system = types.SimpleNamespace(platform="sunos5", modules=sys.modules)
no_such_function = seams.Seam("torch.utils.data.dataloader:DataLoader.no_such", "end",
                              "torch._pin_deprecation:ignore_device", (), "")
no_such_argument = seams.Seam("torch.utils.data.dataloader:DataLoader.__iter__", "end",
                              "torch._pin_deprecation:ignore_device", ("no_such",), "")
no_such_method = seams.Method("torch:Tensor", "no_such", "torch._pin_deprecation:tensor_is_pinned", "")
no_such_file = seams.WholeFile("torch.no_such_file", "")
fake_extension = mock.Mock(wraps=_overlay.load_extension())
fake_extension._register_pin_kernels.side_effect = fail

stages = {
    "another system": mock.patch.object(_overlay, "sys", other_system),
    "no extension": mock.patch.object(_overlay, "extension_dir", lambda v: folder / "nothing"),
    "extension of another torch": mock.patch.object(
        _overlay, "extension_dir", lambda v, place=extension_for("2.99.0"): place),
    "extension that is no library": mock.patch.object(
        _overlay, "extension_dir", lambda v, place=extension_for(torch.__version__): place),
    "version check": mock.patch.object(_overlay.bases, "why_unsupported", fail),
    "first file does not parse": mock.patch.object(
        _overlay, "tree", lambda p=tree_with("torch/_pin_deprecation.py", "def"): p),
    "last file raises": mock.patch.object(
        _overlay, "tree", lambda p=tree_with("torch/utils/data/_utils/pin_target.py", "1/0"): p),
    "no such file": mock.patch.object(seams, "WHOLE_FILES", (*seams.WHOLE_FILES, no_such_file)),
    "no such method": mock.patch.object(seams, "METHODS", (*seams.METHODS, no_such_method)),
    "no such function": mock.patch.object(seams, "SEAMS", (*seams.SEAMS, no_such_function)),
    "no such argument": mock.patch.object(seams, "SEAMS", (*seams.SEAMS, no_such_argument)),
    "kernels": mock.patch.object(_overlay, "load_extension", lambda: fake_extension),
}
for stage, fault in stages.items():
    if "extension" in stage:
        sys.modules.pop("torchpin._C", None)
        vars(torchpin).pop("_C", None)
    for action in ("default", "error"):
        # Under "error" the warning itself would be the exception that ends "import torch".
        with fault, warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter(action)
            _autoload.autoload()
            assert not is_enabled(), stage
            assert changes(stock, state()) == [], (stage, changes(stock, state()))
            if action == "error":
                continue
        [warning] = caught
        assert warning.category is RuntimeWarning, stage
        print(f"{stage}: {str(warning.message).rpartition('as before: ')[2][:70]}")
# None of it has left a trace that would keep torchpin from working now.
assert torchpin.enable() and is_enabled()
torchpin.disable()
assert changes(stock, state()) == [], changes(stock, state())
temporary.cleanup()
""",
            accelerator=None,
            TORCHPIN="0",
        )
        told = dict(line.split(": ", 1) for line in done.stdout.splitlines())
        self.assertEqual(len(told), 12)
        self.assertIn("Linux only, this is sunos5", told["another system"])
        self.assertIn("was not built for this Python", told["no extension"])
        self.assertIn(
            f"built for PyTorch 2.99.0, this is {torch.__version__}"[:40],
            told["extension of another torch"],
        )
        self.assertIn("ImportError", told["extension that is no library"])
        self.assertIn("ZeroDivisionError: on purpose", told["version check"])
        self.assertIn("SyntaxError", told["first file does not parse"])
        self.assertIn("ZeroDivisionError", told["last file raises"])
        self.assertIn("FileNotFoundError", told["no such file"])
        self.assertIn("AttributeError", told["no such method"])
        self.assertIn("AttributeError", told["no such function"])
        self.assertIn("no_such", told["no such argument"])
        self.assertIn("ZeroDivisionError: on purpose", told["kernels"])

    def test_package_that_cannot_be_imported(self):
        for flags in ([], ["-W", "error"]):
            done = run_script(
                """
                import sys
                sys.modules["torchpin.seams"] = None
                import torch
                assert torch.Tensor.pin_memory is torch._C.TensorBase.pin_memory
                print(torch.ones(2).sum().item())
                """,
                accelerator=None,
                flags=flags,
            )
            self.assertEqual(done.stdout, "2.0\n")
            self.assertIn("torchpin stays off, stock PyTorch works as before", done.stderr)
            self.assertIn("torchpin.seams", done.stderr)

    def test_start_up_file_without_its_package(self):
        # What an interrupted uninstall leaves behind must not disturb any Python program.
        source = pathlib.Path(PURELIB, "torchpin.pth")
        self.assertEqual(source.exists(), not AUTOLOADS)
        if not source.exists():
            return
        with tempfile.TemporaryDirectory() as folder:
            pathlib.Path(folder, "torchpin.pth").write_text(source.read_text())
            code = f"import site; site.addsitedir({folder!r}); print('alive')"
            done = run_process([sys.executable, "-S", "-c", code], env=environment(None))
            self.assertEqual((done.stdout, done.stderr), ("alive\n", ""))

    def test_programs_without_torch_pay_nothing(self):
        run_script(
            """
            import sys
            loaded = [name for name in sys.modules if name.startswith("torch")]
            assert set(loaded) <= {"torchpin", "torchpin._startup", "torchpin._overlay",
                                   "torchpin.bases", "torchpin.seams"}, loaded
            # The finder steps aside for everything but torch, and for torch too when it is missing.
            import json, importlib.util
            assert importlib.util.find_spec("no_such_module") is None
            """,
            accelerator=None,
        )


class TestReport(TestCase):
    """``python -m torchpin``."""

    def report(self, *arguments: str, **kwargs: str | None) -> dict[str, str]:
        accelerator = kwargs.pop("accelerator", "refdev")
        broken = kwargs.pop("broken", "") or ""
        done = run_process(
            [sys.executable, "-m", "torchpin", *arguments],
            env=environment(accelerator, broken, **kwargs),
            cwd=os.path.dirname(os.path.abspath(__file__)),
        )
        self.assertEqual(done.stderr, "")
        lines: dict[str, str] = {}
        for line in done.stdout.splitlines():
            label, _, text = line.partition("  ")
            lines[label] = text.strip()
        return lines

    def test_complete_backend(self):
        lines = self.report("--import", "torch_refdev")
        self.assertTrue(lines["torchpin"].endswith(", on"), lines["torchpin"])
        self.assertEqual(lines["PyTorch"], f"{torch.__version__} (supported: 2.3 to 2.15)")
        self.assertEqual(lines["accelerator"], "refdev")
        self.assertIn("refdev", lines["host allocator"])
        self.assertEqual(lines["pinned memory"], "yes")

    def test_no_accelerator(self):
        lines = self.report(accelerator=None)
        self.assertTrue(lines["torchpin"].endswith(", on"), lines["torchpin"])
        self.assertEqual(lines["accelerator"], "none")
        self.assertIn("no accelerator was found", lines["pinned memory"])

    def test_switched_off(self):
        lines = self.report(accelerator=None, TORCHPIN="0")
        self.assertIn("off: the environment variable TORCHPIN switches it off", lines["torchpin"])
        self.assertNotIn("accelerator", lines)


if __name__ == "__main__":
    run_tests()
