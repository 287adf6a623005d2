"""All-reduce over shaped and over unshaped links: gradwire against gloo over TCP, by turns in one run.

    python bench/collective/allreduce.py                                    # 4 ranks, 100 Mbit/s, kernel switch
    python bench/collective/allreduce.py --network uml --size 1             # 1 ms round trip, user-mode-linux switch
    python bench/collective/allreduce.py --network loopback --ranks 2       # bus bandwidth and latency

A sample is the time from a common start to the end on the slowest rank. Variants take turns in blocks of a few samples, of
which the first is not counted: TCP forgets its window when idle, and gradwire its estimates grow old. Every result is
verified. Bus bandwidth is 2 (n - 1) / n times the bytes over the time, as in the NCCL tests. MB are of 1024 * 1024 bytes.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import click
from gradwire.demo.results import percentile
from gradwire.lab import DEVICE, Cluster, LabError, Link, iproute, sandbox
from gradwire.lab.crew import Crew, WorkerFailed, rendezvous_environment
from gradwire.lab.probe import probe_loss, probe_round_trip_ms
from rich.console import Console
from rich.table import Table

START_AHEAD_S = 0.02  # ranks get the order well before it is time
SMALL_REPEAT = 100  # calls in one sample of a size that takes less than a wake-up
MB = 1 << 20


@dataclass(frozen=True)
class Variant:
    """One way to reduce: a process group, and gradwire's preset (None: the exact collective of the group's backend).

    Of rotated results only those without loss can be verified.
    """

    name: str
    group: str
    preset: str | None = None
    hadamard: str = "off"


VARIANTS = {
    "gloo-cubic": Variant("gloo-cubic", "gloo-cubic"),
    "gloo-bbr": Variant("gloo-bbr", "gloo-bbr"),
    "gradwire-auto": Variant("gradwire-auto", "gradwire", "auto"),
    "gradwire-rotated": Variant("gradwire-rotated", "gradwire", "auto", "on"),
    "gradwire-mlt": Variant("gradwire-mlt", "gradwire", "mlt"),
    "gradwire-reliable": Variant("gradwire-reliable", "gradwire", "reliable"),
    "gradwire-exact": Variant("gradwire-exact", "gradwire"),
}


@dataclass
class Series:
    """All samples of one variant, size and loss; times in milliseconds."""

    variant: str
    bytes: int
    loss: float
    ranks: int
    samples_ms: list[float] = field(default_factory=list)
    lost_shares: list[float] = field(default_factory=list)
    wrong: int = 0

    def row(self) -> dict[str, Any]:
        """The numbers that are printed and written."""
        p50 = percentile(self.samples_ms, 50)
        return {
            **{name: getattr(self, name) for name in ("variant", "bytes", "loss", "ranks", "wrong")},
            "samples": len(self.samples_ms),
            "min_ms": min(self.samples_ms),
            "p50_ms": p50,
            "p99_ms": percentile(self.samples_ms, 99),
            "max_ms": max(self.samples_ms),
            "busbw_mb_s": 2 * (self.ranks - 1) / self.ranks * self.bytes / MB / (p50 / 1e3),
            "lost_share": sum(self.lost_shares) / len(self.lost_shares),
            "samples_ms": [round(sample, 3) for sample in self.samples_ms],
        }


@dataclass(frozen=True)
class Bench:
    """What is measured, and over what; see the options."""

    network: str
    ranks: int
    link: Link
    variants: tuple[Variant, ...]
    sizes: tuple[int, ...]
    losses: tuple[float, ...]
    samples: int
    block: int
    minutes: float


class Field:
    """The network that a benchmark runs over: a lab cluster, or the bare loopback device of the sandbox."""

    def __init__(self, bench: Bench) -> None:
        self.cluster: Cluster | None = None
        self._children: list[subprocess.Popen[bytes]] = []
        if bench.network == "loopback":
            iproute.ip("link set lo up")
        elif bench.network == "uml":
            from gradwire.lab.uml_cluster import UmlCluster

            self.cluster = UmlCluster(bench.ranks, bench.link)
        else:
            self.cluster = Cluster(bench.ranks, bench.link)
        self.address, self.device = (Cluster.address(0), DEVICE) if self.cluster else ("127.0.0.1", "lo")

    def spawn(self, rank: int, command: list[str], **options: Any) -> subprocess.Popen[bytes]:
        """Starts a worker where its rank lives; `options` are those of Popen."""
        if self.cluster is not None:
            return self.cluster.spawn(rank, command, **options)
        child = subprocess.Popen(command, **options)
        self._children.append(child)
        return child

    def use_tcp(self, algorithm: str) -> None:
        """Congestion control of the connections that are made from now on."""
        if self.cluster is not None:
            self.cluster.set_congestion_control(algorithm)

    def set_loss(self, share: float) -> None:
        """Share of packets lost from now on; loopback loses none."""
        if self.cluster is not None:
            self.cluster.set_loss(share)

    def close(self) -> None:
        """Ends the workers and the network."""
        for child in self._children:
            child.terminate()
            child.wait()
        if self.cluster is not None:
            self.cluster.close()


@contextmanager
def crew_of(bench: Bench, logs: Path, ground: Field) -> Iterator[Crew]:
    """Workers with all the process groups that the variants need."""
    environments = [
        rendezvous_environment(rank, bench.ranks, ground.address, ground.device, 0 if ground.cluster else rank)
        for rank in range(bench.ranks)
    ]
    command = [sys.executable, str(Path(__file__).with_name("worker.py"))]
    crew = Crew(ground.spawn, command, environments, logs)
    try:
        crew.collect("ready")
        for group in dict.fromkeys(variant.group for variant in bench.variants):
            backend, _, algorithm = group.partition("-")
            ground.use_tcp(algorithm or "cubic")  # a connection keeps what its route said when it was made
            crew.order({"do": "group", "name": group, "backend": backend}, "made")
        yield crew
    finally:
        crew.close()


def measure(bench: Bench, crew: Crew, ground: Field, tell: Callable[[str], None]) -> list[Series]:
    """Takes all samples, by turns; stops early, with a word, when the time is up."""
    cells = [
        Series(variant.name, size, loss, bench.ranks)
        for size in bench.sizes
        for loss in bench.losses
        for variant in bench.variants
    ]
    ends = time.monotonic() + bench.minutes * 60
    for turn in range(-(-bench.samples // bench.block)):
        for at in range(len(cells)):
            series = cells[(at + turn) % len(cells)]
            ground.set_loss(series.loss)
            for index in range(bench.block + 1):
                _sample(crew, series, counted=index > 0)
            size = f"{series.bytes / MB:.3g} MB"
            tell(f"{series.variant}, {size}, {series.loss:.0%} loss: {series.samples_ms[-1]:.3f} ms ({turn + 1})")
        if time.monotonic() > ends:
            tell(f"time is up after {(turn + 1) * bench.block} samples of each")
            break
    return cells


def _sample(crew: Crew, series: Series, counted: bool) -> None:
    small = series.bytes < 64 * 1024
    order = {
        "do": "reduce",
        "variant": asdict(VARIANTS[series.variant]),
        "elems": series.bytes // 4,
        "at": time.monotonic() + START_AHEAD_S + series.bytes * 2e-9,  # the input is copied before
        "repeat": SMALL_REPEAT if small else 1,
    }
    answers = [answer[-1] for answer in crew.order(order, "ended")]
    series.wrong += sum(answer["wrong"] for answer in answers)
    if counted:
        took = max(answer["ended"] for answer in answers) - min(answer["begun"] for answer in answers)
        series.samples_ms.append(took * 1e3 / order["repeat"])
        series.lost_shares.append(sum(answer["lost"] for answer in answers) / len(answers))


def check_network(bench: Bench, ground: Field, tell: Callable[[str], None]) -> dict[str, Any]:
    """Counts what the network does to packets before anything is measured over it."""
    if ground.cluster is None:
        return {}
    facts: dict[str, Any] = {"rtt_ms": probe_round_trip_ms(ground.cluster)}
    for loss in bench.losses:
        ground.set_loss(loss)
        probe = probe_loss(ground.cluster)
        facts[f"counted_loss_at_{loss}"] = probe.share
        tell(f"set to lose {loss:.1%}: {probe}{'' if probe.agrees_with(loss) else ': NOT as set'}")
    ground.set_loss(0)
    tell(f"round trip {facts['rtt_ms']:.2f} ms")
    return facts


def machine() -> dict[str, Any]:
    """What the numbers belong to."""
    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return {
        "commit": git.stdout.strip(),
        "kernel": platform.release(),
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "python": platform.python_version(),
    }


def print_table(console: Console, cells: list[Series]) -> None:
    """One line for each series."""
    table = Table(title="all-reduce, ms", title_justify="left")
    for name in ("variant", "size", "loss", "samples", "min", "p50", "p99", "max", "busbw MB/s", "lost", "wrong"):
        table.add_column(name, justify="left" if name == "variant" else "right")
    for series in cells:
        row = series.row()
        times = [f"{row[name]:.4g}" for name in ("min_ms", "p50_ms", "p99_ms", "max_ms", "busbw_mb_s")]
        size = f"{series.bytes / MB:g} MB" if series.bytes >= MB else f"{series.bytes / 1024:g} KB"
        front = (row["variant"], size, f"{row['loss']:.1%}", str(row["samples"]))
        table.add_row(*front, *times, f"{row['lost_share']:.3%}", str(row["wrong"]))
    console.print(table)


def compare(cells: list[Series]) -> list[str]:
    """The ratios that matter, of p99 under loss: to one's own median without loss, and to gloo's p99 under the same loss."""
    found = {(series.variant, series.bytes, series.loss): series.row() for series in cells}
    lines = []
    for (variant, size, loss), row in found.items():
        calm = found.get((variant, size, 0.0))
        if loss and calm:
            lines.append(
                f"{variant}, {size / MB:g} MB: p99 at {loss:.0%} loss is"
                f" {row['p99_ms'] / calm['p50_ms']:.2f} times its own p50 at 0 %"
            )
        for other in ("gloo-cubic", "gloo-bbr"):
            theirs = found.get((other, size, loss))
            if theirs and variant.startswith("gradwire"):
                ratio, median = theirs["p99_ms"] / row["p99_ms"], theirs["p50_ms"] / row["p50_ms"]
                lines.append(
                    f"{variant}, {size / MB:g} MB, {loss:.0%} loss: {other}'s p99 is {ratio:.2f} times as long,"
                    f" its p50 {median:.2f} times"
                )
    return lines


def run(bench: Bench, out: Path, json_file: Path | None) -> int:
    """The benchmark itself, inside the sandbox."""
    console = Console(width=130)

    def tell(text: str) -> None:
        console.print(f"{time.strftime('%H:%M:%S')} {text}", highlight=False)

    ground = Field(bench)
    try:
        facts = check_network(bench, ground, tell)
        with crew_of(bench, out, ground) as crew:
            cells = measure(bench, crew, ground, tell)
    except (WorkerFailed, LabError) as error:
        console.print(f"error: {error}", markup=False)
        return 1
    finally:
        ground.close()
    print_table(console, cells)
    for line in compare(cells):
        console.print(line, highlight=False)
    if json_file is not None:
        network = {"kind": bench.network, **asdict(bench.link), **facts}
        numbers = {"machine": machine(), "network": network, "rows": [series.row() for series in cells]}
        json_file.write_text(json.dumps(numbers, indent=1) + "\n")
    return int(any(series.wrong for series in cells))


@click.command(help=__doc__, context_settings={"show_default": True})
@click.option("--network", default="kernel", type=click.Choice(["kernel", "uml", "loopback"]), help="The switch.")
@click.option("--ranks", default=4, type=click.IntRange(2, 8))
@click.option("--rate", default=100.0, help="Mbit/s of each host's link.")
@click.option("--rtt", default=None, type=float, help="Added round trip in ms; the user-mode-linux switch adds 0.4.")
@click.option("--buffer", default=256, help="KB that the switch holds for each port.")
@click.option("--variant", "names", multiple=True, type=click.Choice(list(VARIANTS)),
              default=("gloo-cubic", "gloo-bbr", "gradwire-auto"), help="Repeatable.")  # fmt: skip
@click.option("--size", "sizes", multiple=True, type=float, default=(1.0,), help="MB; repeatable.")
@click.option("--loss", "losses", multiple=True, type=click.FloatRange(0, 0.5), default=(0.0, 0.01))
@click.option("--samples", default=100, type=click.IntRange(1), help="Of each variant, size and loss.")
@click.option("--block", default=10, type=click.IntRange(1), help="Samples of one variant in a row.")
@click.option("--minutes", default=9.0, help="Stop early, evenly, after about so long.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write the numbers here.")
@click.option("--out", default=Path("bench-out"), type=click.Path(path_type=Path), help="Folder for the workers' logs.")
def main(
    *,
    network: str,
    ranks: int,
    rate: float,
    rtt: float | None,
    buffer: int,
    names: tuple[str, ...],
    sizes: tuple[float, ...],
    losses: tuple[float, ...],
    samples: int,
    block: int,
    minutes: float,
    json_file: Path | None,
    out: Path,
) -> None:
    """Reads the options and runs the benchmark in the lab's sandbox."""
    added_rtt = rtt if rtt is not None else (0.6 if network == "uml" else 0.0)
    bench = Bench(
        network,
        ranks,
        Link(rate, buffer * 1024, added_rtt / 2),
        tuple(VARIANTS[name] for name in names),
        tuple(max(4, int(size * MB) // 4 * 4) for size in sizes),
        (0.0,) if network == "loopback" else losses,
        samples,
        block,
        minutes,
    )
    out.mkdir(parents=True, exist_ok=True)
    sys.exit(sandbox.run(lambda: run(bench, out, json_file)))


if __name__ == "__main__":
    main()
