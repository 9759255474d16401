"""The runtime: puts whole files, seams and methods in place, and takes them out again.

It has no opinion about pinning. ``seams.py`` says what goes where; the whole files under ``torch/``
hold the logic; this module keeps what it replaced, so that ``disable`` gives back the very objects
of the base.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import os
import pathlib
import sys
import sysconfig
import threading
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from torchpin import bases, seams

_PACKAGE = pathlib.Path(__file__).resolve().parent
_lock = threading.RLock()


class ActivationError(RuntimeError):
    """torchpin cannot be switched on here; the message says why and what to do."""


@dataclass
class _Placed:
    """One attribute that was set, and what undoes it."""

    owner: Any
    name: str
    before: Any
    """The base's object, or ``_ABSENT`` if there was none in the owner's own dictionary."""


_ABSENT: Any = object()
_placed: list[_Placed] = []
_modules: dict[str, ModuleType] = {}
_replaced_modules: dict[str, ModuleType | None] = {}
_why_off: str | None = "it was not asked for"
_SWITCHED_OFF = "the environment variable TORCHPIN switches it off"


def switched_off() -> bool:
    """Whether the environment says ``TORCHPIN=0``."""
    return os.environ.get("TORCHPIN", "1").strip().lower() in ("0", "off", "false", "no")


def tree() -> pathlib.Path:
    """The folder that holds ``torch/``: inside the package, or the checkout it is run from."""
    installed = _PACKAGE / "tree"
    return installed if installed.is_dir() else _PACKAGE.parent.parent


def include_paths() -> list[str]:
    """The folders of the headers: inside the package, or where they lie in the checkout."""
    installed = _PACKAGE / "include"
    folders = [installed] if installed.is_dir() else [tree() / "aten" / "src", tree()]
    return [str(folder) for folder in folders]


def extension_dir(version: str) -> pathlib.Path:
    """The folder that holds ``_C`` for this PyTorch: the package, or a checkout's build folder."""
    if (_PACKAGE / "built_for.txt").exists():
        return _PACKAGE
    return tree() / "build" / f"torch-{version}-{sysconfig.get_config_var('SOABI')}"


def load_extension() -> ModuleType:
    """Loads ``torchpin._C``.

    Raises:
        ActivationError: if it was not built, or built for another PyTorch or Python.
    """
    import torch

    if "torchpin._C" in sys.modules:
        return sys.modules["torchpin._C"]
    folder = extension_dir(torch.__version__)
    path = folder / f"_C{sysconfig.get_config_var('EXT_SUFFIX')}"
    note = folder / "built_for.txt"
    again = "build it again: pip install --no-build-isolation --force-reinstall --no-deps torchpin"
    if not note.exists() or not path.exists():
        raise ActivationError(f"its extension was not built for this Python ({path}); {again}")
    built_for = note.read_text().strip()
    if built_for != torch.__version__:
        raise ActivationError(
            f"its extension was built for PyTorch {built_for}, this is {torch.__version__}; {again}"
        )
    spec = importlib.util.spec_from_file_location("torchpin._C", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    sys.modules["torchpin._C"] = module
    setattr(sys.modules["torchpin"], "_C", module)  # noqa: B010
    return module


def _set(owner: Any, name: str, value: Any) -> None:
    before = vars(owner).get(name, _ABSENT)
    setattr(owner, name, value)
    _placed.append(_Placed(owner, name, before))


def _resolve(path: str) -> tuple[Any, str, Any]:
    """Owner, name and object of ``module:Class.attribute``."""
    module_name, _, qualified = path.partition(":")
    owner: Any = importlib.import_module(module_name)
    *outer, name = qualified.split(".")
    for part in outer:
        owner = getattr(owner, part)
    return owner, name, getattr(owner, name)


def _load_file(row: seams.WholeFile) -> ModuleType:
    """The module of a whole file, which stays in ``sys.modules``."""
    module = _modules.get(row.module)
    if module is None:
        spec = importlib.util.spec_from_file_location(row.module, tree() / row.path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[row.module] = module
        spec.loader.exec_module(module)
        _modules[row.module] = module
    sys.modules[row.module] = module
    return module


def _place_file(row: seams.WholeFile) -> None:
    parent_name, _, name = row.module.rpartition(".")
    parent = importlib.import_module(parent_name)
    _replaced_modules[row.module] = sys.modules.get(row.module)
    _set(parent, name, _load_file(row))


def whole_file(name: str) -> ModuleType:
    """The module of a whole file that the base has no file for, whether it is in place or not.

    So what the package offers from it can be called, without effect, while torchpin is off.

    Raises:
        ActivationError: as :func:`load_extension`.
    """
    with _lock:
        if name not in _modules:
            load_extension()
            _load_file(next(row for row in seams.WHOLE_FILES if row.module == name))
            del sys.modules[name]
        return _modules[name]


def _applies(row: seams.Seam | seams.Method) -> bool:
    import torch

    return row.since <= bases.parse(torch.__version__) <= row.until


def _wrap(base: Callable[..., Any], rows: list[seams.Seam]) -> Callable[..., Any]:
    """``base`` with the calls of ``rows`` at its start and at its end."""
    parameters = list(inspect.signature(base).parameters)

    def compiled(row: seams.Seam) -> tuple[Callable[..., Any], list[tuple[int, str]], int | None]:
        function: Callable[..., Any] = _resolve(row.call)[2]
        places = [(parameters.index(name), name) for name in row.arguments]
        return function, places, parameters.index(row.rebinds) if row.rebinds else None

    starts = [compiled(row) for row in rows if row.at == "start"]
    ends = [compiled(row) for row in rows if row.at == "end"]

    @functools.wraps(base)
    def seamed(*args: Any, **kwargs: Any) -> Any:
        def call(function: Callable[..., Any], places: list[tuple[int, str]]) -> Any:
            return function(*(args[i] if i < len(args) else kwargs[name] for i, name in places))

        for function, places, rebinds in starts:
            value = call(function, places)
            if rebinds is None:
                continue
            if rebinds < len(args):
                args = (*args[:rebinds], value, *args[rebinds + 1 :])
            else:
                kwargs[parameters[rebinds]] = value
        result = base(*args, **kwargs)
        for function, places, _ in ends:
            call(function, places)
        return result

    return seamed


def _place_seams() -> None:
    by_function: dict[str, list[seams.Seam]] = {}
    for row in seams.SEAMS:
        if _applies(row):
            by_function.setdefault(row.function, []).append(row)
    for path, rows in by_function.items():
        owner, name, base = _resolve(path)
        _set(owner, name, _wrap(base, rows))


def _place_methods() -> None:
    for row in seams.METHODS:
        if _applies(row):
            owner, name, base = _resolve(f"{row.owner}.{row.name}")
            _set(owner, name, _resolve(row.maker)[2](base))


def places() -> list[tuple[str, str]]:
    """Every row of the table and whether it is in place, for a report."""
    import torch

    release = bases.parse(torch.__version__)

    def state(row: seams.Seam | seams.Method) -> str:
        if not row.since <= release <= row.until:
            return f"not needed on this PyTorch: {row.reason}"
        return f"{'active' if is_enabled() else 'not active'}: {row.reason}"

    lines = [
        (
            f"file {file.path}",
            f"{'active' if file.module in _replaced_modules else 'not active'}: {file.reason}",
        )
        for file in seams.WHOLE_FILES
    ]
    lines += [
        (f"seam {seam.function.partition(':')[2]} ({seam.at})", state(seam)) for seam in seams.SEAMS
    ]
    lines += [
        (f"method {method.owner.partition(':')[2]}.{method.name}", state(method))
        for method in seams.METHODS
    ]
    return lines


def is_enabled() -> bool:
    """Whether whole files, seams and kernels are in place."""
    return bool(_placed)


def why_off() -> str | None:
    """Why torchpin is not enabled, in one sentence; None if it is."""
    if is_enabled():
        return None
    return _SWITCHED_OFF if switched_off() else _why_off


def enable() -> bool:
    """Puts everything in place; see ``torchpin.enable``."""
    import torch

    global _why_off
    with _lock:
        if is_enabled():
            return True
        if switched_off():
            return False
        try:
            if not sys.platform.startswith("linux"):
                raise ActivationError(f"it works on Linux only, this is {sys.platform}")
            refusal = bases.why_unsupported(torch.__version__)
            if refusal:
                raise ActivationError(refusal)
            extension = load_extension()
            if not bases.binds_get_accelerator(torch.__version__):
                _set(torch._C, "_get_accelerator", extension._get_accelerator)
            for row in seams.WHOLE_FILES:
                _place_file(row)
            _place_methods()
            _place_seams()
            extension._register_pin_kernels()
            extension._register_stand_in_host_allocator()
        except BaseException as error:
            _why_off = f"{type(error).__name__}: {error}"
            if isinstance(error, ActivationError):
                _why_off = str(error)
            _take_out()
            raise
        return True


def _take_out() -> None:
    while _placed:
        place = _placed.pop()
        if place.before is _ABSENT:
            delattr(place.owner, place.name)
        else:
            setattr(place.owner, place.name, place.before)
    for name, module in _replaced_modules.items():
        if module is None:
            sys.modules.pop(name, None)
        else:
            sys.modules[name] = module
    _replaced_modules.clear()
    extension = sys.modules.get("torchpin._C")
    if extension is not None:
        extension._deregister_pin_kernels()
        extension._deregister_stand_in_host_allocator()


def disable() -> None:
    """Takes everything out again; see ``torchpin.disable``."""
    global _why_off
    with _lock:
        if is_enabled():
            _take_out()
            _why_off = "torchpin.disable() was called"
