"""What one gradwire flow and one TCP flow leave each other at a bottleneck, and how that changes over time.

    python bench/transport/fairness.py                          # bbr and cubic, 1 and 40 ms, two buffers: 8 minutes
    python bench/transport/fairness.py --peer bbr --rtt 1       # two of the eight cases
    python bench/transport/fairness.py --small                  # a look whether it works: seconds, no conclusions

The experiment behind LTP's figure 15. Two hosts send to a third, whose switch port is the bottleneck: 200 Mbit/s with a
buffer of one and of four bandwidth-delay products (and at least 16 packets). Both start at the same time and run for the
same 20 s. A share is of the payload that both delivered; `link used` is of what the link can carry. The order of the cases
rotates with each sample; the table shows the median of gradwire's share and its range.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import click
from gradwire.lab import LabError, NamespacesUnavailable, ToolMissing, sandbox
from network import COLOURS, GRADWIRE, Flow, Ground, bdp_bytes, build_stream, link_of, machine, payload_mbit
from rich.console import Console
from rich.table import Table

PEERS = ("bbr", "cubic", "reno")
BUFFER_MIN_BYTES = 16 * 1514
FAIR = (0.35, 0.65)  # the range of gradwire's share beside bbr that counts as fair
STEP_S = 0.5  # of the picture


@dataclass
class Case:
    """All samples of one peer over one bottleneck; a sample is gradwire's flow and the peer's."""

    peer: str
    rtt_ms: float
    bdps: float
    rate_mbit: float
    pairs: list[tuple[Flow, Flow]] = field(default_factory=list)
    overflowed: list[float] = field(default_factory=list)

    def shares(self) -> list[float]:
        """The share of gradwire of what both delivered, of each sample."""
        return [ours.bytes / (ours.bytes + theirs.bytes) for ours, theirs in self.pairs]

    def row(self) -> dict[str, Any]:
        """The numbers that are printed and written."""
        shares = self.shares()
        most = payload_mbit(self.peer, self.rate_mbit)
        return {
            "peer": self.peer,
            "rtt_ms": self.rtt_ms,
            "buffer_bdps": self.bdps,
            "samples": len(shares),
            "gradwire_mbit": statistics.median(ours.mbit for ours, _ in self.pairs),
            "peer_mbit": statistics.median(theirs.mbit for _, theirs in self.pairs),
            "share": statistics.median(shares),
            "shares": shares,
            "link_used": statistics.median((ours.mbit + theirs.mbit) / most for ours, theirs in self.pairs),
            "overflowed": statistics.median(self.overflowed),
        }

    def curve(self) -> tuple[list[float], list[float]]:
        """The share of gradwire in each step of the first sample, in percent: (seconds, shares)."""
        ours, theirs = self.pairs[0]
        end = min(flow.timeline[-1][0] if flow.timeline else 0.0 for flow in (ours, theirs))
        times = [STEP_S * step for step in range(1, int(end / STEP_S) + 1)]
        shares = []
        for at in times:
            parts = [bytes_at(flow, at) - bytes_at(flow, at - STEP_S) for flow in (ours, theirs)]
            shares.append(100 * parts[0] / sum(parts) if sum(parts) > 0 else 50.0)
        return times, shares


def bytes_at(flow: Flow, at: float) -> float:
    """Bytes that a flow had delivered at a time, between its samples on a straight line."""
    before = (0.0, 0)
    for point in flow.timeline:
        if point[0] >= at:
            return before[1] + (point[1] - before[1]) * (at - before[0]) / max(point[0] - before[0], 1e-9)
        before = point
    return before[1]


@dataclass(frozen=True)
class Bench:
    """What is measured; see the options."""

    rate_mbit: float
    peers: tuple[str, ...]
    rtts_ms: tuple[float, ...]
    bdps: tuple[float, ...]
    samples: int
    seconds: float
    minutes: float


def measure(bench: Bench, ground: Ground, tell: Callable[[str], None]) -> list[Case]:
    """Runs all pairs, by turns; stops early, with a word, when the time is up."""
    cases = [
        Case(peer, rtt, bdps, bench.rate_mbit) for peer in bench.peers for rtt in bench.rtts_ms for bdps in bench.bdps
    ]
    ends = time.monotonic() + 60 * bench.minutes
    for turn in range(bench.samples):
        for at in range(len(cases)):
            case = cases[(at + turn) % len(cases)]
            if turn > 0 and time.monotonic() > ends:
                tell(f"time is up after {turn} samples of each and some more")
                return cases
            sample(bench, ground, case)
            tell(f"{case.peer}, {case.rtt_ms:g} ms, {case.bdps:g} BDP: {case.shares()[-1]:.1%} ({turn + 1})")
    return cases


def sample(bench: Bench, ground: Ground, case: Case) -> None:
    """Both flows at once, over a fresh bottleneck."""
    buffer = max(BUFFER_MIN_BYTES, int(case.bdps * bdp_bytes(bench.rate_mbit, case.rtt_ms)))
    ground.cluster.set_link(link_of(bench.rate_mbit, case.rtt_ms, buffer))
    size = int(bench.rate_mbit * bench.seconds * 1e6 / 8)  # more than the link carries, so that it runs to the end
    case.pairs.append(ground.pair(case.peer, size, bench.seconds))
    counters = ground.cluster.port_counters()
    case.overflowed.append(counters.overflowed / max(counters.seen, 1))


def print_table(console: Console, cases: list[Case]) -> None:
    """One line for each case."""
    table = Table(title="gradwire and one TCP flow at one bottleneck", title_justify="left")
    table.add_column("peer")
    names = ("RTT", "buffer", "samples", "gradwire Mbit/s", "peer Mbit/s", "share of gradwire", "of peer", "link used",
             "overflowed")  # fmt: skip
    for name in names:
        table.add_column(name, justify="right")
    for row in (case.row() for case in cases if case.pairs):
        spread = f"{row['share']:.1%} ({min(row['shares']):.0%} to {max(row['shares']):.0%})"
        rates = [f"{row[name]:.1f}" for name in ("gradwire_mbit", "peer_mbit")]
        front = (row["peer"], f"{row['rtt_ms']:g} ms", f"{row['buffer_bdps']:g} BDP", str(row["samples"]))
        table.add_row(
            *front, *rates, spread, f"{1 - row['share']:.1%}", f"{row['link_used']:.1%}", f"{row['overflowed']:.1%}"
        )
    console.print(table)


def verdicts(cases: list[Case]) -> list[str]:
    """Whether both get a fair share beside bbr."""
    lines = []
    for row in (case.row() for case in cases if case.pairs and case.peer == "bbr"):
        word = "fair" if FAIR[0] <= row["share"] <= FAIR[1] else "NOT FAIR"
        where = f"{row['rtt_ms']:g} ms, {row['buffer_bdps']:g} BDP"
        lines.append(f"bbr, {where}: gradwire {row['share']:.1%}, bbr {1 - row['share']:.1%}: {word}")
    return lines


def draw(bench: Bench, cases: list[Case], path: Path) -> None:
    """Writes one PNG: gradwire's share over time, a panel for each peer and round trip."""
    import matplotlib as mpl

    mpl.use("Agg")  # no display is needed
    from matplotlib import pyplot

    rows, columns = len(bench.peers), len(bench.rtts_ms)
    figure, panels = pyplot.subplots(
        rows, columns, figsize=(4.6 * columns, 2.6 * rows + 0.4), layout="constrained", sharey=True, squeeze=False
    )
    for case in (case for case in cases if case.pairs):
        axes = panels[bench.peers.index(case.peer)][bench.rtts_ms.index(case.rtt_ms)]
        times, shares = case.curve()
        style = ("-", "--", ":")[bench.bdps.index(case.bdps) % 3]
        colour = (COLOURS[GRADWIRE], COLOURS["bbr"], COLOURS["reno"])[bench.bdps.index(case.bdps) % 3]
        label = f"buffer {case.bdps:g} BDP: {case.row()['share']:.0%}"
        axes.plot(times, shares, style, color=colour, label=label, linewidth=1.6)
        axes.axhspan(100 * FAIR[0], 100 * FAIR[1], color="#0b7a75", alpha=0.04)
        axes.set_title(f"beside {case.peer}, round trip {case.rtt_ms:g} ms", loc="left", fontsize=11)
        axes.set_ylim(0, 100)
        axes.set_xlabel("seconds")
        axes.legend(frameon=False, fontsize=9, loc="upper right")
        axes.spines[["top", "right"]].set_visible(False)
    for line in panels:
        line[0].set_ylabel("share of gradwire (%)")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)


def run(bench: Bench, stream: Path, out: Path, json_file: Path | None) -> int:
    """The benchmark itself, inside the sandbox."""
    console = Console(width=130)

    def tell(text: str) -> None:
        console.print(f"{time.strftime('%H:%M:%S')} {text}", highlight=False)

    facts = machine()
    try:
        with Ground(3, link_of(bench.rate_mbit, bench.rtts_ms[0], 256 * 1024), stream) as ground:
            cases = measure(bench, ground, tell)
    except LabError as error:
        console.print(f"error: {error}", markup=False)
        return 1
    print_table(console, cases)
    for line in verdicts(cases):
        console.print(line, highlight=False)
    draw(bench, cases, out / "fairness.png")
    console.print(f"drawn: {out / 'fairness.png'}; load of the machine at the start: {facts['load']:.2f}")
    if json_file is not None:
        numbers = {"machine": facts, "rows": [case.row() for case in cases if case.pairs]}
        json_file.write_text(json.dumps(numbers, indent=1) + "\n")
    return 0


@click.command(help=__doc__, context_settings={"show_default": True})
@click.option("--rate", default=200.0, help="Mbit/s of the bottleneck, Ethernet headers included.")
@click.option("--peer", "peers", multiple=True, type=click.Choice(PEERS), default=("bbr", "cubic"), help="Repeatable.")
@click.option("--rtt", "rtts", multiple=True, type=float, default=(1.0, 40.0), help="Round trip in ms; repeatable.")
@click.option("--buffer", "bdps", multiple=True, type=float, default=(1.0, 4.0),
              help="Buffer in bandwidth-delay products; repeatable.")  # fmt: skip
@click.option("--samples", default=2, type=click.IntRange(1), help="Of each case.")
@click.option("--seconds", default=20.0, type=click.FloatRange(1), help="Of one sample.")
@click.option("--minutes", default=7.5, help="Stop early, evenly, after about so long.")
@click.option("--small", is_flag=True, help="One second of one case: only to see that it works.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write the numbers here.")
@click.option("--out", default=Path("bench-out"), type=click.Path(path_type=Path), help="Folder for the picture.")
def main(
    *,
    rate: float,
    peers: tuple[str, ...],
    rtts: tuple[float, ...],
    bdps: tuple[float, ...],
    samples: int,
    seconds: float,
    minutes: float,
    small: bool,
    json_file: Path | None,
    out: Path,
) -> None:
    """Reads the options and runs the benchmark in the lab's sandbox."""
    bench = Bench(rate, peers, rtts, bdps, samples, seconds, minutes)
    if small:
        bench = Bench(min(rate, 50.0), ("bbr",), (1.0,), (4.0,), 1, 1.0, minutes)
    out.mkdir(parents=True, exist_ok=True)
    try:
        stream = build_stream()
        sys.exit(sandbox.run(lambda: run(bench, stream, out, json_file)))
    except (ToolMissing, NamespacesUnavailable) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()
