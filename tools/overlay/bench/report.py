"""Shows results: a table, and progress while they are made. With rich if it is installed."""

from __future__ import annotations

import importlib.util
import sys
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any, Final

from torchpin.bench import cases
from torchpin.bench.results import CaseResult, WayResult, spread

HEAD: Final = (
    "batches/s",
    "±",
    "MB/s",
    "CPU ms/batch",
    "pause ms",
    "× stock",
    "× limit",
    "arrives",
)
NAMES: Final = {
    cases.STOCK: "stock PyTorch",
    "auto": "torchpin",
    "in_place": "torchpin, in place",
    "copy": "torchpin, copy",
    "off": "torchpin, transport off",
    cases.UNPINNED: "stock, pin_memory=False",
    "tensordict": "tensordict pin_memory",
    "torchdata": "torchdata PinMemory",
    "spdl": "SPDL",
    cases.LIMIT: "limit: stack, no loader",
}
_FIRST: Final = max(map(len, NAMES.values())) + 2
# The ratio to stock is followed by what is promised.
_WIDTHS: Final = tuple({"× stock": 13, "arrives": 10}.get(head, max(len(head), 8)) for head in HEAD)


def has_rich() -> bool:
    return importlib.util.find_spec("rich") is not None


def figure(value: float | None) -> str:
    """A number with three digits that count."""
    if value is None:
        return ""
    if value >= 100:
        return f"{value:,.0f}"
    if value >= 10:
        return f"{value:.1f}"
    return f"{value:.2f}" if value >= 0.1 else f"{value:.3f}"


def _cells(result: CaseResult, name: str, way: WayResult) -> list[str]:
    if not way:
        return ["failed", *[""] * (len(HEAD) - 1)]
    to_stock = figure(result.ratio(name, cases.STOCK)) if name != cases.LIMIT else ""
    promised = result.case.promised.get(name)
    if promised and to_stock:
        to_stock += f" (≥ {promised:g})"
    is_limit = name == cases.LIMIT
    return [
        figure(way.rate),
        f"{100 * spread(way.rates()):.0f} %" if len(way.measurements) > 1 else "",
        figure(way.rate * way.bytes / 1e6),
        figure(way.cpu_ms),
        figure(way.pause_ms),
        to_stock,
        figure(result.ratio(name, cases.LIMIT)),
        "" if is_limit else way.arrival(name),
    ]


def rows(result: CaseResult) -> list[tuple[str, list[str]]]:
    """The lines of a case: the way, and a cell for each of ``HEAD``."""
    return [(NAMES[name], _cells(result, name, way)) for name, way in result.ways.items()]


def heading(result: CaseResult) -> str:
    """The case, with what its batches really consisted of."""
    measured = next((way for way in result.ways.values() if way), None)
    if measured is None:
        return result.case.title
    size = figure(measured.bytes / 1e6)
    tensors = f"{measured.tensors} tensor{'' if measured.tensors == 1 else 's'}"
    return f"{result.case.title} ({size} MB in {tensors})"


def print_table(results: Sequence[CaseResult]) -> None:
    """The table, on the standard output."""
    if has_rich():
        _print_rich(results)
        return
    heads = (f"{head:>{width}}" for head, width in zip(HEAD, _WIDTHS, strict=True))
    print(" " * _FIRST, *heads)
    for result in results:
        print(heading(result))
        for name, cells in rows(result):
            line = (f"{cell:>{width}}" for cell, width in zip(cells, _WIDTHS, strict=True))
            print(f"  {name:<{_FIRST - 2}}", *line)


def _print_rich(results: Sequence[CaseResult]) -> None:
    from rich.console import Console
    from rich.table import Table

    # A pipe has no width, and a wrapped table cannot be read.
    console = Console() if sys.stdout.isatty() else Console(width=140)

    def columns(show_header: bool) -> Table:
        table = Table(box=None, show_header=show_header, header_style="bold", pad_edge=False)
        table.add_column(min_width=_FIRST, no_wrap=True)
        for head, width in zip(HEAD, _WIDTHS, strict=True):
            table.add_column(head, justify="right", min_width=width, no_wrap=True)
        return table

    console.print(columns(show_header=True))
    for result in results:
        # A table for each case, because a heading is wider than a column.
        console.print(heading(result), style="bold", highlight=False, markup=False)
        table = columns(show_header=False)
        for name, cells in rows(result):
            table.add_row(f"  {name}", *cells)
        console.print(table)


def markdown(results: Sequence[CaseResult], about: Sequence[str]) -> str:
    """The table as Markdown, after a line for each of ``about``."""
    lines = [*about, ""]
    for result in results:
        lines += [f"**{heading(result)}**", "", f"| | {' | '.join(HEAD)} |"]
        lines.append("|---" * (len(HEAD) + 1) + "|")
        for name, cells in rows(result):
            lines.append(f"| {name} | {' | '.join(cells)} |")
        lines.append("")
        if notes := result.notes():
            lines += [*(f"- {note}" for note in notes), ""]
    return "\n".join(lines)


class Progress:
    """A bar on the standard error; without rich or a terminal, a line for each case."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._done = 0
        self._case = ""
        self._started = time.monotonic()
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> Progress:
        if has_rich() and sys.stderr.isatty():
            from rich import progress
            from rich.console import Console

            self._bar = progress.Progress(
                progress.BarColumn(),
                progress.MofNCompleteColumn(),
                progress.TimeRemainingColumn(),
                progress.TextColumn("{task.description}"),
                console=Console(stderr=True),
                transient=True,
            )
            self._bar.start()
            self._task = self._bar.add_task("starting", total=self._total)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        value: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
        elif sys.stderr.isatty():
            print(f"\r{'':79}\r", end="", file=sys.stderr, flush=True)

    def __call__(self, text: str, done: int) -> None:
        """Says what is being done; ``done`` measurements have ended."""
        self._done += done
        if self._bar is not None:
            self._bar.update(self._task, advance=done, description=text)
        elif sys.stderr.isatty():
            line = f"{self._done}/{self._total} {text}"
            print(f"\r{line:79.79}", end="", file=sys.stderr, flush=True)
        else:
            case = text.rpartition(": ")[0]
            if case != self._case:
                self._case = case
                seconds = time.monotonic() - self._started
                line = f"{self._done}/{self._total} measurements, {seconds:.0f} s: {case}"
                print(line, file=sys.stderr, flush=True)
