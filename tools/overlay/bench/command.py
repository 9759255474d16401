"""The command line of ``python -m torchpin bench``."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import pathlib
import signal
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from torchpin.bench import cases, plot, report, results
from torchpin.bench.cases import Case
from torchpin.bench.results import CaseResult
from torchpin.bench.runner import BenchFailure, Runner, Settings

_INSTALL = "pip install 'torchpin[bench]'"
_DESCRIPTION = """\
Measures on this machine how fast a DataLoader delivers pinned batches: stock PyTorch and torchpin in
turn, in one run. Workers collate samples that lie in memory, and the training loop drops every batch
at once, so that what is measured is the loader. Without --preset or --sweep one batch is measured,
that of --shape and the options after it."""


def _shape(text: str) -> tuple[int, ...]:
    try:
        shape = tuple(int(part) for part in text.replace("x", ",").replace("×", ",").split(","))
    except ValueError:
        shape = ()
    if not shape or min(shape) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no shape; write it like 3,224,224")
    return shape


def _whole(text: str, least: int = 1) -> int:
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number from {least} on")
    return int(text)


def _whole_or_zero(text: str) -> int:
    return _whole(text, 0)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 < seconds < 3600:
        raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds between 0 and 3600")
    return seconds


def _target(text: str) -> pathlib.Path:
    """A file that can be written, found out before an hour of measuring."""
    path = pathlib.Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is a folder; give the name of a file")
    if not path.resolve().parent.is_dir():
        raise argparse.ArgumentTypeError(f"there is no folder for {text!r}; make it first")
    return path


def _picture(text: str) -> pathlib.Path:
    path = _target(text)
    if path.suffix not in plot.SUFFIXES:
        raise argparse.ArgumentTypeError(f"{text!r} must end in {' or '.join(plot.SUFFIXES)}")
    if importlib.util.find_spec("matplotlib") is None:
        raise argparse.ArgumentTypeError(f"the picture needs matplotlib: {_INSTALL}")
    return path


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m torchpin bench", description=_DESCRIPTION)
    add = parser.add_argument_group("what to measure").add_argument
    add("--preset", choices=sorted(cases.PRESETS), help="a named set of batches")
    add(
        "--sweep",
        choices=("bytes", "tensors"),
        action="append",
        default=[],
        help="a cost curve over the bytes or the tensors of a batch; may be given twice",
    )
    add = parser.add_argument_group("one batch of your own").add_argument
    add(
        "--shape",
        type=_shape,
        action="append",
        metavar="N,N,...",
        help="shape of a tensor of one sample; may be repeated [3,224,224]",
    )
    dtypes = list(cases.ITEM_BYTES)
    add("--dtype", choices=dtypes, metavar="DTYPE", help=f"{', '.join(dtypes)} [float32]")
    add("--tensors", type=_whole, metavar="N", help="so many of each shape [1]")
    add("--batch-size", type=_whole, metavar="N", help="samples in a batch [64]")
    add("--records", choices=cases.RECORDS, help="what samples and batches are [list]")
    add(
        "--distinct",
        type=_whole,
        metavar="N",
        help="samples that lie in memory; one stays in the CPU's caches, many do not [1]",
    )
    add("--decode", action="store_true", help="samples are JPEG files, decoded with Pillow")
    add("--latents", action="store_true", help="the batch of a fine-tuning run with cached latents")
    add = parser.add_argument_group("the loader; also for --preset and --sweep").add_argument
    add("--workers", type=_whole_or_zero, metavar="N", help="worker processes [2]")
    add("--start-method", choices=cases.START_METHODS, help="of workers [Python's default]")
    add("--prefetch", type=_whole, metavar="N", help="batches each worker makes ahead [2]")
    add = parser.add_argument_group("against what").add_argument
    add(
        "--mode",
        action="append",
        choices=cases.MODES,
        help="how torchpin transports batches; may be repeated [auto; with --preset and --sweep "
        "copy and in_place]",
    )
    add("--unpinned", action="store_true", help="stock PyTorch with pin_memory=False, too")
    add(
        "--rivals",
        action="store_true",
        help=f"other libraries, too, those of {', '.join(cases.RIVALS)} that are installed",
    )
    add("--copy", action="store_true", help="copy every batch to the accelerator, non_blocking")
    add(
        "--import",
        dest="modules",
        metavar="MODULE",
        action="append",
        default=[],
        help="import this module after torch: the package of a backend that is not loaded by itself",
    )
    add = parser.add_argument_group("how long").add_argument
    add("--rounds", type=_whole, metavar="N", default=5, help="measurements of each [%(default)s]")
    add(
        "--seconds",
        type=_seconds,
        metavar="S",
        default=1.0,
        help="length of a measurement [%(default)s]",
    )
    add("--batches", type=_whole, metavar="N", default=0, help="length in batches instead")
    add(
        "--warmup",
        type=_whole,
        metavar="N",
        default=0,
        help="batches before it [those made ahead, and a few]",
    )
    add = parser.add_argument_group("where to write").add_argument
    add("--json", type=_target, metavar="FILE", help="every single measurement")
    add("--plot", type=_picture, metavar="FILE.svg", help="a picture (needs matplotlib)")
    add("--markdown", type=_target, metavar="FILE", help="the table for a document")
    return parser


def _cases(options: argparse.Namespace) -> list[Case]:
    """What the command line asks for.

    Raises:
        ValueError: if its choices do not go together.
    """
    own = ("shape", "dtype", "tensors", "batch_size", "records", "distinct", "decode", "latents")
    given = [f"--{name.replace('_', '-')}" for name in own if getattr(options, name)]
    loader = {
        name: value
        for name in ("workers", "start_method", "prefetch")
        if (value := getattr(options, name)) is not None
    }
    if options.preset or options.sweep:
        if given:
            raise ValueError(
                f"{given[0]} describes a batch of your own; leave out --preset and --sweep"
            )
        chosen = cases.PRESETS[options.preset]() if options.preset else []
        for axis in dict.fromkeys(options.sweep):
            chosen += cases.sweep(axis)
        if loader:
            # What is promised is promised for the loader of the preset.
            chosen = [dataclasses.replace(case, promised={}, **loader) for case in chosen]
        return chosen
    if options.latents:
        if len(given) > 1:
            raise ValueError(f"--latents is a batch of its own; leave out {given[0]}")
        return [dataclasses.replace(cases.latents(), **loader)]
    return [
        cases.own_case(
            shapes=options.shape or [(3, 224, 224)],
            dtype=options.dtype or "float32",
            tensors=options.tensors or 1,
            batch_size=options.batch_size or 64,
            workers=loader.get("workers", 2),
            records=options.records or "list",
            start_method=options.start_method or "",
            prefetch=options.prefetch or 2,
            decode=options.decode,
            distinct=options.distinct or 1,
        )
    ]


def _ways(case: Case, options: argparse.Namespace) -> list[str]:
    several = (options.preset or options.sweep) and case.workers
    modes = options.mode or (["copy", "in_place"] if several else ["auto"])
    chosen = {cases.STOCK, *modes, *case.ways}
    if not case.epoch:
        chosen.add(cases.LIMIT)
    if options.unpinned:
        chosen.add(cases.UNPINNED)
    if options.rivals and case.workers and not case.epoch:
        chosen.update(name for name in cases.RIVALS if importlib.util.find_spec(name))
    return [way for way in cases.WAYS if way in chosen]


def _about(
    machine: dict[str, Any], versions: dict[str, Any], options: argparse.Namespace
) -> list[str]:
    """The machine, the software and the measuring, a line each."""
    device = versions["accelerator"] or "no accelerator"
    if versions["device"]:
        device += f" ({versions['device']})"
    length = f"{options.batches} batches" if options.batches else f"{options.seconds:g} s"
    return [
        f"{machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB, "
        f"{machine['system']}, {device}",
        f"PyTorch {versions['torch']}, torchpin {versions['torchpin']}, Python {machine['python']}",
        f"medians of {options.rounds} alternating measurements of {length}; "
        f"batches are {'copied to the accelerator' if options.copy else 'dropped at once'}",
    ]


def _warn_unpinned(versions: dict[str, Any], what: str) -> None:
    """Says what figures mean where nothing can be pinned."""
    print(
        f"Nothing can be pinned here: {what}. pin_memory=True gives plain batches then, with torchpin "
        "and without it, and these figures say little about torchpin. "
        + (
            "`python -m torchpin` says more."
            if versions["accelerator"]
            else "A backend that is not loaded by itself is named with --import MODULE."
        ),
        file=sys.stderr,
    )


def _terminated(*_: object) -> NoReturn:
    raise SystemExit(128 + signal.SIGTERM)


def _write(
    options: argparse.Namespace, done: Sequence[CaseResult], about: Sequence[str], head: Any
) -> None:
    if options.json:
        data = {"format": results.FORMAT, **head, "cases": [one.to_json() for one in done]}
        options.json.write_text(json.dumps(data, indent=1, ensure_ascii=False) + "\n")
    if options.markdown:
        options.markdown.write_text(report.markdown(done, [f"{line}  " for line in about]) + "\n")
    if options.plot:
        plot.draw(options.plot, done, "; ".join(about[:2]))


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs ``python -m torchpin bench``; returns the exit status."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        chosen = _cases(options)
        for case in chosen:
            cases.check_memory(case)
    except ValueError as error:
        parser.error(str(error))
    if any(case.load == "jpeg" for case in chosen) and importlib.util.find_spec("PIL") is None:
        if not options.preset:
            parser.error(f"--decode needs Pillow: {_INSTALL}")
        chosen = [case for case in chosen if case.load != "jpeg"]
        print(f"Without Pillow, JPEG files are left out: {_INSTALL}", file=sys.stderr)
    if options.rivals:
        absent = [name for name in cases.RIVALS if importlib.util.find_spec(name) is None]
        if absent:
            print(f"Not installed, left out: {', '.join(absent)}", file=sys.stderr)

    before = signal.signal(signal.SIGTERM, _terminated)
    try:
        return _run(options, chosen)
    except KeyboardInterrupt:
        print("Interrupted.", file=sys.stderr)
        return 130
    except (BenchFailure, OSError) as error:
        print(f"python -m torchpin bench: {error}", file=sys.stderr)
        return 1
    finally:
        signal.signal(signal.SIGTERM, before)


def _run(options: argparse.Namespace, chosen: Sequence[Case]) -> int:
    settings = Settings(
        options.rounds, options.seconds, options.batches, options.warmup, options.copy
    )
    ways = {case.name: _ways(case, options) for case in chosen}
    done: list[CaseResult] = []
    with Runner(options.modules, settings) as runner:
        mode = next(way for way in ways[chosen[0].name] if way in cases.MODES)
        versions = runner.describe(mode)
        machine = results.machine()
        about = _about(machine, versions, options)
        print("\n".join(about))
        if not runner.accelerator:
            _warn_unpinned(versions, versions["missing"])
            if options.copy:
                raise BenchFailure("--copy needs an accelerator")
        total = settings.rounds * sum(len(names) for names in ways.values())
        with report.Progress(total) as progress:
            for case in chosen:
                done.append(runner.run(case, ways[case.name], progress))
    report.print_table(done)
    for result in done:
        for note in result.notes():
            print(note)
    if not report.has_rich():
        print(f"For a progress bar and a picture (--plot): {_INSTALL}")
    head = {"machine": machine, "versions": versions, "settings": dataclasses.asdict(settings)}
    _write(options, done, about, head)
    # That the stock way or another library fails here is a result.
    failed = any(
        result.ways[mode].failed for result in done for mode in result.ways if mode in cases.MODES
    )
    return 1 if failed else 0
