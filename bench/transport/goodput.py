"""Goodput of one flow over a link that loses packets: gradwire beside the kernel's TCP, by turns in one run.

    python bench/transport/goodput.py                           # 200 Mbit/s, 1 and 40 ms, 0 to 5 % loss: 8 minutes
    python bench/transport/goodput.py --rtt 40 --loss 0.01      # one column of one panel
    python bench/transport/goodput.py --small                   # a look whether it works: seconds, no conclusions

The experiment behind LTP's figure 4: how much of a link is left to a transport when packets are lost for other reasons than
congestion. gradwire sends one transfer on a fresh connection, from its first byte to the last one's arrival; iperf3 sends
for as long as that transfer takes at the link's rate. Both times include the start.

Losses hit data and acknowledgements alike and are drawn before the bottleneck, so a transport that sends more than arrives
can still fill the link. The share is of the payload that the link can carry: its rate less headers (see network.py).
What arrives of plain UDP that sends 5 % too much stands beside it: what the lab itself can carry.

Prints progress, a table in Markdown (medians), and each target with what was measured; draws OUT/goodput.png. Targets: at
least 90 % of the link at every loss up to 1 %, and 85 % at 5 %.

Exit code: 0 all targets reached, 1 one missed, 2 it could not run (a wrong option, a missing tool, no namespaces), or no target
was judged.
"""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import click
from experiment import Settings, Tell, Turns, common_options, had_here, run
from figures import GRADWIRE
from gradwire.bench.display import as_written
from gradwire.lab.probe import probe_loss, probe_round_trip_ms
from network import UDP, Ground, bdp_bytes, link_of, payload_mbit

FLOWS = (GRADWIRE, "bbr", "cubic", "reno")
BUFFER_MIN_BYTES = 256 * 1024


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
        share = median / payload_mbit(self.flow, self.rate_mbit)
        return {**asdict(self), "median_mbit": median, "share": share}


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

    def measure(self, ground: Ground, tell: Tell) -> dict[str, Any]:
        """Takes all samples, by turns."""
        cells = [
            Cell(flow, rtt, loss, self.rate_mbit) for rtt in self.rtts_ms for loss in self.losses for flow in self.flows
        ]
        network: dict[str, Any] = {}
        checked: set[tuple[float, float]] = set()
        for _, cell in Turns(cells, self.samples, self.minutes)(tell):
            buffer = max(BUFFER_MIN_BYTES, bdp_bytes(self.rate_mbit, cell.rtt_ms))
            ground.cluster.set_link(link_of(self.rate_mbit, cell.rtt_ms, buffer), cell.loss)
            if (cell.rtt_ms, cell.loss) not in checked:
                checked.add((cell.rtt_ms, cell.loss))
                network |= self.check_network(ground, cell, tell)
            cell.mbit.append(self.sample(ground, cell))
            share = cell.mbit[-1] / payload_mbit(cell.flow, self.rate_mbit)
            where = f"{cell.rtt_ms:g} ms, {cell.loss:.1%} loss"
            tell(f"{where}, {cell.flow}: {cell.mbit[-1]:.1f} Mbit/s, {share:.1%}")
        return {"settings": asdict(self), "network": network, "rows": [cell.row() for cell in cells if cell.mbit]}

    def sample(self, ground: Ground, cell: Cell) -> float:
        """Goodput of one flow in Mbit/s."""
        seconds = self.seconds_of(cell.rtt_ms)
        if cell.flow != GRADWIRE:
            return ground.tcp(cell.flow, 0, 1, seconds).mbit
        size = int(payload_mbit(GRADWIRE, self.rate_mbit) * seconds * 1e6 / 8)
        return ground.gradwire(0, 1, size, 5 * seconds).mbit

    def check_network(self, ground: Ground, cell: Cell, tell: Tell) -> dict[str, Any]:
        """Counts what the network does to packets before anything is measured over it."""
        probe = probe_loss(ground.cluster)
        verdict = "" if probe.agrees_with(cell.loss) else ": NOT as set"
        facts = {f"counted_loss_at_{cell.loss}_{cell.rtt_ms}ms": probe.share}
        tell(f"set to lose {cell.loss:.1%}: {probe}{verdict}")
        if cell.loss == self.losses[0]:
            ground.cluster.set_loss(0)
            rtt_ms = probe_round_trip_ms(ground.cluster)
            lab = ground.udp_ceiling(self.rate_mbit) / payload_mbit(UDP, self.rate_mbit)
            facts |= {f"rtt_ms_at_{cell.rtt_ms}": rtt_ms, f"lab_share_at_{cell.rtt_ms}": lab}
            tell(f"round trip {rtt_ms:.2f} ms; the lab itself carries {lab:.1%} of the link")
            ground.cluster.set_loss(cell.loss)
        return facts


@click.command(help=as_written(__doc__), context_settings={"show_default": True})
@click.option("--rtt", "rtts", multiple=True, type=float, default=(1.0, 40.0), help="Round trip in ms; repeatable.")
@click.option("--loss", "losses", multiple=True, type=click.FloatRange(0, 0.5), default=(0.0, 0.001, 0.01, 0.05),
              help="Share of packets lost; repeatable.")  # fmt: skip
@click.option("--flow", "flows", multiple=True, type=click.Choice(FLOWS), default=FLOWS, help="Repeatable.")
@common_options(samples=3, seconds=6.0, seconds_help="Of one flow; a third of it at round trips up to 10 ms.")
def main(*, rtts: tuple[float, ...], losses: tuple[float, ...], flows: tuple[str, ...], **common: Any) -> None:
    """Reads the options and runs the benchmark in the lab."""
    settings = Settings(**common)
    bench = Bench(settings.rate_mbit, rtts, losses, flows, settings.samples, settings.seconds, settings.minutes)
    if settings.small:
        bench = Bench(min(settings.rate_mbit, 50.0), (1.0,), (0.01,), flows, 1, 1.0, settings.minutes)
    context = click.get_current_context()

    def measure(ground: Ground, tell: Tell) -> dict[str, Any]:
        here = had_here(context, "flows", bench.flows, tell)
        return replace(bench, flows=here[:2] if settings.small else here).measure(ground, tell)

    run("goodput", settings, 2, link_of(bench.rate_mbit, bench.rtts_ms[0], BUFFER_MIN_BYTES), measure)


if __name__ == "__main__":
    main()
