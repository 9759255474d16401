"""A conformance suite for accelerators: does pinned host memory work, how deep, and what breaks?

    pip install 'torchpin[conformance]'
    pytest --pyargs torchpin.conformance --accelerator NAME [--import MODULE]

runs against any registered accelerator and ends in a report of the depths that work. How to read it:
"Conformance of a backend" in the documentation.

pytest finds this module through its entry point in every run of an environment that has torchpin, so
it does nothing, and adds no option, unless the suite was asked for.
"""

from __future__ import annotations

import pathlib
from typing import Any

_SUITE = "torchpin.conformance"
_FOLDER = pathlib.Path(__file__).resolve().parent


def _asks_for_suite(argument: str) -> bool:
    name = argument.partition("::")[0]
    if name == _SUITE or name.startswith(f"{_SUITE}."):
        return True
    if name.startswith("-"):
        return False
    path = pathlib.Path(name).resolve()
    return path == _FOLDER or _FOLDER in path.parents


def pytest_load_initial_conftests(early_config: Any, args: list[str]) -> None:
    """Adds the options of the suite, in time for the command line to be parsed."""
    if any(_asks_for_suite(argument) for argument in args):
        early_config.pluginmanager.import_plugin(f"{_SUITE}.plugin")
