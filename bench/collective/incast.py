"""A small all-reduce by transpose gets shorter with the incast factor: ULTIMA's figure 14, over sockets.

    python bench/collective/incast.py --json bench-out/incast.json    # eight ranks, 1 ms round trip, user-mode-linux switch
    python bench/collective/incast.py --quick                         # four ranks over loopback: only to see that it works

Every rank is a process in a network namespace of its own. The incast factors take turns, call by call; a sample is the time from
a common start to the end on the slowest rank. A call of I takes 2 * ceil((ranks - 1) / I) rounds, each about one round trip.
`make bench-incast` prints the same in the simulator's virtual time, where the machine does not matter. The picture shows both,
and the paper's training times, as multiples of I = 1. Exit status: 0 the time falls with every step of I, 1 not so, 2 it could not run.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import allreduce
import click
from gradwire.demo.results import percentile
from gradwire.lab import LabError, Link, NamespacesUnavailable, ToolMissing, sandbox
from gradwire.lab.crew import Crew, WorkerFailed, rendezvous_environment
from gradwire.lab.probe import probe_round_trip_ms
from rich.console import Console
from rich.table import Table

REACHED, MISSED, NOT_RUN = 0, 1, 2
SWITCH_RTT_MS = 0.4  # what the user-mode-linux switch adds by itself
PAPER_S = {1: 913.71, 3: 430.88, 5: 284.56}  # training of Lenet-5, ULTIMA section 5.3
SIMULATED_MS = {1: 13.3, 2: 7.2, 3: 5.1, 5: 3.1}  # eight ranks, 8 KB, 1 ms (`make bench-incast`)
SETTLE = 2  # calls of each factor that are not counted: the connections measure their round trips
START_AHEAD_S = 0.05

Tell = Callable[[str], None]


def rounds(ranks: int, incast: int) -> int:
    """Rounds of both stages."""
    return 2 * -(-(ranks - 1) // incast)


def form_groups(crew: Crew, ranks: int, incasts: tuple[int, ...]) -> None:
    """A group for each factor."""
    for incast in incasts:
        order = {"do": "engine", "incast": incast, "ranks": ranks}
        records = [answer[-1]["record"] for answer in crew.order(order, "record")]
        crew.order({"do": "join", "incast": incast, "records": records}, "joined")


def sample_ms(crew: Crew, ranks: int, incast: int, elems: int) -> float:
    """Milliseconds of one all-reduce.

    Raises:
        WorkerFailed: a rank ended, or its result was wrong.
    """
    at = time.monotonic() + START_AHEAD_S
    order = {"do": "reduce", "incast": incast, "ranks": ranks, "elems": elems, "at": at}
    answers = [answer[-1] for answer in crew.order(order, "ended")]
    if wrong := sum(answer["wrong"] for answer in answers):
        raise WorkerFailed(f"{wrong} elements are wrong at I = {incast}")
    return (max(answer["ended"] for answer in answers) - min(answer["begun"] for answer in answers)) * 1e3


def measure(
    *,
    network: str,
    ranks: int,
    link: Link,
    incasts: tuple[int, ...],
    elems: int,
    samples: int,
    out: Path,
    tell: Tell,
) -> dict[str, Any]:
    """All samples by turns.

    Raises:
        WorkerFailed: as `sample_ms`.
        LabError: the network cannot be built.
    """
    bench = allreduce.Bench(network, ranks, link, (), (), (), samples, 1, 0.0)
    ground = allreduce.Field(bench)
    try:
        rtt_ms = probe_round_trip_ms(ground.cluster) if ground.cluster else None
        tell("loopback" if rtt_ms is None else f"round trip {rtt_ms:.2f} ms")
        local = [0 if ground.cluster else rank for rank in range(ranks)]
        environments = [
            rendezvous_environment(rank, ranks, ground.address, ground.device, local[rank]) for rank in range(ranks)
        ]
        command = [sys.executable, str(Path(__file__).with_name("incast_worker.py"))]
        crew = Crew(ground.spawn, command, environments, out)
        try:
            crew.collect("ready")
            form_groups(crew, ranks, incasts)
            times: dict[int, list[float]] = {incast: [] for incast in incasts}
            for turn in range(SETTLE + samples):
                for incast in incasts:
                    took = sample_ms(crew, ranks, incast, elems)
                    if turn >= SETTLE:
                        times[incast].append(took)
                if turn % 10 == 9:
                    tell(f"{turn + 1} of {SETTLE + samples} turns")
        finally:
            crew.close()
    finally:
        ground.close()
    rows = [row_of(ranks, incast, times[incast]) for incast in incasts]
    return {"rtt_ms": rtt_ms, "rows": rows}


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
    table = Table(title="all-reduce by transpose, ms", title_justify="left")
    for head in ("I", "rounds", "min", "p50", "p99", "p50 of I = 1"):
        table.add_column(head, justify="right")
    for row in rows:
        times = [f"{row[name]:.2f}" for name in ("min_ms", "p50_ms", "p99_ms")]
        table.add_row(str(row["incast"]), str(row["rounds"]), *times, f"{row['p50_ms'] / rows[0]['p50_ms']:.2f}")
    console.print(table)


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


@click.command(help=__doc__, context_settings={"show_default": True})
@click.option("--network", default="uml", type=click.Choice(["uml", "kernel", "loopback"]), help="The switch.")
@click.option("--ranks", default=8, type=click.IntRange(3, 16))
@click.option("--rate", default=1000.0, help="Mbit/s of each host's link.")
@click.option("--rtt", default=1.0, type=click.FloatRange(SWITCH_RTT_MS), help="Round trip in ms, with uml.")
@click.option("--elems", default=2000, type=click.IntRange(1), help="float32 elements.")
@click.option("--samples", default=40, type=click.IntRange(1), help="Of each incast factor.")
@click.option("--quick", is_flag=True, help="Four ranks over loopback, three samples of I = 1 and 3. No verdict.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write the numbers here.")
@click.option("--out", default=Path("bench-out"), type=click.Path(path_type=Path), help="Folder for picture and logs.")
def main(
    *,
    network: str,
    ranks: int,
    rate: float,
    rtt: float,
    elems: int,
    samples: int,
    quick: bool,
    json_file: Path | None,
    out: Path,
) -> None:
    """Reads the options and measures in the lab's sandbox."""
    incasts: tuple[int, ...] = (1, 2, 3, 5)
    if quick:
        network, ranks, samples, incasts = "loopback", 4, 3, (1, 3)
    out.mkdir(parents=True, exist_ok=True)
    console = Console(width=130)
    link = Link(rate, 256 * 1024, (rtt - SWITCH_RTT_MS) / 2 if network == "uml" else 0.0)

    def tell(text: str) -> None:
        console.print(f"{time.strftime('%H:%M:%S')} {text}", highlight=False)

    def work() -> int:
        try:
            measured = measure(
                network=network,
                ranks=ranks,
                link=link,
                incasts=incasts,
                elems=elems,
                samples=samples,
                out=out,
                tell=tell,
            )
        except (WorkerFailed, LabError) as error:
            console.print(f"error: {error}", markup=False)
            return NOT_RUN
        settings = {"network": network, "ranks": ranks, "rate_mbit": rate, "elems": elems, "quick": quick}
        results = {"benchmark": "incast", "machine": allreduce.machine(), "settings": settings, **measured}
        if json_file is not None:
            json_file.write_text(json.dumps(results, indent=1) + "\n")
        print_table(console, measured["rows"])
        draw(measured["rows"], out / "incast.png")
        console.print(f"drawn: {out / 'incast.png'}")
        if quick:
            return REACHED
        console.print(f"falls with I: {'reached' if falls(measured['rows']) else 'MISSED'}", highlight=False)
        return REACHED if falls(measured["rows"]) else MISSED

    try:
        sys.exit(sandbox.run(work))
    except (ToolMissing, NamespacesUnavailable) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(NOT_RUN)


if __name__ == "__main__":
    main()
