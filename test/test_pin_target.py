"""Tensors are pinned for the current accelerator, on every release, by whatever its backend offers."""

from __future__ import annotations

import json
import sys
from typing import Any

import hypothesis
import hypothesis.strategies as st
import torch
from common_pin import ACCELERATOR, BASE, accelerator_module, environment, run_process, run_script
from torch.testing._internal.common_utils import (
    TestCase,
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
)

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.complex64,
    torch.int64,
    torch.int16,
    torch.uint8,
    torch.bool,
]


@st.composite
def strided_tensors(draw: Any) -> torch.Tensor:
    """CPU tensors of all kinds of shapes and strides, contiguous or not."""
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 5), max_size=4))
    value = torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype)
    if shape and draw(st.booleans()):
        value = value.permute(draw(st.permutations(range(len(shape)))))
    if shape and value.size(0) and draw(st.booleans()):
        value = value[draw(st.integers(0, value.size(0) - 1)) :]
    if shape and draw(st.booleans()):
        value = value[::2]
    if draw(st.booleans()):
        value = value.unsqueeze(0).expand(3, *value.shape)
    return value


class TestTarget(TestCase):
    def test_current_accelerator_is_bound_to_python(self):
        self.assertEqual(torch._C._get_accelerator().type, ACCELERATOR)

    def test_pinned_memory_is_the_accelerators(self):
        value = torch.arange(1000.0)
        self.assertFalse(value.is_pinned())
        pinned = value.pin_memory()
        self.assertTrue(pinned.is_pinned())
        self.assertEqual(pinned, value)
        self.assertNotEqual(pinned.data_ptr(), value.data_ptr())
        self.assertEqual(pinned.device.type, "cpu")
        if ACCELERATOR == "refdev":
            import torch_refdev

            # The driver's word, not PyTorch's.
            self.assertTrue(torch_refdev.is_host_pinned(pinned.data_ptr()))
            self.assertTrue(torch_refdev.is_host_pinned(pinned.data_ptr() + pinned.nbytes - 1))
            self.assertFalse(torch_refdev.is_host_pinned(value.data_ptr()))

    def test_pinning_twice_is_pinning_once(self):
        pinned = torch.ones(3).pin_memory()
        self.assertIs(pinned.pin_memory(), pinned)

    @hypothesis.settings(deadline=None, max_examples=60)
    @hypothesis.given(strided_tensors())
    def test_equal_in_all_but_the_address(self, value: torch.Tensor):
        pinned = value.pin_memory()
        self.assertEqual(pinned, value, exact_dtype=True)
        self.assertEqual(pinned.shape, value.shape)
        self.assertEqual(pinned.stride(), value.stride())
        self.assertEqual(pinned.is_contiguous(), value.is_contiguous())
        self.assertFalse(value.is_pinned())
        if value.numel():
            self.assertTrue(pinned.is_pinned())
            self.assertTrue(pinned.untyped_storage().is_pinned())

    def test_views_and_slices_are_pinned(self):
        pinned = torch.arange(24.0).reshape(4, 6).pin_memory()
        for view in (
            pinned[1:],
            pinned[3, 5:],
            pinned[:, ::2],
            pinned.t(),
            pinned.view(-1)[-1],
            pinned.narrow(1, 2, 3),
            pinned.reshape(2, 12),
            pinned.detach(),
            pinned.view(torch.uint8).view(-1)[-1:],
            pinned.unsqueeze(0).expand(3, 4, 6),
            torch.from_numpy(pinned.numpy()[2:]) if BASE >= (2, 5) else pinned[2:],
            pinned.as_strided((2,), (1,), 22),
        ):
            self.assertTrue(view.is_pinned(), msg=f"{view.shape} {view.stride()}")
        for copy in (pinned.clone(), pinned + 0, pinned.contiguous().clone(), pinned[[0, 1]]):
            self.assertFalse(copy.is_pinned())

    def test_storage_is_pinned_as_its_tensor_is(self):
        value = torch.arange(6.0)
        storage = value.untyped_storage()
        self.assertFalse(storage.is_pinned())
        pinned = storage.pin_memory()
        self.assertTrue(pinned.is_pinned())
        self.assertEqual(list(pinned), list(storage))
        self.assertTrue(value.pin_memory().storage().is_pinned())

    def test_no_memory_no_pinning(self):
        for value in (torch.empty(0), torch.ones(3)[1:1], torch.empty(0, 5)):
            pinned = value.pin_memory()
            self.assertEqual((pinned.shape, pinned.dtype), (value.shape, value.dtype))
            self.assertFalse(value.is_pinned())

    def test_pinned_memory_stays_pinned_while_memory_comes_and_goes(self):
        kept = [torch.full((4099,), float(i)).pin_memory() for i in range(20)]
        for i in range(50):
            torch.full((4099,), -1.0).pin_memory()
            torch.full((i * 97 + 1,), -1.0).pin_memory()
        for i, value in enumerate(kept):
            self.assertTrue(value.is_pinned())
            self.assertEqual(value, torch.full((4099,), float(i)))

    def test_tensors_with_more_than_memory(self):
        leaf = torch.ones(3, requires_grad=True)
        pinned = leaf.pin_memory()
        pinned.sum().backward()
        self.assertEqual(leaf.grad, torch.ones(3))

        conj = torch.tensor([1 + 2j, 3 - 1j]).conj()
        self.assertTrue(conj.is_conj())
        self.assertEqual(conj.pin_memory(), conj)
        negative = torch._neg_view(torch.ones(2))
        self.assertEqual(negative.pin_memory(), negative)

        expanded = torch.tensor([7.0]).expand(3)
        self.assertEqual(expanded.pin_memory(), expanded)
        self.assertEqual(expanded.pin_memory().stride(), (0,))

        parameter = torch.nn.Parameter(torch.ones(2))
        self.assertTrue(parameter.pin_memory().is_pinned())

    def test_nested_tensors(self):
        parts = [torch.ones(2), torch.arange(3.0)]
        for layout in (torch.strided, torch.jagged):
            nested = torch.nested.nested_tensor(parts, layout=layout)
            self.assertFalse(nested.is_pinned())
            pinned = nested.pin_memory()
            self.assertTrue(pinned.is_pinned())
            for a, b in zip(pinned.unbind(), parts, strict=True):
                self.assertEqual(a, b)

    def test_layouts_that_are_not_dense(self):
        # From 2.5 on the base has kernels for the sparse ones, which pin their parts.
        eye = torch.eye(4)
        layouts = [eye.to_sparse(), eye.to_sparse_csr(), eye.to_sparse_bsr((2, 2))]
        for value in layouts:
            self.assertFalse(value.is_pinned())
            try:
                pinned = value.pin_memory()
            except RuntimeError as error:
                self.assertLess(BASE, (2, 5))
                self.assertRegex(str(error), "cannot pin|Could not run")
            else:
                self.assertTrue(pinned.is_pinned())
                self.assertEqual(pinned.to_dense(), eye)

    def test_device_tensors_are_neither_pinned_nor_to_be_pinned(self):
        for value in (torch.ones(2).to(ACCELERATOR), torch.ones(2, device="meta")):
            self.assertFalse(value.is_pinned())
            with self.assertRaisesRegex(RuntimeError, "cannot pin"):
                value.pin_memory()

    def test_is_pinned_starts_nothing(self):
        if ACCELERATOR == "cuda":
            script = """
                import torch
                assert not torch.ones(2).is_pinned()
                assert not torch.ones(2).untyped_storage().is_pinned()
                assert not torch.cuda.is_initialized()
                """
        else:
            script = """
                import torch, torch_refdev
                assert not torch.ones(2).is_pinned()
                assert not torch.ones(2).untyped_storage().is_pinned()
                assert not torch.refdev.is_initialized()
                assert torch_refdev.counters()["pin_calls"] == 0
                """
        run_script(script, accelerator=ACCELERATOR)

    def test_first_pin_is_answered_right(self):
        # From 2.7 on the base says "not pinned" about everything before the device is initialised.
        prelude = "import torch" + (", torch_refdev" if ACCELERATOR == "refdev" else "")
        run_script(
            f"""
            {prelude}
            assert torch.ones(2).pin_memory().is_pinned()
            """,
            accelerator=ACCELERATOR,
        )

    def test_copies_of_pinned_tensors_arrive(self):
        value = torch.arange(1 << 16, dtype=torch.float32)
        moved = value.pin_memory().to(ACCELERATOR, non_blocking=True)
        back = moved.to("cpu", non_blocking=True)
        accelerator_module().synchronize()
        self.assertEqual(back, value)


class TestFactories(TestCase):
    @parametrize(
        "name,make",
        [
            ("empty", lambda: torch.empty(3, 4, pin_memory=True)),
            ("empty_strided", lambda: torch.empty_strided((2, 3), (1, 2), pin_memory=True)),
            (
                "channels_last",
                lambda: torch.empty(2, 3, 4, 5, pin_memory=True, memory_format=torch.channels_last),
            ),
            ("zeros", lambda: torch.zeros(3, pin_memory=True)),
            ("ones", lambda: torch.ones(3, pin_memory=True)),
            ("full", lambda: torch.full((3,), 7.0, pin_memory=True)),
            ("tensor", lambda: torch.tensor([1, 2, 3], pin_memory=True)),
            ("arange", lambda: torch.arange(5, pin_memory=True)),
            ("linspace", lambda: torch.linspace(0, 1, 5, pin_memory=True)),
            ("logspace", lambda: torch.logspace(0, 1, 5, pin_memory=True)),
            ("eye", lambda: torch.eye(3, pin_memory=True)),
            ("rand", lambda: torch.rand(3, pin_memory=True)),
            ("randn", lambda: torch.randn(3, pin_memory=True)),
            ("randint", lambda: torch.randint(9, (3,), pin_memory=True)),
            ("randperm", lambda: torch.randperm(9, pin_memory=True)),
            ("empty_like", lambda: torch.empty_like(torch.ones(3), pin_memory=True)),
            ("zeros_like", lambda: torch.zeros_like(torch.ones(3), pin_memory=True)),
            ("full_like", lambda: torch.full_like(torch.ones(3), 2.0, pin_memory=True)),
            ("rand_like", lambda: torch.rand_like(torch.ones(3), pin_memory=True)),
            ("new_empty", lambda: torch.ones(1).new_empty(3, pin_memory=True)),
            ("new_zeros", lambda: torch.ones(1).new_zeros(3, pin_memory=True)),
            ("new_full", lambda: torch.ones(1).new_full((3,), 2.0, pin_memory=True)),
        ],
        name_fn=lambda name, make: name,
    )
    def test_lands_in_the_accelerators_memory(self, name: str, make: Any):
        value = make()
        self.assertTrue(value.is_pinned())
        self.assertGreater(value.numel(), 0)

    def test_values_and_layout_are_as_without_pinning(self):
        for pin in (False, True):
            torch.manual_seed(0)
            made = (
                torch.rand(5, pin_memory=pin),
                torch.randperm(7, pin_memory=pin),
                torch.eye(3, pin_memory=pin),
                torch.zeros(2, 3, 4, 5, pin_memory=pin).contiguous(),
            )
            if not pin:
                expected = made
        for a, b in zip(made, expected, strict=True):
            self.assertEqual(a, b)
            self.assertEqual(a.stride(), b.stride())
        value = torch.empty(2, 3, 4, 5, pin_memory=True, memory_format=torch.channels_last)
        self.assertTrue(value.is_contiguous(memory_format=torch.channels_last))
        self.assertEqual(torch.empty(0, pin_memory=True).shape, (0,))

    def test_deterministic_algorithms_fill_what_is_empty(self):
        before = torch.are_deterministic_algorithms_enabled()
        torch.use_deterministic_algorithms(True)
        try:
            for value in (
                torch.empty(5, pin_memory=True),
                torch.empty_strided((5,), (2,), pin_memory=True),
            ):
                self.assertTrue(value.isnan().all())
                self.assertTrue(value.is_pinned())
        finally:
            torch.use_deterministic_algorithms(before)

    def test_resize_keeps_the_tensor_usable(self):
        value = torch.ones(3, pin_memory=True)
        value.resize_(5000)
        self.assertEqual(value[:3], torch.ones(3))


class TestNoAccelerator(TestCase):
    def test_error_says_so(self):
        done = run_script(
            """
            import torch
            value = torch.ones(3)
            assert value.is_pinned() is False
            assert value.untyped_storage().is_pinned() is False
            for pin in (
                value.pin_memory,
                value.untyped_storage().pin_memory,
                lambda: torch.empty(3, pin_memory=True),
                lambda: torch.zeros(3, pin_memory=True),
            ):
                try:
                    pin()
                except RuntimeError as error:
                    # A PyTorch that was built for CUDA says so there.
                    print(str(error).splitlines()[0].partition(" (")[0].rstrip("."))
            """,
            accelerator=None,
        )
        self.assertExpectedInline(
            done.stdout,
            """\
Cannot pin memory for the current accelerator: no accelerator was found
Cannot pin memory for the current accelerator: no accelerator was found
Cannot pin memory for the current accelerator: no accelerator was found
Cannot pin memory for the current accelerator: no accelerator was found
""",
        )

    def test_accelerator_that_is_registered_later_counts_from_then_on(self):
        run_script(
            """
            import sys, torch, torchpin
            assert torchpin.is_enabled()
            assert not torch.ones(2).is_pinned()
            try:
                torch.ones(2).pin_memory()
            except RuntimeError:
                pass
            else:
                raise AssertionError("there was nothing to pin for")
            # The stand-in that kept refdev out makes way for it.
            del sys.path[[p.endswith("without_refdev") for p in sys.path].index(True)]
            sys.modules.pop("torch_refdev", None)
            import torch_refdev
            assert torch._C._get_accelerator().type == "refdev"
            assert torch.ones(2).pin_memory().is_pinned()
            assert torch.empty(2, pin_memory=True).is_pinned()
            """,
            accelerator=None,
        )


# What each way of being incomplete is called, and words that the message must contain so that the
# vendor knows what to add.
INCOMPLETE = {
    "no_hooks": ("hooks", ["no hooks", "RegisterPrivateUse1HooksInterface"]),
    "no_allocator": (
        "allocator",
        ["supply no pinned-memory allocator", "getPinnedMemoryAllocator"],
    ),
    "null_allocator": ("null_allocator", ["returned null", "getPinnedMemoryAllocator"]),
    "plain_allocator": ("plain_allocator", ["ordinary CPU allocator", "isPinnedPtr"]),
    "no_module_functions": ("module", ["torch.refdev", "is_available"]),
}
if BASE >= (2, 10):
    INCOMPLETE["python_hooks"] = (
        "allocator",
        ["supply no pinned-memory allocator", "hooks written in Python cannot"],
    )


class TestIncompleteBackends(TestCase):
    """None crashes, none copies twice, and each says what is missing."""

    @parametrize("broken", sorted(INCOMPLETE))
    def test_backend(self, broken: str):
        _, words = INCOMPLETE[broken]
        done = run_script(
            """
            import json, os, sys, warnings
            import torch, torch_refdev
            from torch.utils.data import DataLoader
            from common_pin import Samples

            module_only = os.environ["TORCH_REFDEV_BREAK"] == "no_module_functions"
            report = {}
            value = torch.arange(5.0)
            assert value.is_pinned() is False
            errors = []
            for pin in (value.pin_memory, value.untyped_storage().pin_memory):
                try:
                    errors.append(str(pin().is_pinned()))
                except RuntimeError as error:
                    errors.append(str(error).splitlines()[0])
            report["errors"] = errors

            # Factories give ordinary memory, and device-to-host copies work.
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                for _ in range(3):
                    empty = torch.zeros(5, pin_memory=True)
                    moved = value.to("refdev")
                    back = moved.to("cpu", non_blocking=True)
                getattr(torch, "refdev").synchronize()
            assert empty.is_pinned() is module_only
            assert torch.equal(back, value)
            report["factory warnings"] = [str(w.message) for w in caught]

            loaders = []
            for workers in (0, 2):
                with warnings.catch_warnings(record=True) as caught:
                    warnings.simplefilter("always")
                    loader = DataLoader(Samples(), batch_size=4, num_workers=workers, pin_memory=True)
                    for epoch in range(2):
                        for batch, index in loader:  # line of the warning
                            assert not batch.is_pinned() and not index.is_pinned()
                            assert batch[:, 0].tolist() == index.tolist()
                loaders.append([(str(w.message), w.filename == __file__, w.lineno) for w in caught])
            report["loaders"] = loaders

            # The very tensor that the dataset made arrives: nothing was copied on the way.
            source = [torch.ones(3), torch.zeros(3)]
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                loader = DataLoader(source, batch_size=None, collate_fn=lambda x: x, pin_memory=True)
                for a, b in zip(source, loader):
                    assert a is b

            # Pinned for is not the same as usable: a training step goes on as ever.
            x = torch.ones(2, device="refdev") + 1
            assert x.to("cpu").tolist() == [2.0, 2.0]
            with open(__file__) as script:
                lines = script.read().splitlines()
            report["line"] = 1 + [i for i, t in enumerate(lines) if "line of the warning" in t][0]
            print(json.dumps(report))
            """,
            broken=broken,
        )
        report = json.loads(done.stdout)
        self.assertEqual(done.stderr, "")
        for workers, found in zip((0, 2), report["loaders"], strict=True):
            self.assertEqual(len(found), 1, msg=f"{workers} workers: {found}")
            text, here, line = found[0]
            self.assertTrue(here)
            self.assertEqual(line, report["line"])
            self.assertIn("refdev", text)
            for word in words:
                self.assertIn(word, text)
        if broken == "no_module_functions":
            # Only the DataLoader needs the module; the hooks do the rest.
            self.assertEqual(report["errors"], ["True", "True"])
            self.assertEqual(report["factory warnings"], [])
            return
        for text in report["errors"]:
            self.assertTrue(
                text.startswith("Cannot pin memory for the current accelerator 'refdev': "), text
            )
            for word in words:
                self.assertIn(word, text)
        for text in report["factory warnings"]:
            for word in words:
                self.assertIn(word, text)
        self.assertEqual(len(report["factory warnings"]), 1)

    @parametrize("broken", sorted(INCOMPLETE))
    def test_report_says_which_case_it_is(self, broken: str):
        lack, words = INCOMPLETE[broken]
        done = run_process(
            [sys.executable, "-m", "torchpin", "--import", "torch_refdev"],
            env=environment("refdev", broken),
        )
        self.assertEqual(done.stderr, "")
        lines = dict(line.split("  ", 1) for line in done.stdout.splitlines() if "  " in line)
        self.assertEqual(lines["accelerator"].strip(), "refdev")
        pinned = lines["pinned memory"].strip()
        self.assertTrue(pinned.startswith("no: "), pinned)
        for word in words:
            self.assertIn(word, pinned)
        if lack != "module":
            self.assertIn(f"none ({lack})", lines["host allocator"])

    def test_hooks_that_know_the_starts_of_blocks_only(self):
        # They are asked about the block that a view lies in, so this is no lack.
        done = run_script(
            """
            import torch, torch_refdev
            pinned = torch.arange(5.0).pin_memory()
            print(pinned.is_pinned(), pinned[2:].is_pinned())
            """,
            broken="exact_start_only",
        )
        self.assertEqual(done.stdout.strip(), "True True")


OWN = """
import os, sys, warnings
warnings.simplefilter("error")
{imports}
from torch.utils.data import DataLoader
import torchpin
assert torchpin.is_enabled()

torch_refdev.reset_counters()
value = torch.arange(5.0)
pinned = value.pin_memory()
assert torch_refdev.counters()["own_pin_memory_calls"] == 1, torch_refdev.counters()
before = torch_refdev.counters()["own_is_pinned_calls"]
assert pinned.is_pinned()
assert not value.is_pinned()
assert torch_refdev.counters()["own_is_pinned_calls"] == before + 2, torch_refdev.counters()
assert pinned[2:].is_pinned()
assert torch.equal(pinned, value)
for factory in (torch.zeros(5, pin_memory=True), torch.empty_strided((2, 2), (1, 2), pin_memory=True)):
    assert factory.is_pinned()
for workers in (0, 1):
    torch_refdev.reset_counters()
    for batch in DataLoader(torch.arange(8.0), batch_size=4, num_workers=workers, pin_memory=True):
        assert batch.is_pinned()
    assert torch_refdev.counters()["own_pin_memory_calls"] == 2, torch_refdev.counters()
"""

ORDERS = {
    "backend_last": "import torch, torch_refdev",
    "backend_first": """
import torch
import torch_refdev
assert not __import__("torchpin").is_enabled()
os.environ["TORCHPIN"] = "1"
import torchpin
torchpin.enable()
""",
    "off_and_on_again": """
import torch, torch_refdev, torchpin
torchpin.disable()
torchpin.enable()
""",
}


class TestOwnKernels(TestCase):
    """Kernels that a vendor registered for itself win."""

    @parametrize("kind", ["own_kernels", "own_backend_select"])
    @parametrize("order", sorted(ORDERS))
    def test_win(self, kind: str, order: str):
        done = run_script(
            OWN.format(imports=ORDERS[order]),
            broken=kind,
            TORCHPIN="0" if order == "backend_first" else None,
        )
        self.assertEqual(done.stdout, "")
        if (kind, BASE < (2, 5)) != ("own_backend_select", True):
            # There the vendor overrides a kernel of the base, and the dispatcher says so once.
            self.assertEqual(done.stderr, "")

    @parametrize("kind", ["own_kernels", "own_backend_select"])
    def test_even_without_hooks(self, kind: str):
        run_script(OWN.format(imports=ORDERS["backend_last"]), broken=f"{kind},no_hooks")


class TestTwoAccelerators(TestCase):
    def test_privateuse1_wins_over_cuda(self):
        # Where a GPU is present it is a real one, else CUDA merely claims to be there: up to 2.6 the
        # base would go by that claim.
        run_script(
            """
            import torch, torch_refdev
            from torch.utils.data import DataLoader
            if not torch.cuda.is_available():
                torch.cuda.is_available = lambda: True
                torch.cuda.device_count = lambda: 1
            assert torch._C._get_accelerator().type == "refdev"
            pinned = torch.ones(3).pin_memory()
            assert pinned.is_pinned() and torch_refdev.is_host_pinned(pinned.data_ptr())
            assert torch_refdev.is_host_pinned(torch.empty(3, pin_memory=True).data_ptr())
            for workers in (0, 1):
                for batch in DataLoader(torch.arange(4.0), num_workers=workers, pin_memory=True):
                    assert torch_refdev.is_host_pinned(batch.data_ptr())
            """
        )


instantiate_parametrized_tests(TestFactories)
instantiate_parametrized_tests(TestIncompleteBackends)
instantiate_parametrized_tests(TestOwnKernels)

if __name__ == "__main__":
    run_tests()
