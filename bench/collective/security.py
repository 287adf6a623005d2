"""What sealing every datagram costs: bus bandwidth of an all-reduce over loopback with `security` on and off, by turns.

    python bench/collective/security.py --json bench-out/security.json    # 2 ranks, 25 MB, 30 samples of each
    python bench/collective/security.py --quick                           # small: only to see that it works

Each rank is a process with an engine of each kind. A sample is the time from a common start to the end on the slowest rank; the
two take turns, call by call, and every result is verified. The figure is the median of the ratios of neighbouring samples, which
other load on the machine leaves alone. Loopback is the worst case: no link is slower than the cipher, and both ends of it share
the machine's cores. Bus bandwidth is 2 (n - 1) / n times the bytes over the time. MB are of 1024 * 1024 bytes. Exit status: 0
sealed reaches half of the bandwidth in clear, 1 it does not, 2 it could not run.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import allreduce
import click
from gradwire.demo.results import percentile
from gradwire.lab import Link, NamespacesUnavailable, ToolMissing, sandbox
from gradwire.lab.crew import Crew, WorkerFailed, rendezvous_environment
from rich.console import Console
from rich.table import Table

REACHED, MISSED, NOT_RUN = 0, 1, 2
KINDS = ("off", "on")
TARGET = 0.5
SETTLE = 3  # calls of each kind that are not counted: memory and rates find their size
START_AHEAD_S = 0.02

Tell = Callable[[str], None]


def form_groups(crew: Crew, ranks: int) -> dict[str, str | None]:
    """A group of each kind; the cipher of each.

    Raises:
        WorkerFailed: a rank ended, or a group is not sealed as it was asked to be.
    """
    ciphers = {}
    for kind in KINDS:
        answers = crew.order({"do": "engine", "security": kind, "ranks": ranks}, "record")
        records = [answer[-1]["record"] for answer in answers]
        joined = crew.order({"do": "join", "security": kind, "records": records}, "cipher")
        ciphers[kind] = joined[0][-1]["cipher"]
        if (ciphers[kind] is None) != (kind == "off"):
            raise WorkerFailed(f"security = {kind}: cipher {ciphers[kind]}")
    return ciphers


def sample_ms(crew: Crew, ranks: int, kind: str, elems: int) -> float:
    """Milliseconds of one all-reduce.

    Raises:
        WorkerFailed: a rank ended, or its result was wrong.
    """
    order = {"do": "reduce", "security": kind, "ranks": ranks, "elems": elems}
    answers = [answer[-1] for answer in crew.order({**order, "at": time.monotonic() + START_AHEAD_S}, "ended")]
    if not all(answer["right"] for answer in answers):
        raise WorkerFailed(f"a sum is wrong with security = {kind}")
    return (max(answer["ended"] for answer in answers) - min(answer["begun"] for answer in answers)) * 1e3


def measure(ranks: int, elems: int, samples: int, out: Path, tell: Tell) -> dict[str, Any]:
    """All samples by turns.

    Raises:
        WorkerFailed: as `sample_ms`.
    """
    ground = allreduce.Field(
        allreduce.Bench("loopback", ranks, Link(1000.0, 1 << 18, 0.0), (), (), (), samples, 1, 0.0)
    )
    try:
        places = [rendezvous_environment(rank, ranks, ground.address, ground.device, rank) for rank in range(ranks)]
        crew = Crew(ground.spawn, [sys.executable, str(Path(__file__).with_name("security_worker.py"))], places, out)
        try:
            crew.collect("ready")
            ciphers = form_groups(crew, ranks)
            tell(f"sealed with {ciphers['on']}")
            times: dict[str, list[float]] = {kind: [] for kind in KINDS}
            for turn in range(SETTLE + samples):
                for kind in KINDS:
                    took = sample_ms(crew, ranks, kind, elems)
                    if turn >= SETTLE:
                        times[kind].append(took)
                if turn % 10 == 9:
                    tell(f"{turn + 1} of {SETTLE + samples} turns")
        finally:
            crew.close()
    finally:
        ground.close()
    rows = [row_of(ranks, 4 * elems, kind, times[kind]) for kind in KINDS]
    return {"cipher": ciphers["on"], "rows": rows, "ratio": ratio(times["off"], times["on"])}


def row_of(ranks: int, size: int, kind: str, times_ms: list[float]) -> dict[str, Any]:
    """The numbers of one kind."""
    p50 = percentile(times_ms, 50)
    return {
        "security": kind,
        "min_ms": min(times_ms),
        "p50_ms": p50,
        "p99_ms": percentile(times_ms, 99),
        "busbw_mb_s": 2 * (ranks - 1) / ranks * size / allreduce.MB / (p50 / 1e3),
        "samples_ms": [round(sample, 3) for sample in times_ms],
    }


def ratio(clear_ms: list[float], sealed_ms: list[float]) -> float:
    """Bandwidth with sealing as a share of that without."""
    return median(clear / sealed for clear, sealed in zip(clear_ms, sealed_ms, strict=True))


def print_table(console: Console, rows: list[dict[str, Any]]) -> None:
    """One line for each kind."""
    table = Table(title="all-reduce over loopback", title_justify="left")
    for head in ("security", "min ms", "p50 ms", "p99 ms", "bus bandwidth MB/s"):
        table.add_column(head, justify="right")
    for row in rows:
        times = [f"{row[name]:.2f}" for name in ("min_ms", "p50_ms", "p99_ms")]
        table.add_row(row["security"], *times, f"{row['busbw_mb_s']:.0f}")
    console.print(table)


@click.command(help=__doc__, context_settings={"show_default": True})
@click.option("--ranks", default=2, type=click.IntRange(2, 16))
@click.option("--size", default=25.0, type=click.FloatRange(0.001), help="MB of each rank.")
@click.option("--samples", default=30, type=click.IntRange(1), help="Of each kind.")
@click.option("--quick", is_flag=True, help="1 MB, three samples. No verdict.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write the numbers here.")
@click.option("--out", default=Path("bench-out"), type=click.Path(path_type=Path), help="Folder for logs.")
def main(*, ranks: int, size: float, samples: int, quick: bool, json_file: Path | None, out: Path) -> None:
    """Reads the options and measures in the lab's sandbox."""
    if quick:
        size, samples = 1.0, 3
    out.mkdir(parents=True, exist_ok=True)
    console = Console(width=130)

    def tell(text: str) -> None:
        console.print(f"{time.strftime('%H:%M:%S')} {text}", highlight=False)

    def work() -> int:
        try:
            measured = measure(ranks, int(size * allreduce.MB / 4), samples, out, tell)
        except WorkerFailed as error:
            console.print(f"error: {error}", markup=False)
            return NOT_RUN
        settings = {"ranks": ranks, "size_mb": size, "quick": quick}
        results = {"benchmark": "security", "machine": allreduce.machine(), "settings": settings, **measured}
        if json_file is not None:
            json_file.write_text(json.dumps(results, indent=1) + "\n")
        print_table(console, measured["rows"])
        reached = measured["ratio"] >= TARGET
        verdict = "" if quick else f", target {TARGET}: {'reached' if reached else 'MISSED'}"
        console.print(f"sealed reaches {measured['ratio']:.2f} of the bandwidth in clear{verdict}", highlight=False)
        return REACHED if quick or reached else MISSED

    try:
        sys.exit(sandbox.run(work))
    except (ToolMissing, NamespacesUnavailable) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(NOT_RUN)


if __name__ == "__main__":
    main()
