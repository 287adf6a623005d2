"""Draws the demo's results: how long steps take, how long they communicate, what was lost, and what was learned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gradwire.demo.plan import Plan
from gradwire.demo.results import RunResults, percentile, tail_of

_COLOURS = {"gloo": "#8a8f98", "gradwire": "#0b7a75"}
_OTHER = "#b5651d"
_LINE_STYLES = ("-", "--", ":", "-.")


def draw(plan: Plan, results: list[RunResults], path: Path) -> None:
    """Writes one PNG with four panels. Raises OSError where the file cannot be written."""
    import matplotlib as mpl

    mpl.use("Agg")  # no display is needed
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(2, 2, figsize=(11, 7.5), layout="constrained")
    network = f"{plan.workers} workers, {plan.link.rate_mbit:g} Mbit/s for each"
    figure.suptitle(f"The same training over gloo (TCP {plan.congestion_control}) and gradwire: {network}")
    _bars(panels[0][0], results, "step_ms", "Time of a training step (ms)")
    _bars(panels[0][1], results, "comm_ms", "of it with gradients under way (ms)")
    _lost(panels[1][0], results)
    _curves(panels[1][1], plan, results)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)


def _bars(axes: Any, results: list[RunResults], times: str, title: str) -> None:
    """Median as a solid bar, the 99th percentile, or the slowest of few, as a pale one behind it."""
    for at, result in enumerate(results):
        values = getattr(result, times)
        colour = _COLOURS.get(result.run.backend, _OTHER)
        p50, (name, tail) = percentile(values, 50), tail_of(values)
        axes.bar(at, tail, color=colour, alpha=0.35)
        axes.bar(at, p50, color=colour)
        axes.annotate(f"{name} {tail:.0f}", (at, tail), (0, 3), textcoords="offset points", ha="center", fontsize=9)
        axes.annotate(f"p50 {p50:.0f}", (at, p50), (0, -13), textcoords="offset points", ha="center", color="white")
    axes.margins(y=0.12)
    _label(axes, results, title)


def _lost(axes: Any, results: list[RunResults]) -> None:
    for at, result in enumerate(results):
        share = 100 * sum(result.lost_shares) / len(result.lost_shares)
        axes.bar(at, share, color=_COLOURS.get(result.run.backend, _OTHER))
        axes.annotate(f"{share:.3g} %", (at, share), (0, 3), textcoords="offset points", ha="center", fontsize=9)
    axes.set_ylim(0, max(0.1, axes.get_ylim()[1] * 1.12))
    _label(axes, results, "Gradient bytes not in a step's average (%)")


def _curves(axes: Any, plan: Plan, results: list[RunResults]) -> None:
    for result in results:
        steps, losses = zip(*result.validation, strict=True)
        axes.plot(
            steps,
            losses,
            _LINE_STYLES[plan.losses.index(result.run.loss) % len(_LINE_STYLES)],
            color=_COLOURS.get(result.run.backend, _OTHER),
            marker=".",  # a short run has one point
            label=f"{result.run}: {losses[-1]:.3f}",
        )
    axes.set_title("Validation loss (nats for each byte)", loc="left", fontsize=11)
    axes.ticklabel_format(axis="y", useOffset=False)
    axes.set_xlabel("step")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)


def _label(axes: Any, results: list[RunResults], title: str) -> None:
    axes.set_title(title, loc="left", fontsize=11)
    axes.set_xticks(range(len(results)), [str(result.run).replace(", ", "\n") for result in results])
    axes.spines[["top", "right"]].set_visible(False)
