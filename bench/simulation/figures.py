"""Tables and pictures of the study, from what its runs gave."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

Result = dict[str, Any]
Look = Callable[[str, Any], Result | None]

COLOURS = {
    "dctcp": "#8a8f98",
    "pias": "#c58b2a",
    "pfabric": "#7b4fa3",
    "ndp": "#3a6ea5",
    "auto": "#0b7a75",
    "mlt": "#d1495b",
    "dlcp": "#5b8c2a",
}
NAMES = {"dctcp": "DCTCP", "pias": "PIAS", "pfabric": "pFabric", "ndp": "NDP"}
TAIL = "p99_us"
MEAN = "mean_us"


class Series(NamedTuple):
    """A line of a panel."""

    label: str
    colour: str
    places: Sequence[Any]
    heights: Sequence[float]
    style: str = "-"


class Panel(NamedTuple):
    """One set of axes."""

    title: str
    unit: str
    across: str
    series: Sequence[Series]


def change(ours: float, theirs: float) -> str:
    """How much lower or higher, in per cent."""
    return f"{100 * (ours / theirs - 1):+.0f} %"


def beside(value: float, base: float | None) -> str:
    """Microseconds, and the difference to a base."""
    text = f"{value:.0f}"
    return text if base is None else f"{text} ({change(value, base)})"


def markdown(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table as the documents have them."""
    lines = [heads, ["---"] * len(heads), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def name_of(transport: str) -> str:
    """As people write it; presets are code."""
    return NAMES.get(transport, f"`{transport}`")


def draw(panels: Sequence[Panel], file: Path, columns: int = 2) -> None:
    """Writes a picture. Times on a logarithmic scale, because tails are multiples of the rest."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot, ticker

    rows = -(-len(panels) // columns)
    figure, all_axes = pyplot.subplots(
        rows, columns, figsize=(4.9 * columns, 3.4 * rows), layout="constrained", squeeze=False
    )
    for axes, panel in zip(all_axes.flat, panels, strict=False):
        places = sorted({place for series in panel.series for place in series.places})
        for series in panel.series:
            at = [places.index(place) for place in series.places]
            axes.plot(
                at, series.heights, series.style, marker="o", markersize=4, color=series.colour, label=series.label
            )
        axes.set_xticks(
            range(len(places)), [f"{place:g}" if isinstance(place, float) else str(place) for place in places]
        )
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_formatter(
            ticker.FuncFormatter(lambda value, _: f"{value:g}" if f"{value:e}"[0] in "25" else "")
        )
        axes.set_title(panel.title, fontsize=10)
        axes.set_xlabel(panel.across)
        axes.set_ylabel(panel.unit)
        axes.grid(axis="y", alpha=0.3, which="both")
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=8)
    for axes in all_axes.flat[len(panels) :]:
        axes.set_visible(False)
    figure.savefig(file, dpi=110)
    pyplot.close(figure)
