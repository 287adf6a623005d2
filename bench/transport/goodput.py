"""Goodput of one flow over a link that loses packets: gradwire beside the kernel's TCP, by turns in one run.

    python bench/transport/goodput.py                           # 200 Mbit/s, 1 and 40 ms, 0 to 5 % loss: 8 minutes
    python bench/transport/goodput.py --rtt 40 --loss 0.01      # one column of one panel
    python bench/transport/goodput.py --small                   # a look whether it works: seconds, no conclusions

The experiment behind LTP's figure 4: how much of a link is left to a transport when packets are lost for other reasons than
congestion. gradwire sends one transfer on a fresh connection, from its first byte to the last one's arrival; iperf3 sends
for as long as that transfer takes at the link's rate. Both times include the start.

Losses hit data and acknowledgements alike and are drawn before the bottleneck, so a transport that sends more than arrives
can still fill the link. The share is of the payload that the link can carry: its rate less headers (see network.py). `lab`
is the share that plain UDP gets when it sends 5 % too much: what the lab itself can do on this machine.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import click
from gradwire.lab import LabError, NamespacesUnavailable, ToolMissing, sandbox
from gradwire.lab.probe import probe_loss, probe_round_trip_ms
from network import COLOURS, GRADWIRE, Ground, bdp_bytes, build_stream, link_of, machine, payload_mbit
from rich.console import Console
from rich.table import Table

FLOWS = (GRADWIRE, "bbr", "cubic", "reno")
BUFFER_MIN_BYTES = 256 * 1024
TARGETS = ((0.01, 0.90), (0.05, 0.85))  # up to this loss, at least this share


@dataclass
class Cell:
    """All samples of one flow at one round trip and one loss."""

    flow: str
    rtt_ms: float
    loss: float
    rate_mbit: float
    mbit: list[float] = field(default_factory=list)

    def row(self) -> dict[str, Any]:
        """The numbers that are printed and written."""
        median = statistics.median(self.mbit)
        return {
            **asdict(self),
            "median_mbit": median,
            "share": median / payload_mbit(self.flow, self.rate_mbit),
        }


@dataclass(frozen=True)
class Bench:
    """What is measured; see the options."""

    rate_mbit: float
    rtts_ms: tuple[float, ...]
    losses: tuple[float, ...]
    flows: tuple[str, ...]
    samples: int
    seconds: float
    minutes: float

    def seconds_of(self, rtt_ms: float) -> float:
        """How long a flow runs: shorter where the start is over at once."""
        return self.seconds if rtt_ms > 10 else max(1.0, self.seconds / 3)


def measure(bench: Bench, ground: Ground, tell: Callable[[str], None]) -> tuple[list[Cell], dict[str, Any]]:
    """Takes all samples, by turns; stops early, with a word, when the time is up."""
    cells = [
        Cell(flow, rtt, loss, bench.rate_mbit) for rtt in bench.rtts_ms for loss in bench.losses for flow in bench.flows
    ]
    facts: dict[str, Any] = {}
    ends = time.monotonic() + 60 * bench.minutes
    for turn in range(bench.samples):
        for cell in cells:
            if turn > 0 and time.monotonic() > ends:
                tell(f"time is up after {turn} samples of each and some more")
                return cells, facts
            buffer = max(BUFFER_MIN_BYTES, bdp_bytes(bench.rate_mbit, cell.rtt_ms))
            ground.cluster.set_link(link_of(bench.rate_mbit, cell.rtt_ms, buffer), cell.loss)
            if turn == 0 and cell.flow == bench.flows[0]:
                check_network(bench, ground, cell, facts, tell)
            cell.mbit.append(sample(bench, ground, cell))
            share = cell.mbit[-1] / payload_mbit(cell.flow, bench.rate_mbit)
            where = f"{cell.rtt_ms:g} ms, {cell.loss:.1%} loss"
            tell(f"{where}, {cell.flow}: {cell.mbit[-1]:.1f} Mbit/s, {share:.1%} ({turn + 1})")
    return cells, facts


def sample(bench: Bench, ground: Ground, cell: Cell) -> float:
    """Goodput of one flow in Mbit/s."""
    seconds = bench.seconds_of(cell.rtt_ms)
    if cell.flow != GRADWIRE:
        return ground.tcp(cell.flow, 0, 1, seconds).mbit
    size = int(payload_mbit(GRADWIRE, bench.rate_mbit) * seconds * 1e6 / 8)
    return ground.gradwire(0, 1, size, 5 * seconds).mbit


def check_network(bench: Bench, ground: Ground, cell: Cell, facts: dict[str, Any], tell: Callable[[str], None]) -> None:
    """Counts what the network does to packets before anything is measured over it."""
    probe = probe_loss(ground.cluster)
    verdict = "" if probe.agrees_with(cell.loss) else ": NOT as set"
    facts[f"counted_loss_at_{cell.loss}_{cell.rtt_ms}ms"] = probe.share
    tell(f"set to lose {cell.loss:.1%}: {probe}{verdict}")
    if cell.loss == bench.losses[0]:
        ground.cluster.set_loss(0)
        rtt_ms = probe_round_trip_ms(ground.cluster)
        lab = ground.udp_ceiling(bench.rate_mbit) / payload_mbit("udp", bench.rate_mbit)
        facts |= {f"rtt_ms_at_{cell.rtt_ms}": rtt_ms, f"lab_share_at_{cell.rtt_ms}": lab}
        tell(f"round trip {rtt_ms:.2f} ms; the lab itself carries {lab:.1%} of the link")
        ground.cluster.set_loss(cell.loss)


def print_table(console: Console, bench: Bench, cells: list[Cell]) -> None:
    """One line for each flow and round trip, one column for each loss."""
    title = f"goodput at {bench.rate_mbit:g} Mbit/s: Mbit/s, share of what the link can carry (median of samples)"
    table = Table(title=title, title_justify="left")
    table.add_column("flow")
    for name in ("RTT", "link carries", *(f"{loss:.1%} loss" for loss in bench.losses)):
        table.add_column(name, justify="right")
    for rtt in bench.rtts_ms:
        for flow in bench.flows:
            rows = [cell.row() for cell in cells if (cell.flow, cell.rtt_ms) == (flow, rtt) and cell.mbit]
            values = [f"{row['median_mbit']:.1f}  {row['share']:.1%} ({len(row['mbit'])})" for row in rows]
            table.add_row(flow, f"{rtt:g} ms", f"{payload_mbit(flow, bench.rate_mbit):.1f}", *values)
        table.add_section()
    console.print(table)


def verdicts(cells: list[Cell]) -> list[str]:
    """Whether gradwire reaches its targets."""
    lines = []
    for cell in cells:
        target = next((share for loss, share in TARGETS if cell.loss <= loss), None)
        if cell.flow == GRADWIRE and cell.mbit and target is not None:
            share = cell.row()["share"]
            word = "reached" if share >= target else "MISSED"
            lines.append(
                f"{cell.rtt_ms:g} ms, {cell.loss:.1%} loss: {share:.1%} of the link, target {target:.0%}: {word}"
            )
    return lines


def draw(bench: Bench, cells: list[Cell], path: Path) -> None:
    """Writes one PNG: share of the link against loss, a panel for each round trip."""
    import matplotlib as mpl

    mpl.use("Agg")  # no display is needed
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(
        1, len(bench.rtts_ms), figsize=(4.6 * len(bench.rtts_ms), 3.6), layout="constrained", sharey=True, squeeze=False
    )
    for axes, rtt in zip(panels[0], bench.rtts_ms, strict=True):
        for flow in bench.flows:
            rows = [cell.row() for cell in cells if (cell.flow, cell.rtt_ms) == (flow, rtt) and cell.mbit]
            places = [bench.losses.index(row["loss"]) for row in rows]
            width = 2.4 if flow == GRADWIRE else 1.4
            shares = [100 * row["share"] for row in rows]
            axes.plot(places, shares, "o-", color=COLOURS[flow], label=flow, linewidth=width, markersize=4)
        axes.set_xticks(range(len(bench.losses)), [f"{100 * loss:g} %" for loss in bench.losses])
        axes.set_title(f"{bench.rate_mbit:g} Mbit/s, round trip {rtt:g} ms", loc="left", fontsize=11)
        axes.set_xlabel("packets lost")
        axes.set_ylim(0, 105)
        axes.grid(axis="y", alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    panels[0][0].set_ylabel("goodput, % of what the link carries")
    panels[0][0].legend(frameon=False, loc="lower left")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def run(bench: Bench, stream: Path, out: Path, json_file: Path | None) -> int:
    """The benchmark itself, inside the sandbox."""
    console = Console(width=130)

    def tell(text: str) -> None:
        console.print(f"{time.strftime('%H:%M:%S')} {text}", highlight=False)

    facts = machine()
    try:
        with Ground(2, link_of(bench.rate_mbit, bench.rtts_ms[0], BUFFER_MIN_BYTES), stream) as ground:
            cells, network = measure(bench, ground, tell)
    except LabError as error:
        console.print(f"error: {error}", markup=False)
        return 1
    print_table(console, bench, cells)
    for line in verdicts(cells):
        console.print(line, highlight=False)
    draw(bench, cells, out / "goodput.png")
    console.print(f"drawn: {out / 'goodput.png'}; load of the machine at the start: {facts['load']:.2f}")
    if json_file is not None:
        numbers = {"machine": facts, "network": network, "rows": [cell.row() for cell in cells if cell.mbit]}
        json_file.write_text(json.dumps(numbers, indent=1) + "\n")
    return 0


@click.command(help=__doc__, context_settings={"show_default": True})
@click.option("--rate", default=200.0, help="Mbit/s of the link, Ethernet headers included.")
@click.option("--rtt", "rtts", multiple=True, type=float, default=(1.0, 40.0), help="Round trip in ms; repeatable.")
@click.option("--loss", "losses", multiple=True, type=click.FloatRange(0, 0.5), default=(0.0, 0.001, 0.01, 0.05),
              help="Share of packets lost; repeatable.")  # fmt: skip
@click.option("--flow", "flows", multiple=True, type=click.Choice(FLOWS), default=FLOWS, help="Repeatable.")
@click.option("--samples", default=3, type=click.IntRange(1), help="Of each flow, round trip and loss.")
@click.option("--seconds", default=6.0, help="Of one flow; a third of it at round trips up to 10 ms.")
@click.option("--minutes", default=7.5, help="Stop early, evenly, after about so long.")
@click.option("--small", is_flag=True, help="One second, one loss, gradwire and bbr: only to see that it works.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write the numbers here.")
@click.option("--out", default=Path("bench-out"), type=click.Path(path_type=Path), help="Folder for the picture.")
def main(
    *,
    rate: float,
    rtts: tuple[float, ...],
    losses: tuple[float, ...],
    flows: tuple[str, ...],
    samples: int,
    seconds: float,
    minutes: float,
    small: bool,
    json_file: Path | None,
    out: Path,
) -> None:
    """Reads the options and runs the benchmark in the lab's sandbox."""
    bench = Bench(rate, rtts, losses, flows, samples, seconds, minutes)
    if small:
        bench = Bench(min(rate, 50.0), (1.0,), (0.01,), (GRADWIRE, "bbr"), 1, 1.0, minutes)
    out.mkdir(parents=True, exist_ok=True)
    try:
        stream = build_stream()
        sys.exit(sandbox.run(lambda: run(bench, stream, out, json_file)))
    except (ToolMissing, NamespacesUnavailable) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
