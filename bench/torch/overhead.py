"""What a call costs beside gloo: two ranks of this machine, both backends in the same processes, taking turns.

    python bench/torch/overhead.py                    # about a minute
    python bench/torch/overhead.py --json overhead.json

Targets: an all-reduce, an all-gather and a barrier of 1 KB take at most 1.5 times as long as with gloo; a DDP model with 200
small parameters makes at least 0.95 times as many steps each second. Processor seconds for each GB reduced are reported. A ratio
is the median over the turns of one backend's block beside the other's next to it, so that a busy machine harms both alike.

Exit code 0: all targets met, 1: one missed, 2: could not run. `--quick` judges nothing.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click
from gradwire.bench.display import as_written
from gradwire.bench.machine import machine
from gradwire.lab.crew import THREADS
from gradwire.lab.namespaces import Program
from gradwire.lab.nursery import Nursery
from rich.console import Console
from rich.table import Table

MET, MISSED, NOT_RUN = 0, 1, 2
BACKENDS = ("gloo", "gradwire")
# The most that gradwire may take of gloo's time; 1 / 0.95 for steps.
TARGETS = {"all_reduce": 1.5, "all_gather": 1.5, "barrier": 1.5, "ddp_step": 1 / 0.95}
KB_ELEMS = 256
LARGE_BYTES = 16_000_000
RANKS = 2
RUN_TIMEOUT_S = 500
LOOK_S = 0.05
IMPORTS = ("torch", "torch.distributed", "torch.nn.parallel")  # of every rank, once


def measures(torch: Any, dist: Any, group: Any) -> dict[str, tuple[int, Callable[[], Any]]]:
    """Name -> (calls in a block, one call)."""
    small, row = torch.ones(KB_ELEMS), torch.ones(KB_ELEMS // RANKS)
    rows = torch.empty(KB_ELEMS)
    large = torch.ones(LARGE_BYTES // 4)
    torch.manual_seed(1)
    model = torch.nn.parallel.DistributedDataParallel(
        torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(100))), process_group=group
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batch = torch.ones(4, 16)

    def step() -> None:
        optimizer.zero_grad()
        model(batch).sum().backward()
        optimizer.step()

    return {
        "all_reduce": (100, lambda: dist.all_reduce(small, dist.ReduceOp.MAX, group=group)),
        "all_gather": (100, lambda: dist.all_gather_into_tensor(rows, row, group=group)),
        "barrier": (100, lambda: dist.barrier(group)),
        "ddp_step": (10, step),
        "large": (4, lambda: dist.all_reduce(large, dist.ReduceOp.MAX, group=group)),
    }


def rank_main(turns: int, out: Path) -> None:
    """One rank: `out` gets the times of rank 0 and the processor time of this one."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    store, rank = out.with_suffix(".store"), int(os.environ["RANK"])
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    groups = {name: dist.new_group(backend=name) for name in BACKENDS}
    todo = {name: measures(torch, dist, group) for name, group in groups.items()}
    blocks: list[dict[str, Any]] = []
    for turn in range(-1, turns):  # the first connects and builds buckets
        for measure, (calls, _) in todo[BACKENDS[0]].items():
            for backend in BACKENDS if turn % 2 else reversed(BACKENDS):
                call = todo[backend][measure][1]
                dist.barrier()
                begun, used = time.perf_counter(), time.process_time()
                for _ in range(calls):
                    call()
                seconds, cpu = time.perf_counter() - begun, time.process_time() - used
                block = {"turn": turn, "measure": measure, "backend": backend, "seconds": seconds / calls}
                blocks.append({**block, "cpu": cpu / calls})
        if dist.get_rank() == 0 and turn >= 0:
            print(f"turn {turn + 1} of {turns}", flush=True)
    out.with_suffix(f".{dist.get_rank()}").write_text(json.dumps([b for b in blocks if b["turn"] >= 0]))
    dist.destroy_process_group()


def run_ranks(turns: int, folder: Path) -> list[list[dict[str, Any]]]:
    """The blocks of every rank.

    Raises:
        RuntimeError: a rank failed or took too long.
    """
    out = folder / "blocks"
    command = [sys.executable, __file__, "--turns", str(turns), "--as-rank", str(out)]
    shared = {**os.environ, **THREADS, "GRADWIRE_PORT": "0", "GLOO_SOCKET_IFNAME": "lo"}
    with Nursery(IMPORTS, THREADS) as nursery:
        places = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(RANKS)]
        wait_for([nursery.start(command, env={**shared, **place}) for place in places])
    return [json.loads(out.with_suffix(f".{rank}").read_text()) for rank in range(RANKS)]


def wait_for(ranks: Sequence[Program]) -> None:
    """Returns when all have ended well.

    Raises:
        RuntimeError: one failed, which others may wait for, or took too long.
    """
    end = time.monotonic() + RUN_TIMEOUT_S
    while True:
        codes = [rank.poll() for rank in ranks]
        if any(codes):
            raise RuntimeError(f"ranks ended with {codes}, where None runs still")
        if None not in codes:
            return
        if time.monotonic() > end:
            raise RuntimeError(f"the ranks have not ended after {RUN_TIMEOUT_S} s")
        time.sleep(LOOK_S)


def rows_of(ranks: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """One row for each measure: medians of both backends, the median ratio, the target, and whether it is met."""
    rows = []
    for measure in dict.fromkeys(block["measure"] for block in ranks[0]):
        times = {name: _of(ranks[0], measure, name, "seconds") for name in BACKENDS}
        ratio = statistics.median(ours / theirs for theirs, ours in zip(*times.values(), strict=True))
        target = TARGETS.get(measure)
        row: dict[str, Any] = {"measure": measure, "ratio": ratio, "target": target}
        row |= {f"{name}_us": statistics.median(found) * 1e6 for name, found in times.items()}
        row["met"] = target is None or ratio <= target
        if measure == "large":
            for name in BACKENDS:
                cpu = sum(statistics.median(_of(blocks, measure, name, "cpu")) for blocks in ranks)
                row[f"{name}_cpu_s_per_gb"] = cpu / (LARGE_BYTES / 1e9)
        rows.append(row)
    return rows


def _of(blocks: list[dict[str, Any]], measure: str, backend: str, field: str) -> list[float]:
    found = [block for block in blocks if (block["measure"], block["backend"]) == (measure, backend)]
    return [block[field] for block in sorted(found, key=lambda block: block["turn"])]


def print_rows(console: Console, rows: list[dict[str, Any]]) -> None:
    """The table, and what is only reported."""
    table = Table("", "gloo us", "gradwire us", "gradwire / gloo", "at most", "")
    for row in rows:
        target = "" if row["target"] is None else f"{row['target']:.2f}"
        verdict = "" if row["target"] is None else ("met" if row["met"] else "MISSED")
        cells = (f"{row['gloo_us']:.0f}", f"{row['gradwire_us']:.0f}", f"{row['ratio']:.2f}")
        table.add_row(row["measure"], *cells, target, verdict)
    console.print(table)
    for row in rows:
        if "gloo_cpu_s_per_gb" in row:
            both = (row["gloo_cpu_s_per_gb"], row["gradwire_cpu_s_per_gb"])
            console.print(
                "processor seconds for each GB reduced, all ranks: gloo {:.2f}, gradwire {:.2f}".format(*both)
            )


@click.command(help=as_written(__doc__), context_settings={"show_default": True})
@click.option("--turns", default=20, type=click.IntRange(1), help="Blocks of each measure and backend.")
@click.option("--quick", is_flag=True, help="Two turns, which judge nothing: does it run?")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write the numbers here.")
@click.option("--as-rank", "as_rank", type=click.Path(path_type=Path), hidden=True)
def main(*, turns: int, quick: bool, json_file: Path | None, as_rank: Path | None) -> None:
    """Reads the options, runs the ranks, judges."""
    if as_rank is not None:
        rank_main(turns, as_rank)
        return
    console = Console(width=110)
    try:
        with tempfile.TemporaryDirectory() as folder:
            rows = rows_of(run_ranks(2 if quick else turns, Path(folder)))
    except RuntimeError as error:
        console.print(f"error: {error}", markup=False)
        sys.exit(NOT_RUN)
    print_rows(console, rows)
    if json_file is not None:
        json_file.parent.mkdir(parents=True, exist_ok=True)
        json_file.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n")
    sys.exit(MET if quick or all(row["met"] for row in rows) else MISSED)


if __name__ == "__main__":
    main()
