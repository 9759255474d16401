"""How the objects of a batch are taken apart to reach their tensors, and put together again.

The native walk (``torch/csrc/PinBatch.cpp``) knows exact dicts, lists, tuples and tensors. It asks
here about everything else: :func:`kind_of_type` once per type and walk, :func:`expand` once per
object. Called by ``pin_memory.py`` and that walk only; users call :func:`register_pin_function`.

Objects are copied below the level of their classes: a new object of the same type gets the same
slots, the same ``__dict__`` and the same contents of the built-in container it derives from, with
pinned tensors in the place of the others. No constructor, no ``__post_init__``, no ``update`` of a
user runs, so none can refuse. Only where the contents are not to be found that way (abstract
mappings that make them up, classes registered with pytree) the object's own methods are used, and
what they raise costs the pinning of that object, not the epoch. What a *user's own pin function*
raises, by contrast, is the user's to see, and is left alone.
"""

from __future__ import annotations

import array
import collections
import collections.abc
import contextlib
import dataclasses
import enum
import inspect
import numbers
import pathlib
import sys
import types
import uuid
import weakref
from collections.abc import Callable
from typing import Any, Final, TypeVar

import torch
import torch.utils._pytree as pytree
from torch.nn.utils.rnn import PackedSequence
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torchpin import _C

_T = TypeVar("_T")

# What expand() answers with, as PinBatch.cpp knows it: None ("nothing in here"), or a tuple that
# begins with one of these.
REPLACED: Final = 0
"""``(REPLACED, object)``: that takes the object's place."""
PARTS: Final = 1
"""``(PARTS, children, label, make, fill)``.

``label(i)`` says how the i-th child is reached, for warnings. ``fill(copy, new children)`` returns the
object with the new children in it. ``copy`` is None, except in a cycle: then it is what ``make()``
returned, a copy that still holds the old children and that something may refer to already. ``make``
is None where an object cannot be changed once it exists.
"""
MISSED: Final = 2
"""``(MISSED, path, reason or None)``: the tensor at that path in the object stays as it is."""

Answer = tuple[Any, ...] | None
Handler = Callable[[Any], Answer]

# Py_TPFLAGS_IMMUTABLETYPE: made in C. Whether a type lives on the heap says less from year to year: more
# and more of the interpreter's own do.
_MADE_IN_C: Final = 1 << 8
_handlers: weakref.WeakKeyDictionary[type, Handler] = weakref.WeakKeyDictionary()
_registered: dict[type, Callable[..., Any]] = {}

# A string with attributes is still a string.
_WITHOUT_TENSORS: Final = (
    str,
    bytes,
    bytearray,
    range,
    array.array,
    numbers.Number,
    collections.UserString,
    pathlib.PurePath,
    uuid.UUID,
)
_EXACT: Final = frozenset({dict, list, tuple, torch.Tensor})
IMMUTABLE: Final = frozenset(
    {bool, bytearray, bytes, complex, float, int, memoryview, range, str, type(None)}
)


def register_pin_function(kind: type[_T], function: Callable[..., Any]) -> None:
    """Says how an object of a class that one cannot edit is pinned.

    ``DataLoader(pin_memory=True)`` then calls ``function(obj)`` once for each object of that class,
    or of a class derived from it, and delivers what it returns. If ``function`` has a parameter
    named ``device`` it gets the current accelerator, a ``torch.device``, there. What it raises
    reaches the training loop.

    The nearest registered class in the method resolution order counts, and registering a class again
    replaces its function. Not needed for dataclasses, attrs classes, containers, and classes
    registered with ``torch.utils._pytree``: those are pinned through, and keep what they share with
    the rest of the batch.

    Args:
        kind: the class.
        function: takes the object and returns the pinned one; the object itself should stay as it is.

    Raises:
        TypeError: if ``kind`` is not a class or ``function`` cannot be called.
        ValueError: if ``kind`` is one that never needs a function (dict, list, tuple, Tensor,
            numbers, strings) or has a method ``pin_memory`` of its own, which always wins.

    Example::

        torchpin.register_pin_function(Scene, lambda scene: Scene(scene.points.pin_memory()))
    """
    if not isinstance(kind, type):
        raise TypeError(f"register_pin_function expects a class, got {kind!r}")
    if not callable(function):
        raise TypeError(f"register_pin_function expects a function for {kind!r}, got {function!r}")
    if kind in _EXACT or kind in IMMUTABLE or kind is object:
        raise ValueError(f"{kind.__qualname__} is pinned as it is and takes no function of its own")
    if _own_method(kind) is not None:
        raise ValueError(
            f"{kind.__qualname__} has a method pin_memory() of its own, which is always used; change "
            "that, or register the function for another class"
        )
    _registered[kind] = function
    _handlers.clear()


EXPAND: Final = 0
"""Objects of the type go to :func:`expand`."""
PLAIN: Final = 1
"""No object of the type can hold a tensor."""
BARE_TUPLE: Final = 2
"""A tuple with another name, as a named tuple is: no attributes, nothing of its own to say."""


def kind_of_type(kind: type) -> int:
    """How the native walk treats a type that it does not know: one of the three above."""
    try:
        if _is_plain_type(kind):
            return PLAIN
        if kind.__base__ is tuple and kind.__dictoffset__ == 0 and _choose(kind) is _tuple:
            return BARE_TUPLE
    except Exception:  # a metaclass that answers no question
        return EXPAND
    return EXPAND


def _is_plain_type(kind: type) -> bool:
    if _registered and any(base in _registered for base in kind.__mro__):
        return False
    if issubclass(kind, (type, types.ModuleType, enum.Enum)):
        return True
    if kind in _STORAGES or _own_method(kind) is not None:
        return False
    if issubclass(kind, _WITHOUT_TENSORS):
        return True
    if not kind.__flags__ & _MADE_IN_C:
        return False
    # Of these, those that hold objects are containers.
    return not (
        issubclass(kind, _CONTAINERS) or kind in pytree.SUPPORTED_NODES or _is_numpy_array(kind)
    )


_CONTAINERS: Final = (
    collections.abc.Mapping,
    collections.abc.Sequence,
    collections.abc.Set,
    types.SimpleNamespace,
    torch.Tensor,
)


def expand(obj: Any) -> Answer:
    """How to take ``obj`` apart, see the constants above; None if there is nothing in it.

    Raises:
        BaseException: what the object's own ``pin_memory()``, or a function registered for its
            class, raises.
    """
    kind = type(obj)
    try:
        handler = _handlers.get(kind)
        if handler is None:
            handler = _handlers[kind] = _choose(kind)
    except Exception:  # a metaclass that answers no question
        return None
    return handler(obj)


# ---- which way to go, once per type


def _choose(kind: type) -> Handler:
    method = _own_method(kind)
    for base in kind.__mro__:
        if base in _registered:
            return _by_function(_registered[base])
        if method is not None and "pin_memory" in vars(base):
            break
    if kind in _STORAGES:
        return _storage
    if (
        issubclass(kind, PackedSequence)
        and getattr(kind, "pin_memory", None) is PackedSequence.pin_memory
    ):
        # What its own method does, but as part of the batch: with what is shared, and spared when
        # the accelerator refuses.
        return _tuple
    if method is not None:
        return _by_own_method()
    if issubclass(kind, torch.Tensor):
        return _tensor
    for bases, handler in _BUILT_IN:
        if issubclass(kind, bases):
            return handler
    if _native_base(kind) in (object, types.SimpleNamespace) and (
        dataclasses.is_dataclass(kind)
        or hasattr(kind, "__attrs_attrs__")
        or issubclass(kind, types.SimpleNamespace)
    ):
        return _record
    if kind in pytree.SUPPORTED_NODES:
        return _pytree
    if issubclass(kind, collections.abc.Mapping):
        return _mapping
    if issubclass(kind, collections.abc.Sequence):
        return _sequence
    if issubclass(kind, collections.abc.Set):
        return _record
    if _is_numpy_array(kind):
        return _array
    return _unknown


def _own_method(kind: type) -> Callable[..., Any] | None:
    """The method ``pin_memory`` that a class brings along itself, or None.

    Looked up on the class alone: a dict may well have a key or an attribute of that name.
    """
    for base in kind.__mro__:
        if "pin_memory" in vars(base):
            if base is torch.Tensor or base.__module__ == "torch._C":
                return None
            method = getattr(kind, "pin_memory", None)
            return method if callable(method) else None
    return None


def _device_parameter(function: Callable[..., Any], taken: int) -> inspect.Parameter | None:
    """The parameter that wants a device, behind the first ``taken`` ones."""
    try:
        parameters = list(inspect.signature(function).parameters.values())[taken:]
    except (TypeError, ValueError):  # made in C, without a signature
        return None
    variable = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    parameters = [parameter for parameter in parameters if parameter.kind not in variable]
    for parameter in parameters:
        if parameter.name == "device":
            return parameter
    needed = [parameter for parameter in parameters if parameter.default is parameter.empty]
    return needed[0] if len(needed) == 1 else None


def _call_with_device(
    function: Callable[..., Any], arguments: tuple[Any, ...], wanted: inspect.Parameter | None
) -> Answer:
    if wanted is None:
        return REPLACED, function(*arguments)
    accelerator = torch._C._get_accelerator()
    if accelerator.type == "cpu" and wanted.default is not wanted.empty:
        return REPLACED, function(*arguments)
    if wanted.kind is wanted.POSITIONAL_ONLY:
        return REPLACED, function(*arguments, accelerator)
    return REPLACED, function(*arguments, **{wanted.name: accelerator})


def _by_function(function: Callable[..., Any]) -> Handler:
    """Calls a registered function."""
    wanted = _device_parameter(function, 1)
    return lambda obj: _call_with_device(function, (obj,), wanted)


def _by_own_method() -> Handler:
    """Calls ``obj.pin_memory()``. What it takes is found out once, until somebody replaces it."""
    known: Any = None
    wanted: inspect.Parameter | None = None

    def call(obj: Any) -> Answer:
        nonlocal known, wanted
        method = obj.pin_memory
        function = getattr(method, "__func__", method)
        if function is not known:
            known, wanted = function, _device_parameter(method, 0)
        return _call_with_device(method, (), wanted)

    return call


# ---- the state of an object, below the level of its class

_slots_of: weakref.WeakKeyDictionary[type, tuple[tuple[str, Any], ...]] = (
    weakref.WeakKeyDictionary()
)


def _slots(kind: type) -> tuple[tuple[str, Any], ...]:
    """Names and descriptors of all ``__slots__``, of base classes too."""
    found = _slots_of.get(kind)
    if found is None:
        found = _slots_of[kind] = tuple(
            (name, descriptor)
            for base in kind.__mro__
            if not base.__flags__ & _MADE_IN_C
            for name, descriptor in vars(base).items()
            if isinstance(descriptor, types.MemberDescriptorType)
        )
    return found


def _dict_of(obj: Any) -> dict[str, Any]:
    """The attributes of an object; an empty dict that is nobody's if it has none."""
    try:
        found = object.__getattribute__(obj, "__dict__")
    except Exception:  # no such attribute, or a property of that name
        return {}
    return found if isinstance(found, dict) else {}


class _State:
    """The slots and attributes of an object: names, values, and how to set them in a copy."""

    __slots__ = ("_descriptors", "_is_its_own_dict", "names", "values")

    def __init__(self, obj: Any) -> None:
        self.names: list[str] = []
        self.values: list[Any] = []
        self._descriptors: list[Any] = []
        self._is_its_own_dict = False
        kind = type(obj)
        for name, descriptor in _slots(kind):
            try:
                value = descriptor.__get__(obj, kind)
            except AttributeError:  # never set
                continue
            self.names.append(name)
            self.values.append(value)
            self._descriptors.append(descriptor)
        attributes = _dict_of(obj)
        if attributes is obj:
            # A dict whose keys are its attributes, by `self.__dict__ = self`.
            self._is_its_own_dict = True
            return
        self.names += attributes
        self.values += attributes.values()

    def apply(self, target: Any, values: list[Any]) -> Any:
        """Sets all of it in ``target``, and returns that."""
        slots = len(self._descriptors)
        for descriptor, value in zip(self._descriptors, values, strict=False):
            descriptor.__set__(target, value)
        if self._is_its_own_dict:
            object.__setattr__(target, "__dict__", target)
        if len(self.names) > slots:
            _dict_of(target).update(zip(self.names[slots:], values[slots:], strict=True))
        return target

    def label(self, index: int) -> str:
        return f".{self.names[index]}"


def _native_base(kind: type) -> Any:
    """The class made in C that objects of ``kind`` are at bottom: object, dict, deque, ..."""
    return next(base for base in kind.__mro__ if base.__flags__ & _MADE_IN_C)


def _blank(kind: type) -> Any:
    return _native_base(kind).__new__(kind)


def _record(obj: Any) -> Answer:
    """Any object that is its slots and attributes: dataclasses, attrs classes, namespaces."""
    state = _State(obj)
    kind = type(obj)

    def make() -> Any:
        return state.apply(_blank(kind), state.values)

    def fill(copy: Any, new: list[Any]) -> Any:
        return state.apply(_blank(kind) if copy is None else copy, new)

    return (PARTS, state.values, state.label, make, fill) if state.values else None


# ---- what derives from a built-in container


def _with_state(
    obj: Any,
    contents: list[Any],
    label: Callable[[int], str],
    build: Callable[[list[Any]], Any],
    refill: Callable[[Any, list[Any]], None] | None,
) -> Answer:
    """Parts of an object that has contents and, perhaps, attributes.

    ``build`` makes it from its contents; ``refill`` changes them, where they can be changed.
    """
    state = _State(obj)
    size = len(contents)
    children = contents + state.values
    if not children:
        return None

    def make() -> Any:
        return state.apply(build(contents), state.values)

    def fill(copy: Any, new: list[Any]) -> Any:
        if copy is None:
            copy = build(new[:size])
        elif refill is not None:
            refill(copy, new[:size])
        return state.apply(copy, new[size:])

    return (
        PARTS,
        children,
        lambda i: label(i) if i < size else state.label(i - size),
        None if refill is None else make,
        fill,
    )


def _key_label(key: Any) -> str:
    try:
        return f'["{key}"]' if isinstance(key, str) else f"[{key!r}]"
    except Exception:
        return f"[<{type(key).__name__}>]"


def _index_label(index: int) -> str:
    return f"[{index}]"


def _dict(obj: Any) -> Answer:
    kind = type(obj)
    base = _native_base(kind)
    items = list(base.items(obj))
    keys = [key for key, _ in items]

    def refill(copy: Any, new: list[Any]) -> None:
        for key, value in zip(keys, new, strict=True):
            base.__setitem__(copy, key, value)

    def build(new: list[Any]) -> Any:
        copy = base.__new__(kind)
        if base is collections.defaultdict:
            # Of the class made in C: one of the user's may have an attribute of that name.
            factory: Any = vars(base)["default_factory"]
            base.__init__(copy, factory.__get__(obj))
        refill(copy, new)
        return copy

    return _with_state(
        obj, [value for _, value in items], lambda i: _key_label(keys[i]), build, refill
    )


def _list(obj: Any) -> Answer:
    kind = type(obj)

    def build(new: list[Any]) -> Any:
        copy = _blank(kind)
        list.extend(copy, new)
        return copy

    def refill(copy: Any, new: list[Any]) -> None:
        list.__setitem__(copy, slice(None), new)

    return _with_state(obj, list(list.__iter__(obj)), _index_label, build, refill)


def _deque(obj: Any) -> Answer:
    kind = type(obj)
    deque = collections.deque

    def build(new: list[Any]) -> Any:
        copy = deque.__new__(kind)
        deque.__init__(copy, new, deque.maxlen.__get__(obj))
        return copy

    def refill(copy: Any, new: list[Any]) -> None:
        for index, value in enumerate(new):
            deque.__setitem__(copy, index, value)

    return _with_state(obj, list(deque.__iter__(obj)), _index_label, build, refill)


def _tuple(obj: Any) -> Answer:
    kind = type(obj)
    values = list(tuple.__iter__(obj))
    fields = getattr(kind, "_fields", ())

    def label(index: int) -> str:
        return f".{fields[index]}" if len(fields) == len(values) else _index_label(index)

    def build(new: list[Any]) -> Any:
        if _native_base(kind) is tuple:
            return tuple.__new__(kind, new)
        # A struct sequence, made in C: its constructor takes a sequence.
        return kind(new)

    return _with_state(obj, values, label, build, None)


def _set(obj: Any) -> Answer:
    kind = type(obj)
    base = _native_base(kind)

    def build(new: list[Any]) -> Any:
        if base is frozenset:
            return frozenset.__new__(kind, new)
        copy = base.__new__(kind)
        set.update(copy, new)
        return copy

    def refill(copy: Any, new: list[Any]) -> None:
        set.clear(copy)
        set.update(copy, new)

    return _with_state(
        obj,
        list(base.__iter__(obj)),
        lambda i: "{...}",
        build,
        None if base is frozenset else refill,
    )


_BUILT_IN: Final[tuple[tuple[Any, Handler], ...]] = (
    (dict, _dict),
    (list, _list),
    (tuple, _tuple),
    ((set, frozenset), _set),
    (collections.deque, _deque),
)


# ---- containers whose contents only they know


def _is_the_same(found: Any, wanted: Any) -> bool:
    """Whether what a container shows is what it is meant to hold.

    Some make what they show when they are asked: a view of the one tensor that they keep, or a dict
    of such views.
    """
    if found is wanted:
        return True
    kind = type(wanted)
    if type(found) is not kind:
        return False
    if isinstance(wanted, torch.Tensor):
        with torch._C.DisableTorchFunctionSubclass():
            return (
                found.layout is wanted.layout is torch.strided
                and found.data_ptr() == wanted.data_ptr()
                and found.dtype is wanted.dtype
                and found.shape == wanted.shape
                and found.stride() == wanted.stride()
                # One without elements has an address of 0, wherever its storage is.
                and (
                    found.numel() != 0
                    or found.untyped_storage().data_ptr() == wanted.untyped_storage().data_ptr()
                )
            )
    if kind is dict:
        return found.keys() == wanted.keys() and all(
            _is_the_same(found[key], value) for key, value in wanted.items()
        )
    if kind is list or kind is tuple:
        return len(found) == len(wanted) and all(map(_is_the_same, found, wanted))
    return kind in IMMUTABLE and bool(found == wanted)


def _contents(
    obj: Any,
    read: Callable[[list[Any], list[Any]], None],
    from_contents: Callable[[list[Any], list[Any]], Any],
) -> Answer:
    """An abstract mapping or sequence: what is in its attributes, and what it shows.

    Most keep their contents in an attribute, and a copy made from the attributes shows them. Where
    it does not, the copy is asked to take them, then the class to make an object from them, and at
    last the object itself, if it is of the kind that can be changed. ``read`` fills in keys and
    values; if it raises, the attributes are what is left.
    """
    keys: list[Any] = []
    values: list[Any] = []
    try:
        read(keys, values)
    except Exception:
        keys.clear()
        values.clear()
    state = _State(obj)
    kind = type(obj)
    inner = len(state.values)
    children = state.values + values
    if not children:
        return None

    def label(index: int) -> str:
        return state.label(index) if index < inner else _key_label(keys[index - inner])

    def make() -> Any:
        return state.apply(_blank(kind), state.values)

    def fill(copy: Any, new: list[Any]) -> Any:
        changed = [
            (key, old, value)
            for key, old, value in zip(keys, values, new[inner:], strict=True)
            if value is not old
        ]

        def shows(candidate: Any) -> bool:
            return type(candidate) is kind and all(
                _is_the_same(candidate[key], value) for key, _, value in changed
            )

        def take(candidate: Any) -> bool:
            for key, _, value in changed:
                candidate[key] = value
            return shows(candidate)

        def by_attributes() -> Any:
            made = state.apply(_blank(kind) if copy is None else copy, new[:inner])
            if shows(made):
                return made
            try:
                return made if hasattr(kind, "__setitem__") and take(made) else None
            finally:
                # It may keep its contents where the original keeps them.
                for key, old, value in changed:
                    with contextlib.suppress(Exception):
                        if obj[key] is value:
                            obj[key] = old

        def by_class() -> Any:
            made = from_contents(keys, new[inner:])
            return made if shows(made) and len(made) == len(obj) == len(keys) else None

        def by_itself() -> Any:
            return obj if hasattr(kind, "__setitem__") and take(obj) else None

        for way in (by_attributes, by_class, by_itself):
            with contextlib.suppress(Exception):
                made = way()
                if made is not None:
                    return made
        raise TypeError(f"{kind.__qualname__} does not take its own contents")

    return PARTS, children, label, make, fill


def _is_endless(obj: Any, key: Any, value: Any) -> bool:
    """Whether an item is one more of its container, made up as it is asked for."""
    return type(value) is type(obj) and obj[key] is not value


def _mapping(obj: Any) -> Answer:
    kind = type(obj)
    names: list[Any] | None = None
    repeated = False
    with contextlib.suppress(Exception):
        names = list(obj)
        repeated = len(set(names)) < max(len(names), len(obj))
    if repeated:
        return _items(kind, obj)

    def read(keys: list[Any], values: list[Any]) -> None:
        for key in obj if names is None else names:
            value = obj[key]
            if not _is_endless(obj, key, value):
                keys.append(key)
                values.append(value)

    return _contents(obj, read, lambda keys, new: kind(dict(zip(keys, new, strict=True))))


def _items(kind: type, obj: Any) -> Answer:
    """A mapping with several values for one key, of which a key shows only one.

    The object itself is never asked to take others: it would give up all but one of them.
    """
    try:
        items = [(key, value) for key, value in obj.items()]
    except Exception:
        return None

    def fill(_: Any, new: list[Any]) -> Any:
        wanted = [(key, value) for (key, _), value in zip(items, new, strict=True)]
        made: Any = kind(wanted)
        found = list(made.items())
        if type(made) is kind and _is_the_same(found, wanted):
            return made
        raise TypeError(f"{kind.__qualname__} does not take its own contents")

    return PARTS, [value for _, value in items], lambda i: _key_label(items[i][0]), None, fill


def _sequence(obj: Any) -> Answer:
    def read(keys: list[Any], values: list[Any]) -> None:
        for index in range(len(obj)):
            value = obj[index]
            if not _is_endless(obj, index, value):
                keys.append(index)
                values.append(value)

    kind = type(obj)
    return _contents(obj, read, lambda _, new: kind(new))


def _pytree(obj: Any) -> Answer:
    kind = type(obj)
    node = pytree.SUPPORTED_NODES[kind]
    try:
        children, context = node.flatten_fn(obj)
        children = list(children)
    except Exception:
        return _scan(obj)

    def fill(_: Any, new: list[Any]) -> Any:
        try:
            made = node.unflatten_fn(new, context)
            if type(made) is kind:
                return made
            raise TypeError(f"its unflatten function returned {type(made).__qualname__}")
        except Exception:
            # Perhaps the children simply are its attributes.
            state = _State(obj)
            places = {id(old): value for old, value in zip(children, new, strict=True)}
            values = [places.get(id(value), value) for value in state.values]
            if all(value is old for value, old in zip(values, state.values, strict=True)):
                raise
            return state.apply(_blank(kind), values)

    return (PARTS, children, _index_label, None, fill) if children else None


# ---- numpy, storages


def _is_numpy_array(kind: type) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and issubclass(kind, numpy.ndarray)


def _array(obj: Any) -> Answer:
    """An array of Python objects may hold tensors; any other is bulk data."""
    if obj.dtype.kind != "O" or obj.size == 0:
        return None

    numpy = sys.modules["numpy"]

    def make() -> Any:
        return obj.copy(order="C")

    def fill(copy: Any, new: list[Any]) -> Any:
        copy = make() if copy is None else copy
        # As a plain array: matrices have two dimensions whatever they are asked for.
        flat = numpy.asarray(copy).reshape(-1)
        for index, value in enumerate(new):
            flat[index] = value
        return copy

    return PARTS, numpy.asarray(obj).reshape(-1).tolist(), lambda i: f".flat[{i}]", make, fill


_STORAGES: Final = (torch.UntypedStorage, torch.TypedStorage)


def _storage(obj: Any) -> Answer:
    if obj.device.type != "cpu":
        return None
    try:
        return REPLACED, obj.pin_memory()
    except Exception as error:
        return MISSED, "", str(error)


# ---- tensors that are more than their memory

_SPARSE_PARTS: Final = {
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}


def _tensor(obj: Any) -> Answer:
    # What the tensor is, not what its class makes of the question.
    with torch._C.DisableTorchFunctionSubclass():
        treatment = _C._pin_treatment(obj)
        if treatment == 0:
            # First of its own parts: the walk takes that for the memory alone.
            return _with_class(obj, [obj], ("",), lambda new: new[0])
        if treatment == 1:
            return None
        if not obj.requires_grad or obj.is_leaf:
            if obj.layout is torch.sparse_coo:
                return _sparse_coo(obj)
            if obj.layout in _SPARSE_PARTS:
                return _sparse_compressed(obj)
    try:
        # Putting together what has a history would cut it off.
        has_history = obj.requires_grad and not obj.is_leaf
        if not has_history and is_traceable_wrapper_subclass(obj):
            return _wrapper_subclass(obj)
        return REPLACED, obj.pin_memory()
    except Exception as error:
        return MISSED, "", str(error)


def _with_class(
    obj: Any, data: list[Any], names: tuple[str, ...], build: Callable[[list[Any]], Any]
) -> Answer:
    """Parts of a tensor: its data, and what its class and its Python attributes add."""
    kind = type(obj)
    state = _State(obj)
    size = len(data)

    def fill(_: Any, new: list[Any]) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            plain = build(new[:size])
            if plain is obj:
                # The memory was pinned already, only an attribute changed.
                plain = obj.detach()
            if kind is not torch.Tensor:
                plain = torch.Tensor._make_subclass(kind, plain, obj.requires_grad)
            elif obj.requires_grad:
                plain.requires_grad_()
        return state.apply(plain, new[size:])

    return (
        PARTS,
        data + state.values,
        lambda i: names[i] if i < size else state.label(i - size),
        None,
        fill,
    )


def _sparse_coo(obj: Any) -> Answer:
    bare = obj.detach()

    def build(new: list[Any]) -> Any:
        return torch.sparse_coo_tensor(
            new[0], new[1], bare.shape, is_coalesced=bare.is_coalesced(), check_invariants=False
        )

    return _with_class(obj, [bare._indices(), bare._values()], (".indices()", ".values()"), build)


def _sparse_compressed(obj: Any) -> Answer:
    bare = obj.detach()
    names = _SPARSE_PARTS[obj.layout]

    def build(new: list[Any]) -> Any:
        compressed, plain, values = new
        return torch.sparse_compressed_tensor(
            compressed, plain, values, bare.shape, layout=bare.layout, check_invariants=False
        )

    return _with_class(
        obj,
        [getattr(bare, name)() for name in names],
        tuple(f".{name}()" for name in names),
        build,
    )


def _wrapper_subclass(obj: Any) -> Answer:
    """A class that says itself which tensors it consists of: jagged tensors and their kin."""
    kind = type(obj)
    parts, context = obj.__tensor_flatten__()
    attributes = _dict_of(obj)
    # What a user hung on it; the rest the class makes anew.
    added = [name for name in attributes if name not in parts and not name.startswith("_")]
    names = [*parts, *added]

    def fill(_: Any, new: list[Any]) -> Any:
        values = dict(zip(names, new, strict=True))
        inner = {name: values[name] for name in parts}
        made = kind.__tensor_unflatten__(inner, context, obj.shape, obj.stride())
        known = _dict_of(made)
        for name, value in attributes.items():
            known.setdefault(name, values.get(name, value))
        return made.requires_grad_() if obj.requires_grad else made

    children = [getattr(obj, name) for name in parts] + [attributes[name] for name in added]
    return PARTS, children, lambda i: f".{names[i]}", None, fill


# ---- objects of unknown type

_SCANNED_ITEMS: Final = 64
_SCANNED_DEPTH: Final = 3


def _unknown(obj: Any) -> Answer:
    if type(obj) in pytree.SUPPORTED_NODES:
        # Registered after the first object of the class was seen.
        return _pytree(obj)
    try:
        method = getattr(obj, "pin_memory", None)
    except Exception:
        method = None
    if callable(method):
        # In the instance, or through a proxy.
        return _call_with_device(method, (), _device_parameter(method, 0))
    return _scan(obj)


def _scan(obj: Any) -> Answer:
    try:
        path = _path_to_tensor(obj, _SCANNED_DEPTH)
    except Exception:
        return None
    return None if path is None else (MISSED, path, None)


def _path_to_tensor(obj: Any, depth: int) -> str | None:
    """Where in an unknown object a tensor is that could be pinned; looks about, not everywhere."""
    kind = type(obj)
    if kind in IMMUTABLE:
        return None
    if isinstance(obj, torch.Tensor):
        return "" if _C._pin_treatment(obj) != 1 and not obj.is_pinned() else None
    if depth == 0 or _is_plain_type(kind):
        return None
    steps: list[tuple[str, Any]]
    if isinstance(obj, dict):
        steps = [(_key_label(key), value) for key, value in list(obj.items())[:_SCANNED_ITEMS]]
    elif isinstance(obj, (list, tuple)):
        steps = [(_index_label(i), value) for i, value in enumerate(obj[:_SCANNED_ITEMS])]
    else:
        state = _State(obj)
        steps = [(f".{name}", value) for name, value in zip(state.names, state.values, strict=True)]
    for step, value in steps:
        with contextlib.suppress(Exception):  # an object that answers no question
            path = _path_to_tensor(value, depth - 1)
            if path is not None:
                return step + path
    return None
