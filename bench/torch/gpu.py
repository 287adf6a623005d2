"""DDP steps of a model on a GPU beside gloo, which copies through host memory as well: two ranks of one GPU, over loopback.

    python bench/torch/gpu.py --json bench-out/gpu.json    # about a minute
    python bench/torch/gpu.py --quick                      # two turns: does it run?

Each rank trains sixteen layers of 6.6 MB with DDP in its usual buckets of 25 MB: with gloo, with gradwire (large calls go in pieces
of `gpu_chunk_mb`), with gradwire in one piece for each bucket, and with `tolerate_loss`. Steps take turns in the same processes;
a ratio is the median over the turns of one step beside gloo's next to it. `all-reduce` is one call on 105 MB.

Copies between GPU and host are timed by events on their own streams, calls in flight by the engine's reports. What of the copies
runs while a call is in flight is hidden behind sending:

    hidden = time in which a copy runs and a call is in flight / time in which a copy runs

Targets: a step takes at most as long as gloo's; half of the copies of one all-reduce in pieces is hidden; after all steps the ranks have
the same parameters bit for bit, and those of gloo within rounding. Exit code 0: targets met, 1: one missed, 2: could not run
(no GPU). `--quick` judges only the parameters.
"""

from __future__ import annotations

import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import click
from gradwire._interpreter import running_module
from gradwire.bench.display import as_written
from gradwire.bench.machine import machine
from overhead import MET, MISSED, NOT_RUN, RANKS, RUN_TIMEOUT_S
from overlap import Range, union
from rich.console import Console
from rich.table import Table

VARIANTS = ("gloo", "gradwire", "gradwire, in one piece", "gradwire, tolerant")
LAYERS, WIDTH, BATCH = 16, 1280, 512
SETTLE = 3  # steps of each variant that are not counted: DDP builds its buckets, connections learn their link
WATCHED = 3
STEP_RATIO_MOST = 1.0
HIDDEN_LEAST = 0.5
DIFFERENCE_MOST = 1e-4  # of a parameter


class Clock:
    """One clock for the GPU's events and this thread: seconds of `time.monotonic`."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        torch.cuda.synchronize()
        self._zero = torch.cuda.Event(enable_timing=True)
        self._zero.record()
        self._zero.synchronize()
        self._zero_s = time.monotonic()

    def event(self, stream: Any) -> Any:
        """What the stream has come to."""
        found = self._torch.cuda.Event(enable_timing=True)
        found.record(stream)
        return found

    def seconds(self, event: Any) -> float:
        """When it came there."""
        return self._zero_s + float(self._zero.elapsed_time(event)) / 1e3


class Watch:
    """Times copies and calls of gradwire while it is on."""

    def __init__(self, torch: Any) -> None:
        from gradwire.torch import _group, _streams

        self._torch = torch
        self._clock: Clock | None = None
        self._copies: list[tuple[str, int, Any, Any]] = []
        self._calls: list[tuple[float, Any]] = []
        streams: Any = _streams._of_type["cuda"]
        copy, submit = streams.copy, _group.GroupLink._submit

        def timed_copy(stream: Any, target: Any, source: Any) -> None:
            if self._clock is None:
                copy(stream, target, source)
                return
            begun = self._clock.event(stream)
            copy(stream, target, source)
            way = "out" if target.device.type == "cpu" else "back"
            self._copies.append((way, target.nbytes, begun, self._clock.event(stream)))

        def noted_submit(link: Any, call: Any, timeout: Any) -> Any:
            begun, op = time.monotonic(), submit(link, call, timeout)
            if self._clock is not None:
                self._calls.append((begun, op))
            return op

        streams.copy = timed_copy
        _group.GroupLink._submit = noted_submit  # type: ignore[method-assign]

    @contextmanager
    def on(self) -> Iterator[dict[str, Any]]:
        """What happened inside, known afterwards: ranges of copies and of calls in ms from the begin, and bytes."""
        self._copies.clear()
        self._calls.clear()
        self._clock = clock = Clock(self._torch)
        begun, found = time.monotonic(), {}
        yield found
        self._torch.cuda.synchronize()
        self._clock = None

        def since(start: float, end: float) -> Range:
            return (start - begun) * 1e3, (end - begun) * 1e3

        for way in ("out", "back"):
            mine = [copy for copy in self._copies if copy[0] == way]
            found[way] = [since(clock.seconds(start), clock.seconds(end)) for _, _, start, end in mine]
            found[f"{way}_bytes"] = sum(nbytes for _, nbytes, _, _ in mine)
        found["calls"] = [since(start, start + op.report()["elapsed_s"]) for start, op in self._calls]


class Rank:
    """One rank: the models of all variants, and one large call."""

    def __init__(self) -> None:
        import gradwire.torch
        import torch
        import torch.distributed as dist
        from gradwire.torch._tolerant import link_of

        self.torch, self.dist, self.gradwire = torch, dist, gradwire.torch
        self.groups = {name: dist.new_group(backend=name) for name in ("gloo", "gradwire")}
        self.owner = link_of(self.groups["gradwire"]).owner
        self.in_pieces = self.owner.config
        self.whole = dataclasses.replace(self.in_pieces, gpu_chunk_mb=0)
        self.models: dict[str, Any] = {}
        self.optimizers: dict[str, Any] = {}
        for variant in VARIANTS:
            torch.manual_seed(1)
            layers = [torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU()) for _ in range(LAYERS)]
            model = torch.nn.parallel.DistributedDataParallel(
                torch.nn.Sequential(*layers).cuda(), process_group=self._group(variant)
            )
            self.models[variant] = model
            self.optimizers[variant] = torch.optim.SGD(model.parameters(), lr=0.01)
        gradwire.torch.tolerate_loss(self.models[VARIANTS[-1]])
        torch.manual_seed(10 + dist.get_rank())
        self.batch = torch.randn(BATCH, WIDTH, device="cuda")
        self.gradients = torch.randn(LAYERS * WIDTH * (WIDTH + 1), device="cuda")

    def _group(self, variant: str) -> Any:
        return self.groups[variant.partition(",")[0]]

    def runs(self, variant: str) -> dict[str, Callable[[], None]]:
        """What is measured of a variant, by name."""
        # Of one process alone: ranks change it together.
        self.owner.config = self.whole if variant == VARIANTS[2] else self.in_pieces
        return {"step": partial(self._step, variant), "all_reduce": partial(self._reduce, variant)}

    def _step(self, variant: str) -> None:
        self.optimizers[variant].zero_grad()
        self.models[variant](self.batch).square().mean().backward()
        self.optimizers[variant].step()

    def _reduce(self, variant: str) -> None:
        if variant == VARIANTS[-1]:
            self.gradwire.all_reduce(self.gradients, group=self.groups["gradwire"])
        else:
            self.dist.all_reduce(self.gradients, self.dist.ReduceOp.MAX, group=self._group(variant))

    def timed(self, turns: int) -> Iterator[dict[str, Any]]:
        """Times of all variants, turn by turn."""
        for turn in range(-SETTLE, turns):
            for variant in VARIANTS if turn % 2 else reversed(VARIANTS):
                for what, run in self.runs(variant).items():
                    self.dist.barrier(self.groups["gloo"])
                    begun = time.perf_counter()
                    run()
                    self.torch.cuda.synchronize()
                    ms = (time.perf_counter() - begun) * 1e3
                    if turn >= 0:
                        yield {"turn": turn, "variant": variant, "what": what, "ms": ms}
            if self.dist.get_rank() == 0 and turn >= 0:
                print(f"turn {turn + 1} of {turns}", flush=True)

    def watched(self) -> Iterator[dict[str, Any]]:
        """Copies and calls of gradwire's variants, by themselves: events cost a little."""
        watch = Watch(self.torch)
        for variant in VARIANTS[1:]:
            for what, run in self.runs(variant).items():
                for _ in range(WATCHED):
                    self.dist.barrier(self.groups["gloo"])
                    with watch.on() as found:
                        run()
                    yield {"variant": variant, "what": what, **found}

    def parameters(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Of each variant: whether all ranks have the same parameters, and the largest difference from those of gloo."""
        torch, dist = self.torch, self.dist
        flat = {
            name: torch.cat([p.detach().flatten() for p in m.parameters()]).cpu() for name, m in self.models.items()
        }
        for variant, mine in flat.items():
            first = mine.clone()
            dist.broadcast(first, 0, group=self.groups["gloo"])
            same = torch.tensor(float(torch.equal(mine, first)))
            dist.all_reduce(same, dist.ReduceOp.MIN, group=self.groups["gloo"])
            yield variant, {"equal": bool(same), "from_gloo": float((mine - flat["gloo"]).abs().max())}


def rank_main(turns: int, out: Path) -> None:
    """One rank; rank 0 writes what it measured."""
    import torch
    import torch.distributed as dist

    torch.cuda.set_device(0)
    dist.init_process_group("gloo")
    rank = Rank()
    found = {
        "measured": list(rank.timed(turns)),
        "parameters": dict(rank.parameters()),
        "watched": list(rank.watched()),
    }
    if dist.get_rank() == 0:
        out.write_text(json.dumps({**found, "device": torch.cuda.get_device_name()}))
    dist.destroy_process_group()


def run_ranks(turns: int, folder: Path) -> dict[str, Any]:
    """What rank 0 measured.

    Raises:
        RuntimeError: a rank failed or took too long.
    """
    out = folder / "measured"
    command = [*running_module("torch.distributed.run"), "--standalone", f"--nproc-per-node={RANKS}", __file__]
    shared = {**os.environ, "GRADWIRE_PORT": "0", "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    try:
        options = ["--turns", str(turns), "--as-rank", str(out)]
        ran = subprocess.run([*command, *options], env=shared, timeout=RUN_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"the ranks have not ended after {RUN_TIMEOUT_S} s") from error
    if ran.returncode:
        raise RuntimeError(f"torchrun ended with {ran.returncode}")
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def hidden_share(copies: list[Range], calls: list[Range]) -> float:
    """Share of the time in which a copy runs that a call is in flight in, too."""
    together = sum(
        max(0.0, min(end, until) - max(start, since)) for start, end in union(copies) for since, until in union(calls)
    )
    return together / sum(end - start for start, end in union(copies))


def rows_of(found: dict[str, Any]) -> list[dict[str, Any]]:
    """One row for each variant: medians, ratios beside gloo, copies, parameters, and whether its targets are met."""
    rows = []
    for variant in VARIANTS:
        row: dict[str, Any] = {"variant": variant, **found["parameters"][variant]}
        for what in ("step", "all_reduce"):
            times, gloos = (_times(found["measured"], name, what) for name in (variant, VARIANTS[0]))
            row[f"{what}_ms"] = statistics.median(times)
            row[f"{what}_ratio"] = statistics.median(mine / theirs for mine, theirs in zip(times, gloos, strict=True))
            watched = [one for one in found["watched"] if (one["variant"], one["what"]) == (variant, what)]
            if watched:
                each = [(one["out"] + one["back"], one["calls"]) for one in watched]
                row[f"{what}_hidden"] = statistics.median(hidden_share(*one) for one in each)
                row[f"{what}_calls"] = len(watched[0]["calls"])
                for way in ("out", "back"):
                    row[f"{what}_{way}_bytes"] = watched[0][f"{way}_bytes"]
                    row[f"{what}_{way}_ms"] = statistics.median(
                        sum(end - start for start, end in union(one[way])) for one in watched
                    )
        row["equal_met"] = row["equal"] and row["from_gloo"] <= DIFFERENCE_MOST
        row["met"] = row["equal_met"] and (variant != VARIANTS[1] or row["step_ratio"] <= STEP_RATIO_MOST)
        row["met"] &= variant != VARIANTS[1] or row["all_reduce_hidden"] >= HIDDEN_LEAST
        rows.append(row)
    return rows


def _times(measured: list[dict[str, Any]], variant: str, what: str) -> list[float]:
    return [one["ms"] for one in measured if (one["variant"], one["what"]) == (variant, what)]


def print_rows(console: Console, rows: list[dict[str, Any]]) -> None:
    """The tables: times, and copies."""
    table = Table("", "step ms", "beside gloo", "all-reduce ms", "beside gloo", "equal", "")
    for row in rows:
        times = [f"{row[f'{what}_{unit}']:.2f}" for what in ("step", "all_reduce") for unit in ("ms", "ratio")]
        same = "yes" if row["equal"] else "NO"
        table.add_row(row["variant"], *times, f"{same}, {row['from_gloo']:.1e}", "met" if row["met"] else "MISSED")
    console.print(table)
    table = Table("", "", "calls", "MB out", "ms", "MB back", "ms", "hidden")
    for row in rows[1:]:
        for what in ("step", "all_reduce"):
            ways = [
                text
                for way in ("out", "back")
                for text in (f"{row[f'{what}_{way}_bytes'] / 1e6:.0f}", f"{row[f'{what}_{way}_ms']:.1f}")
            ]
            table.add_row(row["variant"], what, str(row[f"{what}_calls"]), *ways, f"{row[f'{what}_hidden']:.0%}")
    console.print(table)


@click.command(help=as_written(__doc__), context_settings={"show_default": True})
@click.option("--turns", default=20, type=click.IntRange(1), help="Steps and calls of each variant.")
@click.option("--quick", is_flag=True, help="Two turns. Times judge nothing.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write the numbers here.")
@click.option("--as-rank", "as_rank", type=click.Path(path_type=Path), hidden=True)
def main(*, turns: int, quick: bool, json_file: Path | None, as_rank: Path | None) -> None:
    """Reads the options, runs the ranks, judges."""
    import torch

    if as_rank is not None:
        rank_main(turns, as_rank)
        return
    console = Console(width=110)
    if not torch.cuda.is_available():
        console.print("error: torch finds no GPU here: this benchmark needs one", markup=False)
        sys.exit(NOT_RUN)
    try:
        with tempfile.TemporaryDirectory() as folder:
            found = run_ranks(2 if quick else turns, Path(folder))
    except RuntimeError as error:
        console.print(f"error: {error}", markup=False)
        sys.exit(NOT_RUN)
    rows = rows_of(found)
    console.print(f"{found['device']}, two ranks, {os.cpu_count()} cores", highlight=False)
    print_rows(console, rows)
    if json_file is not None:
        json_file.parent.mkdir(parents=True, exist_ok=True)
        results = {"benchmark": "gpu", "machine": machine(), "device": found["device"], "rows": rows}
        json_file.write_text(json.dumps(results, indent=1) + "\n")
    met = all(row["equal_met"] if quick else row["met"] for row in rows)
    sys.exit(MET if met else MISSED)


if __name__ == "__main__":
    main()
