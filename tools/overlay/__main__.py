"""``python -m torchpin``: what is active in this environment, and why not where it is not.

``python -m torchpin bench`` measures instead, see ``torchpin.bench``.
"""

from __future__ import annotations

import argparse
import importlib
import sys

from torchpin import __version__, _overlay, bases


def _release(release: tuple[int, int]) -> str:
    return ".".join(map(str, release))


_TRANSPORT = {
    "auto": "auto: in place where that is safe, else by one copy; torchpin.stats() says which it was",
    "in_place": "in_place: without a copy",
    "copy": "copy: by one copy",
    "off": "off: as PyTorch without torchpin",
}


def _pin_lines() -> list[tuple[str, str]]:
    """Accelerator, host allocator and what is missing, without starting a device."""
    from torch.utils.data._utils import pin_target, transport
    from torchpin import _C

    name, lack, reason, own_kernels, allocator = _C._pin_target(initialize=False)
    if name is None:
        return [("accelerator", "none"), ("pinned memory", f"no: {reason}")]
    lines = [("accelerator", name)]
    if own_kernels:
        lines.append(("host allocator", "the backend's own kernels of aten::_pin_memory"))
    elif lack == "nothing":
        source = f"{allocator}, from the backend's hooks" if allocator else "PyTorch's own"
        lines.append(("host allocator", source))
    else:
        lines.append(("host allocator", f"none ({lack})"))
    _, missing = pin_target.what_is_missing()
    lines.append(("pinned memory", "yes" if missing is None else f"no: {missing}"))
    try:
        mode = _TRANSPORT[transport.mode_of(None)]
    except ValueError as error:
        mode = str(error)
    lines.append(("transport", mode))
    return lines


def report() -> list[tuple[str, str]]:
    """What is active, as pairs of a label and a line of text."""
    import torch

    low, high = _release(bases.OLDEST), _release(bases.NEWEST)
    why_off = _overlay.why_off()
    lines = [
        ("torchpin", f"{__version__}, {'on' if why_off is None else f'off: {why_off}'}"),
        ("PyTorch", f"{torch.__version__} (supported: {low} to {high})"),
        ("extension", str(_overlay.extension_dir(torch.__version__))),
    ]
    if why_off is None:
        lines += _pin_lines()
    for what, state in _overlay.places():
        lines.append((what, state))
    return lines


def main(arguments: list[str] | None = None) -> int:
    """Runs the command line; returns the exit status."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] == ["bench"]:
        from torchpin.bench import command

        return command.main(arguments[1:])
    parser = argparse.ArgumentParser(
        prog="python -m torchpin",
        description="Prints what torchpin does in this environment, and why not where it does not.",
        epilog="`python -m torchpin bench` measures stock PyTorch against torchpin on this machine; "
        "`python -m torchpin bench --help` says what can be chosen.",
    )
    parser.add_argument(
        "--import",
        dest="modules",
        metavar="MODULE",
        action="append",
        default=[],
        help="import this module first: the package of a backend that PyTorch does not load by "
        "itself (any backend up to 2.4)",
    )
    options = parser.parse_args(arguments)
    try:
        import torch  # noqa: F401
    except ImportError as error:
        print(f"torchpin {__version__}: PyTorch cannot be imported: {error}", file=sys.stderr)
        return 1
    for module in options.modules:
        importlib.import_module(module)
    lines = report()
    width = max(len(label) for label, _ in lines)
    for label, text in lines:
        print(f"{label:<{width}}  {text}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
