"""What the pictures of `gradwire bench` show."""

from __future__ import annotations

from typing import Any

import pytest
from gradwire.bench.figures import charts, condition_text
from gradwire.bench.results import percent_of

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


@pytest.mark.parametrize("count", [20, 100])
def test_the_spread_shows_the_share_of_the_samples_that_take_longer(count: int) -> None:
    from matplotlib import cbook

    times = [100.0 + at for at in range(count)]
    one = {**row("gradwire-auto", 0.0), "samples": count, "samples_ms": times, "p99_ms": percent_of(times, "p99_ms")}
    ((_, spread),) = charts([one])
    (line,) = spread.axes[0].lines
    place, share = cbook.STEP_LOOKUP_MAP[line.get_drawstyle()](*line.get_data())
    for at in (0, count // 2, count - 2):
        above = next(y for x, y in zip(place, share, strict=True) if x > times[at] + 0.5)
        assert above == pytest.approx((count - 1 - at) / count)
        assert place[-1] == times[-1]
    if count == 100:
        assert one["p99_ms"] == times[98], "above which is one of a hundred"
