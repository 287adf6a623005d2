"""Draws simulated steps: completion times, and what was lost of each layer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gradwire.simulation.result import TIMES, lost_share

if TYPE_CHECKING:
    from pathlib import Path

_WIDE, _HIGH = 11, 4.2
# Bars on a logarithmic axis show small differences as large ones: only times so many times apart are drawn so.
_LOG_FROM = 10


def check_format(path: Path) -> None:
    """Before minutes of simulation. Raises ValueError where the suffix names no format that there is, ImportError without matplotlib."""
    from matplotlib.backend_bases import FigureCanvasBase

    formats = FigureCanvasBase.get_supported_filetypes()
    suffix = path.suffix.removeprefix(".").lower()
    if suffix and suffix not in formats:
        raise ValueError(f"--picture {path}: no format {suffix!r}: there are {', '.join(sorted(formats))}")


def draw(results: list[dict[str, Any]], path: Path) -> None:
    """Writes a picture with two panels. Raises OSError where the file cannot be written, ImportError without matplotlib."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot, ticker

    figure, (times, losses) = pyplot.subplots(1, 2, figsize=(_WIDE, _HIGH), layout="constrained")
    width = 0.8 / len(results)
    for number, result in enumerate(results):
        places = [place + number * width for place in range(len(TIMES))]
        times.bar(places, [result["flows"][name] for name in TIMES], width, label=result["transport"])
        lost = [100 * lost_share(layer) for layer in reversed(result["layers"])]
        losses.plot(range(1, len(lost) + 1), lost, marker=".", label=result["transport"])
    centre = width * (len(results) - 1) / 2
    times.set_xticks([place + centre for place in range(len(TIMES))], [name.removesuffix("_us") for name in TIMES])
    every = [result["flows"][name] for result in results for name in TIMES]
    if max(every) > _LOG_FROM * min(every):
        times.set_yscale("log")
    times.set_ylabel("completion time of a transfer, us")
    times.set_title(f"{results[0]['hosts']} hosts, {results[0]['algorithm'].replace('_', ' ')}")
    losses.set_xlabel("layer, from the input to the loss")
    losses.set_ylabel("contributions that did not count, %")
    losses.set_ylim(bottom=0)
    losses.xaxis.set_major_locator(ticker.MaxNLocator(integer=True, min_n_ticks=1))
    losses.set_title("losses by layer")
    times.margins(y=0.25)  # room for the legend
    for panel in (times, losses):
        panel.legend()
        panel.grid(axis="y", alpha=0.3)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
