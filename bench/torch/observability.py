"""What it costs a training step that it can be seen: two ranks of this machine that train, with all of it on and with all of it off.

    python bench/torch/observability.py                          # about two minutes
    python bench/torch/observability.py --json observability.json

On: the straggler watch at its shortest, the status socket with a client that asks every second, the Prometheus endpoint with a scrape
every 5 s (three times as often as usual), and scalars of every step. Off: none of it. Both pairs of ranks run at once and take turns, a
block of steps each, so that a busy machine harms both alike. Seconds are of the blocks with it on: nobody asks while the other pair
trains, which would harm that one and be in neither's processor time. The cost in time is the median over the turns of one block beside
the other. What comes once in seconds is in a few blocks only, so the cost in processor time, of both ranks, is of all blocks together;
it is the steadier one on a busy machine.

Target: each at most 1 %. Counting itself is never off; what it adds to a call is in `make bench-overhead`.

Exit code 0: the target is met, 1: missed, 2: could not run. `--quick` judges nothing.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path
from typing import Any

import click
from gradwire.bench.display import as_written
from gradwire.bench.machine import machine
from gradwire.lab.crew import THREADS
from gradwire.lab.namespaces import Start
from gradwire.lab.nursery import Nursery
from overhead import IMPORTS
from rich.console import Console

MET, MISSED, NOT_RUN = 0, 1, 2
TARGET = 0.01
RANKS = 2
SCRAPE_S = 5
STEPS = 20
RUN_TIMEOUT_S = 500
LAYERS, WIDTH, BATCH = 4, 512, 64


class Scalars:
    """Stands for a SummaryWriter, which queues what it gets."""

    def __init__(self) -> None:
        self.values: list[tuple[str, float, int]] = []

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        """Takes a value."""
        self.values.append((tag, scalar_value, global_step))


def rank_main(folder: Path, turns: int, *, seen: bool) -> None:
    """One rank of one pair: trains a block when told to by a line on its standard input, and prints how long it took."""
    import gradwire.torch
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    torch.manual_seed(1)
    rank = int(os.environ["RANK"])
    dist.init_process_group("gradwire", init_method=f"file://{folder}/store-{seen}", rank=rank, world_size=RANKS)
    layers = [module for _ in range(LAYERS) for module in (torch.nn.Linear(WIDTH, WIDTH), torch.nn.ReLU())]
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers))
    gradwire.torch.tolerate_loss(model, tensorboard=Scalars() if seen else None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    batch = torch.ones(BATCH, WIDTH)
    print("ready", flush=True)
    for _ in range(turns):
        sys.stdin.readline()
        begun, cpu_begun = time.perf_counter(), time.process_time()
        for _ in range(STEPS):
            optimizer.zero_grad()
            model(batch).sum().backward()
            optimizer.step()
        took, cpu_took = time.perf_counter() - begun, time.process_time() - cpu_begun
        print(took / STEPS, cpu_took / STEPS, flush=True)
    dist.destroy_process_group()


class Pair:
    """Two ranks, seen or unseen, which `start` starts."""

    def __init__(self, folder: Path, turns: int, start: Start, *, seen: bool) -> None:
        self.folder, self.port = folder, _free_port()
        (folder / "runtime").mkdir(mode=0o700, exist_ok=True)
        setting = {
            True: {"GRADWIRE_STRAGGLER_WARNING_S": "1", "GRADWIRE_METRICS_PORT": str(self.port)},
            False: {"GRADWIRE_STRAGGLER_WARNING_S": "0", "GRADWIRE_STATUS_SOCKET": "0"},
        }[seen]
        command = [
            sys.executable,
            __file__,
            "--turns",
            str(turns),
            "--as-rank",
            str(folder),
            *(["--seen"] if seen else []),
        ]
        common = {
            **os.environ,
            **THREADS,
            "GRADWIRE_PORT": "0",
            "XDG_RUNTIME_DIR": str(folder / "runtime"),
        }
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        self.ranks: list[Any] = [
            start(command, env={**common, **setting, "RANK": str(rank), "LOCAL_RANK": str(rank)}, **pipes)
            for rank in range(RANKS)
        ]
        for rank in self.ranks:
            _line(rank)

    def block(self) -> tuple[float, float]:
        """Seconds for each step of one block, and processor time of both ranks."""
        for rank in self.ranks:
            rank.stdin.write(b"go\n")
            rank.stdin.flush()
        took, cpu = zip(*(map(float, _line(rank).split()) for rank in self.ranks), strict=True)
        return max(took), sum(cpu)

    def end(self) -> None:
        """Waits for the ranks."""
        for rank in self.ranks:
            rank.kill() if rank.poll() is None else None
            rank.wait()


def _line(rank: Any) -> str:
    line: str = rank.stdout.readline().decode()
    if not line:
        raise RuntimeError(f"a rank ended with {rank.wait()}")
    return line


class Looks:
    """What a monitor does every second, and a Prometheus server every `SCRAPE_S`, of the time that a pair's blocks take."""

    def __init__(self, pair: Pair) -> None:
        self._pair = pair
        self._left_s, self._seconds = 0.0, 0
        self._error: OSError | None = None

    def block(self) -> tuple[float, float]:
        """A block of the pair with looks at it, of which none goes on when this returns.

        Raises:
            RuntimeError: a rank ended.
            OSError: a rank did not answer.
        """
        ended = threading.Event()
        thread = threading.Thread(target=self._look_until, args=(ended,), daemon=True)
        thread.start()
        try:
            took = self._pair.block()
        finally:
            ended.set()
            thread.join()
        if self._error is not None:
            raise self._error
        return took

    def _look_until(self, ended: threading.Event) -> None:
        begun = time.monotonic()
        while not ended.wait(self._left_s):
            self._left_s, begun = 1.0, time.monotonic()
            self._seconds += 1
            try:
                self._look()
            except OSError as error:
                self._error = error
                return
        self._left_s = max(0.0, self._left_s - (time.monotonic() - begun))

    def _look(self) -> None:
        for rank in range(RANKS if self._seconds % SCRAPE_S == 1 else 0):
            urllib.request.urlopen(f"http://127.0.0.1:{self._pair.port + rank}/metrics", timeout=10).read()
        for path in (self._pair.folder / "runtime" / "gradwire").glob("*.sock"):
            with socket.socket(socket.AF_UNIX) as connection:
                connection.connect(str(path))
                connection.sendall(b'{"ask": "stats"}\n')
                while connection.recv(1 << 16):
                    pass


def measure(turns: int, folder: Path, console: Console) -> list[dict[str, float]]:
    """Step times of both pairs, turn by turn.

    Raises:
        RuntimeError: a rank failed, or could not be started.
        OSError: a rank did not answer.
    """
    pairs: dict[bool, Pair] = {}
    nursery = Nursery(IMPORTS, THREADS)
    try:
        for seen in (False, True):
            pairs[seen] = Pair(folder, turns + 1, nursery.start, seen=seen)
        block = {False: pairs[False].block, True: Looks(pairs[True]).block}
        rows = []
        for turn in range(turns + 1):  # the first builds buckets
            order = (False, True) if turn % 2 else (True, False)
            times = {seen: block[seen]() for seen in order}
            if turn:
                named = [
                    (f"{'on' if seen else 'off'}_{what}ms", seen, at)
                    for seen in times
                    for at, what in enumerate(("", "cpu_"))
                ]
                rows.append({name: times[seen][at] * 1e3 for name, seen, at in named})
                if turn % 10 == 0:
                    console.print(f"turn {turn} of {turns}")
        return rows
    finally:
        for pair in pairs.values():
            pair.end()
        nursery.close()


def conclude(rows: list[dict[str, float]]) -> dict[str, Any]:
    """Medians and means, the costs as shares of the step, and whether the target is met."""
    cost = statistics.median(row["on_ms"] / row["off_ms"] for row in rows) - 1
    medians = {name: statistics.median(row[name] for row in rows) for name in ("off_ms", "on_ms")}
    means = {name: statistics.fmean(row[name] for row in rows) for name in ("off_cpu_ms", "on_cpu_ms")}
    cpu_cost = means["on_cpu_ms"] / means["off_cpu_ms"] - 1
    met = cost <= TARGET and cpu_cost <= TARGET
    return {**medians, **means, "cost": cost, "cpu_cost": cpu_cost, "met": met, "turns": len(rows)}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@click.command(help=as_written(__doc__), context_settings={"show_default": True})
@click.option("--turns", default=100, type=click.IntRange(1), help="Blocks of each pair.")
@click.option("--quick", is_flag=True, help="Two turns, which judge nothing: does it run?")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write the numbers here.")
@click.option("--as-rank", "as_rank", type=click.Path(path_type=Path), hidden=True)
@click.option("--seen", is_flag=True, hidden=True)
def main(*, turns: int, quick: bool, json_file: Path | None, as_rank: Path | None, seen: bool) -> None:
    """Reads the options, runs the ranks, judges."""
    if as_rank is not None:
        rank_main(as_rank, turns, seen=seen)
        return
    console = Console(width=110)
    try:
        with tempfile.TemporaryDirectory() as folder:
            rows = measure(2 if quick else turns, Path(folder), console)
    except (RuntimeError, OSError) as error:
        console.print(f"error: {error}", markup=False)
        sys.exit(NOT_RUN)
    found = conclude(rows)
    console.print(
        "a step of {off_ms:.2f} ms takes {on_ms:.2f} ms when everything is on: {cost:+.2%}, median of {turns} turns; "
        "of the processor {on_cpu_ms:.2f} ms instead of {off_cpu_ms:.2f}: {cpu_cost:+.2%}".format(**found)
    )
    if json_file is not None:
        json_file.parent.mkdir(parents=True, exist_ok=True)
        json_file.write_text(json.dumps({"machine": machine(), **found, "rows": rows}, indent=1) + "\n")
    sys.exit(MET if quick or found["met"] else MISSED)


if __name__ == "__main__":
    main()
