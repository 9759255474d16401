"""pin_memory(batch): any container, any tensor, sharing kept, the original untouched."""

from __future__ import annotations

import array
import collections
import collections.abc
import dataclasses
import datetime
import enum
import pathlib
import sys
import threading
import time
import types
import unittest.mock
import warnings
from typing import Any, ClassVar, NamedTuple

import attrs
import hypothesis
import hypothesis.strategies as st
import numpy as np
import torch
import torch.utils._pytree as pytree
import torchpin
from common_pin import ACCELERATOR, BASE, DRIVER, HERE, run_script
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.testing._internal.common_utils import (
    TestCase,
    instantiate_parametrized_tests,
    parametrize,
    run_tests,
)
from torch.utils.data import DataLoader, Dataset
from torch.utils.data._utils import pin_memory as module
from torch.utils.data._utils.pin_containers import IMMUTABLE, expand, kind_of_type
from torch.utils.data._utils.pin_memory import LoaderDevice, pin_memory, register_pin_function
from torchpin import _C

# ---- containers


class Pair(NamedTuple):
    left: Any
    right: Any


class TwoArguments(tuple):
    """A tuple whose constructor does not take a sequence."""

    def __new__(cls, left: Any, right: Any) -> TwoArguments:
        return super().__new__(cls, (left, right))


class AttributedList(list):
    """A list with an attribute."""

    note: Any = None


class AttributedDict(dict):
    """A dict whose items are attributes."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


class RefusingDict(dict):
    """A dict that refuses everything that would change or copy it."""

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise RuntimeError("no")

    __init__ = __setitem__ = update = __copy__ = __reduce_ex__ = copy = _refuse


class SealedMapping(collections.abc.Mapping):
    """Cannot be made from a mapping, nor changed."""

    def __init__(self, left: Any, right: Any) -> None:
        self._items = {"left": left, "right": right}

    def __getitem__(self, key: str) -> Any:
        return self._items[key]

    def __iter__(self) -> Any:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)


class OpenMapping(SealedMapping, collections.abc.MutableMapping):
    """Its shallow copies share their items: an update of a copy would change the original."""

    def __setitem__(self, key: str, value: Any) -> None:
        self._items[key] = value

    def __delitem__(self, key: str) -> None:
        del self._items[key]


class HiddenMapping(collections.abc.Mapping):
    """Keeps its items where nobody sees them, but can be made from a mapping."""

    __slots__ = ("_get",)

    def __init__(self, items: dict[str, Any]) -> None:
        items = dict(items)
        self._get = lambda: items

    def __getitem__(self, key: str) -> Any:
        return self._get()[key]

    def __iter__(self) -> Any:
        return iter(self._get())

    def __len__(self) -> int:
        return len(self._get())


class LockedMapping(HiddenMapping):
    """As above, but its constructor takes something else."""

    __slots__ = ()

    def __init__(self, left: Any, right: Any) -> None:
        super().__init__({"left": left, "right": right})


class Frames(collections.abc.Sequence):
    """A sequence over a list of its own."""

    def __init__(self, *frames: Any) -> None:
        self._frames = list(frames)

    def __getitem__(self, index: Any) -> Any:
        return self._frames[index]

    def __len__(self) -> int:
        return len(self._frames)


@dataclasses.dataclass
class Record:
    left: Any
    right: Any = None
    derived: Any = dataclasses.field(init=False, default=None)

    def __post_init__(self) -> None:
        self.derived = ["made once", id(self)]


@dataclasses.dataclass(frozen=True)
class FrozenRecord:
    left: Any
    right: Any = None

    made: ClassVar[int] = 0

    def __post_init__(self) -> None:
        FrozenRecord.made += 1


@dataclasses.dataclass(slots=True)
class SlottedRecord:
    left: Any
    right: Any = None


@dataclasses.dataclass(frozen=True, slots=True)
class FrozenSlottedRecord:
    left: Any
    right: Any = None


@attrs.define
class Attrs:
    left: Any
    right: Any = None


@attrs.frozen
class FrozenAttrs:
    left: Any
    right: Any = attrs.field(default=None, converter=lambda value: value)


@attrs.define(slots=False)
class UnslottedAttrs:
    left: Any
    right: Any = None


@dataclasses.dataclass
class Fields(Record):
    """Fields of every kind, behind those of a dataclass that it derives from."""

    scale: dataclasses.InitVar[Any] = None
    parts: list[Any] = dataclasses.field(default_factory=list)
    hidden: Any = dataclasses.field(init=False, repr=False, compare=False)
    _private: Any = None
    note: Any = dataclasses.field(default=None, kw_only=True)
    made: ClassVar[int] = 0

    def __post_init__(self, scale: Any) -> None:  # type: ignore[override]
        super().__post_init__()
        Fields.made += 1
        self.hidden = scale


@dataclasses.dataclass(frozen=True, slots=True)
class FrozenFields(FrozenSlottedRecord):
    """Has slots of its own behind those that it inherits, one of which is never set."""

    hidden: Any = dataclasses.field(init=False)
    unset: Any = dataclasses.field(init=False)
    made: ClassVar[int] = 0

    def __post_init__(self) -> None:
        FrozenFields.made += 1
        object.__setattr__(self, "hidden", self.left)


class Refuses:
    """Lets nobody make, copy, change or pickle it."""

    def _refuse(self, *_: Any, **__: Any) -> Any:
        raise RuntimeError("no")

    __setattr__ = __delattr__ = __copy__ = __deepcopy__ = _refuse  # type: ignore[assignment]
    __reduce__ = __reduce_ex__ = __getstate__ = __setstate__ = __eq__ = __hash__ = _refuse  # type: ignore[assignment]

    def __new__(cls, *_: Any, **__: Any) -> Any:
        raise RuntimeError("no")


@dataclasses.dataclass(init=False, eq=False)
class RefusingRecord(Refuses):
    left: Any
    right: Any

    def __init__(self) -> None:
        raise RuntimeError("no")


@attrs.define(init=False, eq=False, slots=True)
class RefusingAttrs(Refuses):
    left: Any
    right: Any

    def __init__(self) -> None:
        raise RuntimeError("no")


@attrs.define(cache_hash=True, frozen=True)
class AttrsFields(FrozenAttrs):
    """Fields of every kind, behind those of a class that it derives from."""

    parts: list[Any] = attrs.field(factory=list, kw_only=True)
    hidden: Any = attrs.field(init=False)
    unset: Any = attrs.field(init=False)
    _private: Any = attrs.field(default=None, kw_only=True)
    made: ClassVar[int] = 0

    def __attrs_post_init__(self) -> None:
        AttrsFields.made += 1
        object.__setattr__(self, "hidden", self.left)


class OwnDict(dict):
    """A dict whose keys are its attributes."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.__dict__ = self


class Stacked(collections.abc.Sequence):
    """Keeps one tensor; its items are views, made as they are asked for."""

    def __init__(self, stacked: Any, labels: Any) -> None:
        self._stacked = stacked
        self._labels = labels

    def __getitem__(self, index: int) -> Any:
        return {"row": self._stacked[index], "label": (self._labels[index], [index])}

    def __len__(self) -> int:
        return len(self._stacked)


class Registered:
    """Registered with pytree below; nothing else is known of it."""

    def __init__(self, left: Any, right: Any) -> None:
        self.left = left
        self.right = right


class Stubborn:
    """Registered with pytree, with a function that does not put it together again."""

    def __init__(self, left: Any) -> None:
        self.left = left


def _refuse(children: Any, context: Any) -> Any:
    raise ValueError("will not")


_register = getattr(pytree, "register_pytree_node", None) or pytree._register_pytree_node
_register(Registered, lambda r: ([r.left, r.right], None), lambda c, _: Registered(*c))
_register(Stubborn, lambda s: ([s.left], None), _refuse)


class OwnMethod:
    """Pins itself, and counts."""

    def __init__(self, value: Any) -> None:
        self.value = value
        self.calls = 0
        self.device: Any = "none given"

    def pin_memory(self) -> OwnMethod:
        self.calls += 1
        result = OwnMethod(self.value.pin_memory())
        result.calls = self.calls
        return result


class OwnMethodWithDevice(OwnMethod):
    def pin_memory(self, device: Any = None) -> OwnMethod:  # type: ignore[override]
        self.device = device
        return super().pin_memory()


class Unknown:
    """Nobody knows that its attributes may be tensors."""

    def __init__(self, **attributes: Any) -> None:
        self.__dict__.update(attributes)


class Colour(enum.Enum):
    RED = 1


def object_array(left: Any, right: Any) -> Any:
    array = np.empty((1, 2), dtype=object)
    array[0, 0], array[0, 1] = left, right
    return array


def with_set(kind: type, left: Any, right: Any) -> list[Any]:
    """Behind what it consists of, so that :class:`Sharing` knows its members already."""
    return [left, right, kind(x for x in (left, right) if isinstance(x, (torch.Tensor, str)))]


CONTAINERS: dict[str, Any] = {
    "list": lambda a, b: [a, b, 1],
    "tuple": lambda a, b: (a, "x", b),
    "dict": lambda a, b: {"a": a, 2: b, "n": None},
    "named tuple": Pair,
    "tuple with other arguments": TwoArguments,
    "set": lambda a, b: with_set(set, a, b),
    "frozen set": lambda a, b: with_set(frozenset, a, b),
    "array of objects": object_array,
    "dict that is its attributes": lambda a, b: OwnDict(a=a, b=b),
    "ordered dict": lambda a, b: collections.OrderedDict(b=b, a=a),
    "default dict": lambda a, b: collections.defaultdict(list, {"a": a, "b": b}),
    "dict with attributes": lambda a, b: AttributedDict(a=a, b=b),
    "deque": lambda a, b: collections.deque([a, b], maxlen=5),
    "user dict": lambda a, b: collections.UserDict(a=a, b=b),
    "user list": lambda a, b: collections.UserList([a, b]),
    "mapping proxy": lambda a, b: types.MappingProxyType({"a": a, "b": b}),
    "mapping": SealedMapping,
    "mutable mapping": OpenMapping,
    "mapping without attributes": lambda a, b: HiddenMapping({"a": a, "b": b}),
    "sequence": Frames,
    "namespace": lambda a, b: types.SimpleNamespace(a=a, b=b),
    "dataclass": Record,
    "dataclass with fields of every kind": lambda a, b: Fields(a, b, scale=a, parts=[b], note=a),
    "frozen dataclass that inherits slots": FrozenFields,
    "frozen dataclass": FrozenRecord,
    "dataclass with slots": SlottedRecord,
    "frozen dataclass with slots": FrozenSlottedRecord,
    "attrs": Attrs,
    "attrs with fields of every kind": lambda a, b: AttrsFields(a, b, parts=[b], private=a),
    "frozen attrs": FrozenAttrs,
    "attrs without slots": UnslottedAttrs,
    "pytree": Registered,
}


# ---- tensors


class Tagged(torch.Tensor):
    """A subclass without data of its own."""


def _tagged() -> torch.Tensor:
    tensor = torch.randn(3).as_subclass(Tagged)
    tensor.tag = "cat"
    return tensor


def _with_attribute() -> torch.Tensor:
    tensor = torch.randn(3)
    tensor.origin = ("file", 7)  # type: ignore[attr-defined]
    return tensor


TENSORS: dict[str, Any] = {
    "float32": lambda: torch.randn(2, 3),
    "int64": lambda: torch.arange(5),
    "bool": lambda: torch.tensor(True),
    "bfloat16": lambda: torch.randn(4).bfloat16(),
    "complex": lambda: torch.randn(3, dtype=torch.complex64),
    "transposed": lambda: torch.randn(2, 3, 4).permute(2, 0, 1),
    "channels last": lambda: torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last),
    "slice of a large base": lambda: torch.randn(100, 100)[3:5],
    "column of a large base": lambda: torch.randn(100, 100)[:, 5],
    "every other": lambda: torch.randn(64)[::2],
    "expanded": lambda: torch.randn(1, 3).expand(1000, 3),
    "overlapping": lambda: torch.randn(10).as_strided((5, 3), (1, 1)),
    "no elements": lambda: torch.empty(0, 3),
    "conjugate": lambda: torch.randn(3, dtype=torch.complex64).conj(),
    "negative": lambda: torch.randn(3, dtype=torch.complex64).conj().imag,
    "requires grad": lambda: torch.randn(3, requires_grad=True),
    "parameter": lambda: torch.nn.Parameter(torch.randn(3)),
    "frozen parameter": lambda: torch.nn.Parameter(torch.randn(3), requires_grad=False),
    "subclass": _tagged,
    "attribute": _with_attribute,
}


def jagged(
    values: torch.Tensor, offsets: torch.Tensor, lengths: torch.Tensor | None = None
) -> torch.Tensor:
    if hasattr(torch.nested, "nested_tensor_from_jagged"):
        return torch.nested.nested_tensor_from_jagged(values, offsets, lengths)
    # Up to 2.3 its class is all that there is.
    from torch.nested._internal.nested_tensor import NestedTensor

    return NestedTensor(values, offsets, lengths=lengths)  # type: ignore[no-any-return]


# Kinds of which torch.equal and is_pinned know nothing on some releases.
SPECIAL_TENSORS: dict[str, Any] = {
    "sparse coo": lambda: torch.eye(3).to_sparse(),
    "uncoalesced": lambda: torch.sparse_coo_tensor([[0, 0], [1, 1]], [1.0, 2.0], (2, 2)),
    "hybrid": lambda: torch.randn(3, 4).to_sparse(1),
    "sparse csr": lambda: torch.eye(4).to_sparse_csr(),
    "sparse csc": lambda: torch.eye(4).to_sparse_csc(),
    "sparse bsr": lambda: torch.eye(4).to_sparse_bsr((2, 2)),
    "sparse bsc": lambda: torch.eye(4).to_sparse_bsc((2, 2)),
    "quantized": lambda: torch.quantize_per_tensor(torch.randn(4), 0.1, 3, torch.qint8),
    "quantized by channel": lambda: torch.quantize_per_channel(
        torch.randn(2, 4), torch.tensor([0.1, 0.2]), torch.tensor([0, 1]), 0, torch.qint8
    ),
    "nested": lambda: torch.nested.nested_tensor([torch.randn(2, 3), torch.randn(4, 3)]),
    "jagged": lambda: jagged(torch.randn(6, 3), torch.tensor([0, 2, 6])),
    "jagged with gaps": lambda: jagged(
        torch.randn(9, 3), torch.tensor([0, 4, 9]), torch.tensor([3, 2])
    ),
    "jagged that requires grad": lambda: jagged(
        torch.randn(6, 3), torch.tensor([0, 2, 6])
    ).requires_grad_(),
}


def parts_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The dense tensors that a tensor of special layout consists of."""
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    if tensor.is_nested and tensor.layout is torch.jagged:
        lengths = [] if tensor._lengths is None else [tensor._lengths]  # type: ignore[attr-defined]
        return [tensor._values, tensor._offsets, *lengths]  # type: ignore[attr-defined]
    if tensor.is_nested:
        return list(tensor.unbind())
    if tensor.is_quantized:
        return [tensor.int_repr(), tensor.dequantize()]
    return [tensor]


def is_pinned(tensor: torch.Tensor) -> bool:
    if tensor.is_quantized:
        return tensor.is_pinned()
    return all(part.is_pinned() for part in parts_of(tensor))


def attributes_of(tensor: torch.Tensor) -> set[str]:
    """Without what jagged tensors of 2.3 keep for whoever asked for their sizes and strides."""
    return {name for name in vars(tensor) if not name.startswith("_sym_")}


def storage_id(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


class Sharing:
    """Checks that two structures are the same up to where their tensors lie."""

    def __init__(self, case: TestCase) -> None:
        self.case = case
        self.objects: dict[int, Any] = {}
        self.storages: dict[int, int] = {}
        self.origins: dict[int, int] = {}

    def check(self, old: Any, new: Any) -> None:
        """``new`` is what pin_memory made of ``old``."""
        case = self.case
        case.assertIs(type(new), type(old))
        if id(old) in self.objects:
            case.assertIs(new, self.objects[id(old)])
            return
        if isinstance(old, torch.Tensor):
            self.objects[id(old)] = new
            self.check_tensor(old, new)
        elif is_bulk(old):
            self.check_bulk(old, new)
        else:
            self.objects[id(old)] = new
            if isinstance(old, (set, frozenset)):
                case.assertEqual(len(new), len(old))
                self.check_members(old, new)
                return
            before, after = contents(old), contents(new)
            case.assertEqual(list(before), list(after))
            for key, value in before.items():
                self.check(value, after[key])

    def check_bulk(self, old: Any, new: Any) -> None:
        self.case.assertIs(new, old)

    def check_members(self, old: Any, new: Any) -> None:
        """Of sets, which do not say which member came of which."""
        members = {id(member) for member in new}
        for member in old:
            self.case.assertIn(id(self.objects.get(id(member), member)), members)

    def check_tensor(self, old: torch.Tensor, new: torch.Tensor) -> None:
        case = self.case
        case.assertTrue(is_pinned(new))
        case.assertFalse(is_pinned(old) and new is not old)
        for name in ("dtype", "layout", "requires_grad", "is_leaf"):
            case.assertEqual(getattr(new, name), getattr(old, name))
        case.assertEqual(attributes_of(new), attributes_of(old))
        if old.layout is torch.strided and not old.is_nested:
            case.assertEqual(new.shape, old.shape)
            case.assertEqual(new.stride(), old.stride())
            case.assertEqual(new.is_conj(), old.is_conj())
            case.assertEqual(new.is_neg(), old.is_neg())
            # Two storages that were one are one, and the other way round.
            before, after = storage_id(old), storage_id(new)
            case.assertEqual(self.storages.setdefault(before, after), after)
            case.assertEqual(self.origins.setdefault(after, before), before)
            case.assertLessEqual(
                new.untyped_storage().nbytes(), max(old.untyped_storage().nbytes(), 64)
            )
        for before, after in zip(parts_of(old), parts_of(new), strict=True):
            case.assertTrue(torch.equal(before.detach(), after.detach()))


def is_bulk(value: Any) -> bool:
    if isinstance(value, np.ndarray):
        return value.dtype != object
    return isinstance(value, (str, bytes, int, float, type(None), enum.Enum))


def contents(container: Any) -> dict[Any, Any]:
    """Children of a container of these tests, by a name for each."""
    if isinstance(container, (collections.abc.Mapping)):
        found = dict(container.items())
        if getattr(container, "__dict__", None) is container:
            return found
    elif isinstance(container, np.ndarray):
        found = dict(enumerate(container.reshape(-1).tolist()))
    elif isinstance(container, PackedSequence):
        found = {i: value for i, value in enumerate(tuple(container)) if value is not None}
    elif isinstance(container, (set, frozenset)):
        found = {("item", i): value for i, value in enumerate(sorted(container, key=repr))}
    elif isinstance(container, (collections.abc.Sequence, collections.deque)):
        found = dict(enumerate(container))
    else:
        found = {}
    found.update(getattr(container, "__dict__", {}))
    for kind in type(container).__mro__:
        for name in vars(kind).get("__slots__", ()):
            if name not in ("__weakref__", "_get") and hasattr(container, name):
                found[name] = getattr(container, name)
    return found


# ---- random batches

ALL_TENSORS = {**TENSORS, **SPECIAL_TENSORS}


def make_tensor(name: str) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about layouts that are new
        return ALL_TENSORS[name]()  # type: ignore[no-any-return]


packed = st.builds(lambda: pack_sequence([torch.randn(2), torch.randn(3)], enforce_sorted=False))
plain = st.one_of(
    st.integers(), st.text(max_size=3), st.none(), st.just(Colour.RED), st.just(np.arange(3))
)


@st.composite
def batches(draw: st.DrawFn, leave_out: frozenset[str] = frozenset()) -> Any:
    """A nesting of containers over a pool of tensors, some of them views of one another."""
    tensors = st.sampled_from(sorted(set(ALL_TENSORS) - leave_out)).map(make_tensor)
    pool = [draw(tensors) for _ in range(draw(st.integers(1, 5)))]
    base = torch.randn(40)
    for _ in range(draw(st.integers(0, 3))):
        start, end = sorted(draw(st.tuples(st.integers(0, 40), st.integers(0, 40))))
        pool.append(base[start:end])
    leaves = st.one_of(st.sampled_from(range(len(pool))).map(lambda i: pool[i]), plain, packed)

    def container(children: Any) -> Any:
        return st.builds(
            lambda name, left, right: CONTAINERS[name](left, right),
            st.sampled_from(sorted(set(CONTAINERS) - leave_out)),
            children,
            children,
        )

    return draw(st.recursive(leaves, container, max_leaves=12))


@instantiate_parametrized_tests
class TestContainers(TestCase):
    @hypothesis.settings(max_examples=150, deadline=None, database=None)
    @hypothesis.given(batches())
    @hypothesis.example(HiddenMapping({"a": torch.empty(0, 3), "b": None}))
    def test_any_nesting_comes_out_equal_pinned_and_with_its_sharing(self, batch: Any) -> None:
        before = snapshot(batch)
        with warnings.catch_warnings():
            warnings.simplefilter("error", UserWarning)
            result = pin_memory(batch)
        Sharing(self).check(batch, result)
        self.assertEqual(snapshot(batch), before)

    @parametrize("name", sorted(CONTAINERS))
    def test_container(self, name: str) -> None:
        left, right = torch.randn(3), torch.randn(2)
        batch = CONTAINERS[name](left, right)
        before = snapshot(batch)
        result = pin_memory(batch)
        self.assertIsNot(result, batch)
        Sharing(self).check(batch, result)
        self.assertEqual(snapshot(batch), before)
        self.assertFalse(left.is_pinned())

    @parametrize("name", sorted(CONTAINERS))
    def test_container_without_tensors_comes_back_itself(self, name: str) -> None:
        batch = CONTAINERS[name]("left", (1, 2))
        self.assertIs(pin_memory(batch), batch)

    def test_what_native_classes_keep_beside_their_items_is_kept(self) -> None:
        order = collections.OrderedDict(a=torch.zeros(1), b=torch.zeros(1))
        order.move_to_end("a")
        queue = collections.deque([torch.zeros(1)], maxlen=3)
        found = pin_memory(
            [
                order,
                queue,
                collections.defaultdict(int, a=torch.zeros(1)),
                collections.Counter("ab"),
            ]
        )
        self.assertEqual(list(found[0]), ["b", "a"])
        self.assertEqual(found[1].maxlen, 3)
        self.assertIs(found[2].default_factory, int)
        self.assertEqual(found[3], {"a": 1, "b": 1})

    def test_attributes_of_containers_are_pinned_too(self) -> None:
        batch = AttributedList([torch.zeros(1)])
        batch.note = torch.ones(2)
        found = pin_memory(batch)
        self.assertTrue(found.note.is_pinned())
        self.assertFalse(batch.note.is_pinned())

    def test_sets(self) -> None:
        one, two = torch.zeros(1), torch.ones(1)
        for kind in (set, frozenset):
            found = pin_memory([kind([one, two, "x"]), one])
            self.assertIs(type(found[0]), kind)
            self.assertEqual(len(found[0]), 3)
            self.assertIn(found[1], found[0])
            self.assertEqual(
                sum(isinstance(x, torch.Tensor) and x.is_pinned() for x in found[0]), 2
            )

    def test_struct_sequence_of_torch(self) -> None:
        found = pin_memory(torch.max(torch.randn(3, 4), dim=1))
        self.assertIs(type(found), torch.return_types.max)
        self.assertTrue(found.values.is_pinned() and found.indices.is_pinned())

    def test_packed_sequence(self) -> None:
        batch = pack_sequence([torch.randn(2), torch.randn(3)], enforce_sorted=False)
        found = pin_memory({"again": batch.data, "packed": batch})
        self.assertIs(type(found["packed"]), PackedSequence)
        self.assertTrue(found["packed"].is_pinned())
        self.assertIs(found["packed"].data, found["again"])
        self.assertEqual(found["packed"], batch)

    def test_arrays_of_objects(self) -> None:
        batch = np.empty((2, 2), dtype=object)
        batch[0, 1] = torch.randn(2, 2)
        batch[1, 0] = [torch.zeros(1)]
        found = pin_memory(batch)
        self.assertTrue(found[0, 1].is_pinned() and found[1, 0][0].is_pinned())
        self.assertEqual(found.shape, (2, 2))
        self.assertFalse(batch[0, 1].is_pinned())

    def test_key_and_attribute_called_pin_memory(self) -> None:
        for batch in (
            AttributedDict(pin_memory=True, x=torch.zeros(1)),
            AttributedDict(pin_memory=lambda: None, x=torch.zeros(1)),
            {"pin_memory": lambda: None, "x": torch.zeros(1)},
        ):
            found = pin_memory(batch)
            self.assertIs(type(found), type(batch))
            self.assertTrue(found["x"].is_pinned())
            self.assertIs(found["pin_memory"], batch["pin_memory"])

    def test_post_init_runs_once(self) -> None:
        batch = Record(torch.zeros(1))
        found = pin_memory(batch)
        self.assertEqual(found.derived, batch.derived)
        self.assertTrue(found.left.is_pinned())
        frozen = FrozenRecord(torch.zeros(1))
        made = FrozenRecord.made
        self.assertTrue(pin_memory(frozen).left.is_pinned())
        self.assertEqual(FrozenRecord.made, made)

    def test_fields_of_every_kind(self) -> None:
        one, two, three = torch.zeros(1), torch.ones(2), torch.ones(3)
        batch = Fields(one, [two], scale=three, parts=[two], note=three, _private=one)
        made = Fields.made
        found = pin_memory([batch, one])
        self.assertEqual(Fields.made, made)
        Sharing(self).check([batch, one], found)
        self.assertEqual(found[0].derived, batch.derived)
        self.assertIs(found[0].hidden, found[0].note)
        self.assertIs(found[0].parts[0], found[0].right[0])
        self.assertTrue(found[0]._private.is_pinned())
        self.assertIsNot(found[0].parts, batch.parts)
        self.assertFalse(any(tensor.is_pinned() for tensor in (one, two, three)))

        frozen = FrozenFields(one, [two])
        made = FrozenFields.made
        found = pin_memory(frozen)
        self.assertEqual(FrozenFields.made, made)
        Sharing(self).check(frozen, found)
        self.assertIs(found.hidden, found.left)
        self.assertFalse(hasattr(found, "unset"))
        with self.assertRaises(dataclasses.FrozenInstanceError):
            found.left = 1

    def test_attrs_fields_of_every_kind(self) -> None:
        one, two = torch.zeros(1), torch.ones(2)
        batch = AttrsFields(one, 5, parts=[two], private=two)
        made = AttrsFields.made
        found = pin_memory([batch])[0]
        self.assertEqual(AttrsFields.made, made)
        self.assertIs(type(found), AttrsFields)
        self.assertIs(found.hidden, found.left)
        self.assertIs(found.parts[0], found._private)
        self.assertTrue(found.left.is_pinned() and found._private.is_pinned())
        self.assertEqual(found.right, 5)
        self.assertFalse(hasattr(found, "unset"))
        with self.assertRaises(attrs.exceptions.FrozenInstanceError):
            found.left = 1
        self.assertFalse(one.is_pinned() or two.is_pinned())
        self.assertIs(batch.parts[0], two)

    def test_record_that_refuses_everything(self) -> None:
        for kind in (RefusingRecord, RefusingAttrs):
            batch = object.__new__(kind)
            object.__setattr__(batch, "left", torch.zeros(1))
            object.__setattr__(batch, "right", [torch.ones(1)])
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                found = pin_memory([batch])[0]
            self.assertIs(type(found), kind)
            self.assertIsNot(found, batch)
            self.assertTrue(found.left.is_pinned() and found.right[0].is_pinned())
            self.assertFalse(batch.left.is_pinned() or batch.right[0].is_pinned())

    def test_record_that_is_more_than_its_attributes_is_handed_on(self) -> None:
        @dataclasses.dataclass
        class Failure(Exception):
            left: Any

        batch = Failure(torch.zeros(1))
        with self.assertWarnsRegex(UserWarning, r"batch\[0\]\.left is a tensor in .*Failure"):
            found = pin_memory([batch])
        self.assertIs(found[0], batch)

    def test_dict_that_is_its_own_attributes(self) -> None:
        batch = OwnDict(x=torch.zeros(1), y=[torch.ones(1)])
        found = pin_memory(batch)
        self.assertIs(type(found), OwnDict)
        self.assertIs(found.__dict__, found)
        self.assertTrue(found.x.is_pinned() and found["y"][0].is_pinned())
        found.z = 1
        self.assertEqual(found["z"], 1)
        self.assertIs(batch.__dict__, batch)
        self.assertFalse(batch.x.is_pinned())
        self.assertNotIn("z", batch)

    def test_items_that_are_made_when_they_are_asked_for(self) -> None:
        batch = Stacked(torch.randn(3, 2), ["a", "b", "c"])
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            found = pin_memory([batch])[0]
        self.assertIs(type(found), Stacked)
        self.assertTrue(found._stacked.is_pinned() and found[2]["row"].is_pinned())
        self.assertEqual(found._stacked, batch._stacked)
        self.assertEqual(found._stacked.untyped_storage().nbytes(), 24)
        self.assertFalse(batch._stacked.is_pinned())

    def test_class_that_is_registered_after_it_was_seen(self) -> None:
        class Late(Unknown):
            pass

        with self.assertWarns(UserWarning):
            self.assertFalse(pin_memory([Late(left=torch.zeros(1))])[0].left.is_pinned())
        _register(Late, lambda late: ([late.left], None), lambda c, _: Late(left=c[0]))
        self.assertTrue(pin_memory([Late(left=torch.zeros(1))])[0].left.is_pinned())

    def test_ten_thousand_levels(self) -> None:
        batch: Any = torch.zeros(1)
        for _ in range(10_000):
            batch = [batch]
        found = pin_memory(batch)
        while isinstance(found, list):
            self.assertEqual(len(found), 1)
            below = found[0]
            found.clear()  # freeing it all at once would be too deep for the interpreter
            found = below
        self.assertTrue(found.is_pinned())
        while isinstance(batch, list):
            below = batch[0]
            batch.clear()
            batch = below

    def test_classes_and_modules_are_left_alone(self) -> None:
        batch = [OwnMethod, torch, Colour.RED, pathlib.Path("x"), len, torch.float32]
        self.assertIs(pin_memory(batch), batch)


def snapshot(value: Any, depth: int = 0) -> Any:
    """What a batch of these tests consists of, by identity."""
    if isinstance(value, torch.Tensor) or depth > 60:
        return id(value)
    if is_bulk(value):
        return id(value)
    return (id(value), [(repr(k), snapshot(v, depth + 1)) for k, v in contents(value).items()])


class TestCycles(TestCase):
    def test_list_in_itself(self) -> None:
        batch: list[Any] = [torch.zeros(2)]
        batch.append(batch)
        found = pin_memory(batch)
        self.assertIs(found[1], found)
        self.assertIsNot(found, batch)
        self.assertTrue(found[0].is_pinned())
        self.assertIs(batch[1], batch)

    def test_through_every_kind(self) -> None:
        inner: list[Any] = [torch.zeros(2)]
        record = Record(inner)
        batch = {"tuple": (inner, torch.ones(1)), "record": record, "slots": SlottedRecord(inner)}
        inner += [batch, batch["tuple"], record]
        record.right = record
        for start in (batch, inner, batch["tuple"], record, batch["slots"]):
            whole = pin_memory(start)
            found = (
                whole
                if start is batch
                else whole[1]
                if start is inner
                else whole[0][1]
                if start is batch["tuple"]
                else whole.left[1]
            )
            with self.subTest(type(start).__name__):
                new = found["tuple"][0]
                self.assertIs(new[1], found)
                self.assertIs(new[2], found["tuple"])
                self.assertIs(new[3], found["record"])
                self.assertIs(found["record"].right, found["record"])
                self.assertIs(found["slots"].left, new)
                self.assertTrue(new[0].is_pinned() and found["tuple"][1].is_pinned())
                self.assertIsNot(new, inner)
        self.assertFalse(inner[0].is_pinned())

    def test_without_tensors_comes_back_itself(self) -> None:
        batch: list[Any] = [1]
        batch.append((batch,))
        self.assertIs(pin_memory(batch), batch)


class TestResistance(TestCase):
    def test_refusing_dict_keeps_its_type(self) -> None:
        batch = RefusingDict.__new__(RefusingDict)
        dict.__setitem__(batch, "x", torch.zeros(1))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            found = pin_memory([batch])[0]
        self.assertIs(type(found), RefusingDict)
        self.assertTrue(found["x"].is_pinned())
        self.assertFalse(batch["x"].is_pinned())

    def test_unflatten_that_raises_falls_back_to_the_attributes(self) -> None:
        batch = Stubborn(torch.zeros(1))
        found = pin_memory(batch)
        self.assertIs(type(found), Stubborn)
        self.assertTrue(found.left.is_pinned())
        self.assertFalse(batch.left.is_pinned())

    def test_what_cannot_be_rebuilt_is_handed_on_with_one_warning(self) -> None:
        batch = {"m": LockedMapping(torch.zeros(1), 2), "x": torch.zeros(1)}
        with self.assertWarnsRegex(UserWarning, r'batch\["m"\] of type .*LockedMapping cannot be'):
            found = pin_memory(batch)
        self.assertIs(found["m"], batch["m"])
        self.assertTrue(found["x"].is_pinned())
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            self.assertIs(pin_memory(batch)["m"], batch["m"])

    def test_mapping_that_raises_whatever_it_is_asked(self) -> None:
        class Angry(collections.abc.Mapping):
            def _raise(self, *_: Any) -> Any:
                raise ZeroDivisionError

            __getitem__ = __iter__ = __len__ = __contains__ = __eq__ = _raise
            __hash__ = None

        angry = Angry()
        found = pin_memory([angry, torch.zeros(1)])
        self.assertIs(found[0], angry)
        self.assertTrue(found[1].is_pinned())

    def test_mapping_with_several_values_for_a_key(self) -> None:
        class Multi(HiddenMapping, collections.abc.MutableMapping):
            """A key shows its first value; setting it leaves that one alone."""

            __slots__ = ()

            def __init__(self, items: Any) -> None:
                pairs = list(items.items() if isinstance(items, collections.abc.Mapping) else items)
                self._get = lambda: pairs

            def __getitem__(self, key: str) -> Any:
                return next(value for name, value in self._get() if name == key)

            def __iter__(self) -> Any:
                return iter([name for name, _ in self._get()])

            def __setitem__(self, key: str, value: Any) -> None:
                pairs = self._get()
                pairs[:] = [pair for pair in pairs if pair[0] != key] + [(key, value)]

            def __delitem__(self, key: str) -> None:
                raise KeyError(key)

            def __len__(self) -> int:
                return len(self._get())

            def items(self) -> Any:
                return list(self._get())

        class Stubborn(Multi):
            __slots__ = ()

            def __init__(self) -> None:
                super().__init__([("x", torch.zeros(2)), ("x", torch.ones(2)), ("y", 1)])

        class OnceEach(Multi):
            """Names a key once; how many values there are is its length."""

            __slots__ = ()

            def __iter__(self) -> Any:
                return iter(dict(self._get()))

        class Silent(Stubborn):
            __slots__ = ()

            def items(self) -> Any:
                raise OSError("unreadable")

        def shown(of: Any) -> Any:
            return [
                (key, getattr(value, "tolist", lambda v=value: v)()) for key, value in of._get()
            ]

        for kind in (Multi, OnceEach):
            original = kind([("x", torch.zeros(2)), ("x", torch.ones(2)), ("y", 1)])
            found = pin_memory(original)
            self.assertIs(type(found), kind)
            self.assertIsNot(found, original)
            self.assertEqual(shown(found), [("x", [0, 0]), ("x", [1, 1]), ("y", 1)])
            self.assertEqual([v.is_pinned() for _, v in found.items()[:2]], [True, True])
            self.assertEqual(shown(original), shown(found))
            self.assertFalse(original["x"].is_pinned())

        stubborn = Stubborn()
        with self.assertWarnsRegex(UserWarning, "Stubborn cannot be rebuilt"):
            self.assertIs(pin_memory(stubborn), stubborn)
        self.assertEqual(shown(stubborn), shown(original))
        silent = Silent()
        self.assertIs(pin_memory(silent), silent)
        self.assertEqual(shown(silent), shown(original))

    def test_mapping_that_breaks_off_loses_nothing(self) -> None:
        class Half(HiddenMapping):
            """Has a value that cannot be read."""

            __slots__ = ()

            def __getitem__(self, key: str) -> Any:
                if key == "bad":
                    raise OSError("unreadable")
                return super().__getitem__(key)

        batch = Half({"x": torch.zeros(1), "bad": 1})
        self.assertIs(pin_memory([batch, torch.zeros(1)])[0], batch)

    def test_objects_and_classes_that_answer_no_question(self) -> None:
        class Meta(type):
            def __eq__(cls, other: Any) -> Any:
                raise ZeroDivisionError

            __hash__ = None  # type: ignore[assignment]

        class Silent(metaclass=Meta):
            pass

        class Mute:
            """Raises whatever it is asked, also what its class is."""

            def __init__(self) -> None:
                object.__setattr__(self, "x", [1])

            def __getattribute__(self, name: str) -> Any:
                raise ZeroDivisionError

            def __eq__(self, other: object) -> bool:
                raise ZeroDivisionError

            __hash__ = None  # type: ignore[assignment]

        batch = [Silent(), Mute(), Unknown(mute=Mute()), {"x": Mute()}, Record(Mute())]
        self.assertIs(pin_memory(batch), batch)
        found = pin_memory([*batch, torch.zeros(1)])
        self.assertIs(found[1], batch[1])
        self.assertTrue(found[5].is_pinned())

    def test_equality_is_never_asked(self) -> None:
        class Vague:
            """Equal to nothing and everything, like an array."""

            def __eq__(self, other: object) -> Any:
                raise AssertionError("asked")

            def __hash__(self) -> int:
                return 1

        vague = Vague()
        batch = {
            "list": [vague, torch.zeros(1)],
            vague: Record(vague, torch.zeros(1)),
            "mapping": SealedMapping(vague, torch.zeros(1)),
            "hidden": HiddenMapping({"v": vague, "t": torch.zeros(1)}),
            "set": {vague, torch.zeros(1)},
            "stacked": Stacked(torch.randn(1, 2), [vague]),
        }
        found = pin_memory(batch)
        self.assertTrue(found["list"][1].is_pinned() and found[vague].right.is_pinned())
        self.assertTrue(found["mapping"]["right"].is_pinned() and found["hidden"]["t"].is_pinned())
        self.assertTrue(found["stacked"]._stacked.is_pinned())

    def test_endless_sequences_end(self) -> None:
        class Echo(collections.abc.Sequence):
            def __getitem__(self, index: Any) -> Any:
                return Echo()

            def __len__(self) -> int:
                return 3

        batch = [Echo(), collections.UserString("abc")]
        self.assertIs(pin_memory(batch), batch)


class TestOwnMethods(TestCase):
    def test_called_once_and_wins(self) -> None:
        class OwnList(list):
            calls = 0

            def pin_memory(self) -> str:
                type(self).calls += 1
                return "pinned"

        self.assertEqual(pin_memory([[[[[OwnList([torch.zeros(1)])]]]]]), [[[[["pinned"]]]]])
        self.assertEqual(OwnList.calls, 1)
        batch = OwnMethod(torch.zeros(1))
        found = pin_memory({"a": [batch], "b": batch})
        self.assertEqual(batch.calls, 1)
        self.assertIs(found["a"][0], found["b"])

    def test_gets_the_accelerator_if_it_takes_a_device(self) -> None:
        batch = OwnMethodWithDevice(torch.zeros(1))
        pin_memory([batch])
        self.assertEqual(batch.device, torch.device(ACCELERATOR))

        class KeywordOnly:
            def pin_memory(self, *, device: Any) -> Any:
                return device

        class Positional:
            def pin_memory(self, where: Any) -> Any:
                return where

        class Others:
            def pin_memory(self, *names: str, inplace: bool = False) -> Any:
                return names, inplace

        self.assertEqual(
            pin_memory([KeywordOnly(), Positional(), Others()]),
            [torch.device(ACCELERATOR), torch.device(ACCELERATOR), ((), False)],
        )

    def test_method_of_the_instance(self) -> None:
        batch = Unknown(pin_memory=lambda: "pinned")
        self.assertEqual(pin_memory([batch]), ["pinned"])
        batch = Unknown(pin_memory=lambda device: device.type)
        self.assertEqual(pin_memory([batch]), [ACCELERATOR])

    def test_method_of_a_tensor_subclass(self) -> None:
        class Own(torch.Tensor):
            def pin_memory(self) -> str:  # type: ignore[override]
                return "own"

        self.assertEqual(pin_memory([torch.zeros(1).as_subclass(Own)]), ["own"])

    def test_exceptions_are_neither_swallowed_nor_repeated(self) -> None:
        calls = []

        class Failing:
            def pin_memory(self) -> None:
                calls.append(1)
                raise TypeError("mine")

        batch: Any = Failing()
        for _ in range(5):
            batch = Frames([{"x": SealedMapping((batch,), [])}])
        with self.assertRaisesRegex(TypeError, "^mine$"):
            pin_memory(batch)
        self.assertEqual(len(calls), 1)


class TestRegisteredFunctions(TestCase):
    def test_function_is_called_for_the_class_and_its_subclasses(self) -> None:
        class Scene(Unknown):
            pass

        class Room(Scene):
            pass

        register_pin_function(Scene, lambda scene: type(scene)(x=scene.x.pin_memory()))
        for kind in (Scene, Room):
            found = pin_memory([kind(x=torch.zeros(1))])[0]
            self.assertIs(type(found), kind)
            self.assertTrue(found.x.is_pinned())
        register_pin_function(Room, lambda room, device: device)
        self.assertEqual(pin_memory(Room()), torch.device(ACCELERATOR))

    def test_takes_the_place_of_what_is_known_of_containers(self) -> None:
        class Own(dict):
            pass

        register_pin_function(Own, lambda own: "own")
        self.assertEqual(pin_memory([Own(x=torch.zeros(1))]), ["own"])

    def test_its_exceptions_come_through(self) -> None:
        class Bad:
            pass

        register_pin_function(Bad, lambda bad: 1 / 0)
        with self.assertRaises(ZeroDivisionError):
            pin_memory([Bad()])

    def test_refuses_what_would_have_no_effect(self) -> None:
        for kind in (dict, list, torch.Tensor, int, str, OwnMethod):
            with self.assertRaises(ValueError):
                register_pin_function(kind, lambda x: x)
        with self.assertRaises(TypeError):
            register_pin_function("Scene", lambda x: x)  # type: ignore[arg-type]
        with self.assertRaises(TypeError):
            register_pin_function(Unknown, None)  # type: ignore[arg-type]


class TestBulkData(TestCase):
    def test_comes_back_as_the_same_object(self) -> None:
        for data in (
            b"x" * 10,
            bytearray(10),
            array.array("d", [1.0]),
            memoryview(b"abc"),
            range(10**9),
            np.zeros(10),
            np.array(["a", None], dtype=object),
            np.float32(1),
            "text",
            torch.Size([1, 2]),
            [1, 2.0, None, True, "x", 1j],
            {"a": {"b": (1, [2, {3: "c"}])}},
        ):
            self.assertIs(pin_memory(data), data)

    def test_types_that_are_never_asked_about(self) -> None:
        """The native walk knows the same ones as the Python around it."""
        asked: list[type] = []

        def kind_of_type(kind: type) -> int:
            asked.append(kind)
            return 1  # plain

        samples = [
            True, b"", bytearray(), 1j, 1.0, 1, memoryview(b""), range(1), "", None, ..., slice(1),
            NotImplemented, len, {}.keys(), np.float32(1), datetime.date.min, object(), {1}, frozenset(),
        ]  # fmt: skip
        for sample in samples:
            _C._pin_batch([sample], False, kind_of_type, None, None, None)
        types_of_samples = {type(sample) for sample in samples}
        self.assertEqual(types_of_samples - set(asked), set(IMMUTABLE))

    def test_million_numbers_cost_one_scan(self) -> None:
        data = list(range(10**6))

        def fastest(function: Any) -> float:
            times = []
            for _ in range(7):
                start = time.perf_counter()
                function()
                times.append(time.perf_counter() - start)
            return min(times)

        missing = object()
        scan = fastest(lambda: missing in data)
        self.assertLess(fastest(lambda: pin_memory(data)), 1.5 * scan)

    def test_nothing_is_called_for_each_element(self) -> None:
        calls: list[Any] = []

        def trace(frame: Any, event: str, argument: Any) -> None:
            if event == "call":
                calls.append(frame.f_code.co_name)

        data = [
            bytearray(10**6),
            list(range(10**5)),
            [np.float64(1)] * 10**5,
            array.array("i", [0] * 99),
        ]
        sys.setprofile(trace)
        try:
            pin_memory(data)
        finally:
            sys.setprofile(None)
        self.assertLess(len(calls), 200, calls[-20:])


@instantiate_parametrized_tests
class TestTensors(TestCase):
    @parametrize("name", sorted(TENSORS))
    def test_kind(self, name: str) -> None:
        tensor = TENSORS[name]()
        found = pin_memory([tensor])[0]
        Sharing(self).check(tensor, found)
        self.assertIs(pin_memory([found])[0], found)

    @parametrize("name", sorted(SPECIAL_TENSORS))
    def test_special_kind(self, name: str) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tensor = SPECIAL_TENSORS[name]()
        other = torch.zeros(1)
        found = pin_memory([tensor, other])
        Sharing(self).check(tensor, found[0])
        self.assertTrue(found[1].is_pinned())
        if name in ("uncoalesced", "sparse coo"):
            self.assertEqual(found[0].is_coalesced(), tensor.is_coalesced())

    def test_named(self) -> None:
        if BASE >= (2, 13):
            self.assertFalse(hasattr(torch.Tensor, "names"))
            return
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tensor = torch.zeros(2, 3, names=("N", "C"))
        found = pin_memory([tensor])[0]
        self.assertEqual(found.names, ("N", "C"))
        self.assertTrue(found.is_pinned())

    def test_expansion_is_not_materialised(self) -> None:
        found = pin_memory([torch.randn(1, 3).expand(10**9, 3)])[0]
        self.assertEqual(found.untyped_storage().nbytes(), 12)
        self.assertEqual(found.shape, (10**9, 3))

    def test_pinned_already_comes_back_itself(self) -> None:
        tensor = torch.randn(3).pin_memory()
        view = tensor[1:]
        batch = [tensor, view]
        self.assertIs(pin_memory(batch), batch)

    def test_other_devices_pass_through(self) -> None:
        batch = [torch.zeros(2, device="meta"), torch.zeros(2, device=ACCELERATOR)]
        self.assertIs(pin_memory(batch), batch)

    def test_gradient_history_is_kept(self) -> None:
        leaf = torch.randn(3, requires_grad=True)
        found = pin_memory([leaf * 2])[0]
        found.sum().backward()
        self.assertEqual(leaf.grad, torch.full((3,), 2.0))
        self.assertTrue(found.is_pinned())

    def test_gradients_of_a_leaf_stay_with_it(self) -> None:
        leaf = torch.randn(3, requires_grad=True)
        found = pin_memory([leaf])[0]
        found.sum().backward()
        self.assertIsNone(leaf.grad)
        self.assertEqual(found.grad, torch.ones(3))

    def test_views_take_no_more_than_their_base(self) -> None:
        """Although each begins in a cache line of its own."""
        base = torch.arange(46.0)
        for gap in range(1, 36):
            views = [base[:5], base[5 + gap : 10 + gap]]
            found = pin_memory(views)
            self.assertEqual(found, views)
            self.assertLessEqual(found[0].untyped_storage().nbytes(), 4 * (10 + gap))

    def test_inference_tensor(self) -> None:
        with torch.inference_mode():
            tensor = torch.randn(3)
        found = pin_memory([tensor])[0]
        self.assertTrue(found.is_pinned())
        self.assertEqual(found, tensor)
        # A loader without workers in a loop under inference mode: as any other batch.
        with torch.inference_mode():
            base = torch.randn(100, 100)
            batch = [base[:2], base[1:3], base[:, 5], torch.randn(2, 3), torch.randn(100, 9)[:, 3]]
            batch.append(batch[0])
            found = pin_memory(batch)
            Sharing(self).check(batch, found)
            self.assertTrue(all(tensor.is_inference() for tensor in found))
            self.assertLess(found[0].untyped_storage().nbytes(), 4 * 100 * 100 + 64)

    def test_attribute_that_is_a_tensor(self) -> None:
        tensor = torch.randn(3)
        tensor.mask = torch.ones(3)  # type: ignore[attr-defined]
        found = pin_memory([tensor, tensor.mask])
        self.assertTrue(found[0].mask.is_pinned())
        self.assertIs(found[0].mask, found[1])
        self.assertFalse(tensor.mask.is_pinned())
        held = found[0]
        held.mask = torch.ones(3)
        again = pin_memory([held])[0]
        self.assertTrue(again.mask.is_pinned())
        self.assertEqual(again.data_ptr(), held.data_ptr())

    def test_torch_function_of_a_subclass_is_not_asked(self) -> None:
        class Plainer(torch.Tensor):
            @classmethod
            def __torch_function__(
                cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
            ):
                raise AssertionError("asked")

        tensor = torch.randn(3).as_subclass(Plainer)
        found = pin_memory([tensor])[0]
        self.assertIs(type(found), Plainer)
        with torch._C.DisableTorchFunctionSubclass():
            self.assertTrue(found.is_pinned())

    def test_one_awkward_leaf_spoils_nothing(self) -> None:
        opaque = torch.randn(3, 4).to_mkldnn()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            found = pin_memory({"a": torch.zeros(1), "b": opaque, "c": torch.zeros(1)})
        self.assertIs(found["b"], opaque)
        self.assertTrue(found["a"].is_pinned() and found["c"].is_pinned())
        self.assertLessEqual(len(caught), 1)

    def test_storages(self) -> None:
        storage = torch.randn(4).untyped_storage()
        with warnings.catch_warnings():
            warnings.simplefilter("error", DeprecationWarning)
            found = pin_memory([storage])[0]
        self.assertIs(type(found), torch.UntypedStorage)
        self.assertTrue(torch.empty(0).set_(found).is_pinned())


class TestOneWalk(TestCase):
    def test_each_object_is_taken_apart_once(self) -> None:
        """Wherever it is met, whether or not it is changed or resists."""
        seen: list[Any] = []

        def counting(obj: Any) -> Any:
            seen.append(obj)
            return expand(obj)

        record, plain = Record([torch.zeros(1)]), Record(1)
        locked = LockedMapping(torch.zeros(1), record)
        batch = [record, {"a": record, "p": plain}, (plain, locked), Frames(record, locked)]
        with unittest.mock.patch.object(module, "expand", counting), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            pin_memory(batch)
        identities = [id(obj) for obj in seen]
        self.assertEqual(len(identities), len(set(identities)))
        self.assertLessEqual({id(record), id(plain), id(locked)}, set(identities))

    def test_items_are_read_once_where_nothing_changes(self) -> None:
        class Counting(Frames):
            reads = 0

            def __getitem__(self, index: Any) -> Any:
                Counting.reads += 1
                return super().__getitem__(index)

        batch = Counting(*range(100))
        self.assertIs(pin_memory([[batch], batch])[1], batch)
        self.assertEqual(Counting.reads, 100)

    def test_what_is_remembered_is_forgotten_with_the_batch(self) -> None:
        tensor, record = torch.zeros(2), Record([1])
        record.right = tensor
        first = pin_memory({"t": tensor, "r": record})
        tensor.fill_(1)
        second = pin_memory({"t": tensor, "r": record})
        self.assertIsNot(second["t"], first["t"])
        self.assertIsNot(second["r"], first["r"])
        self.assertEqual(second["t"], torch.ones(2))
        self.assertEqual(first["t"], torch.zeros(2))
        self.assertIs(second["r"].right, second["t"])
        count = sys.getrefcount(tensor)
        pin_memory([tensor, record])
        self.assertEqual(sys.getrefcount(tensor), count)


class TestSharing(TestCase):
    def test_one_tensor_twice_stays_one(self) -> None:
        tensor = torch.randn(3)
        found = pin_memory({"a": tensor, "b": [tensor, (tensor,)], "c": Record(tensor)})
        self.assertIs(found["a"], found["b"][0])
        self.assertIs(found["a"], found["b"][1][0])
        self.assertIs(found["a"], found["c"].left)

    def test_containers_stay_shared(self) -> None:
        inner = [torch.zeros(1)]
        found = pin_memory([inner, {"x": inner}])
        self.assertIs(found[0], found[1]["x"])

    def test_views_share_and_leave_the_rest_of_the_base_behind(self) -> None:
        base = torch.randn(1000, 1000)
        batch = [base[:2], base[1:3], base[900:901], base[:, 5][500:510], base.view(torch.int32)[2]]
        found = pin_memory(batch)
        self.assertEqual(len({storage_id(tensor) for tensor in found}), 1)
        for old, new in zip(batch, found, strict=True):
            self.assertEqual(new, old)
            self.assertEqual(new.stride(), old.stride())
        # Rows 0 to 2, row 900, and the stretch from row 500 to row 509.
        self.assertLess(found[0].untyped_storage().nbytes(), (3 + 1 + 10) * 4000)
        found[0][1].fill_(7)
        self.assertEqual(found[1][0], torch.full((1000,), 7.0))
        self.assertNotEqual(base[1], torch.full((1000,), 7.0))

    def test_neighbours_stay_neighbours(self) -> None:
        base = torch.randn(10)
        first, second = pin_memory([base[:4], base[4:]])
        self.assertEqual(second.data_ptr() - first.data_ptr(), 16)

    def test_views_of_other_element_sizes(self) -> None:
        base = torch.arange(64, dtype=torch.uint8)
        batch = [base[40:48].view(torch.float64), base[3:5], base[50:52].view(torch.int16)]
        found = pin_memory(batch)
        self.assertEqual(found, batch)
        self.assertEqual(len({storage_id(tensor) for tensor in found}), 1)

    def test_single_view_takes_only_its_own(self) -> None:
        found = pin_memory([torch.randn(1000, 1000)[5:6]])[0]
        self.assertEqual(found.untyped_storage().nbytes(), 4000)
        self.assertEqual(found.storage_offset(), 0)

    def test_jagged_tensors_keep_their_common_offsets(self) -> None:
        from torch.nested._internal.nested_tensor import NestedTensor

        offsets = torch.tensor([0, 2, 6])
        batch = [NestedTensor(torch.randn(6, 3), offsets) for _ in range(2)]
        found = pin_memory(batch)
        self.assertIs(found[0]._offsets, found[1]._offsets)
        self.assertEqual((found[0] + found[1])._values, batch[0]._values + batch[1]._values)

    def test_each_tensor_without_views_has_a_storage_of_its_own(self) -> None:
        found = pin_memory([torch.zeros(4) for _ in range(10)])
        self.assertEqual(len({storage_id(tensor) for tensor in found}), 10)


class TestMissedLeaves(TestCase):
    def test_named_once_with_its_path(self) -> None:
        class Box(Unknown):
            pass

        batch = {"boxes": [Box(mask=1), Box(), Box(), Box(mask=torch.zeros(1))]}
        with self.assertWarnsRegex(
            UserWarning, r'batch\["boxes"\]\[3\]\.mask .*Box.*register'
        ) as seen:
            found = pin_memory(batch)
        self.assertEqual(seen.filename, __file__)
        self.assertIs(found, batch)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            pin_memory([Box(mask=torch.zeros(1))])

    def test_path_through_every_kind(self) -> None:
        class Deep(Unknown):
            pass

        batch = Record([Pair(1, {"k": (Deep(inner={"list": [1, torch.zeros(1)]}),)})])
        with self.assertWarnsRegex(
            UserWarning, r'batch\.left\[0\]\.right\["k"\]\[0\]\.inner\["list"\]\[1\] '
        ):
            pin_memory(batch)

    def test_error_filter_makes_it_an_error_each_time(self) -> None:
        class Box(Unknown):
            pass

        for _ in range(2):
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                with self.assertRaisesRegex(UserWarning, "Box"):
                    pin_memory([Box(mask=torch.zeros(1))])

    def test_no_warning_for_what_is_not_missed(self) -> None:
        batch = [
            Unknown(x=1, y="a", z=[1, 2], p=np.zeros(3)),
            Unknown(x=torch.zeros(1, device=ACCELERATOR)),
            Unknown(x=torch.zeros(1).pin_memory()),
        ]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            self.assertIs(pin_memory(batch), batch)


WARNINGS_ARE_ERRORS = """
    import faulthandler

    import torch
    import torch_refdev
    import torchpin
    from torch.utils.data import DataLoader

    faulthandler.dump_traceback_later(100, exit=True)
    # Else PyTorch warns that nobody has chosen.
    torch.sparse.check_sparse_tensor_invariants.disable()


    class Box:
        def __init__(self, mask):
            self.mask = mask


    class Boxes(torch.utils.data.Dataset):
        # Not known, from the third sample on.
        def __len__(self):
            return 6

        def __getitem__(self, index):
            found = {"x": torch.full((1000,), float(index)), "boxes": [1]}
            if index >= 2:
                # Sparse: dense tensors of a worker arrive pinned in whatever object they are.
                found["boxes"].append(Box(torch.eye(3).to_sparse()))
            return found


    def first(samples):
        return samples[0]


    caught = 0
    for workers in (0, 1, 2):
        for mode in ("off", "copy", "auto"):
            with torchpin.transport(mode):
                loader = DataLoader(
                    Boxes(), collate_fn=first, num_workers=workers, pin_memory=True
                )
                # More than once: the filter makes it an error each time.
                for epoch in range(2):
                    batches = 0
                    try:
                        for batch in loader:
                            assert batch["x"].is_pinned() and batch["x"][0] == batches
                            batches += 1
                    except UserWarning as error:
                        assert type(error) is UserWarning, type(error)
                        assert 'batch["boxes"][1].mask is a tensor in an object' in str(error), error
                        assert "register_pin_function" in str(error), error
                        caught += 1
                    assert batches == 2, batches
    assert caught == 18, caught
    print("caught all")
    # And with nobody to catch it the program ends.
    for batch in DataLoader(Boxes(), collate_fn=first, num_workers=1, pin_memory=True):
        pass
"""


class TestWarningsAsErrors(TestCase):
    def test_missed_leaf_ends_a_program_that_runs_under_error_filters(self) -> None:
        # What PyTorch and its dependencies warn about when they are imported is theirs.
        done = run_script(WARNINGS_ARE_ERRORS, flags=["-W", "error::UserWarning"], status=1)
        self.assertIn("caught all", done.stdout)
        self.assertRegex(done.stderr, r'(?s)UserWarning: .*batch\["boxes"\]\[1\]\.mask is a tensor')


REFUSALS = """
    import gc
    import resource
    import warnings

    import torch
    import torch_refdev
    import torchpin
    from torch.utils.data import DataLoader
    from torch.utils.data._utils import pin_memory

    MIB = 1 << 20
    LIMIT = 48 << 10
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (LIMIT, resource.getrlimit(resource.RLIMIT_MEMLOCK)[1]))
    torch_refdev.set_locked_limit(5 * MIB)
    data = [torch.full((MIB // 4,), float(i)) for i in range(8)]
    warnings.simplefilter("always")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        loader = DataLoader(data, batch_size=8, pin_memory=True, num_workers=WORKERS)
        for epoch in range(2):
            for batch in loader:
                assert not batch.is_pinned()
                assert batch.shape == (8, MIB // 4) and batch[3, 0] == 3
        other = DataLoader(data, batch_size=8, pin_memory=True)
        next(iter(other))
    texts = [str(w.message) for w in caught if "ordinary memory" in str(w.message)]
    assert len(texts) == 2, texts  # one for each loader
    assert f"{8 * MIB} bytes could not be pinned" in texts[0], texts[0]
    assert "bytes are held by the host allocator" in texts[0], texts[0]
    assert f"Limit of this process on locked memory (ulimit -l): {LIMIT} bytes" in texts[0], texts[0]
    assert pin_memory.refused.tensors == 3, pin_memory.refused
    assert pin_memory.refused.bytes == 24 * MIB
    # Later batches are tried again, and the cache is emptied for them.
    del batch, other
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            for size in (1, 2):
                loader = DataLoader(data, batch_size=size, pin_memory=True, drop_last=True)
                assert all(batch.is_pinned() for batch in loader)
                gc.collect()
    # One leaf that is refused leaves the others pinned.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        small, large = pin_memory.pin_memory([torch.ones(3), torch.ones(2 * MIB)])
    assert small.is_pinned() and not large.is_pinned()
    # Tensor.pin_memory() itself still raises, and says which limits there are.
    def refusal():
        try:
            torch.ones(2 * MIB).pin_memory()
        except (torch.OutOfMemoryError if hasattr(torch, "OutOfMemoryError") else RuntimeError) as error:
            return str(error)
        raise AssertionError("no error")

    message = refusal()
    assert f"Limit of this process on locked memory (ulimit -l): {LIMIT} bytes" in message, message
    assert f"asked for {8 * MIB} bytes" in message and "bytes being held" in message, message
    assert "Cap of this allocator: none" in message, message
    torch_refdev.set_locked_limit(None)
    torchpin.max_host_memory(3 * MIB)
    message = refusal()
    assert f"Cap of this allocator: {3 * MIB} bytes" in message, message
    assert f"asked for {8 * MIB} bytes" in message, message
    print("done")
"""


LARGE = (3 << 19) + 5
"""Of eight bytes: enough for three threads, and not in whole pages."""


class LargeSamples(Dataset):
    def __len__(self) -> int:
        return 200

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"large": torch.arange(index, LARGE + index), "small": torch.tensor([index])}


class TestCopyThreads(TestCase):
    def test_large_tensors_come_out_equal(self) -> None:
        batch = [torch.randn(size) for size in (1 << 20, (3 << 20) + 7, 16)]
        try:
            for threads in (2, 3, 16, 1):
                torchpin.set_pin_threads(threads)
                found: list[Any] = []

                def pin_in_thread() -> None:
                    torch.set_num_threads(1)
                    found.extend(pin_memory(batch))  # noqa: B023

                thread = threading.Thread(target=pin_in_thread)
                thread.start()
                thread.join()
                self.assertEqual(found, batch)
                self.assertTrue(all(tensor.is_pinned() for tensor in found))
        finally:
            torchpin.set_pin_threads(1)

    def test_hundreds_of_batches_in_both_ways(self) -> None:
        """Copied out of a slot, and out of what the base's own way delivers."""
        numbers = torch.arange(LARGE)
        try:
            torchpin.set_pin_threads(3)
            for mode in ("copy", "off"):
                with torchpin.transport(mode):  # type: ignore[arg-type]
                    loader = DataLoader(
                        LargeSamples(), batch_size=None, num_workers=2, pin_memory=True
                    )
                    iterator = iter(loader)
                    for index, batch in enumerate(iterator):
                        self.assertTrue(batch["large"].is_pinned() and batch["small"].is_pinned())
                        self.assertEqual(batch["small"][0], index)
                        batch["large"] -= index
                        self.assertTrue(torch.equal(batch["large"], numbers), index)
                self.assertEqual(index, len(LargeSamples()) - 1)
                if mode == "copy":
                    stats = torchpin.stats(iterator)
                    self.assertEqual(stats["batches"], len(LargeSamples()))
                    self.assertEqual(stats["in_place"], 0)
        finally:
            torchpin.set_pin_threads(1)

    def test_refuses_other_numbers(self) -> None:
        for threads in (0, -1, 17):
            with self.assertRaisesRegex(ValueError, f"from 1 to 16, got {threads}"):
                torchpin.set_pin_threads(threads)


class TestRefusals(TestCase):
    def test_refused_tensors_are_delivered_in_ordinary_memory(self) -> None:
        for workers in (0, 1):
            with self.subTest(workers=workers):
                done = run_script(REFUSALS.replace("WORKERS", str(workers)))
                self.assertIn("done", done.stdout)

    def test_without_accelerator_the_batch_is_delivered_with_one_warning(self) -> None:
        done = run_script(
            """
            import warnings
            import torch
            from torch.utils.data._utils.pin_memory import pin_memory

            class Own:
                calls = 0
                def pin_memory(self, device=None):
                    self.calls += 1
                    return self

            own = Own()
            batch = {"x": torch.ones(3), "own": own}
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                for _ in range(2):
                    found = pin_memory(batch)
            assert found is batch and own.calls == 2
            assert len(caught) == 1 and "no accelerator" in str(caught[0].message), caught
            print("done")
            """,
            accelerator=None,
        )
        self.assertIn("done", done.stdout)

    def test_counts_belong_to_the_loader(self) -> None:
        loader = DataLoader([1, 2])
        device = LoaderDevice.of(loader, ACCELERATOR)
        self.assertEqual(device, ACCELERATOR)
        self.assertIs(LoaderDevice.of(loader, ACCELERATOR).refusals, device.refusals)
        self.assertIsNot(LoaderDevice.of(DataLoader([1]), ACCELERATOR).refusals, device.refusals)


class Batches(Dataset):
    """Batches that exist already."""

    def __init__(self, items: list[Any]) -> None:
        self.items = items

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: int) -> Any:
        return self.items[index]


def identity(value: Any) -> Any:
    return value


# What cannot be pickled, with pinning or without.
UNPICKLABLE = frozenset(
    {
        "attrs with fields of every kind",
        "frozen dataclass that inherits slots",
        "mapping proxy",
        "mapping without attributes",
        "tuple with other arguments",
    }
)


# What comes out of a worker without its scales, with pinning or without.
LOST_BY_WORKERS = frozenset({"quantized", "quantized by channel"})


def is_equal(new: torch.Tensor, old: torch.Tensor) -> bool:
    return new.layout is old.layout and all(
        torch.equal(a, b) for a, b in zip(parts_of(new), parts_of(old), strict=True)
    )


class SharingWithCopies(Sharing):
    """The same for what came out of two loaders: plain data is equal."""

    def check_bulk(self, old: Any, new: Any) -> None:
        if isinstance(old, np.ndarray):
            self.case.assertTrue(np.array_equal(old, new))
        else:
            self.case.assertEqual(old, new)

    def check_members(self, old: Any, new: Any) -> None:
        left = list(new)
        for member in old:
            if isinstance(member, torch.Tensor):
                found = next(
                    tensor
                    for tensor in left
                    if isinstance(tensor, torch.Tensor) and is_equal(tensor, member)
                )
                self.case.assertTrue(is_pinned(found))
                left = [other for other in left if other is not found]
            else:
                left.remove(member)
        self.case.assertEqual(left, [])


def load(items: list[Any], **options: Any) -> list[Any]:
    return list(DataLoader(Batches(items), batch_size=None, collate_fn=identity, **options))


@instantiate_parametrized_tests
class TestThroughWorkers(TestCase):
    """Pinned batches against what the same loader delivers without pinning."""

    @hypothesis.settings(max_examples=10, deadline=None, database=None)
    @hypothesis.given(st.lists(batches(UNPICKLABLE | LOST_BY_WORKERS), min_size=1, max_size=12))
    def test_any_nesting(self, items: list[Any]) -> None:
        expected = load(items, num_workers=1)
        for mode in ("off", "copy", "auto"):
            with torchpin.transport(mode):  # type: ignore[arg-type]
                found = load(items, num_workers=1, pin_memory=True)
            for old, new in zip(expected, found, strict=True):
                SharingWithCopies(self).check(old, new)

    @parametrize("workers", [0, 2])
    def test_every_kind(self, workers: int) -> None:
        base = torch.randn(6, 3)
        items = [
            CONTAINERS[name](base[0], base[1:]) for name in sorted(set(CONTAINERS) - UNPICKLABLE)
        ]
        items += [[make_tensor(name), base] for name in sorted(set(ALL_TENSORS) - LOST_BY_WORKERS)]
        expected = load(items, num_workers=workers)
        for mode in ("off", "copy", "auto"):
            with torchpin.transport(mode):  # type: ignore[arg-type]
                found = load(items, num_workers=workers, pin_memory=True)
            for old, new in zip(expected, found, strict=True):
                SharingWithCopies(self).check(old, new)

    def test_objects_that_are_not_known(self) -> None:
        """Out of a slot their tensors come pinned; on the base's own way they are named."""
        items = [{"boxes": [1, Unknown(mask=torch.full((3,), float(i)))]} for i in range(3)]
        for mode in ("copy", "auto"):
            with torchpin.transport(mode), warnings.catch_warnings():  # type: ignore[arg-type]
                warnings.simplefilter("error")
                for index, batch in enumerate(load(items, num_workers=1, pin_memory=True)):
                    self.assertTrue(batch["boxes"][1].mask.is_pinned())
                    self.assertEqual(batch["boxes"][1].mask[0], index)


class TestExample(TestCase):
    @unittest.skipIf(
        ACCELERATOR == "cuda" and DRIVER is not None, "training takes kernels of a GPU"
    )
    def test_example_of_the_documentation(self) -> None:
        """Pins everything with its switch, nothing without, and trains alike."""
        example = HERE.parent / "docs/source/examples/finetune_buckets.py"
        load = "import torch, torch_refdev\n" if ACCELERATOR == "refdev" else ""
        outputs = []
        for switch in ([], ["--pin_memory"]):
            argv = [str(example), "--device", ACCELERATOR, *switch]
            done = run_script(
                f"{load}import runpy, sys\nif __name__ == '__main__':\n    sys.argv = {argv!r}\n"
                f"    runpy.run_path({str(example)!r}, run_name='__main__')\n",
                accelerator=ACCELERATOR,
                flags=["-W", "error:.*pin_memory:UserWarning"],
            )
            outputs.append(done.stdout.splitlines())
        self.assertEqual(outputs[0][:-1], outputs[1][:-1])
        self.assertEqual(outputs[0][-1], "0 of 48 tensors were pinned")
        self.assertEqual(outputs[1][-1], "48 of 48 tensors were pinned")


class TestThreads(TestCase):
    def test_threads_pin_side_by_side(self) -> None:
        shared = [torch.full((100,), float(i)) for i in range(20)]
        errors: list[BaseException] = []

        def work() -> None:
            try:
                for _ in range(50):
                    found = pin_memory({"shared": shared, "own": Record([torch.ones(3)])})
                    assert all(t.is_pinned() and t[0] == i for i, t in enumerate(found["shared"]))
                    assert found["own"].left[0].is_pinned()
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(errors, [])

    def test_the_interpreter_runs_while_memory_is_copied_and_freed(self) -> None:
        # Not timed: while the native call runs, another thread must get a turn at all.
        turns = 0
        stop = threading.Event()

        def count() -> None:
            nonlocal turns
            while not stop.is_set():
                turns += 1
                time.sleep(0)  # gives way itself

        thread = threading.Thread(target=count)
        batch = [torch.ones(16 << 20) for _ in range(2)]
        interval = sys.getswitchinterval()
        sys.setswitchinterval(1000)  # the main thread is not made to give way
        thread.start()
        try:
            before = turns
            pin_memory(batch)
            self.assertGreater(turns, before)
            _, retired, _ = _C._pin_batch(batch, True, kind_of_type, expand, None, None)
            del batch
            before = turns
            retired.release()
            self.assertGreater(turns, before)
        finally:
            stop.set()
            sys.setswitchinterval(interval)
            thread.join()


if __name__ == "__main__":
    run_tests()
