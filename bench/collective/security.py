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

from pathlib import Path
from statistics import median
from typing import Any

import click
import frame
from gradwire.bench.display import as_written
from gradwire.bench.plan import MB, NetworkPlan
from gradwire.demo.results import percentile
from gradwire.lab.crew import WorkerFailed
from rich.console import Console

KINDS = ("off", "on")
TARGET = 0.5
SETTLE = 3  # calls of each kind that are not counted: memory and rates find their size


def measure(engines: frame.Engines, out: Path, tell: frame.Tell) -> dict[str, Any]:
    """All samples by turns.

    Raises:
        WorkerFailed: as `Engines.measure`, or a group is not sealed as it was asked to be.
    """
    facts, times = engines.measure(out, tell)
    for kind, cipher in facts["ciphers"].items():
        if (cipher is None) != (kind == "off"):
            raise WorkerFailed(f"security = {kind}: cipher {cipher}")
    rows = [row_of(engines.ranks, 4 * engines.elems, kind, times[kind]) for kind in KINDS]
    return {"cipher": facts["ciphers"]["on"], "rows": rows, "ratio": ratio(times["off"], times["on"])}


def row_of(ranks: int, size: int, kind: str, times_ms: list[float]) -> dict[str, Any]:
    """The numbers of one kind."""
    p50 = percentile(times_ms, 50)
    return {
        "security": kind,
        "min_ms": min(times_ms),
        "p50_ms": p50,
        "p99_ms": percentile(times_ms, 99),
        "busbw_mb_s": 2 * (ranks - 1) / ranks * size / MB / (p50 / 1e3),
        "samples_ms": [round(sample, 3) for sample in times_ms],
    }


def ratio(clear_ms: list[float], sealed_ms: list[float]) -> float:
    """Bandwidth with sealing as a share of that without."""
    return median(clear / sealed for clear, sealed in zip(clear_ms, sealed_ms, strict=True))


def conclude(console: Console, results: dict[str, Any]) -> bool:
    """Prints one line for each kind, and what the ratio says."""
    lines = []
    for row in results["rows"]:
        times = [f"{row[name]:.2f}" for name in ("min_ms", "p50_ms", "p99_ms")]
        lines.append([row["security"], *times, f"{row['busbw_mb_s']:.0f}"])
    heads = ("security", "min ms", "p50 ms", "p99 ms", "bus bandwidth MB/s")
    console.print(frame.table(f"all-reduce over loopback, {results['cipher']}", heads, lines))
    reached: bool = results["ratio"] >= TARGET
    words = f"sealed reaches {results['ratio']:.2f} of the bandwidth in clear, target {TARGET}"
    console.print(f"{words}: {'reached' if reached else 'MISSED'}", highlight=False)
    return reached


@click.command(help=as_written(__doc__), context_settings={"show_default": True})
@click.option("--ranks", default=2, type=click.IntRange(2, 16))
@click.option("--size", default=25.0, type=click.FloatRange(0.001), help="MB of each rank.")
@click.option("--samples", default=30, type=click.IntRange(1), help="Of each kind.")
@frame.common_options("1 MB, three samples.")
def main(*, ranks: int, size: float, samples: int, quick: bool, json_file: Path | None, out: Path) -> None:
    """Reads the options and measures in the lab's sandbox."""
    if quick:
        size, samples = 1.0, 3
    configs = {kind: {"security": kind} for kind in KINDS}
    engines = frame.Engines(NetworkPlan("loopback"), ranks, configs, int(size * MB / 4), samples, SETTLE)
    settings = frame.Settings(quick, json_file, out)
    frame.run(
        "security", settings, {"ranks": ranks, "size_mb": size}, lambda tell: measure(engines, out, tell), conclude
    )


if __name__ == "__main__":
    main()
