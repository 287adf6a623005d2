"""How much of a DDP step's communication is hidden under its computation, read from torch.profiler's traces.

    python bench/torch/overlap.py --json bench-out/overlap.json    # two ranks over a lab link of 1 Gbit/s, about a minute
    python bench/torch/overlap.py --quick                          # two steps over loopback: does it run?

Each rank trains eight layers of 4 MB with DDP in buckets of 4 MB, once with gloo, once with gradwire, once with gradwire and
`tolerate_loss`. A profiler records single steps in turns. In a trace the backward pass computes until it hands over its last
bucket; after that it only waits. All-reduces that run before that moment are hidden, what is left of them is not:

    hidden = time before the last bucket in which an all-reduce runs / time in which one runs

Target: of gradwire's buckets at least two are in flight at once, in every step (ULTIMA, section 4). The hidden share is reported, and
cannot be 1: the last bucket has nothing to hide under. Nor is more of it better: who takes the cores from the backward pass hides more
under it. What counts is the step, which is reported beside gloo's. The picture is the median step of each. Exit code 0: target met,
1: missed, 2: could not run. `--quick` judges nothing.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import click
from gradwire.bench.display import as_written
from gradwire.bench.machine import machine
from gradwire.lab import Cluster, LabError, Link, NamespacesUnavailable, ToolMissing, sandbox
from gradwire.lab.crew import THREADS, rendezvous_environment
from gradwire.lab.nursery import Nursery
from overhead import IMPORTS, MET, MISSED, NOT_RUN, wait_for
from rich.console import Console
from rich.table import Table

VARIANTS = ("gloo", "gradwire", "gradwire, tolerant")
COLOURS = {"forward": "#c9ced6", "backward": "#8a8f98", "hidden": "#0b7a75", "waited for": "#b5651d"}
RANKS = 2
LAYERS, BATCH = 8, 192
WIDTH, WIDTH_QUICK = 1024, 512
# Steps of each variant that are not counted: DDP builds its buckets, connections learn their link.
SETTLE, SETTLE_QUICK = 3, 1

Range = tuple[float, float]
Step = dict[str, Any]


def rank_main(steps: int, out: Path, width: int, settle: int) -> None:
    """One rank; rank 0 writes its steps: `{variant, forward, backward, reductions}`, ranges in ms from the step's begin."""
    import gradwire.torch
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    groups = {name: dist.new_group(backend=name) for name in ("gloo", "gradwire")}
    models, bucket_mb = {}, 4 * width * width / (1 << 20)  # a layer
    for variant in VARIANTS:
        layers = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(LAYERS)))
        group = groups[variant.partition(",")[0]]
        models[variant] = torch.nn.parallel.DistributedDataParallel(
            layers, process_group=group, bucket_cap_mb=bucket_mb
        )
    gradwire.torch.tolerate_loss(models[VARIANTS[-1]])
    batch, record = torch.randn(BATCH, width), torch.profiler.record_function

    def step(model: Any) -> None:
        with record("forward"):
            loss = model(batch).square().mean()
        with record("backward"):
            loss.backward()
        model.zero_grad()

    measured: list[Step] = []
    for turn in range(-settle, steps):
        for variant, model in models.items():
            dist.barrier(groups["gloo"])
            if turn < 0:
                step(model)
                continue
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
                step(model)
            measured.append(step_of(variant, profile.events()))
        if dist.get_rank() == 0 and turn >= 0:
            print(f"step {turn + 1} of {steps}", flush=True)
    if dist.get_rank() == 0:
        out.write_text(json.dumps(measured))
    dist.destroy_process_group()


def step_of(variant: str, events: Any) -> Step:
    """The ranges of one profiled step."""
    found: dict[str, list[Range]] = {"forward": [], "backward": [], "all_reduce": []}
    for event in events:
        name = event.name.rpartition(":")[2]
        if name in found:
            found[name].append((event.time_range.start / 1e3, event.time_range.end / 1e3))
    zero = found["forward"][0][0]
    moved = {name: sorted((start - zero, end - zero) for start, end in ranges) for name, ranges in found.items()}
    forward, backward = moved["forward"][0], moved["backward"][0]
    return {"variant": variant, "forward": forward, "backward": backward, "reductions": moved["all_reduce"]}


def union(ranges: list[Range]) -> list[Range]:
    """The same time in ranges that do not overlap."""
    joined: list[Range] = []
    for start, end in sorted(ranges):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(end, joined[-1][1]))
        else:
            joined.append((start, end))
    return joined


def in_flight(ranges: list[Range]) -> int:
    """The most that overlap."""
    edges = sorted([(start, 1) for start, _ in ranges] + [(end, -1) for _, end in ranges])
    most = now = 0
    for _, change in edges:
        now += change
        most = max(most, now)
    return most


def overlap_of(step: Step) -> dict[str, float]:
    """What one step says: ms of communication, hidden and in all, and buckets at once."""
    last = max(start for start, _ in step["reductions"])
    busy = union(step["reductions"])
    comm_ms = sum(end - start for start, end in busy)
    hidden_ms = sum(min(end, last) - start for start, end in busy if start < last)
    return {
        "buckets": len(step["reductions"]),
        "in_flight": in_flight(step["reductions"]),
        "comm_ms": comm_ms,
        "hidden_ms": hidden_ms,
        "hidden_share": hidden_ms / comm_ms,
        "backward_ms": step["backward"][1] - step["backward"][0],
        "step_ms": step["backward"][1] - step["forward"][0],
    }


def rows_of(steps: list[Step]) -> list[dict[str, Any]]:
    """One row for each variant: medians, and whether two buckets were in flight in each step."""
    rows = []
    for variant in VARIANTS:
        each = [overlap_of(step) for step in steps if step["variant"] == variant]
        row: dict[str, Any] = {"variant": variant, "steps": len(each)}
        row |= {name: statistics.median(one[name] for one in each) for name in each[0]}
        row["in_flight_least"] = min(one["in_flight"] for one in each)
        row["beside_gloo"] = row["step_ms"] / (rows[0]["step_ms"] if rows else row["step_ms"])
        row["met"] = variant == "gloo" or row["in_flight_least"] >= 2
        rows.append(row)
    return rows


def measure(steps: int, link: Link | None, out: Path) -> list[Step]:
    """All steps of rank 0; `link` None: over loopback. Runs in the sandbox.

    Raises:
        LabError: the network cannot be built, or a rank failed.
    """
    result = out / "overlap-steps.json"
    command = [sys.executable, __file__, "--steps", str(steps), "--as-rank", str(result)]
    cluster = None if link is None else Cluster(RANKS, link)
    nursery = Nursery(IMPORTS, THREADS)
    try:
        if cluster is None:
            subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
            command.append("--quick")
        ranks = []
        for rank in range(RANKS):
            address, device = ("127.0.0.1", "lo") if cluster is None else (cluster.address(0), "eth0")
            environment = {**os.environ, **rendezvous_environment(rank, RANKS, address, device), "GRADWIRE_PORT": "0"}
            with (out / f"overlap-{rank}.log").open("w") as log:  # the profiler talks
                options: dict[str, Any] = {"env": environment, "stderr": log}
                start = nursery.start if cluster is None else partial(cluster.spawn, rank, start=nursery.start)
                ranks.append(start(command, **options))
        wait_for(ranks)
    except RuntimeError as error:
        raise LabError(f"{error}: see {out}/overlap-*.log") from error
    finally:
        if cluster is not None:
            cluster.close()
        nursery.close()
    found: list[Step] = json.loads(result.read_text())
    result.unlink()
    return found


def print_rows(console: Console, rows: list[dict[str, Any]]) -> None:
    """The table."""
    table = Table("", "buckets", "in flight (least)", "communication ms", "hidden ms", "hidden", "step ms", "/ gloo's")
    for row in rows:
        at_once = f"{row['in_flight']:.0f} ({row['in_flight_least']})"
        times = (f"{row['comm_ms']:.0f}", f"{row['hidden_ms']:.0f}", f"{row['hidden_share']:.0%}")
        step = (f"{row['step_ms']:.0f}", f"{row['beside_gloo']:.2f}")
        table.add_row(row["variant"], f"{row['buckets']:.0f}", at_once, *times, *step)
    console.print(table)


def draw(steps: list[Step], file: Path) -> None:
    """The step of each variant whose hidden share is the median one: computation above, a line for each bucket below."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    figure, panels = pyplot.subplots(len(VARIANTS), 1, figsize=(7.2, 6.4), sharex=True, layout="constrained")
    for axes, variant in zip(panels, VARIANTS, strict=True):
        mine = [step for step in steps if step["variant"] == variant]
        step = sorted(mine, key=lambda one: overlap_of(one)["hidden_share"])[len(mine) // 2]
        last = max(start for start, _ in step["reductions"])
        for name, until in (("forward", step["forward"][1]), ("backward", last)):
            start = step[name][0]
            axes.broken_barh([(start, until - start)], (-0.4, 0.8), color=COLOURS[name])
        for line, (start, end) in enumerate(step["reductions"], start=1):
            for name, parts in (("hidden", (start, min(end, last))), ("waited for", (max(start, last), end))):
                if parts[1] > parts[0]:
                    axes.broken_barh([(parts[0], parts[1] - parts[0])], (line - 0.4, 0.8), color=COLOURS[name])
        axes.invert_yaxis()
        axes.set_yticks(
            [0, 1, len(step["reductions"])], ["compute", "bucket 0", f"bucket {len(step['reductions']) - 1}"]
        )
        axes.set_title(
            f"{variant}: {overlap_of(step)['hidden_share']:.0%} of the communication hidden", loc="left", fontsize=10
        )
        axes.spines[["top", "right"]].set_visible(False)
    panels[-1].set_xlabel("ms from the begin of the step")
    legend = [Patch(color=colour, label=label) for label, colour in COLOURS.items()]
    figure.legend(handles=legend, loc="outside lower center", ncols=len(legend), frameon=False)
    figure.savefig(file, dpi=110)


@click.command(help=as_written(__doc__), context_settings={"show_default": True})
@click.option("--steps", default=15, type=click.IntRange(1), help="Of each variant.")
@click.option("--rate", default=1000.0, help="Mbit/s of each host's link.")
@click.option("--quick", is_flag=True, help="Two steps of a smaller model over loopback. No verdict.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write the numbers here.")
@click.option("--out", default=Path("bench-out"), type=click.Path(path_type=Path), help="Folder for the picture.")
@click.option("--as-rank", "as_rank", type=click.Path(path_type=Path), hidden=True)
def main(*, steps: int, rate: float, quick: bool, json_file: Path | None, out: Path, as_rank: Path | None) -> None:
    """Reads the options and measures in the lab's sandbox."""
    width = WIDTH_QUICK if quick else WIDTH
    if as_rank is not None:
        rank_main(steps, as_rank, width, SETTLE_QUICK if quick else SETTLE)
        return
    out.mkdir(parents=True, exist_ok=True)
    console = Console(width=120)

    def work() -> int:
        try:
            measured = measure(2, None, out) if quick else measure(steps, Link(rate), out)
        except LabError as error:
            console.print(f"error: {error}", markup=False)
            return NOT_RUN
        rows = rows_of(measured)
        if json_file is not None:
            settings = {"ranks": RANKS, "rate_mbit": rate, "layers": LAYERS, "width": width, "batch": BATCH}
            results = {"benchmark": "overlap", "machine": machine(), "settings": settings, "rows": rows}
            json_file.parent.mkdir(parents=True, exist_ok=True)
            json_file.write_text(json.dumps({**results, "steps": measured}, indent=1) + "\n")
        print_rows(console, rows)
        draw(measured, out / "overlap.png")
        console.print(f"drawn: {out / 'overlap.png'}")
        if quick:
            return MET
        met = all(row["met"] for row in rows)
        console.print(f"two of gradwire's buckets in flight in every step: {'met' if met else 'MISSED'}")
        return MET if met else MISSED

    console.print(f"{time.strftime('%H:%M:%S')} {len(VARIANTS)} variants", highlight=False)
    try:
        sys.exit(sandbox.run(work))
    except (ToolMissing, NamespacesUnavailable) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(NOT_RUN)


if __name__ == "__main__":
    main()
