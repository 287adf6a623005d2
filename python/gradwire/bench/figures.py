"""Draws rows of the benchmark: times by size, by loss and by scenario, bus bandwidth, and how samples are spread. Needs matplotlib."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from gradwire.bench.plan import HEALTHY, size_text
from gradwire.bench.results import Row

_PEERS = ("#8a8f98", "#c2803a", "#b23a48", "#6b6f2a")
_OWN = ("#0b7a75", "#4a6fdc", "#7b4ab8", "#2f9e44", "#00a3c4", "#c2418c", "#5c3d2e")
_SPREAD_SAMPLES = 10  # fewer say nothing about a distribution
_SPREADS_MAX = 8
_PANELS_MAX = 5  # of one picture: the losses that LTP and ULTIMA compare
_LEGEND_ENTRY = 1.5  # inches that a name and its line take at most

Draw = Callable[[Any], None]


def charts(rows: list[Row]) -> list[tuple[str, Any]]:
    """(title, figure) of every picture that these rows have more than one point for. Needs matplotlib."""
    found = []
    for collective, ranks in _keys(rows, "collective", "ranks"):
        mine = _of(rows, collective=collective, ranks=ranks)
        title = f"{collective}, {ranks} ranks"
        found += [(title, figure) for figure in (_sizes(mine), _losses(mine), _scenarios(mine)) if figure]
    spreads = [figure for figure in map(_spread, _groups(rows, "collective", "ranks", "bytes")) if figure[1]]
    return found + spreads[:_SPREADS_MAX]


def colours(rows: Iterable[Row]) -> dict[str, str]:
    """One for each variant, the same in every picture."""
    peers = list(dict.fromkeys(row["variant"] for row in rows if row["peer"]))
    own = list(dict.fromkeys(row["variant"] for row in rows if not row["peer"]))
    return {
        name: palette[at % len(palette)]
        for names, palette in ((peers, _PEERS), (own, _OWN))
        for at, name in enumerate(names)
    }


def picture(panels: Sequence[Draw], height: float = 3.3, legend: bool = True) -> Any:
    """A figure of several panels side by side, with one legend for all."""
    import matplotlib as mpl

    mpl.use("Agg")  # no display is needed
    from matplotlib import pyplot

    width = max(5.2, 4.4 * len(panels))
    figure, axes = pyplot.subplots(1, len(panels), figsize=(width, height), squeeze=False, layout="constrained")
    for draw, panel in zip(panels, axes[0], strict=True):
        draw(panel)
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(alpha=0.25, linewidth=0.5)
        panel.set_axisbelow(True)
    labels: dict[str, Any] = {}
    for panel in axes[0]:
        labels |= {label: handle for handle, label in zip(*panel.get_legend_handles_labels(), strict=True)}
    if legend and labels:
        columns = max(1, min(5, len(labels), int(width / _LEGEND_ENTRY)))
        figure.legend(labels.values(), labels.keys(), loc="outside lower center", ncols=columns, frameon=False)
    return figure


def render(figure: Any, png: Path) -> str:
    """Writes the picture to `png`, and returns it as SVG for a page; text stays text."""
    import matplotlib as mpl
    from matplotlib import pyplot

    text = io.StringIO()
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "gradwire"}):
        figure.savefig(text, format="svg", metadata={"Date": None})
    figure.savefig(png, dpi=110)
    pyplot.close(figure)
    return re.sub(r"^.*?(?=<svg)", "", text.getvalue(), count=1, flags=re.DOTALL)


def _sizes(rows: list[Row]) -> Any:
    """Time and bus bandwidth by size, in the calmest condition."""
    calm = _calmest(rows)
    sizes = sorted({row["bytes"] for row in calm})
    if len(sizes) < 2:
        return None

    def panel(name: str, title: str) -> Draw:
        def draw(axes: Any) -> None:
            for variant, colour in colours(rows).items():
                mine = sorted(_of(calm, variant=variant), key=lambda row: row["bytes"])
                axes.plot(
                    [row["bytes"] for row in mine], [row[name] for row in mine], "o-", ms=3, color=colour, label=variant
                )
            axes.set_xscale("log", base=2)
            axes.set_yscale("log")
            _plain(axes.yaxis)
            axes.set_xticks(sizes, [size_text(size) for size in sizes], rotation=30)
            axes.set_title(title, loc="left")

        return draw

    return picture([panel("p50_ms", "median time, ms"), panel("busbw_gb_s", "bus bandwidth, GB/s")])


def _losses(rows: list[Row]) -> Any:
    """Median and p99 by loss, one panel for each size."""
    healthy = _of(rows, scenario=HEALTHY, rtt_ms=min(row["rtt_ms"] for row in rows))
    losses = sorted({row["loss"] for row in healthy})
    if len(losses) < 2:
        return None

    def panel(size: int) -> Draw:
        def draw(axes: Any) -> None:
            for variant, colour in colours(rows).items():
                mine = sorted(_of(healthy, variant=variant, bytes=size), key=lambda row: row["loss"])
                places = [losses.index(row["loss"]) for row in mine]
                axes.plot(places, [row["p50_ms"] for row in mine], "o-", ms=3, color=colour, label=variant)
                high = [(at, row[_tail(row)]) for at, row in zip(places, mine, strict=True)]
                axes.plot(*zip(*high, strict=True), "^:", ms=3, color=colour) if high else None
            axes.set_xticks(range(len(losses)), [f"{100 * loss:g} %" for loss in losses])
            axes.set_yscale("log")
            _plain(axes.yaxis)
            axes.set_title(
                f"{size_text(size)}: ms by loss; solid median, dotted {_tail_name(healthy)}", loc="left", fontsize=9
            )

        return draw

    return picture([panel(size) for size in sorted({row["bytes"] for row in healthy})[-3:]])


def _scenarios(rows: list[Row]) -> Any:
    """Median and tail of each variant, healthy beside each scenario, one panel for each size."""
    names = list(dict.fromkeys(row["scenario"] for row in rows))
    if len(names) < 2:
        return None

    def panel(size: int) -> Draw:
        def draw(axes: Any) -> None:
            mine = _of(rows, bytes=size)
            variants = colours(rows)
            for at, (variant, colour) in enumerate(variants.items()):
                for row in _of(mine, variant=variant):
                    place = names.index(row["scenario"]) + 0.5 * ((at + 0.5) / len(variants) - 0.5)
                    low, high = row["p50_ms"], row[_tail(row)]
                    axes.plot([place, place], [low, high], color=colour, linewidth=2, alpha=0.5)
                    axes.plot(place, low, "o", color=colour, label=variant)
                    axes.plot(place, high, "^", color=colour)
            axes.set_xticks(range(len(names)), names)
            axes.set_xlim(-0.5, len(names) - 0.5)
            axes.set_yscale("log")
            _plain(axes.yaxis)
            axes.set_title(f"{size_text(size)}: ms; dot median, triangle {_tail_name(mine)}", loc="left", fontsize=9)

        return draw

    return picture([panel(size) for size in sorted({row["bytes"] for row in rows})[-3:]])


def _spread(rows: list[Row]) -> tuple[str, Any]:
    """Share of the samples that take longer than so long: a panel for each condition."""
    groups = _groups(rows, "rtt_ms", "loss", "scenario")
    # Of many the harshest is among them.
    groups = groups if len(groups) <= _PANELS_MAX else [*groups[: _PANELS_MAX - 1], groups[-1]]
    first = rows[0]
    title = (
        f"{first['collective']}, {first['ranks']} ranks, {size_text(first['bytes'])}: share of samples that took longer"
    )
    if min(row["samples"] for row in rows) < _SPREAD_SAMPLES:
        return title, None

    def panel(mine: list[Row]) -> Draw:
        def draw(axes: Any) -> None:
            for row in mine:
                times = sorted(row["samples_ms"])
                shares = [1 - at / len(times) for at in range(len(times))]
                # Until one of these times has passed, it and all after it take longer; from then on only those after it.
                axes.step(times, shares, where="pre", color=colours(rows)[row["variant"]], label=row["variant"])
            axes.set_xscale("log")
            axes.set_yscale("log")
            _plain(axes.xaxis)
            _plain(axes.yaxis)
            axes.set_xlabel("ms")
            axes.set_title(condition_text(mine[0]), loc="left")

        return draw

    return title, picture([panel(mine) for mine in groups])


def condition_text(row: Row) -> str:
    """The condition of a row, for people."""
    parts = [f"{100 * row['loss']:g} % lost"] if row["loss"] or row["scenario"] == HEALTHY else []
    parts += [f"{row['rtt_ms']:g} ms added"] if row["rtt_ms"] else []
    parts += [row["scenario"]] if row["scenario"] != HEALTHY else []
    return ", ".join(parts)


def _plain(axis: Any) -> None:
    """Numbers as people write them at 1, 2 and 5 of each power of ten."""
    from matplotlib import ticker

    axis.set_major_locator(ticker.LogLocator(subs=(1.0, 2.0, 5.0)))
    axis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(ticker.NullFormatter())


def _tail(row: Row) -> str:
    return "p99_ms" if row["p99_ms"] is not None else "max_ms"


def _tail_name(rows: list[Row]) -> str:
    return "/".join(dict.fromkeys(_tail(row).removesuffix("_ms") for row in rows))


def _calmest(rows: list[Row]) -> list[Row]:
    def trouble(mine: list[Row]) -> tuple[Any, ...]:
        return mine[0]["scenario"] != HEALTHY, mine[0]["loss"], mine[0]["rtt_ms"]

    return min(_groups(rows, "scenario", "loss", "rtt_ms"), key=trouble)


def _of(rows: list[Row], **wanted: Any) -> list[Row]:
    return [row for row in rows if all(row[key] == value for key, value in wanted.items())]


def _keys(rows: list[Row], *names: str) -> list[tuple[Any, ...]]:
    return list(dict.fromkeys(tuple(row[name] for name in names) for row in rows))


def _groups(rows: list[Row], *names: str) -> list[list[Row]]:
    return [_of(rows, **dict(zip(names, key, strict=True))) for key in _keys(rows, *names)]
