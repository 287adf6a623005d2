"""Draws a plan: where each queue begins to drop, what it holds, and what it is expected to lose."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from gradwire.switch.errors import SwitchError
from gradwire.switch.plan import SwitchPlan

_SMALL, _LARGE, _ROOM = "#b5651d", "#0b7a75", "#d8dbe0"
_LEAST = 1e-15  # less is no loss at all, and the axis is logarithmic


def draw(plan: SwitchPlan, path: Path) -> None:
    """Writes a picture with two panels, in the format that the file's suffix names; where it has none that of PNG is added.

    Raises:
        SwitchError: matplotlib does not know the format, or is not installed.
        OSError: the file cannot be written.
    """
    try:
        import matplotlib as mpl
    except ImportError:
        raise SwitchError("a picture needs matplotlib: pip install 'gradwire[switch]'") from None
    mpl.use("Agg")  # no display is needed
    from matplotlib import pyplot

    figure = figure_of(plan)
    try:
        figure.savefig(path, dpi=130)
    except ValueError as error:
        raise SwitchError(f"--plot {path}: {error}") from None
    finally:
        pyplot.close(figure)


def figure_of(plan: SwitchPlan) -> Any:
    """The picture as matplotlib's figure: queues on the left, expected losses of those with a threshold on the right."""
    from matplotlib import pyplot

    figure, (left, right) = pyplot.subplots(1, 2, figsize=(12, 4.8), layout="constrained")
    figure.suptitle(
        f"{plan.rate_mbit:g} Mbit/s, {plan.buffer_bytes / 1000:g} KB of buffer; the queue on top is served first"
    )
    _draw_queues(left, plan)
    _draw_losses(right, plan)
    return figure


def _draw_queues(axes: Any, plan: SwitchPlan) -> None:
    names = [f"{queue.name}  (DSCP {', '.join(map(str, queue.code_points)) or 'others'})" for queue in plan.queues]
    rows = range(len(names))
    axes.barh(
        rows, [queue.limit_bytes / 1000 for queue in plan.queues], color=_ROOM, label="limit L: everything is dropped"
    )
    axes.barh(rows, [(queue.threshold_bytes or 0) / 1000 for queue in plan.queues], color=_SMALL, height=0.5,
              label="threshold S: unimportant packets are dropped")  # fmt: skip
    axes.set_yticks(rows, names)
    axes.invert_yaxis()
    axes.set_xlabel("KB")
    axes.legend(fontsize=8)


def _draw_losses(axes: Any, plan: SwitchPlan) -> None:
    data = [(row, queue) for row, queue in enumerate(plan.queues) if queue.small_loss is not None]
    shown = [
        max(_LEAST, loss) for _, queue in data for loss in (queue.small_loss, queue.large_loss) if loss is not None
    ]
    start = min(shown) / 10
    for offset, name, colour in ((-0.2, "small", _SMALL), (0.2, "large", _LARGE)):
        shares = [max(_LEAST, getattr(queue, f"{name}_loss")) for _, queue in data]
        places = [row + offset for row, _ in data]
        axes.barh(places, [share - start for share in shares], 0.4, left=start, color=colour, label=f"{name} gradients")
        for place, share in zip(places, shares, strict=True):
            axes.annotate(f"{share:.1e}", (share, place), (3, 0), textcoords="offset points", va="center", fontsize=7)
    axes.set_xscale("log")
    axes.set_xlim(start, max(1.0, 30 * max(shown)))
    axes.set_yticks([row for row, _ in data], [queue.name for _, queue in data])
    axes.invert_yaxis()
    axes.set_xlabel("expected share lost (M/M/1/m, MLT appendix B)")
    axes.legend(fontsize=8)
