"""What the randomised Hadamard transform does against lost packets, and what it costs.

    python bench/collective/hadamard.py --json bench-out/hadamard.json    # two minutes
    python bench/collective/hadamard.py --quick                           # two seeds, few all-reduces, no verdict

Three measurements. Error: of a bucket whose gradients differ by layer the packets of the tail, or as many at random, are lost;
what is missing counts as zero; the mean squared error of what a receiver has, with and without the transform, over seeds.
Kernel: GB/s of the transform there and back, in the bucket's own memory, beside a copy. Step: an all-reduce of 25 MB over loopback
that loses nothing, plain and rotated by turns. Exit status: 0 every target was reached, 1 one was missed, 2 it could not run. MB are
of 1024 * 1024 bytes, GB of 10**9.
"""

from __future__ import annotations

import json
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import click
import torch
from gradwire import _native
from gradwire.bench import conductor
from gradwire.bench.conductor import IMPORTS, Crews
from gradwire.bench.display import as_written
from gradwire.bench.ground import Ground
from gradwire.bench.machine import machine
from gradwire.bench.plan import NetworkPlan, Plan, gradwire
from gradwire.lab import LabError, sandbox
from gradwire.lab.crew import THREADS, WorkerFailed
from gradwire.lab.nursery import Nursery
from gradwire.torch import _memory
from rich.console import Console
from rich.table import Table

REACHED, MISSED, NOT_RUN = 0, 1, 2
# A burst may cost so many times what scattered losses do; the transform must run at so many GB/s (issue: ULTIMA's figures).
RATIO_MAX = 1.1
KERNEL_GB_S_MIN = 3.0
PACKET_ELEMS = 352  # of 1408 bytes, what a datagram of 1472 carries
MB = 1 << 20
BUCKET_BYTES = 25 * MB
ODD_ELEMS = 12_345  # more than whole columns hold: they are mixed in
KINDS = ("burst", "scattered")
PATIENCE_S = 180.0


def gradient(elems: int, seed: int) -> torch.Tensor:
    """`[elems] float32` like a bucket of a model: eight layers, each of another size of gradients, the last ones largest."""
    chance = torch.Generator().manual_seed(seed)
    sizes = torch.logspace(-2, 0, 8).repeat_interleave(-(-elems // 8))[:elems]
    return torch.randn(elems, generator=chance) * sizes


def rotated(tensor: torch.Tensor, seed: int, *, inverse: bool = False) -> torch.Tensor:
    """What a reduction of a bucket of this size makes of it (`gradwire_collectives::WholeHadamard`)."""
    target = tensor.clone()
    _native.hadamard_in_place(_memory.DTYPE_CODES[tensor.dtype], seed, _memory.address(target), inverse)
    return target


def lost_packets(packets: int, share: float, kind: str, seed: int) -> torch.Tensor:
    """A mask `[packets]`: the tail, or as many anywhere."""
    count = round(packets * share)
    if kind == "burst":
        return torch.arange(packets) >= packets - count
    order = torch.randperm(packets, generator=torch.Generator().manual_seed(seed))
    return order < count


def without(tensor: torch.Tensor, lost: torch.Tensor) -> torch.Tensor:
    """The tensor with zeros where its packets were lost."""
    return tensor.masked_fill(lost.repeat_interleave(PACKET_ELEMS)[: tensor.numel()], 0.0)


def errors(elems: int, share: float, seeds: int) -> list[dict[str, Any]]:
    """Mean squared error relative to the mean square of the gradients, by kind of loss, with and without the transform."""
    rows = []
    for seed in range(seeds):
        bucket = gradient(elems, seed)
        power = bucket.square().mean()
        spread = rotated(bucket, seed)
        for kind in KINDS:
            holes = lost_packets(-(-elems // PACKET_ELEMS), share, kind, seed)
            plain = without(bucket, holes)
            back = rotated(without(spread, holes), seed, inverse=True)
            for name, got in (("plain", plain), ("hadamard", back)):
                error = float((got - bucket).square().mean() / power)
                rows.append({"seed": seed, "kind": kind, "transform": name, "relative_error": error})
    return rows


def mean_error(rows: list[dict[str, Any]], transform: str, kind: str) -> float:
    """Mean over the seeds."""
    found = [row["relative_error"] for row in rows if (row["transform"], row["kind"]) == (transform, kind)]
    return sum(found) / len(found)


def kernel(rounds: int) -> dict[str, float]:
    """GB/s of one bucket in this thread's own time, the best of some rounds by turns: others may use this machine too.

    As a reduction turns a bucket of this size: in its own memory. A bucket that the caller wants kept is copied first.
    """
    bucket = gradient(BUCKET_BYTES // 4 + ODD_ELEMS, 1)
    copy, code, memory = torch.empty_like(bucket), _memory.DTYPE_CODES[torch.float32], _memory.address(bucket)
    works = {
        "copy": lambda: copy.copy_(bucket),
        "spread": lambda: _native.hadamard_in_place(code, 1, memory, False),
        "restore": lambda: _native.hadamard_in_place(code, 1, memory, True),
    }
    best = dict.fromkeys(works, float("inf"))
    for _ in range(rounds):
        for name, work in works.items():
            begun = time.thread_time()
            work()
            best[name] = min(best[name], time.thread_time() - begun)
    return {name: bucket.numel() * 4 / 1e9 / seconds for name, seconds in best.items()}


def step(ranks: int, samples: int, out: Path, tell: Any) -> dict[str, Any]:
    """Milliseconds of an all-reduce that loses nothing, plain and rotated by turns.

    Raises:
        WorkerFailed: a rank ended.
        LabError: there is no sandbox.
    """
    variants = (gradwire("auto"), gradwire("auto", hadamard="on"))
    plan = Plan(
        NetworkPlan("loopback"), variants, ranks=(ranks,), sizes=(BUCKET_BYTES,), samples=samples, block=5, minutes=3.0
    )
    worker = ["gradwire.bench.worker"]

    def told(done: int, total: int, series: Any) -> None:
        tell(f"{done} of {total} blocks: {series.cell.variant.name} {series.samples_ms[-1]:.1f} ms")

    with (
        Ground(ranks, plan.network) as ground,
        Nursery(IMPORTS, THREADS) as nursery,
        Crews(variants, ground, worker, out, PATIENCE_S, start=nursery.start) as crews,
    ):
        *_, found = conductor.measure(plan, crews, ground, told)
    plain, turned = (series.row() for series in found)
    ratio = turned["p50_ms"] / plain["p50_ms"]
    return {"ranks": ranks, "plain": plain, "rotated": turned, "ratio_p50": ratio}


def draw(rows: list[dict[str, Any]], share: float, file: Path) -> None:
    """Errors of each seed, plain beside rotated."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6.4, 3.6), layout="constrained")
    places = [(transform, kind) for transform in ("plain", "hadamard") for kind in KINDS]
    for at, (transform, kind) in enumerate(places):
        found = [row["relative_error"] for row in rows if (row["transform"], row["kind"]) == (transform, kind)]
        axes.plot([at] * len(found), found, "o", color="C0" if kind == "burst" else "C1", alpha=0.4, markersize=5)
        mean = sum(found) / len(found)
        axes.plot([at - 0.25, at + 0.25], [mean, mean], color="black")
        axes.annotate(f"{mean:.3f}", (at + 0.28, mean), va="center", fontsize=9)
    labels = [f"{'rotated' if transform == 'hadamard' else 'as it is'},\n{kind}" for transform, kind in places]
    axes.set_xticks(range(len(places)), labels)
    axes.set_xlim(-0.5, len(places) - 0.2)
    axes.set_ylim(bottom=0)
    axes.set_ylabel("squared error / squared gradients")
    axes.set_title(f"{share:.0%} of a bucket's packets lost: at its end, or scattered", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(file, dpi=110)


def tables(console: Console, results: dict[str, Any]) -> None:
    """What was measured, for people."""
    table = Table(title="squared error / squared gradients", title_justify="left")
    for head in ("sent", *KINDS, "burst / scattered"):
        table.add_column(head, justify="right")
    for transform in ("plain", "hadamard"):
        found = [mean_error(results["errors"], transform, kind) for kind in KINDS]
        table.add_row(transform, *(f"{error:.4f}" for error in found), f"{found[0] / found[1]:.3f}")
    console.print(table)
    speeds = ", ".join(f"{name} {speed:.2f}" for name, speed in results["kernel_gb_s"].items())
    console.print(f"kernel, GB/s of 25 MB float32 on one core: {speeds}", highlight=False)
    if results["step"]:
        plain, turned = (results["step"][name] for name in ("plain", "rotated"))
        console.print(
            f"all-reduce of 25 MB, {results['step']['ranks']} ranks over loopback, no loss: p50 {plain['p50_ms']:.1f} ms plain,"
            f" {turned['p50_ms']:.1f} ms rotated ({results['step']['ratio_p50']:.2f} times); min {plain['min_ms']:.1f} and"
            f" {turned['min_ms']:.1f} ms",
            highlight=False,
        )


def verdicts(results: dict[str, Any]) -> list[tuple[bool, str]]:
    """Each target: whether it was reached, and the words."""
    ratio = mean_error(results["errors"], "hadamard", "burst") / mean_error(results["errors"], "hadamard", "scattered")
    slowest = min(results["kernel_gb_s"][name] for name in ("spread", "restore"))
    return [
        (ratio <= RATIO_MAX, f"a burst costs {ratio:.3f} times as much as scattered losses, target {RATIO_MAX}"),
        (slowest >= KERNEL_GB_S_MIN, f"the transform runs at {slowest:.2f} GB/s, target {KERNEL_GB_S_MIN}"),
    ]


def run(
    facts: dict[str, Any],
    *,
    share: float,
    seeds: int,
    ranks: int,
    samples: int,
    quick: bool,
    out: Path,
    json_file: Path | None,
) -> int:
    """Everything, inside the sandbox. `facts`: of the machine; `samples` 0: no all-reduce; `quick`: no verdict."""
    console = Console(width=130)

    def tell(text: str) -> None:
        console.print(f"{time.strftime('%H:%M:%S')} {text}", highlight=False)

    torch.set_num_threads(1)
    tell(f"errors over {seeds} seeds")
    results: dict[str, Any] = {"benchmark": "hadamard", "machine": facts, "share": share}
    results["errors"] = errors(BUCKET_BYTES // 4 + ODD_ELEMS, share, seeds)
    tell("kernel")
    results["kernel_gb_s"] = kernel(rounds=2 if quick else 20)
    try:
        results["step"] = step(ranks, samples, out, tell) if samples else None
    except (WorkerFailed, LabError) as error:
        console.print(f"error: {error}", markup=False)
        return NOT_RUN
    tables(console, results)
    draw(results["errors"], share, out / "hadamard.png")
    console.print(f"drawn: {out / 'hadamard.png'}")
    if json_file is not None:
        json_file.write_text(json.dumps(results, indent=1) + "\n")
    for reached, words in verdicts(results):
        console.print(f"{'reached' if reached else 'MISSED'}: {words}", highlight=False)
    if quick or not samples:
        console.print("no verdict: a quick run, or one without all-reduces")
        return REACHED
    return REACHED if all(reached for reached, _ in verdicts(results)) else MISSED


@click.command(help=as_written(__doc__), context_settings={"show_default": True})
@click.option("--share", default=0.1, type=click.FloatRange(0.001, 0.9), help="Of the packets that are lost.")
@click.option("--seeds", default=20, type=click.IntRange(2))
@click.option("--ranks", default=2, type=click.IntRange(2, 8), help="Of the all-reduce.")
@click.option(
    "--samples", default=40, type=click.IntRange(0), help="All-reduces of each kind; 0: none, and no verdict."
)
@click.option("--quick", is_flag=True, help="Two seeds, one block of all-reduces. No verdict.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write the numbers here.")
@click.option("--out", default=Path("bench-out"), type=click.Path(path_type=Path), help="Folder for picture and logs.")
def main(*, share: float, seeds: int, ranks: int, samples: int, quick: bool, json_file: Path | None, out: Path) -> None:
    """Reads the options and measures in the lab's sandbox."""
    if quick:
        seeds, samples = 2, 1
    out.mkdir(parents=True, exist_ok=True)
    files = {"out": out, "json_file": json_file}
    work = partial(run, machine(), share=share, seeds=seeds, ranks=ranks, samples=samples, quick=quick, **files)
    sys.exit(sandbox.run(work) if samples else work())


if __name__ == "__main__":
    main()
