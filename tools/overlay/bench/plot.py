"""The picture: bars of the ratio to stock for each case, and cost curves of sweeps. Needs matplotlib."""

from __future__ import annotations

import pathlib
from collections.abc import Sequence
from typing import Any, Final

from torchpin.bench import cases
from torchpin.bench.report import NAMES, figure
from torchpin.bench.results import CaseResult

SUFFIXES: Final = (".svg", ".png", ".pdf")

_COLORS: Final = {
    cases.STOCK: "#7f7f7f",
    "auto": "#009e73",
    "in_place": "#d55e00",
    "copy": "#1f6fb4",
    "off": "#9ecae1",
    cases.UNPINNED: "#c7c7c7",
    "tensordict": "#8c6bb1",
    "torchdata": "#41ab5d",
    "spdl": "#c994c7",
    cases.LIMIT: "#000000",
}
_AXES: Final = {"bytes": "bytes in a batch", "tensors": "tensors in a batch"}


def _bars(axes: Any, results: Sequence[CaseResult]) -> None:
    place = 0.0
    ticks, labels, shown = [], [], set()
    for result in results:
        first = place
        for name, way in result.ways.items():
            ratio = result.ratio(name, cases.STOCK)
            if ratio is None or not way or name == cases.LIMIT:
                continue
            label = None if name in shown else NAMES[name]
            shown.add(name)
            axes.barh(place, ratio, color=_COLORS[name], label=label)
            axes.text(ratio, place, f" {figure(way.rate)}", va="center", fontsize=8)
            place += 1
        ticks.append((first + place - 1) / 2)
        labels.append("\n".join(result.case.title.rsplit(", ", 1)))
        place += 0.8
    axes.set_yticks(ticks, labels, fontsize=8)
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.set_xlabel("batches per second, stock PyTorch = 1 (figures: batches per second)")
    axes.legend(fontsize=8)


def _curves(axes: Any, results: Sequence[CaseResult], sweep: str) -> None:
    names = list(dict.fromkeys(name for result in results for name in result.ways))
    for name in names:
        points = []
        for result in results:
            way = result.ways.get(name)
            if way:
                points.append((way.bytes if sweep == "bytes" else way.tensors, way.rate))
        if not points:
            continue
        style = {"linestyle": "--", "linewidth": 1} if name == cases.LIMIT else {"marker": "o"}
        axes.plot(*zip(*points, strict=True), color=_COLORS[name], label=NAMES[name], **style)
    axes.set_xscale("log", base=2 if sweep == "bytes" else 10)
    axes.set_yscale("log")
    if sweep == "bytes":
        axes.xaxis.set_major_formatter(lambda value, _: _bytes_text(value))
    axes.set_xlabel(_AXES[sweep])
    axes.set_ylabel("batches per second")
    axes.grid(True, which="major", alpha=0.3)
    axes.legend(fontsize=8)
    axes.set_title(f"workers that only collate: {results[0].case.workers}", fontsize=9)


def _bytes_text(value: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} {unit}"
        value /= 1024
    return f"{value:.0f} GiB"


def draw(path: pathlib.Path, results: Sequence[CaseResult], about: str) -> None:
    """Writes the picture to ``path``; ``about`` stands under it.

    Raises:
        ImportError: without matplotlib.
        OSError: if the file cannot be written.
    """
    import matplotlib
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    plain = [result for result in results if not result.case.sweep]
    sweeps = {
        axis: points
        for axis in _AXES
        if (points := [result for result in results if result.case.sweep == axis])
    }
    panels = bool(plain) + len(sweeps)
    bars = sum(len(result.ways) for result in plain)
    height = max(4.5 if sweeps else 2.5, 0.28 * bars + 1.2)
    # Text stays text and nothing depends on the time, so that two versions can be compared.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "torchpin"}):
        drawing = Figure(figsize=(7.0 * panels, height), layout="constrained")
        FigureCanvasAgg(drawing)
        row = drawing.subplots(1, panels, squeeze=False)[0]
        panel = iter(row)
        if plain:
            _bars(next(panel), plain)
        for axis, points in sweeps.items():
            _curves(next(panel), points, axis)
        drawing.supxlabel(about, fontsize=7)
        metadata = {"Date": None} if path.suffix == ".svg" else None
        drawing.savefig(path, metadata=metadata)
