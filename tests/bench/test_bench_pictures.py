"""What the pictures of `gradwire bench` show."""

from __future__ import annotations

from typing import Any

import pytest
from gradwire.bench.figures import charts, condition_text

pytest.importorskip("matplotlib")

VARIANTS = ("gloo-cubic", "gloo-reno", "gloo-bbr", "gradwire-auto")
LOSSES = (0.0, 0.0001, 0.001, 0.005, 0.01, 0.05)


def row(variant: str, loss: float) -> dict[str, Any]:
    times = [100.0 + at for at in range(20)]
    return {
        "variant": variant, "peer": variant.startswith("gloo"), "collective": "all_reduce", "ranks": 4, "bytes": 1 << 20,
        "loss": loss, "rtt_ms": 0.6, "scenario": "healthy", "samples": len(times), "samples_ms": times, "p50_ms": 110.0,
        "p95_ms": 118.0, "p99_ms": None, "max_ms": 119.0, "busbw_gb_s": 0.01,
    }  # fmt: skip


def drawn(losses: tuple[float, ...]) -> list[Any]:
    return [figure for _, figure in charts([row(variant, loss) for loss in losses for variant in VARIANTS])]


@pytest.mark.parametrize("count", [2, 5, 6])
def test_the_spread_is_drawn_for_the_harshest_condition_too(count: int) -> None:
    *_, spread = drawn(LOSSES[:count])
    titles = [panel.get_title(loc="left") for panel in spread.axes]
    assert titles[0] == condition_text(row("gloo-cubic", LOSSES[0]))
    assert titles[-1] == condition_text(row("gloo-cubic", LOSSES[count - 1]))
    assert len(titles) == min(count, 5)


def test_the_legend_is_whole() -> None:
    for figure in drawn(LOSSES[:2]):
        figure.canvas.draw()
        (legend,) = figure.legends
        box = legend.get_window_extent()
        assert box.x0 >= 0
        assert box.x1 <= figure.bbox.width
