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


def _bars(axes: Any, result: CaseResult) -> None:
    """One case: a bar from stock PyTorch to each way, on a logarithmic axis."""
    labels: list[str] = []
    for name, way in result.ways.items():
        ratio = result.ratio(name, cases.STOCK)
        if ratio is None:
            continue
        row = len(labels)
        labels.append(NAMES[name])
        limit = name == cases.LIMIT
        axes.plot([1, ratio], [row, row], color=_COLORS[name], linewidth=1 if limit else 5)
        axes.plot(ratio, row, "D" if limit else "o", color=_COLORS[name], markersize=6)
        if name in result.case.promised:
            axes.plot(result.case.promised[name], row, "|", color="black", markersize=11)
        text = f"{figure(ratio)}×  ({figure(way.rate)}/s)"
        axes.annotate(
            text, (max(ratio, 1), row), (8, 0), "data", "offset points", va="center", size=8
        )
    axes.axvline(1, color=_COLORS[cases.STOCK], linewidth=0.8)
    axes.set_yticks(range(len(labels)), labels, fontsize=8)
    axes.set_ylim(len(labels) - 0.4, -0.6)
    axes.set_title(result.case.title, fontsize=9, loc="left", fontweight="bold")
    axes.tick_params(axis="x", labelsize=7)
    axes.grid(True, axis="x", which="major", alpha=0.3)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)


def _grid(results: Sequence[CaseResult]) -> tuple[int, int]:
    """Rows and columns of the panels of these cases."""
    columns = 1 if len(results) == 1 else 2
    return -(-len(results) // columns), columns


def _all_bars(drawing: Any, results: Sequence[CaseResult]) -> None:
    """All cases on axes of the same length, two in a row where there are several."""
    ratios = [
        ratio
        for result in results
        for name in result.ways
        if (ratio := result.ratio(name, cases.STOCK)) is not None
    ]
    # Room for the figures behind the longest bar.
    limits = 0.7 * min([*ratios, 0.5]), 8 * max([*ratios, 2.0])
    panels = iter(drawing.subplots(*_grid(results), squeeze=False, sharex=True).flat)
    for result, axes in zip(results, panels, strict=False):
        axes.set_xscale("log")
        axes.set_xlim(*limits)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}×")
        axes.tick_params(labelbottom=True)
        _bars(axes, result)
    for axes in panels:
        axes.set_visible(False)
    drawing.suptitle(
        "Batches per second as a multiple of stock PyTorch's, and per second; "
        "| is what the project promises",
        fontsize=9,
    )


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
    rows, columns = _grid(plain)
    lines = max((len(result.ways) for result in plain), default=0)
    bars_height = 0.9 + rows * (0.23 * lines + 0.6) if plain else 0.0
    curves_height = 4.5 if sweeps else 0.0
    size = 6.5 * max(columns, len(sweeps)), bars_height + curves_height
    # Text stays text and nothing depends on the time, so that two versions can be compared.
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "torchpin"}):
        drawing = Figure(figsize=size, layout="constrained")
        FigureCanvasAgg(drawing)
        heights = [height for height in (bars_height, curves_height) if height]
        parts = iter(drawing.subfigures(len(heights), 1, squeeze=False, height_ratios=heights).flat)
        if plain:
            _all_bars(next(parts), plain)
        if sweeps:
            row = next(parts).subplots(1, len(sweeps), squeeze=False)[0]
            for axes, (axis, points) in zip(row, sweeps.items(), strict=True):
                _curves(axes, points, axis)
        drawing.supxlabel(about, fontsize=7)
        metadata = {"Date": None} if path.suffix == ".svg" else None
        drawing.savefig(path, metadata=metadata)
