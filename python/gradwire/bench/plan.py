"""What `gradwire bench` measures, over which network and in which order. Plain values; checked when made."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import groupby
from typing import Any, TypeVar

from gradwire.bench.collectives import COLLECTIVES, elems_of

PRESETS = ("auto", "mlt", "dlcp", "ltp", "ultima", "reliable")
EXACT = "exact"  # the backend's own collective, which is exact, instead of an opted-in reduction
TCP = ("cubic", "reno", "bbr")
UNSHAPED = ("loopback", "bridge")
NETWORKS = (*UNSHAPED, "lab", "netem", "uml", "nft", "soft")
KERNEL = "kernel"  # netem, or nft where the kernel has no netem; only the sandbox can tell, so it is decided there
SCENARIOS = ("gray", "slow-host", "incast")
HEALTHY = "healthy"
GRAY_RAILS, GRAY_LOSS = 4, 0.1
SLOW_SHARE = 0.5  # of the rate that a slow host has left
# Mbit/s of each link: so few that a healthy call waits for links and not for the two cores that many machines have for all ranks.
SCENARIO_RATES = {"gray": 25.0, "slow-host": 50.0, "incast": 25.0}
# Calls: after 105 of a group the second exchange of what ranks measure holds (it comes after 72, and holds 32 later), and as the published
# figures have it some more.
SETTLE_CALLS = 160
INCAST_BUFFER_PACKETS = 64
MB = 1 << 20
_SMALL_BYTES = 64 * 1024
_SMALL_CALLS = 20  # in a row of a size that takes less than waking all ranks
_Item = TypeVar("_Item")


@dataclass(frozen=True)
class Variant:
    """One way to call a collective.

    Attributes:
        name: what tables call it.
        backend: `gloo` or `gradwire`.
        tcp: congestion control of gloo's connections.
        preset: gradwire's rule for an opted-in reduction; None: the exact collective of the group's backend.
        algorithm: schedule of an opted-in all-reduce.
        hadamard: whether it is sent rotated, `on` or `off`.
    """

    name: str
    backend: str
    tcp: str = ""
    preset: str | None = None
    algorithm: str = "auto"
    hadamard: str = "off"

    @property
    def is_peer(self) -> bool:
        """Whether it is what gradwire is compared with."""
        return self.backend == "gloo"

    @property
    def crew(self) -> str:
        """Variants of one crew share processes. A preset brings its own rate control only to processes that are configured so."""
        return "" if self.preset in (None, "auto", "reliable") else str(self.preset)

    def can(self, collective: str) -> bool:
        """Only an all-reduce and a reduce-scatter can be opted in to loss, and the latter has one schedule and is not rotated."""
        is_plain = self.algorithm == "auto" and self.hadamard == "off"
        return self.preset is None or collective == "all_reduce" or (collective == "reduce_scatter" and is_plain)


def gloo(tcp: str) -> Variant:
    """Gloo over TCP with this congestion control."""
    return Variant(f"gloo-{tcp}", "gloo", tcp=tcp)


def gradwire(preset: str, algorithm: str = "auto", hadamard: str = "off") -> Variant:
    """A preset, or `EXACT`, which leaves the schedule to the configuration."""
    if preset == EXACT:
        return Variant("gradwire-exact", "gradwire")
    ends = ("" if algorithm == "auto" else f"/{algorithm}") + ("/rotated" if hadamard == "on" else "")
    return Variant(f"gradwire-{preset}{ends}", "gradwire", preset=preset, algorithm=algorithm, hadamard=hadamard)


@dataclass(frozen=True)
class Condition:
    """What the network does while a sample is taken.

    Attributes:
        loss: share of the packets that every port loses.
        rtt_ms: round trip that the links add.
        scenario: what is wrong besides: one of `SCENARIOS`, or `HEALTHY`.
    """

    loss: float = 0.0
    rtt_ms: float = 0.0
    scenario: str = HEALTHY

    @property
    def lossless(self) -> Condition:
        """The same without loss, that of a gray rail included: what ranks meet over, by a TCP that would wait for seconds."""
        return replace(self, loss=0.0, scenario=HEALTHY if self.scenario == "gray" else self.scenario)

    def __str__(self) -> str:
        return f"{self.loss:g} lost, {self.rtt_ms:g} ms, {self.scenario}"


@dataclass(frozen=True)
class Cell:
    """What one series of samples is of; `bytes` as the NCCL tests count them (`collectives`)."""

    collective: str
    ranks: int
    bytes: int
    condition: Condition
    variant: Variant

    @property
    def place(self) -> tuple[str, int, int, Condition]:
        """What its variants have in common that are compared."""
        return self.collective, self.ranks, self.bytes, self.condition

    def __str__(self) -> str:
        parts = [self.variant.name, self.collective, f"{self.ranks} ranks", size_text(self.bytes)]
        if self.condition.loss:
            parts.append(f"{self.condition.loss:.3g} lost")
        if self.condition.rtt_ms:
            parts.append(f"{self.condition.rtt_ms:g} ms")
        if self.condition.scenario != HEALTHY:
            parts.append(self.condition.scenario)
        return ", ".join(parts)


@dataclass(frozen=True)
class NetworkPlan:
    """The network; links as in `gradwire.lab`. Loopback and bridge are not shaped.

    Attributes:
        kind: one of `NETWORKS`, or `KERNEL`.
        rate_mbit, buffer_bytes, mtu_bytes: of each link.
        rails: links of each host.
        bucket_bytes: what a link lets go at once after it was idle; None: four packets.
    """

    kind: str = "lab"
    rate_mbit: float = 100.0
    buffer_bytes: int = 256 * 1024
    mtu_bytes: int = 1500
    rails: int = 1
    bucket_bytes: int | None = None

    @property
    def is_shaped(self) -> bool:
        """Whether it can lose and delay packets."""
        return self.kind not in UNSHAPED

    def described(self) -> dict[str, Any]:
        """For the numbers; None for what its links have not, whatever stands in the field."""
        lacks = [] if self.is_shaped else ["rate_mbit", "buffer_bytes", "bucket_bytes"]
        lacks += ["mtu_bytes"] if self.kind == "loopback" else []
        return asdict(self) | dict.fromkeys(lacks)


@dataclass(frozen=True)
class Plan:
    """The whole benchmark.

    Attributes:
        sizes: bytes.
        samples: of each cell; of a small size (`timed_calls`) each is several calls in a row, every one of which is timed.
        block: samples of one variant in a row. One more comes before, which is not counted: TCP forgets its window when idle,
            and gradwire its estimates grow old.
        settle: so many come before a block of gradwire's. A group's ranks agree on what they measure every 64th call
            (docs/architecture.md), and each condition has groups of its own.
        minutes: after about so long no new turn is begun; each round trip has its share.
        is_tcp_chosen: whether the peers' congestion controls were named, so that one that the kernel lacks is an error (`tcp.fitted`).
    """

    network: NetworkPlan
    variants: tuple[Variant, ...]
    collectives: tuple[str, ...] = ("all_reduce",)
    ranks: tuple[int, ...] = (4,)
    sizes: tuple[int, ...] = (MB,)
    conditions: tuple[Condition, ...] = (Condition(),)
    samples: int = 100
    block: int = 10
    minutes: float = 9.0
    settle: int = 1
    is_tcp_chosen: bool = True

    def __post_init__(self) -> None:
        unknown = set(self.collectives) - set(COLLECTIVES)
        if unknown:
            raise ValueError(f"no such collective: {', '.join(sorted(unknown))}; there are {', '.join(COLLECTIVES)}")
        if min(self.ranks) < 2 or max(self.ranks) > 8:
            raise ValueError(f"2 to 8 ranks fit on one machine, not {self.ranks}")
        if self.samples < 1 or self.block < 1 or self.settle < 1 or min(self.sizes) < 4:
            raise ValueError(
                "at least one sample, in blocks of at least one after at least one, of at least four bytes"
            )
        harmful = [condition for condition in self.conditions if condition != Condition()]
        if harmful and not self.network.is_shaped:
            raise ValueError(f"--network {self.network.kind} loses and delays nothing: take --network lab")
        if len(self.ranks) > 1 and "slow-host" in {condition.scenario for condition in self.conditions}:
            raise ValueError(
                "--scenario slow-host takes one --ranks: the host is the last one, which smaller groups are without"
            )
        if not self.cells():
            raise ValueError(
                "no variant can do these collectives: only an all-reduce and a reduce-scatter (neither rotated nor with an algorithm) "
                "have presets, others take `exact`"
            )

    def cells(self) -> list[Cell]:
        """All that is measured. Variants that are compared stand side by side, as the network changes between the others.

        Bytes are those that are sent: with parts of whole elements, two small sizes can be the same.
        """
        cells = (
            Cell(collective, ranks, 4 * elems_of(collective, size // 4, ranks), condition, variant)
            for collective in self.collectives
            for ranks in self.ranks
            for size in self.sizes
            for condition in self.conditions
            for variant in self.variants
            if variant.can(collective)
        )
        return list(dict.fromkeys(cells))

    def left_out(self) -> list[str]:
        """What was asked for and is not measured, for people: variants that a collective does not have."""
        found = []
        for collective in self.collectives:
            names = [variant.name for variant in self.variants if not variant.can(collective)]
            why = "has one schedule and is not rotated" if collective == "reduce_scatter" else "has no presets"
            found += [f"not measured: {', '.join(names)}, as {collective} {why}"] if names else []
        return found

    @property
    def least_times(self) -> int:
        """Times that each cell gets at least, if nothing ends it early."""
        return self.samples * min(map(timed_calls, self.sizes))

    def uncounted(self, variant: Variant) -> int:
        """Samples before each block."""
        return 1 if variant.is_peer else self.settle

    def turns(self) -> Iterator[list[int]]:
        """Indices into `cells` for each turn. What is compared stays side by side.

        The first moves on, of the places and of the variants in each, so that no cell always follows the same one.
        """
        cells = self.cells()
        places = [list(group) for _, group in groupby(range(len(cells)), lambda at: cells[at].place)]
        for turn in range(-(-self.samples // self.block)):
            yield [at for place in _rotated(places, turn) for at in _rotated(place, turn)]

    def by_round_trip(self) -> list[Plan]:
        """The same of each round trip by itself, in the order of the conditions. Nothing is compared across round trips."""
        trips = dict.fromkeys(condition.rtt_ms for condition in self.conditions)
        split = [tuple(each for each in self.conditions if each.rtt_ms == trip) for trip in trips]
        return [replace(self, conditions=conditions) for conditions in split]

    @property
    def hosts(self) -> int:
        """As many as the largest group needs; smaller groups are the first of them."""
        return max(self.ranks)


def _rotated(items: list[_Item], by: int) -> list[_Item]:
    by %= len(items)
    return items[by:] + items[:by]


def timed_calls(size: int) -> int:
    """Calls in a row that one sample of so many bytes times."""
    return _SMALL_CALLS if size <= _SMALL_BYTES else 1


def size_text(size: int) -> str:
    """Bytes as people read them."""
    if size >= MB - 512:  # what would be 1024 KB
        return f"{size / MB:.4g} MB"
    return f"{size / 1024:.4g} KB" if size >= 1024 else f"{size} B"
