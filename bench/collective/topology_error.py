"""What best effort costs by schedule: ULTIMA's table 2, the mean squared error of ring, parameter server and transpose.

    python bench/collective/topology_error.py --json bench-out/topology_error.json    # minutes
    python bench/collective/topology_error.py --quick                                 # one run of each

The real groups over the simulator's network (`gradwire-sim topology-error`): eight ranks under preset `ultima` at incast factor
1, 1 Gbit/s, round trip 0.2 ms, ports that hold 256 KB; the parameter server is a process of its own. A packet in a thousand is
lost by chance, more where a port overflows. Counted is how many ranks' values are missing from each element of the result; that
gives the mean squared error of any gradients, here of independent ones, relative to the mean square of their mean. Virtual time:
a busy machine changes nothing. Exit status: 0 ring > parameter server > transpose, 1 not so, 2 it could not run.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import click
import frame
from gradwire.bench.display import as_written
from rich.console import Console

ROOT = Path(__file__).resolve().parents[2]
PAPER = {"ring": 14.55, "parameter server": 9.90, "transpose": 2.47}


def measure(settings: dict[str, Any]) -> list[dict[str, Any]]:
    """What `gradwire-sim` counted, one row for each schedule.

    Raises:
        OSError: there is no Rust, it could not be built, or a run broke a promise.
    """
    # Of the whole workspace, whose dependencies `make test` has built with the same features.
    command = [
        "cargo",
        "build",
        "--quiet",
        "--profile",
        "test",
        "--locked",
        "--offline",
        "--workspace",
        "--bin",
        "gradwire-sim",
    ]
    _run(command)
    simulator = Path(os.environ.get("CARGO_TARGET_DIR", ROOT / "target"), "debug", "gradwire-sim")
    options = [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]
    done = _run([str(simulator), "topology-error", *options])
    return [error_of(json.loads(line)) for line in done.stdout.splitlines()]


def _run(command: list[str]) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise OSError(f"{' '.join(command)} ended with {done.returncode}\n{done.stderr}")
    return done


def error_of(row: dict[str, Any]) -> dict[str, Any]:
    """The row with its errors: of independent gradients, and of gradients that are the same on all ranks.

    A sum of `N` gradients of variance 1, divided by `N`, that lacks `k` of them is off by `k / N**2` in the mean square where they are
    independent, by `k**2 / N**2` where they are equal; the mean itself has the mean square `1 / N`, or 1.
    """
    ranks, elems = row["ranks"], row["elems"]
    return {
        **row,
        "relative_error": row["values"] / elems / ranks,
        "relative_error_equal": row["values_squared"] / elems / ranks**2,
    }


def reached(rows: list[dict[str, Any]]) -> bool:
    """Whether the paper's order holds."""
    ring, server, transpose = (row["relative_error"] for row in rows)
    return bool(ring > server > transpose > 0)


def print_table(console: Console, rows: list[dict[str, Any]]) -> None:
    """One line for each schedule."""
    heads = ("schedule", "error", "to transpose", "equal gradients", "paper", "to transpose", "lost", "overflowed")
    lines = []
    least = rows[-1]["relative_error"] or float("nan")
    for row in rows:
        paper = PAPER[row["schedule"]]
        lines.append(
            [
                row["schedule"],
                f"{row['relative_error'] * 1e3:.3f}",
                f"{row['relative_error'] / least:.2f}",
                f"{row['relative_error_equal'] * 1e3:.3f}",
                f"{paper:.2f}",
                f"{paper / PAPER['transpose']:.2f}",
                f"{row['lost'] / row['packets']:.3%}",
                f"{row['overflowed'] / row['packets']:.3%}",
            ]
        )
    console.print(frame.table("squared error / squared mean gradient, times 1000", heads, lines))


def draw(rows: list[dict[str, Any]], file: Path) -> None:
    """Errors as multiples of the transpose's, beside the paper's."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6.4, 3.4), layout="constrained")
    least = rows[-1]["relative_error"] or float("nan")
    series = {
        "gradwire": [row["relative_error"] / least for row in rows],
        "ULTIMA, table 2": [PAPER[row["schedule"]] / PAPER["transpose"] for row in rows],
    }
    for at, (label, heights) in enumerate(series.items()):
        places = [index + 0.36 * (at - 0.5) for index in range(len(rows))]
        bars = axes.bar(places, heights, 0.34, label=label, color=("#0b7a75", "#8a8f98")[at])
        axes.bar_label(bars, fmt="%.2f", fontsize=9)
    axes.set_xticks(range(len(rows)), [row["schedule"] for row in rows])
    axes.set_ylabel("squared error, transpose = 1")
    axes.set_title("best effort, 0.1 % of packets lost, 8 ranks", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(file, dpi=110)


@click.command(help=as_written(__doc__), context_settings={"show_default": True})
@click.option("--ranks", default=8, type=click.IntRange(3, 16))
@click.option("--elems", default=1 << 16, type=click.IntRange(1024), help="float32 elements of the bucket.")
@click.option("--loss", default=0.001, type=click.FloatRange(0, 0.5), help="Share of packets lost by chance.")
@click.option("--buffer", default=256, help="KB that a port of the switch holds.")
@click.option("--calls", default=40, type=click.IntRange(1), help="All-reduces of each run that are counted.")
@click.option("--runs", default=16, type=click.IntRange(1), help="Runs of each schedule, each with its own chance.")
@frame.common_options("One run of five small all-reduces: only to see that it works.")
def main(
    *, ranks: int, elems: int, loss: float, buffer: int, calls: int, runs: int, quick: bool, json_file: Path | None,
    out: Path,
) -> None:  # fmt: skip
    """Reads the options and measures."""
    if quick:
        elems, calls, runs = 1 << 14, 5, 1
    chosen = {
        "ranks": ranks,
        "elems": elems,
        "loss": loss,
        "buffer_bytes": buffer << 10,
        "calls": calls,
        "runs": runs,
    }

    def take(tell: frame.Tell) -> dict[str, Any]:
        tell(f"{runs} runs of {calls} all-reduces by each of three schedules")
        return {"rows": measure(chosen)}

    def conclude(console: Console, results: dict[str, Any]) -> bool:
        rows = results["rows"]
        print_table(console, rows)
        draw(rows, out / "topology_error.png")
        console.print(f"drawn: {out / 'topology_error.png'}")
        console.print(
            f"ring > parameter server > transpose: {'reached' if reached(rows) else 'MISSED'}", highlight=False
        )
        return reached(rows)

    frame.run("topology_error", frame.Settings(quick, json_file, out), chosen, take, conclude, in_lab=False)


if __name__ == "__main__":
    main()
