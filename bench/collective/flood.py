"""What a stranger's flood costs a job: the time of a step before, during and after it, memory, and what was refused.

    python bench/collective/flood.py --json bench-out/flood.json    # 2 ranks, steps of 20 ms and 1 MB, 10 s of flood
    python bench/collective/flood.py --quick                        # a second of flood: only to see that it works

Three hosts of the lab on one switch. Two are ranks, which compute for a while and then all-reduce, exactly and sealed; the third,
which knows rank 0's address but no secret, sends datagrams to it at the rate of its own link, or `--share` of it. What the flood
takes of rank 0's port no program on a host gets back: gradwire yields to it as to any other traffic. Every result is verified. Judged
is the mean step, since a step that hung for seconds is one step. Exit status: 0 it at most doubles, nothing was wrong and memory
grew by less than 16 MB; 1 not so; 2 it could not run.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import frame
from gradwire.bench.display import as_written
from gradwire.bench.plan import MB
from gradwire.demo.results import percentile
from gradwire.lab import Link
from gradwire.lab.cluster import DEVICE
from gradwire.lab.crew import Crew, WorkerFailed, rendezvous_environment
from gradwire.lab.soft_cluster import SoftCluster
from rich.console import Console

RANKS, STRANGER = 2, 2  # the stranger's host comes after the ranks'
PORT = 47400
DATAGRAM_BYTES = 1472
FRAME_BYTES = DATAGRAM_BYTES + 8 + 20 + 14
SETTLE_STEPS = 5
START_AHEAD_S = 0.005
SLOWER_MOST, GROWN_MOST_KB = 2.0, 16 << 10


def step_ms(crew: Crew, compute_ms: float, elems: int) -> float:
    """Milliseconds of one step on the slowest rank.

    Raises:
        WorkerFailed: a rank ended, or its result was wrong.
    """
    order = {"do": "step", "compute_ms": compute_ms, "elems": elems, "at": time.monotonic() + START_AHEAD_S}
    answers = [answer[-1] for answer in crew.order(order, "ended")]
    if not all(answer["right"] for answer in answers):
        raise WorkerFailed("a sum is wrong")
    return (max(answer["ended"] for answer in answers) - min(answer["begun"] for answer in answers)) * 1e3


def steps_for(seconds: float, step: Callable[[], float]) -> list[float]:
    """Steps until the time is over, at least one."""
    end, times = time.monotonic() + seconds, []
    while not times or time.monotonic() < end:
        times.append(step())
    return times


def measure(
    link: Link, *, share: float, compute_ms: float, elems: int, seconds: float, out: Path, tell: frame.Tell
) -> dict[str, Any]:
    """The three phases.

    Raises:
        WorkerFailed: as `step_ms`.
        LabError: the network cannot be built.
    """
    with SoftCluster(RANKS + 1, link) as cluster:
        places = [rendezvous_environment(rank, RANKS, cluster.address(0), DEVICE) for rank in range(RANKS)]
        meeting = {"GRADWIRE_RENDEZVOUS": f"{cluster.address(0)}:29500", "GRADWIRE_SECURITY": "on"}
        command = [sys.executable, str(Path(__file__).with_name("flood_worker.py"))]
        crew = Crew(cluster.spawn, command, [place | meeting for place in places], out)
        try:
            crew.collect("ready")

            def step() -> float:
                return step_ms(crew, compute_ms, elems)

            for _ in range(SETTLE_STEPS):
                step()
            calm_s = max(1.0, seconds / 3)
            before, seen_before = steps_for(calm_s, step), look(crew)
            tell(f"before: {len(before)} steps, median {percentile(before, 50):.1f} ms; the flood begins")
            flood = start_flood(cluster, share * link.rate_mbit, seconds)
            during = steps_for(seconds, step)
            sent = int(flood.communicate(timeout=seconds + 30)[0])
            seen_during = look(crew)
            tell(f"during: {len(during)} steps, median {percentile(during, 50):.1f} ms; {sent} datagrams sent")
            after = steps_for(calm_s, step)
            tell(f"after: {len(after)} steps, median {percentile(after, 50):.1f} ms")
        finally:
            crew.close()
    rows = [row_of(name, times) for name, times in (("before", before), ("during", during), ("after", after))]
    return {
        "rows": rows,
        "datagrams_sent": sent,
        "refused": {name: value - seen_before[0]["refused"][name] for name, value in seen_during[0]["refused"].items()},
        "grown_kb": max(
            now["resident_kb"] - then["resident_kb"] for then, now in zip(seen_before, seen_during, strict=True)
        ),
        "slower": rows[1]["mean_ms"] / rows[0]["mean_ms"],
    }


def start_flood(cluster: SoftCluster, rate_mbit: float, seconds: float) -> subprocess.Popen[bytes]:
    """The stranger, on its own host."""
    program = str(Path(__file__).with_name("flood_stranger.py"))
    arguments = [
        cluster.address(0),
        str(PORT),
        str(seconds),
        str(DATAGRAM_BYTES),
        str(rate_mbit * 1e6 / 8 / FRAME_BYTES),
    ]
    return cluster.spawn(STRANGER, [sys.executable, program, *arguments], stdout=subprocess.PIPE)


def look(crew: Crew) -> list[dict[str, Any]]:
    """Resident memory of each rank, and the datagrams that it refused."""
    return [answer[-1] for answer in crew.order({"do": "look"}, "resident_kb")]


def row_of(phase: str, times_ms: list[float]) -> dict[str, Any]:
    """The numbers of one phase."""
    return {
        "phase": phase,
        "steps": len(times_ms),
        "mean_ms": sum(times_ms) / len(times_ms),
        "p50_ms": percentile(times_ms, 50),
        "p99_ms": percentile(times_ms, 99),
        "samples_ms": [round(sample, 3) for sample in times_ms],
    }


def print_table(console: Console, measured: dict[str, Any]) -> None:
    """One line for each phase."""
    lines = []
    for row in measured["rows"]:
        times = [f"{row[name]:.1f}" for name in ("mean_ms", "p50_ms", "p99_ms")]
        lines.append([row["phase"], str(row["steps"]), *times])
    console.print(frame.table("steps and a stranger's flood", ("phase", "steps", "mean ms", "p50 ms", "p99 ms"), lines))
    refused = ", ".join(f"{name} {count}" for name, count in measured["refused"].items())
    console.print(f"{measured['datagrams_sent']} datagrams sent by the stranger; rank 0: {refused}", highlight=False)


def reached(measured: dict[str, Any]) -> bool:
    """Whether steps took at most twice the time and memory stayed flat."""
    return bool(measured["slower"] <= SLOWER_MOST and measured["grown_kb"] < GROWN_MOST_KB)


@click.command(help=as_written(__doc__), context_settings={"show_default": True})
@click.option("--rate", default=200.0, type=click.FloatRange(1), help="Mbit/s of each host's link.")
@click.option("--rtt", default=1.0, type=click.FloatRange(0), help="Round trip in ms.")
@click.option("--compute", "compute_ms", default=20.0, type=click.FloatRange(0), help="ms of computing in a step.")
@click.option("--size", default=1.0, type=click.FloatRange(0.001), help="MB that a step reduces.")
@click.option("--share", default=1.0, type=click.FloatRange(0.01), help="Rate of the flood, as a share of the link's.")
@click.option("--seconds", default=10.0, type=click.FloatRange(0.5), help="Of flood.")
@frame.common_options("A second.")
def main(
    *,
    rate: float,
    rtt: float,
    compute_ms: float,
    size: float,
    share: float,
    seconds: float,
    quick: bool,
    json_file: Path | None,
    out: Path,
) -> None:
    """Reads the options and measures in the lab's sandbox."""
    seconds = 1.0 if quick else seconds
    link = Link(rate, delay_ms=rtt / 2)

    def take(tell: frame.Tell) -> dict[str, Any]:
        elems = int(size * MB / 4)
        return measure(link, share=share, compute_ms=compute_ms, elems=elems, seconds=seconds, out=out, tell=tell)

    def conclude(console: Console, results: dict[str, Any]) -> bool:
        print_table(console, results)
        grown = f"steps take {results['slower']:.2f} times as long, memory {results['grown_kb'] / 1024:+.1f} MB"
        verdict = "reached" if reached(results) else "MISSED"
        console.print(f"{grown} (target: at most {SLOWER_MOST:g} and 16 MB: {verdict})", highlight=False)
        return reached(results)

    chosen = {"rate_mbit": rate, "rtt_ms": rtt, "compute_ms": compute_ms, "size_mb": size}
    frame.run("flood", frame.Settings(quick, json_file, out), chosen, take, conclude)


if __name__ == "__main__":
    main()
