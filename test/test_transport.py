"""Batches of workers through shared slots: the same batches as without, in every mode, and rule by rule
what keeps that invisible."""

from __future__ import annotations

import collections
import dataclasses
import gc
import os
import pickle
import signal
import threading
import time
from collections.abc import Iterator
from multiprocessing.reduction import ForkingPickler
from typing import Any

import common_pin
import numpy
import pytest
import torch
from common_pin import ACCELERATOR, run_script
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch.testing._internal.common_utils import TestCase, run_tests
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torch.utils.data._utils import transport

HAS_REPORTS = hasattr(torch, "accelerator") and common_pin.BASE >= (2, 8)
"""Whether the base reports copies to a host allocator, without which in place is impossible."""

MODES = ("copy", "in_place") if HAS_REPORTS else ("copy",)
each_mode = pytest.mark.parametrize("mode", MODES)


def same(value: Any) -> Any:
    return value


class Items(Dataset):
    """What is in a list; under ``spawn`` it travels to the worker by pickle."""

    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        return self.items[index]


class Images(Dataset):
    """``length`` samples ``(3 x side x side floats, label)`` that can be told from one another."""

    def __init__(self, length: int = 64, side: int = 32) -> None:
        self.length = length
        self.side = side

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        image = torch.arange(3 * self.side * self.side, dtype=torch.float32) + 7 * index
        return image.reshape(3, self.side, self.side), index


def check_images(batch: list[torch.Tensor]) -> None:
    images, labels = batch
    side = images.shape[-1]
    base = torch.arange(3 * side * side, dtype=torch.float32).reshape(3, side, side)
    expected = torch.stack([base + 7 * int(label) for label in labels])
    assert torch.equal(images, expected)


def loader_of(dataset: Any, mode: str | None, **options: Any) -> Any:
    options.setdefault("num_workers", 1)
    loader: Any = DataLoader(dataset, pin_memory=True, **options)
    if mode is not None:
        loader.transport = mode
    return loader


def through_worker(batches: list[Any], mode: str, **options: Any) -> tuple[list[Any], Any]:
    """What a worker sends comes out, and the counts of the iterator."""
    loader = loader_of(Items(batches), mode, batch_size=None, collate_fn=same, **options)
    iterator = iter(loader)
    return list(iterator), iterator._transport.stats


def assert_same(got: Any, want: Any, path: str = "batch") -> None:
    assert type(got) is type(want), f"{path}: {type(got)} is not {type(want)}"
    if isinstance(want, torch.Tensor):
        assert got.dtype == want.dtype and got.shape == want.shape, path
        assert got.layout == want.layout, path
        if want.layout == torch.strided:
            assert got.stride() == want.stride(), path
            assert got.requires_grad == want.requires_grad, path
            if want.device.type == "cpu":
                assert got.is_pinned(), path
        torch.testing.assert_close(got, want, rtol=0, atol=0, equal_nan=True)
    elif isinstance(want, numpy.ndarray):
        # Without torchpin an array is pickled, which brings it into the machine's byte order.
        assert got.dtype.str == pickle.loads(pickle.dumps(want)).dtype.str, path
        assert got.shape == want.shape, path
        assert got.flags.f_contiguous == want.flags.f_contiguous, path
        assert got.flags.writeable, path
        numpy.testing.assert_array_equal(got, want)
    elif dataclasses.is_dataclass(want):
        for field in dataclasses.fields(want):
            assert_same(getattr(got, field.name), getattr(want, field.name), f"{path}.{field.name}")
    elif isinstance(want, dict):
        assert list(got) == list(want), path
        for key in want:
            assert_same(got[key], want[key], f"{path}[{key!r}]")
    elif isinstance(want, (list, tuple)):
        assert len(got) == len(want), path
        for i, (a, b) in enumerate(zip(got, want, strict=True)):
            assert_same(a, b, f"{path}[{i}]")
    else:
        assert got == want, path


# ---- generated batches

DTYPES = [
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.complex64,
]


@st.composite
def tensors(draw: Any) -> torch.Tensor:
    dtype = draw(st.sampled_from(DTYPES))
    shape = draw(st.lists(st.integers(0, 5), max_size=4))
    tensor = torch.randint(0, 2, [*shape, 3]).to(dtype)[..., 0]
    if draw(st.booleans()):
        tensor = tensor.clone()
    if tensor.dim() > 1 and draw(st.booleans()):
        tensor = tensor.transpose(0, 1)
    if tensor.dim() > 0 and tensor.shape[0] > 2 and draw(st.booleans()):
        tensor = tensor[1::2]
    if draw(st.integers(0, 9)) == 0:
        tensor = tensor.unsqueeze(0).expand(4, *tensor.shape)
    return tensor


@st.composite
def arrays(draw: Any) -> numpy.ndarray:
    dtype = draw(st.sampled_from(["f4", "i8", "u1", "?", "c8", "M8[s]", "U3", ">f8"]))
    shape = draw(st.lists(st.integers(0, 40), min_size=1, max_size=2))
    array = numpy.arange(int(numpy.prod(shape))).astype("i8").reshape(shape)
    array = array.astype("U3") if dtype == "U3" else array.astype(dtype)
    return numpy.asfortranarray(array) if draw(st.booleans()) else array


leaves = st.one_of(
    tensors(),
    arrays(),
    st.integers(),
    st.text(max_size=5),
    st.none(),
    st.binary(max_size=5),
)
batches = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.tuples(inner, inner),
        st.dictionaries(st.text(max_size=4), inner, max_size=4),
    ),
    max_leaves=12,
)


@each_mode
@settings(
    max_examples=10,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    # Shrinking starts a worker at each step.
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
)
@given(data=st.lists(batches, min_size=10, max_size=25))
def test_generated_batches_come_out_equal(mode: str, data: list[Any]) -> None:
    got, stats = through_worker(data, mode)
    assert_same(got, data)
    # Batches that are kept use up the slots in place.
    assert set(stats.stock_batches) <= ({"no_free_slot"} if mode == "in_place" else set())


# ---- kinds

Pair = collections.namedtuple("Pair", "left right")


@dataclasses.dataclass
class Record:
    image: torch.Tensor
    name: str
    array: numpy.ndarray


class Tagged(torch.Tensor):
    pass


def awkward() -> list[Any]:
    base = torch.arange(100.0)
    return [
        torch.tensor(3.5),
        torch.empty(0, 4),
        torch.randn(4, 4).requires_grad_(),
        torch.nn.Parameter(torch.randn(3)),
        torch.randn(3, dtype=torch.complex64).conj(),
        torch.randn(3, dtype=torch.complex64).conj().imag,
        torch.eye(3).to_sparse(),
        torch.eye(3).to_sparse_csr(),
        torch.randn(5, 5).as_subclass(Tagged),
        torch.randn(1000, 1000)[:, 3],
        base[3:90:7],
        torch.randn(6).expand(4, 6),
        torch.randn(2, 8, 3, 3).to(memory_format=torch.channels_last),
        Pair(torch.ones(2), [torch.zeros(3)]),
        Record(torch.ones(4), "a", numpy.ones(600)),
        collections.OrderedDict(a=torch.ones(1), b=2),
        "text",
        None,
        [],
        {"s": {1, 2}, "f": frozenset([3]), "d": torch.float32, "z": torch.Size([1, 2])},
        numpy.array([torch.ones(2), "x"], dtype=object),
        numpy.zeros(300, dtype=[("a", "f4"), ("b", "i8")]),
        torch.quantize_per_tensor(torch.randn(4), 0.1, 0, torch.qint8),
    ]


class KindsTest(TestCase):
    def _sent(self, batches: list[Any], mode: str, **options: Any) -> list[Any]:
        return through_worker(batches, mode, **options)[0]

    def test_views_of_one_storage_stay_that_also_where_one_goes_the_stock_way(self) -> None:
        base = torch.arange(160.0)
        # So few elements of what it spans, or with a gradient, are for the base's reducer.
        others = [base.as_strided((10,), (16,)), torch.nn.Parameter(base[20:40])]
        batches = [pair for other in others for pair in ([base[:10], other], [other, base[:10]])]
        for mode in MODES:
            for sent, batch in zip(self._sent(batches, mode), batches, strict=True):
                first, second = sent
                self.assertEqual(first.untyped_storage()._cdata, second.untyped_storage()._cdata)
                self.assertEqual(sent, batch)
                self.assertTrue(first.is_pinned() and second.is_pinned())

    def test_awkward_leaves_come_out_as_stock_gives_them(self) -> None:
        batches = awkward()
        # What the queues of the base make of them.
        want = [pickle.loads(ForkingPickler.dumps(batch)) for batch in batches]
        for mode in MODES:
            got = self._sent(batches, mode)
            for i, (item, expected) in enumerate(zip(got, want, strict=True)):
                with self.subTest(mode=mode, item=i):
                    if isinstance(expected, numpy.ndarray):
                        self.assertEqual(item.dtype, expected.dtype)
                        self.assertEqual(item.tolist(), expected.tolist())
                        continue
                    if not isinstance(expected, torch.Tensor):
                        assert_same(item, expected)
                        continue
                    self.assertIs(type(item), type(expected))
                    self.assertEqual(item.requires_grad, expected.requires_grad)
                    self.assertEqual(item.layout, expected.layout)
                    if expected.is_quantized:
                        item, expected = item.int_repr(), expected.int_repr()
                    elif expected.layout == torch.strided:
                        self.assertEqual(item.stride(), expected.stride())
                        self.assertEqual(item.is_conj(), expected.is_conj())
                        self.assertEqual(item.is_neg(), expected.is_neg())
                        self.assertTrue(item.numel() == 0 or item.is_pinned())
                    self.assertEqual(item, expected)

    def test_what_shares_memory_goes_on_sharing(self) -> None:
        base = torch.arange(64.0)
        batch = [base[:10], base[5:20], base, base]
        for mode in MODES:
            (got,) = self._sent([batch], mode)
            self.assertIs(got[2], got[3])
            got[0][7] = -1
            self.assertEqual(got[1][2].item(), -1)
            self.assertEqual(got[2][7].item(), -1)

    def test_a_view_does_not_bring_its_whole_base(self) -> None:
        huge = torch.arange(1 << 20, dtype=torch.float32)
        for mode in MODES:
            batches, stats = through_worker([[huge[1000:1100]]], mode)
            self.assertEqual(batches[0][0], huge[1000:1100])
            self.assertLess(stats.bytes, 4096)

    def test_delivered_tensors_behave_as_pinned_tensors_do(self) -> None:
        for mode in MODES:
            ((images, labels),) = list(loader_of(Images(8), mode, batch_size=8))
            self.assertTrue(images.is_pinned() and labels.is_pinned())
            self.assertIs(images.pin_memory(), images)
            self.assertTrue(images.is_contiguous() and images.is_leaf)
            self.assertFalse(images.is_shared())
            view = images.numpy()
            view[0, 0, 0, 0] = 5
            self.assertEqual(images[0, 0, 0, 0].item(), 5)
            with self.assertRaisesRegex(RuntimeError, "not resizable"):
                labels.resize_(1000)
            self.assertEqual(labels.resize_(2).tolist(), [0, 1])
            clone = images.clone()
            images.share_memory_()
            self.assertTrue(images.is_shared())
            self.assertEqual(images, clone)
            images.add_(1)
            images.requires_grad_().sum().backward()

    def test_numpy_arrays_are_ordinary_arrays(self) -> None:
        for mode in MODES:
            got = self._sent([numpy.arange(5000.0)], mode)[0]
            self.assertTrue(got.flags.owndata and got.flags.writeable)
            got.resize((10,), refcheck=False)

    def test_numpy_arrays_of_the_other_byte_order(self) -> None:
        # Pickling brings them into the machine's, and torch takes no other.
        array = numpy.arange(5000.0).astype(numpy.dtype("f8").newbyteorder())
        for mode in MODES:
            got = self._sent([array], mode)[0]
            self.assertEqual(torch.from_numpy(got), torch.arange(5000.0, dtype=torch.float64))


# ---- loaders


class Stream(IterableDataset):
    def __iter__(self) -> Iterator[tuple[torch.Tensor, int]]:
        info = torch.utils.data.get_worker_info()
        assert info is not None
        images = Images(64)
        for index in range(info.id, 64, info.num_workers):
            yield images[index]


def make_list(samples: list[Any]) -> list[Any]:
    return [torch.stack([s[0] for s in samples]), torch.tensor([s[1] for s in samples])]


seeds: list[int] = []


def init_worker(worker_id: int) -> None:
    assert torch.utils.data.get_worker_info().id == worker_id


@each_mode
@pytest.mark.parametrize(
    "options",
    [
        {"num_workers": 1},
        {"num_workers": 3},
        {"num_workers": 2, "persistent_workers": True},
        {"num_workers": 2, "collate_fn": make_list, "worker_init_fn": init_worker},
        {"num_workers": 2, "prefetch_factor": 1},
        {"num_workers": 2, "shuffle": True, "drop_last": True},
        *([{"num_workers": 2, "in_order": False}] if common_pin.BASE >= (2, 6) else []),
    ],
    ids=str,
)
def test_options_of_the_loader(mode: str, options: dict[str, Any]) -> None:
    loader = loader_of(Images(50), mode, batch_size=8, **options)
    for _ in range(3):
        labels = []
        for batch in loader:
            check_images(batch)
            assert batch[0].is_pinned()
            labels += batch[1].tolist()
        assert sorted(labels) == sorted(set(labels))
        assert len(labels) == (48 if options.get("drop_last") else 50)


@each_mode
def test_iterable_datasets_and_no_automatic_batching(mode: str) -> None:
    labels = []
    for batch in loader_of(Stream(), mode, batch_size=8, num_workers=2):
        check_images(batch)
        labels += batch[1].tolist()
    assert sorted(labels) == list(range(64))
    singles = list(loader_of(Images(10), mode, batch_size=None))
    assert [label for _, label in singles] == list(range(10))
    assert all(image.is_pinned() for image, _ in singles)


@each_mode
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_start_methods(mode: str, method: str) -> None:
    loader = loader_of(
        Images(40), mode, batch_size=8, num_workers=2, multiprocessing_context=method
    )
    iterator = iter(loader)
    for batch in iterator:
        check_images(batch)
        assert batch[0].is_pinned()
    stats = iterator._transport.stats
    assert stats.batches == 5
    if mode == "copy":
        assert stats.in_place == 0
    else:
        # A batch whose worker lost its processor before it let go of it is copied.
        assert stats.in_place > 0
        assert stats.in_place + stats.copied_instead.get("kept_by_worker", 0) == 5


@each_mode
def test_loaders_in_threads_and_nested(mode: str) -> None:
    errors: list[BaseException] = []

    def run() -> None:
        try:
            for _ in range(2):
                for batch in loader_of(Images(64), mode, batch_size=4, num_workers=2):
                    check_images(batch)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    # One data set, two loaders in step.
    shared = Images(24)
    for one, other in zip(
        loader_of(shared, mode, batch_size=4),
        loader_of(shared, mode, batch_size=4, num_workers=2),
        strict=True,
    ):
        check_images(one)
        check_images(other)
        assert torch.equal(one[1], other[1])
    for outer in loader_of(Images(24), mode, batch_size=4):
        # The batch of the outer loader is inherited by the worker of the inner one.
        (inner,) = list(loader_of(Items([outer]), mode, batch_size=None, collate_fn=same))
        check_images(inner)
        check_images(outer)


# ---- the rules


@each_mode
def test_a_program_that_keeps_all_batches_ends(mode: str) -> None:
    loader = loader_of(Images(400), mode, batch_size=4, num_workers=2)
    iterator = iter(loader)
    kept = list(iterator)
    assert len(kept) == 100
    for batch in kept:
        check_images(batch)
        assert batch[0].is_pinned()
    if mode == "in_place":
        assert iterator._transport.stats.stock_batches["no_free_slot"] > 0


class Keeps(Dataset):
    """Collates on the way to a sample, keeps what it collated, and looks at it ever after."""

    def __init__(self) -> None:
        self.kept: list[tuple[int, torch.Tensor]] = []

    def __len__(self) -> int:
        return 60

    def __getitem__(self, index: int) -> torch.Tensor:
        for was, tensor in self.kept:
            assert torch.equal(tensor, torch.full((4, 500), float(was)))
        made = torch.utils.data.default_collate([torch.full((500,), float(index))] * 4)
        if index % 3 == 0:
            self.kept.append((index, made))
        return made


@each_mode
def test_what_a_dataset_keeps_of_a_batch_is_left_alone(mode: str) -> None:
    got = list(loader_of(Keeps(), mode, batch_size=2, num_workers=2))
    for i, batch in enumerate(got):
        for j in range(2):
            assert torch.equal(batch[j], torch.full((4, 500), float(2 * i + j)))


class Overwrites:
    """A collate function that changes a batch after it was sent."""

    def __init__(self) -> None:
        self.sent: Any = None

    def __call__(self, samples: list[Any]) -> Any:
        if self.sent is not None:
            time.sleep(0.01)
            self.sent[0].fill_(-1)
        self.sent = torch.utils.data.default_collate(samples)
        return self.sent


@each_mode
def test_a_worker_cannot_change_what_was_delivered(mode: str) -> None:
    loader = loader_of(Images(40), mode, batch_size=4, collate_fn=Overwrites(), prefetch_factor=1)
    iterator = iter(loader)
    got = []
    for batch in iterator:
        check_images(batch)
        time.sleep(0.02)
        got.append(batch)
    for batch in got:
        check_images(batch)
    if mode == "in_place":
        assert iterator._transport.stats.copied_instead["kept_by_worker"] > 0


class KeepsBatches:
    """A collate function that keeps every batch and looks whether it is still as it was."""

    def __init__(self) -> None:
        self.kept: list[Any] = []

    def __call__(self, samples: list[Any]) -> Any:
        for batch in self.kept:
            check_images(batch)
        self.kept.append(torch.utils.data.default_collate(samples))
        return self.kept[-1]


@each_mode
def test_a_worker_that_keeps_all_batches_finds_them_unchanged(mode: str) -> None:
    loader = loader_of(Images(200, 8), mode, batch_size=4, num_workers=2, collate_fn=KeepsBatches())
    iterator = iter(loader)
    for batch in iterator:
        check_images(batch)
        batch[0].zero_()
    # It costs a few slots, not the transport.
    assert iterator._transport.stats.batches > 30


@each_mode
def test_batches_outlive_loader_and_workers(mode: str) -> None:
    kept = []
    for _ in range(4):
        iterator = iter(loader_of(Images(32), mode, batch_size=4, num_workers=2))
        kept += [next(iterator), next(iterator)]
        del iterator
        gc.collect()
    for batch in kept:
        check_images(batch)
        assert batch[0].is_pinned()


@each_mode
def test_a_batch_larger_than_a_slot_goes_the_stock_way(
    mode: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transport, "_MAX_SLOT_BYTES", 2 << 20)
    big = torch.randn(1 << 20)
    small = torch.randn(100)
    iterator = iter(
        loader_of(
            Items([[small, big], [small], [big, big + 1]]),
            mode,
            batch_size=None,
            collate_fn=same,
        )
    )
    got = list(iterator)
    assert_same(got, [[small, big], [small], [big, big + 1]])
    assert iterator._transport.stats.stock_tensors == 1
    assert iterator._transport.stats.stock_batches == {"too_large": 1}


class Dies(Dataset):
    def __init__(self, at: int) -> None:
        self.at = at

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == self.at:
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.full((10000,), float(index))


@each_mode
@pytest.mark.parametrize("at", [0, 37])
def test_a_worker_that_dies_is_reported_as_by_stock(mode: str, at: int) -> None:
    got = []
    with pytest.raises(RuntimeError, match="DataLoader worker"):
        # The error comes by a signal, perhaps while the iterator is still being made.
        for batch in loader_of(Dies(at), mode, batch_size=2, num_workers=2):
            got.append(batch)
    for batch in got:
        for row in batch:
            assert torch.equal(row, row[:1].expand(10000))


@each_mode
def test_workers_killed_from_outside_leave_whole_batches(mode: str) -> None:
    for attempt in range(6):
        iterator = iter(loader_of(Images(4000, 16), mode, batch_size=4, num_workers=2))
        victim = iterator._workers[attempt % 2].pid
        timer = threading.Timer(0.005 * attempt, os.kill, (victim, signal.SIGKILL))
        with pytest.raises(RuntimeError, match="DataLoader worker"):
            # The error comes by a signal, perhaps before the timer is known to run.
            timer.start()
            for batch in iterator:
                check_images(batch)
        timer.join()
        del iterator


@each_mode
def test_a_worker_killed_while_it_asks_whether_to_end_stops_nobody(mode: str) -> None:
    """The event that all workers ask has a lock, which would stay taken."""
    iterator = iter(loader_of(Images(400, 16), mode, batch_size=4, num_workers=2, timeout=20))
    with iterator._workers_done_event._cond:
        for _ in range(50):
            check_images(next(iterator))
    for batch in iterator:
        check_images(batch)


class Fails(Dataset):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        if index == 5:
            raise KeyError("no such sample")
        return torch.utils.data.default_collate([torch.ones(1000)] * 2)


class Unpicklable:
    def __init__(self) -> None:
        self.tensor = torch.ones(3)

    def __reduce__(self) -> Any:
        return make_it, (self.tensor,)


def make_it(tensor: torch.Tensor) -> Any:
    raise ValueError("cannot be made")


@each_mode
def test_errors_arrive_as_they_are(mode: str) -> None:
    with pytest.raises(KeyError, match="no such sample"):
        list(loader_of(Fails(), mode, batch_size=2))
    with pytest.raises(ValueError, match="cannot be made"):
        list(loader_of(Items([Unpicklable()]), mode, batch_size=None, collate_fn=same))


# ---- modes


class ModeTest(TestCase):
    def tearDown(self) -> None:
        transport._mode = None
        super().tearDown()

    def _mode_used(self, loader: Any) -> str | None:
        iterator = iter(loader)
        list(iterator)
        made = getattr(iterator, "_transport", None)
        return None if made is None else made.mode

    def test_function_context_manager_attribute_and_environment(self) -> None:
        loader = DataLoader(Images(4), num_workers=1, pin_memory=True)
        transport.transport("off")
        self.assertIsNone(self._mode_used(loader))
        with transport.transport("copy"):
            self.assertEqual(self._mode_used(loader), "copy")
            loader.transport = "off"
            self.assertIsNone(self._mode_used(loader))
            del loader.transport
        self.assertIsNone(self._mode_used(loader))
        with self.assertRaisesRegex(ValueError, "'fast'; expected one of 'auto'"):
            transport.transport("fast")
        loader.transport = "slow"
        with self.assertRaisesRegex(ValueError, "DataLoader.transport is 'slow'"):
            iter(loader)

    def test_no_slots_without_pin_memory_or_workers(self) -> None:
        with transport.transport("copy"):
            self.assertIsNone(self._mode_used(DataLoader(Images(4), num_workers=1)))
            self.assertIsNone(self._mode_used(DataLoader(Images(4), pin_memory=True)))


# ---- what can be seen


@each_mode
def test_where_the_time_goes(mode: str) -> None:
    class Slow(Images):
        def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
            time.sleep(0.02)
            return super().__getitem__(index)

    def waits(dataset: Any, at_the_loop: float) -> tuple[dict[str, Any], float]:
        iterator = iter(loader_of(dataset, mode, batch_size=4))
        check_images(next(iterator))
        began = time.perf_counter()
        before = transport.stats(iterator)
        for batch in iterator:
            check_images(batch)
            time.sleep(at_the_loop)
        took = time.perf_counter() - began
        after = transport.stats(iterator)
        return {key: after[key] - before[key] for key in after if "seconds" in key}, took

    slow_loader, took = waits(Slow(48), 0)
    assert slow_loader["loop_wait_seconds"] > 0.5 * took
    assert slow_loader["wait_for_workers_seconds"] > 0.5 * took
    slow_loop, took = waits(Images(48), 0.1)
    assert slow_loop["wait_for_consumer_seconds"] > 0.5 * took
    assert slow_loop["loop_wait_seconds"] < 0.5 * took
    for found in (slow_loader, slow_loop):
        assert 0 < found["unpack_seconds"] < took


def ranges(mode: str, all_threads: bool, workers: int) -> dict[str, int]:
    options = {}
    if all_threads:
        make: Any = torch._C._profiler._ExperimentalConfig
        options["experimental_config"] = make(profile_all_threads=True)
    loader = loader_of(Images(32), mode, batch_size=4, num_workers=workers, collate_fn=make_list)
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], **options
    ) as profiler:
        for batch in loader:
            check_images(batch)
    return {event.key: event.count for event in profiler.key_averages()}


@each_mode
def test_ranges_in_the_profiler(mode: str) -> None:
    assert ranges(mode, False, 0)["pin_memory: allocate and copy"] == 8
    found = ranges(mode, False, 1)
    assert found["enumerate(DataLoader)#_MultiProcessingDataLoaderIter.__next__"] == 9
    if common_pin.BASE >= (2, 7):
        found = ranges(mode, True, 1)
        names = ("copy", "move", "deliver in place")
        counts = {name: found.get(f"pin transport: {name}", 0) for name in names}
        assert sum(counts.values()) == 8
        assert counts["copy"] == (8 if mode == "copy" else 0)


# ---- without workers


def test_without_workers_batches_are_stacked_into_pinned_memory_and_not_copied(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stacked: list[int] = []
    stack = torch.stack

    def noting(*arguments: Any, **options: Any) -> torch.Tensor:
        result = stack(*arguments, **options)
        stacked.append(result.data_ptr())
        return result

    monkeypatch.setattr(torch, "stack", noting)
    got = [images for images, _ in DataLoader(Images(16), batch_size=4, pin_memory=True)]
    assert [images.data_ptr() for images in got] == stacked
    assert all(images.is_pinned() for images in got)
    for number, images in enumerate(got):
        check_images([images, torch.arange(4 * number, 4 * number + 4)])


# ---- limits that stock runs into

SMALL_SHM = """
    import ctypes, os, sys
    libc = ctypes.CDLL(None, use_errno=True)
    uid, gid = os.getuid(), os.getgid()
    CLONE_NEWNS, CLONE_NEWUSER = 0x20000, 0x10000000
    if uid != 0:
        assert libc.unshare(CLONE_NEWUSER) == 0, os.strerror(ctypes.get_errno())
        open("/proc/self/setgroups", "w").write("deny")
        open("/proc/self/uid_map", "w").write(f"0 {uid} 1")
        open("/proc/self/gid_map", "w").write(f"0 {gid} 1")
    assert libc.unshare(CLONE_NEWNS) == 0, os.strerror(ctypes.get_errno())
    MS_REC, MS_PRIVATE = 0x4000, 0x40000
    assert libc.mount(b"none", b"/", None, MS_REC | MS_PRIVATE, None) == 0
    assert libc.mount(b"tmpfs", b"/dev/shm", b"tmpfs", 0, b"size=64m") == 0
    import torch, common_pin
    from torch.utils.data import DataLoader, Dataset
    class Large(Dataset):
        def __len__(self): return 24
        def __getitem__(self, index): return torch.full((4 << 20,), float(index))
    loader = DataLoader(Large(), batch_size=4, num_workers=2, pin_memory=True)
    for i, batch in enumerate(loader):
        assert batch.is_pinned() and batch[1, -1] == 4 * i + 1
        del batch
    print("done")
"""

FEW_DESCRIPTORS = """
    import resource, torch, common_pin
    from torch.utils.data import DataLoader, Dataset
    class Many(Dataset):
        def __len__(self): return 8
        def __getitem__(self, index): return [torch.full((8,), float(index)) for _ in range(1000)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
    kept = list(DataLoader(Many(), batch_size=None, collate_fn=lambda x: x, num_workers=1,
                           pin_memory=True, prefetch_factor=1))
    for index, batch in enumerate(kept):
        assert len(batch) == 1000 and all(t[0] == index and t.is_pinned() for t in batch)
    print("done")
"""


@each_mode
def test_a_small_dev_shm_is_no_limit(mode: str) -> None:
    assert "done" in run_script(SMALL_SHM, ACCELERATOR, TORCHPIN_TRANSPORT=mode).stdout


@each_mode
def test_few_descriptors_are_no_limit(mode: str) -> None:
    assert "done" in run_script(FEW_DESCRIPTORS, ACCELERATOR, TORCHPIN_TRANSPORT=mode).stdout


@each_mode
def test_interpreter_exit_with_live_batches(mode: str) -> None:
    done = run_script(
        """
        import torch, common_pin
        from torch.utils.data import DataLoader
        from common_pin import Samples
        loader = DataLoader(Samples(64, 1000), batch_size=4, num_workers=2, pin_memory=True,
                            persistent_workers=True)
        iterator = iter(loader)
        kept = [next(iterator) for _ in range(3)]
        print("done")
        """,
        ACCELERATOR,
        TORCHPIN_TRANSPORT=mode,
    )
    assert done.stdout == "done\n" and done.stderr == ""


# Mains are killed while their workers start, while they work, and while they end. Their orphans become
# children of the script, which has none when the last is gone, and with it the memory, which has no name.
KILLED_MAIN = """
    import ctypes, os, random, signal, time, torch, common_pin
    from torch.utils.data import DataLoader
    from common_pin import Samples
    PR_SET_CHILD_SUBREAPER = 36
    assert ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) == 0
    for attempt in range(16):
        main = os.fork()
        if main == 0:
            samples = Samples(400 if attempt % 4 else 100000, 1000)
            loader = DataLoader(samples, batch_size=4, num_workers=2, pin_memory=True)
            iterator = iter(loader)
            if attempt < 3:
                os.kill(os.getpid(), signal.SIGKILL)
            for _ in iterator:
                pass
            del iterator
            time.sleep(60)
        time.sleep(random.uniform(0, 0.5) if attempt >= 3 else 0)
        if attempt >= 3:
            os.kill(main, signal.SIGKILL)
    deadline = time.monotonic() + 90
    try:
        while time.monotonic() < deadline:
            if os.waitpid(-1, os.WNOHANG)[0] == 0:
                time.sleep(0.05)
        left = open(f"/proc/self/task/{os.getpid()}/children").read()
        for pid in left.split():
            os.kill(int(pid), signal.SIGKILL)
        print("left:", left)
    except ChildProcessError:
        print("done")
"""


@each_mode
def test_main_processes_killed_at_random_leave_no_worker_and_no_memory(mode: str) -> None:
    assert run_script(KILLED_MAIN, ACCELERATOR, TORCHPIN_TRANSPORT=mode).stdout == "done\n"


if __name__ == "__main__":
    run_tests()
