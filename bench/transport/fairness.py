"""What one gradwire flow and one TCP flow leave each other at a bottleneck, and how that changes over time.

    python bench/transport/fairness.py                          # bbr and cubic, 1 and 40 ms, two buffers: 20 minutes
    python bench/transport/fairness.py --peer bbr --rtt 1       # two of the eight cases
    python bench/transport/fairness.py --small                  # a look whether it works: seconds, no conclusions

The experiment behind LTP's figure 15. Two hosts send to a third, whose switch port is the bottleneck: 200 Mbit/s with a
buffer of one and of four bandwidth-delay products (and at least 16 packets). Both start at the same time and run for the
same 20 s. A share is of the payload that both delivered while both ran; `link used` is of what the link can carry. The order of the cases
rotates with each sample.

Prints progress, a table in Markdown (medians, with the range of gradwire's share), and each target with what was measured;
draws OUT/fairness.png. Target: beside bbr gradwire gets 35 to 65 %, by the median of at least five
samples; with fewer a case is not judged. What it gets beside others is reported.

Exit code: 0 all targets reached, 1 one missed, 2 it could not run (a wrong option, a missing tool, no namespaces), or no target
was judged.
"""

from __future__ import annotations

import statistics
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import click
from experiment import Settings, Tell, Turns, common_options, had_here, run
from gradwire.bench.display import as_written
from network import Flow, Ground, bdp_bytes, link_of, payload_mbit

PEERS = ("bbr", "cubic", "reno")
BUFFER_MIN_BYTES = 16 * 1514
STEP_S = 0.5  # of the picture


@dataclass(frozen=True)
class Together:
    """One sample: both flows. Only the time counts in which both ran.

    They start a moment apart, the longer the busier the machine is, and whoever is alone has the whole link.
    """

    ours: Flow
    theirs: Flow

    @property
    def seconds(self) -> float:
        """How long both ran."""
        return max(min(self.ours.ended, self.theirs.ended) - self._start, 1e-9)

    @property
    def _start(self) -> float:
        return max(self.ours.begun, self.theirs.begun)

    def mbit(self, flow: Flow) -> float:
        """Goodput of one of them in Mbit/s."""
        return flow.bytes_between(self._start, self._start + self.seconds) * 8e-6 / self.seconds

    @property
    def share(self) -> float:
        """Share of gradwire in what both delivered."""
        ours, theirs = self.mbit(self.ours), self.mbit(self.theirs)
        return ours / (ours + theirs) if ours + theirs > 0 else 0.0

    def curve(self) -> tuple[list[float], list[float]]:
        """The share of gradwire in each step, in percent: (seconds, shares)."""
        times = [STEP_S * step for step in range(1, int(self.seconds / STEP_S) + 1)]
        shares = []
        for at in times:
            span = (self._start + at - STEP_S, self._start + at)
            parts = [flow.bytes_between(*span) for flow in (self.ours, self.theirs)]
            shares.append(round(100 * parts[0] / sum(parts), 1) if sum(parts) > 0 else 50.0)
        return times, shares


@dataclass
class Case:
    """All samples of one peer over one bottleneck."""

    peer: str
    rtt_ms: float
    bdps: float
    rate_mbit: float
    pairs: list[Together] = field(default_factory=list)
    overflowed: list[float] = field(default_factory=list)

    def row(self) -> dict[str, Any]:
        """The numbers that are printed and written."""
        shares = [pair.share for pair in self.pairs]
        ours, theirs = ([pair.mbit(getattr(pair, name)) for pair in self.pairs] for name in ("ours", "theirs"))
        most = payload_mbit(self.peer, self.rate_mbit)
        return {
            "peer": self.peer,
            "rtt_ms": self.rtt_ms,
            "buffer_bdps": self.bdps,
            "samples": len(shares),
            "gradwire_mbit": statistics.median(ours),
            "peer_mbit": statistics.median(theirs),
            "share": statistics.median(shares),
            "shares": shares,
            "link_used": statistics.median((a + b) / most for a, b in zip(ours, theirs, strict=True)),
            "overflowed": statistics.median(self.overflowed),
            "seconds_together": [pair.seconds for pair in self.pairs],
            "curve": self.pairs[0].curve(),
        }


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

    def measure(self, ground: Ground, tell: Tell) -> dict[str, Any]:
        """Runs all pairs, by turns."""
        cases = [
            Case(peer, rtt, bdps, self.rate_mbit) for peer in self.peers for rtt in self.rtts_ms for bdps in self.bdps
        ]
        for _, case in Turns(cases, self.samples, self.minutes)(tell):
            self.sample(ground, case)
            tell(f"{case.peer}, {case.rtt_ms:g} ms, {case.bdps:g} BDP: gradwire has {case.pairs[-1].share:.1%}")
        return {"settings": asdict(self), "rows": [case.row() for case in cases if case.pairs]}

    def sample(self, ground: Ground, case: Case) -> None:
        """Both flows at once, over a fresh bottleneck."""
        buffer = max(BUFFER_MIN_BYTES, int(case.bdps * bdp_bytes(self.rate_mbit, case.rtt_ms)))
        ground.cluster.set_link(link_of(self.rate_mbit, case.rtt_ms, buffer))
        size = int(self.rate_mbit * self.seconds * 1e6 / 8)  # more than the link carries, so that it runs to the end
        case.pairs.append(Together(*ground.pair(case.peer, size, self.seconds)))
        counters = ground.cluster.port_counters()
        case.overflowed.append(counters.overflowed / max(counters.seen, 1))


@click.command(help=as_written(__doc__), context_settings={"show_default": True})
@click.option("--peer", "peers", multiple=True, type=click.Choice(PEERS), default=("bbr", "cubic"), help="Repeatable.")
@click.option("--rtt", "rtts", multiple=True, type=float, default=(1.0, 40.0), help="Round trip in ms; repeatable.")
@click.option("--buffer", "bdps", multiple=True, type=float, default=(1.0, 4.0),
              help="Buffer in bandwidth-delay products; repeatable.")  # fmt: skip
@common_options(samples=5, seconds=20.0, seconds_help="Of one sample.", minutes=20.0)
def main(*, peers: tuple[str, ...], rtts: tuple[float, ...], bdps: tuple[float, ...], **common: Any) -> None:
    """Reads the options and runs the benchmark in the lab."""
    settings = Settings(**common)
    bench = Bench(settings.rate_mbit, peers, rtts, bdps, settings.samples, settings.seconds, settings.minutes)
    if settings.small:
        bench = Bench(min(settings.rate_mbit, 50.0), peers, (1.0,), (4.0,), 1, 1.0, settings.minutes)
    context = click.get_current_context()

    def measure(ground: Ground, tell: Tell) -> dict[str, Any]:
        here = had_here(context, "peers", bench.peers, tell)
        return replace(bench, peers=here[:1] if settings.small else here).measure(ground, tell)

    run("fairness", settings, 3, link_of(bench.rate_mbit, bench.rtts_ms[0], 256 * 1024), measure)


if __name__ == "__main__":
    main()
