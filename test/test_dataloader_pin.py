"""DataLoader(pin_memory=True) delivers batches that are pinned for the current accelerator."""

from __future__ import annotations

import threading
from collections import namedtuple
from typing import Any

import hypothesis
import hypothesis.strategies as st
import torch
import torch.multiprocessing
from common_pin import ACCELERATOR, BASE, Samples, Stream, accelerator_module, run_script
from torch.testing._internal.common_utils import (
    TestCase,
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
)
from torch.utils.data import BatchSampler, DataLoader, Dataset, SequentialSampler, TensorDataset

Pair = namedtuple("Pair", "image, label")


class Collated:
    """A batch of a class of its own that knows how to pin itself."""

    def __init__(self, samples: list[Any]) -> None:
        self.values = torch.stack([value for value, _ in samples])
        self.calls = 0

    def pin_memory(self) -> Collated:
        self.values = self.values.pin_memory()
        self.calls += 1
        return self


class Structured(Dataset):
    """Samples that are collated into nested containers."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> dict[str, Any]:
        value = torch.full((2, 3), float(index))
        return {
            "pair": Pair(value, index),
            "list": [value, {"deep": value + 1}],
            "name": f"sample {index}",
            "number": index * 0.5,
        }


class Failing(Samples):
    """Raises at one index."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if index == 5:
            raise ZeroDivisionError("sample 5")
        return super().__getitem__(index)


class WorkerInfo(Dataset):
    """Tells what a worker is like."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> torch.Tensor:
        import torchpin

        info = torch.utils.data.get_worker_info()
        started = accelerator_module().is_initialized()
        return torch.tensor([info.seed % (1 << 40), torchpin.is_enabled(), started])


def tensors(data: Any) -> list[torch.Tensor]:
    if isinstance(data, torch.Tensor):
        return [data]
    if isinstance(data, dict):
        return tensors(list(data.values()))
    if isinstance(data, (list, tuple)):
        return [leaf for item in data for leaf in tensors(item)]
    return []


class TestPinned(TestCase):
    def assert_pinned(self, batch: Any, count: int | None = None) -> None:
        leaves = tensors(batch)
        self.assertTrue(leaves)
        for leaf in leaves:
            self.assertTrue(leaf.is_pinned())
            self.assertEqual(leaf.device.type, "cpu")
        if count is not None:
            self.assertEqual(len(leaves), count)

    @parametrize("num_workers", [0, 1, 2])
    def test_no_other_argument_is_needed(self, num_workers: int):
        loader = DataLoader(Samples(10), batch_size=4, num_workers=num_workers, pin_memory=True)
        for _ in range(2):
            batches = list(loader)
            self.assert_pinned(batches, 6)
            expected = list(DataLoader(Samples(10), batch_size=4))
            self.assertEqual(batches, expected)
            self.assertEqual([type(b) for b in batches], [type(b) for b in expected])

    @parametrize("num_workers", [0, 2])
    def test_without_pin_memory_nothing_is_pinned(self, num_workers: int):
        for batch in DataLoader(Samples(), batch_size=4, num_workers=num_workers):
            self.assertFalse(any(leaf.is_pinned() for leaf in tensors(batch)))

    @parametrize("method", ["fork", "spawn", "forkserver"])
    def test_every_way_to_start_workers(self, method: str):
        loader = DataLoader(
            WorkerInfo(),
            batch_size=2,
            num_workers=1 if method != "fork" else 2,
            pin_memory=True,
            multiprocessing_context=method,
        )
        batches = list(loader)
        self.assert_pinned(batches, 4)
        for batch in batches:
            self.assertTrue(batch[:, 1].all(), "torchpin is not on in the worker")
        if ACCELERATOR != "cuda" and method != "fork":
            self.assertFalse(
                any(batch[:, 2].any() for batch in batches), "a worker started the device"
            )

    @parametrize("num_workers", [1, 2])
    def test_persistent_workers_over_several_epochs(self, num_workers: int):
        loader = DataLoader(
            Samples(8),
            batch_size=2,
            num_workers=num_workers,
            pin_memory=True,
            persistent_workers=True,
        )
        kept = []
        for _ in range(4):
            batches = list(loader)
            self.assert_pinned(batches, 8)
            self.assertEqual(torch.cat([index for _, index in batches]), torch.arange(8))
            kept.append(batches)
        # Batches of the first epoch have not been written over.
        for batches in kept:
            self.assertEqual(torch.cat([value[:, 0] for value, _ in batches]), torch.arange(8.0))

    @parametrize("num_workers", [0, 2])
    def test_iterable_dataset(self, num_workers: int):
        loader = DataLoader(Stream(10), batch_size=2, num_workers=num_workers, pin_memory=True)
        for _ in range(2):
            batches = list(loader)
            self.assert_pinned(batches)
            found = sorted(torch.cat([batch[:, 0] for batch in batches]).tolist())
            self.assertEqual(found, [float(i) for i in range(10)])

    @parametrize("num_workers", [0, 2])
    def test_without_batches_of_its_own(self, num_workers: int):
        # batch_size=None: what the dataset returns is what arrives.
        loader = DataLoader(Samples(5), batch_size=None, num_workers=num_workers, pin_memory=True)
        samples = list(loader)
        self.assertEqual(len(samples), 5)
        for number, (value, index) in enumerate(samples):
            self.assertTrue(value.is_pinned())
            self.assertEqual((value[0].item(), index), (number, number))
        for value in DataLoader(
            Stream(3), batch_size=None, num_workers=num_workers, pin_memory=True
        ):
            self.assertTrue(value.is_pinned())

    @parametrize("num_workers", [0, 2])
    def test_batch_sampler(self, num_workers: int):
        # A sampler that yields whole batches, indices of a dataset that takes them at once.
        sampler = BatchSampler(SequentialSampler(range(10)), batch_size=4, drop_last=False)
        data = TensorDataset(torch.arange(20.0).reshape(10, 2))
        for arguments in ({"batch_sampler": sampler}, {"sampler": sampler, "batch_size": None}):
            loader = DataLoader(data, num_workers=num_workers, pin_memory=True, **arguments)
            batches = list(loader)
            self.assert_pinned(batches, 3)
            self.assertEqual(torch.cat([batch[0] for batch in batches]), data.tensors[0])

    @parametrize("num_workers", [0, 2])
    def test_containers(self, num_workers: int):
        loader = DataLoader(Structured(), batch_size=3, num_workers=num_workers, pin_memory=True)
        expected = list(DataLoader(Structured(), batch_size=3))
        batches = list(loader)
        self.assert_pinned(batches, 10)
        self.assertEqual(batches, expected)
        for batch in batches:
            self.assertIs(type(batch["pair"]), Pair)
            self.assertEqual(len(batch["name"]), 3)

    @parametrize("num_workers", [0, 2])
    def test_pin_memory_method_of_a_batch(self, num_workers: int):
        loader = DataLoader(
            Samples(4), batch_size=2, num_workers=num_workers, pin_memory=True, collate_fn=Collated
        )
        batches = list(loader)
        self.assertEqual(len(batches), 2)
        for batch in batches:
            self.assertIs(type(batch), Collated)
            self.assertTrue(batch.values.is_pinned())
            self.assertEqual(batch.calls, 1)

    @hypothesis.settings(deadline=None, max_examples=25)
    @hypothesis.given(
        length=st.integers(0, 13),
        batch_size=st.one_of(st.none(), st.integers(1, 5)),
        drop_last=st.booleans(),
        shuffle=st.booleans(),
    )
    def test_pinning_changes_nothing_else(
        self, length: int, batch_size: int | None, drop_last: bool, shuffle: bool
    ):
        if batch_size is None:
            drop_last = False
        hypothesis.assume(length > 0 or not shuffle)
        results = []
        for pin_memory in (False, True):
            torch.manual_seed(0)
            loader = DataLoader(
                Samples(length),
                batch_size=batch_size,
                drop_last=drop_last,
                shuffle=shuffle,
                pin_memory=pin_memory,
            )
            results.append((len(loader), list(loader), torch.rand(1)))
        self.assertEqual(results[1], results[0])

    def test_worker_seeds_are_those_of_stock(self):
        seeds = []
        for pin_memory in (False, True):
            torch.manual_seed(7)
            loader = DataLoader(WorkerInfo(), batch_size=4, num_workers=2, pin_memory=pin_memory)
            seeds.append([batch[:, 0].tolist() for batch in loader])
        self.assertEqual(seeds[1], seeds[0])

    @parametrize("num_workers", [0, 2])
    def test_exceptions_of_the_dataset(self, num_workers: int):
        for pin_memory in (False, True):
            loader = DataLoader(
                Failing(8), batch_size=2, num_workers=num_workers, pin_memory=pin_memory
            )
            batches = iter(loader)
            self.assertEqual(next(batches)[1], torch.tensor([0, 1]))
            self.assertEqual(next(batches)[1], torch.tensor([2, 3]))
            with self.assertRaisesRegex(ZeroDivisionError, "sample 5"):
                next(batches)

    def test_iterators_that_are_given_up(self):
        before = set(threading.enumerate())
        for _ in range(3):
            iterator = iter(DataLoader(Samples(64), num_workers=2, pin_memory=True))
            next(iterator)
            del iterator
        left = [t for t in threading.enumerate() if t not in before and "pin" in t.name.lower()]
        for thread in left:
            thread.join(10)
            self.assertFalse(thread.is_alive())
        self.assertEqual(torch.multiprocessing.active_children(), [])

    def test_two_loaders_at_once(self):
        loaders = [DataLoader(Samples(6), num_workers=1, pin_memory=True) for _ in range(2)]
        for (a, i), (b, j) in zip(*loaders, strict=True):
            self.assert_pinned([a, b, i, j])
            self.assertEqual((a, i), (b, j))

    def test_iterator_of_a_thread(self):
        found: list[Any] = []

        def consume() -> None:
            found.extend(DataLoader(Samples(4), num_workers=1, pin_memory=True))

        thread = threading.Thread(target=consume)
        thread.start()
        thread.join()
        self.assert_pinned(found, 8)

    def test_subclass_with_attributes_of_its_own(self):
        class Loader(DataLoader):
            def __init__(self, *args: Any, **kwargs: Any) -> None:
                super().__init__(*args, **kwargs)
                self.extra = 3

            @property
            def more(self) -> int:
                return self.extra + 1

        loader = Loader(Samples(4), pin_memory=True)
        self.assert_pinned(list(loader))
        self.assertEqual((loader.extra, loader.more, loader.pin_memory), (3, 4, True))

    def test_pin_memory_can_be_switched_between_epochs(self):
        loader = DataLoader(Samples(4), batch_size=2)
        self.assertFalse(next(iter(loader))[0].is_pinned())
        loader.pin_memory = True
        self.assertTrue(next(iter(loader))[0].is_pinned())
        loader.pin_memory = False
        self.assertFalse(next(iter(loader))[0].is_pinned())


class TestDevices(TestCase):
    def setUp(self):
        super().setUp()
        self.module = accelerator_module()
        self.before = self.module.current_device()

    def tearDown(self):
        self.module.set_device(self.before)
        super().tearDown()

    @parametrize("num_workers", [0, 2])
    def test_every_device(self, num_workers: int):
        for device in range(self.module.device_count()):
            self.module.set_device(device)
            loader = DataLoader(Samples(4), batch_size=2, num_workers=num_workers, pin_memory=True)
            for value, index in loader:
                self.assertTrue(value.is_pinned() and index.is_pinned())
                moved = value.to(ACCELERATOR, non_blocking=True)
                self.assertEqual(moved.device.index, device)
                self.assertEqual(moved.cpu()[:, 0], index.to(torch.float32))
            self.assertEqual(self.module.current_device(), device)

    def test_only_the_current_device_gets_a_context(self):
        if ACCELERATOR == "cuda":
            # Memory in use, as the driver's own tool tells it, is all there is to see there; one
            # device of two is needed.
            script = """
                import torch
                from torch.utils.data import DataLoader
                from common_pin import Samples
                list(DataLoader(Samples(), num_workers=1, pin_memory=True))
                last = torch.cuda.device_count() - 1
                assert last == 0 or not torch._C._cuda_hasPrimaryContext(last)
                """
        else:
            script = """
                import torch, torch_refdev
                from torch.utils.data import DataLoader
                from common_pin import Samples
                for workers in (0, 2):
                    for device in (1, 0):
                        torch.refdev.set_device(device)
                        before = torch_refdev.counters()["contexts"]
                        batches = list(DataLoader(Samples(), num_workers=workers, pin_memory=True))
                        assert all(value.is_pinned() for value, _ in batches)
                        new = torch_refdev.counters()["contexts"] - before
                        assert new <= {device}, (workers, device, new)
                        assert torch.refdev.current_device() == device
                """
        run_script(script, accelerator=ACCELERATOR)

    def test_context_that_loader_does_not_need_is_not_made(self):
        run_script(
            """
            import torch, torch_refdev
            from torch.utils.data import DataLoader
            from common_pin import Samples
            loader = DataLoader(Samples(), num_workers=2, pin_memory=True)
            plain = DataLoader(Samples(), num_workers=2)
            list(plain)
            assert not torch.refdev.is_initialized()
            """
        )


class TestNothingToPinFor(TestCase):
    def test_one_warning_for_each_loader(self):
        # At the line of the user that first iterates it; not one for each epoch, nor one in all.
        run_script(
            """
            import sys, warnings
            import torch
            from torch.utils.data import DataLoader
            from common_pin import Samples

            def line():
                return sys._getframe(1).f_lineno

            for action in ("always", "default"):
                for workers in (0, 1):
                    with warnings.catch_warnings(record=True) as caught:
                        warnings.simplefilter(action)
                        first = DataLoader(Samples(), batch_size=4, num_workers=workers, pin_memory=True)
                        second = DataLoader(Samples(), batch_size=4, pin_memory=True)
                        assert not caught
                        expected = []
                        for epoch in range(3):
                            batches = iter(first); expected.append(line())
                            for value, index in batches:
                                assert not value.is_pinned() and not index.is_pinned()
                                assert value[:, 0].tolist() == index.tolist()
                        list(second); expected.append(line())
                        list(second)
                        list(DataLoader(Samples(), pin_memory=False))
                    places = [(w.filename, w.lineno) for w in caught]
                    assert places == [(__file__, expected[0]), (__file__, expected[-1])], places
                    for w in caught:
                        assert w.category is UserWarning
                        assert "no accelerator was found" in str(w.message), w.message
                        assert "'pin_memory' argument is set as true" in str(w.message), w.message
            """,
            accelerator=None,
        )

    def test_persistent_workers_warn_once(self):
        run_script(
            """
            import warnings
            import torch
            from torch.utils.data import DataLoader
            from common_pin import Samples
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                loader = DataLoader(
                    Samples(), num_workers=1, persistent_workers=True, pin_memory=True)
                for _ in range(3):
                    assert len(list(loader)) == 8
            assert len(caught) == 1, [str(w.message) for w in caught]
            """,
            accelerator=None,
        )

    def test_accelerator_without_pinned_memory(self):
        # As on a Mac, whose accelerator shares its memory with the CPU.
        run_script(
            """
            import warnings
            import torch, torchpin
            from torch.utils.data import DataLoader
            from common_pin import Samples
            from torchpin import _C
            from unittest import mock

            reason = "mps shares its memory with the CPU and has no pinned memory"
            answer = ("mps", "pinned_memory", reason, False, None)
            for workers in (0, 1):
                with mock.patch.object(_C, "_pin_target", lambda initialize: answer):
                    with warnings.catch_warnings(record=True) as caught:
                        warnings.simplefilter("always")
                        loader = DataLoader(Samples(), num_workers=workers, pin_memory=True)
                        for _ in range(2):
                            assert not any(value.is_pinned() for value, _ in loader)
                [warning] = caught
                assert reason in str(warning.message)
                assert warning.filename == __file__
            """,
            accelerator=None,
        )

    def test_warning_as_error_is_raised_where_the_loader_is_iterated(self):
        done = run_script(
            """
            import torch
            from torch.utils.data import DataLoader
            loader = DataLoader([1, 2], pin_memory=True)
            print("made")
            next(iter(loader))
            """,
            accelerator=None,
            flags=["-W", "error"],
            status=1,
        )
        self.assertEqual(done.stdout, "made\n")
        self.assertIn("UserWarning: 'pin_memory' argument is set as true", done.stderr)

    def test_accelerator_that_comes_later(self):
        # After torchpin, and after the loader: each new iterator asks again.
        run_script(
            """
            import sys, warnings
            import torch
            from torch.utils.data import DataLoader
            from common_pin import Samples
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                loader = DataLoader(Samples(), num_workers=1, pin_memory=True)
                untouched = DataLoader(Samples(), pin_memory=True)
                assert not any(value.is_pinned() for value, _ in loader)
            assert len(caught) == 1
            # The stand-in that kept refdev out makes way for it.
            sys.path[:] = [p for p in sys.path if not p.endswith("without_refdev")]
            sys.modules.pop("torch_refdev", None)
            import torch_refdev
            warnings.simplefilter("error")
            for made_before in (loader, untouched):
                for _ in range(2):
                    assert all(value.is_pinned() for value, _ in made_before)
            """,
            accelerator=None,
        )

    def test_backend_whose_module_says_unavailable(self):
        run_script(
            """
            import warnings
            import torch, torch_refdev
            from torch.utils.data import DataLoader
            from common_pin import Samples
            torch.refdev.is_available = lambda: False
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                loader = DataLoader(Samples(), num_workers=1, pin_memory=True)
                for _ in range(2):
                    assert not any(value.is_pinned() for value, _ in loader)
            [warning] = caught
            assert "torch.refdev.is_available() is False" in str(warning.message)
            """
        )


class TestSwitching(TestCase):
    def test_iterator_that_is_under_way_when_torchpin_is_switched_off(self):
        # The pin thread goes on as it was made. Without workers there is no thread, and the base
        # pins the rest its own way, if it can.
        run_script(
            f"""
            import torch, torch_refdev, torchpin
            from torch.utils.data import DataLoader
            from common_pin import Samples
            for workers in {[0, 2] if BASE >= (2, 7) else [2]}:
                iterator = iter(DataLoader(Samples(), num_workers=workers, pin_memory=True))
                assert next(iterator)[0].is_pinned()
                torchpin.disable()
                rest = list(iterator)
                assert [int(i) for _, i in rest] == list(range(1, 8))
                torchpin.enable()
                assert all(value.is_pinned() for value, _ in rest), workers
                fresh = list(DataLoader(Samples(), num_workers=workers, pin_memory=True))
                assert all(value.is_pinned() for value, _ in fresh)
            """
        )

    def test_loader_made_before_torchpin_was_on(self):
        run_script(
            """
            import os
            import torch, torch_refdev, torchpin
            from torch.utils.data import DataLoader
            assert not torchpin.is_enabled()
            loader = DataLoader(torch.arange(8.0), num_workers=1, pin_memory=True)
            os.environ["TORCHPIN"] = "1"
            torchpin.enable()
            for _ in range(2):
                assert all(value.is_pinned() for value in loader)
            """,
            TORCHPIN="0",
        )


instantiate_parametrized_tests(TestPinned)
instantiate_parametrized_tests(TestDevices)

if __name__ == "__main__":
    run_tests()
