"""A small all-reduce by transpose gets shorter with the incast factor: ULTIMA's figure 14, over sockets.

    python bench/collective/incast.py --json bench-out/incast.json    # eight ranks, 1 ms round trip, user-mode-linux switch
    python bench/collective/incast.py --quick                         # four ranks over loopback: only to see that it works

Every rank is a process in a network namespace of its own. The incast factors take turns, call by call; a sample is the time from
a common start to the end on the slowest rank. A call of I takes 2 * ceil((ranks - 1) / I) rounds, each about one round trip.
`make bench-incast` prints the same in the simulator's virtual time, where the machine does not matter. The picture shows both,
and the paper's training times, as multiples of I = 1. Exit status: 0 the time falls with every step of I, 1 not so, 2 it could not run.
"""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import click
import frame
from gradwire.bench.display import as_written
from gradwire.bench.plan import NetworkPlan
from gradwire.demo.results import percentile
from rich.console import Console

SWITCH_RTT_MS = 0.4  # what the user-mode-linux switch adds by itself
PAPER_S = {1: 913.71, 3: 430.88, 5: 284.56}  # training of Lenet-5, ULTIMA section 5.3
SIMULATED_MS = {1: 13.3, 2: 7.2, 3: 5.1, 5: 3.1}  # eight ranks, 8 KB, 1 ms (`make bench-incast`)
SETTLE = 2  # calls of each factor that are not counted: the connections measure their round trips
TRANSPOSE = 2  # code of gradwire_collectives


def rounds(ranks: int, incast: int) -> int:
    """Rounds of both stages."""
    return 2 * -(-(ranks - 1) // incast)


def row_of(ranks: int, incast: int, times_ms: list[float]) -> dict[str, Any]:
    """The numbers of one factor."""
    return {
        "incast": incast,
        "rounds": rounds(ranks, incast),
        "min_ms": min(times_ms),
        "p50_ms": percentile(times_ms, 50),
        "p99_ms": percentile(times_ms, 99),
        "samples_ms": [round(sample, 3) for sample in times_ms],
    }


def falls(rows: list[dict[str, Any]]) -> bool:
    """Whether the median falls with each step of I."""
    return all(before["p50_ms"] > after["p50_ms"] for before, after in pairwise(rows))


def print_table(console: Console, rows: list[dict[str, Any]]) -> None:
    """One line for each factor."""
    lines = []
    for row in rows:
        times = [f"{row[name]:.2f}" for name in ("min_ms", "p50_ms", "p99_ms")]
        lines.append([str(row["incast"]), str(row["rounds"]), *times, f"{row['p50_ms'] / rows[0]['p50_ms']:.2f}"])
    heads = ("I", "rounds", "min", "p50", "p99", "p50 of I = 1")
    console.print(frame.table("all-reduce by transpose, ms", heads, lines))


def draw(rows: list[dict[str, Any]], file: Path) -> None:
    """Times as multiples of I = 1: over sockets, in the simulator, in the paper."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6.4, 3.6), layout="constrained")
    measured = {row["incast"]: row["p50_ms"] for row in rows}
    series = {
        "sockets, 1 ms (median)": (measured, "#0b7a75", "o-"),
        "simulator, 1 ms": (SIMULATED_MS, "#b5651d", "s--"),
        "ULTIMA, figure 14 (training)": (PAPER_S, "#8a8f98", "^:"),
    }
    for label, (times, colour, style) in series.items():
        axes.plot(list(times), [time / times[1] for time in times.values()], style, color=colour, label=label)
    axes.set_xticks(sorted({*measured, *SIMULATED_MS}))
    axes.set_xlabel("incast factor I")
    axes.set_ylabel("time, I = 1 is 1")
    axes.set_ylim(bottom=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(file, dpi=110)


@click.command(help=as_written(__doc__), context_settings={"show_default": True})
@click.option("--network", default="uml", type=click.Choice(["uml", "kernel", "loopback"]), help="The switch.")
@click.option("--ranks", default=8, type=click.IntRange(3, 16))
@click.option("--rate", default=1000.0, help="Mbit/s of each host's link.")
@click.option("--rtt", default=1.0, type=click.FloatRange(SWITCH_RTT_MS), help="Round trip in ms, with uml.")
@click.option("--elems", default=2000, type=click.IntRange(1), help="float32 elements.")
@click.option("--samples", default=40, type=click.IntRange(1), help="Of each incast factor.")
@frame.common_options("Four ranks over loopback, three samples of I = 1 and 3.")
def main(
    *, network: str, ranks: int, rate: float, rtt: float, elems: int, samples: int, quick: bool, json_file: Path | None,
    out: Path,
) -> None:  # fmt: skip
    """Reads the options and measures in the lab's sandbox."""
    incasts: tuple[int, ...] = (1, 2, 3, 5)
    if quick:
        network, ranks, samples, incasts = "loopback", 4, 3, (1, 3)
    engines = frame.Engines(
        NetworkPlan(network, rate),
        ranks,
        {str(incast): {"incast": incast} for incast in incasts},
        elems,
        samples,
        SETTLE,
        rtt - SWITCH_RTT_MS if network == "uml" else 0.0,
        TRANSPOSE,
    )

    def measure(tell: frame.Tell) -> dict[str, Any]:
        facts, times = engines.measure(out, tell)
        rows = [row_of(ranks, incast, times[str(incast)]) for incast in incasts]
        return {"rtt_ms": facts["rtt_ms"], "rows": rows}

    def conclude(console: Console, results: dict[str, Any]) -> bool:
        print_table(console, results["rows"])
        draw(results["rows"], out / "incast.png")
        reached = falls(results["rows"])
        console.print(f"drawn: {out / 'incast.png'}")
        console.print(f"falls with I: {'reached' if reached else 'MISSED'}", highlight=False)
        return reached

    chosen = {"network": network, "ranks": ranks, "rate_mbit": None if network == "loopback" else rate, "elems": elems}
    frame.run("incast", frame.Settings(quick, json_file, out), chosen, measure, conclude)


if __name__ == "__main__":
    main()
