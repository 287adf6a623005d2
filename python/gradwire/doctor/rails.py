"""The ways from the local addresses that the kernel does not choose by itself: further paths begin there.

The first path begins at one of them where a hello is answered there first. So each is measured as the kernel's own way is: losses of
small and of full packets, the largest packet, DSCP and ECN. All packets leave from the job's port: a filter may let nothing else in,
and another port would be called a dead way. Nothing need come back on it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from ipaddress import ip_address

from gradwire.config import Config
from gradwire.doctor import marks
from gradwire.doctor.findings import NOTE, PROBLEM, WARNING, Finding
from gradwire.doctor.marks import Marks, octets_of
from gradwire.doctor.probe import End, Prober
from gradwire.doctor.ways import Plan, Way, worst

_REPAIR = "repair that way, or leave its interface out (GRADWIRE_INTERFACE)"


@dataclass(frozen=True)
class Rail:
    """What was measured on one.

    Attributes:
        source: the local address.
        sent: small packets, of which `lost` were lost; all: nothing arrives, and nothing else was measured.
        ip_bytes: largest IP packet that arrives, up to the one that gradwire would send.
        large: packets sent of the size that gradwire would send, and those of them that were lost.
        marks: for each octet sent the one that arrived; None: nothing arrived with it.
    """

    source: str
    sent: int
    lost: int
    ip_bytes: int = 0
    large: tuple[int, int] = (0, 0)
    marks: Marks = ()

    @property
    def is_dead(self) -> bool:
        """Whether nothing arrives."""
        return self.lost >= self.sent

    def is_path(self, wanted: int) -> bool:
        """Whether packets of this size arrive, those that gradwire would send."""
        return not self.is_dead and self.ip_bytes >= wanted and self.large[1] < self.large[0]


def ways(prober: Prober, to: End, ends: Sequence[str], sources: Sequence[str]) -> list[Way]:
    """The ways from these local addresses, each to the nearest of the peer's, which is asked where it is known to answer."""
    return [
        Way(prober, to._replace(address=nearest(source, ends)), number, source, to)
        for number, source in enumerate(sources, 1)
    ]


def measure(way: Way, plan: Plan, config: Config, ip_bytes: int) -> Rail:
    """Measures one, with IP packets of up to this size."""
    small = way.small_loss(plan)
    if small.lost >= small.sent:
        return Rail(way.source, small.sent, small.lost)
    large = way.large_loss(plan, ip_bytes)
    largest = way.largest(ip_bytes) if large.lost >= large.sent else ip_bytes
    arriving = [way.arriving(octet, number) for number, octet in enumerate(octets_of(config))]
    told = tuple(mark for mark in arriving if mark is not None)
    return Rail(way.source, small.sent, small.lost, largest, (large.sent, large.lost), told)


@dataclass(frozen=True)
class Judge:
    """What is needed to say what follows.

    Attributes:
        config: the job's.
        wanted: bytes of the IP packets that gradwire would send.
        loss_max: share lost, 0 to 1, beyond which training would suffer.
        marks: of the way that the kernel chooses: what is so everywhere is told once.
        found: makes a finding of level, check, text and fix.
    """

    config: Config
    wanted: int
    loss_max: float
    marks: Marks
    found: Callable[..., Finding]

    def judge(self, rail: Rail) -> list[Finding]:
        """What follows from one."""
        if rail.is_dead:
            return [self._dead(rail)]
        if rail.ip_bytes < self.wanted:  # so no path begins there, whatever else is so
            return [self._size(rail)]
        findings = self._loss(rail)
        if tuple(rail.marks) != tuple(self.marks):
            findings += marks.judge(rail.marks, self.config, self.found, f"from {rail.source} ")
        return findings

    @property
    def _is_used(self) -> bool:
        """Whether paths of the job begin there: none of a job with one path begins where full packets do not pass."""
        return self.config.paths > 1

    def _dead(self, rail: Rail) -> Finding:
        """It is found out by the engine, and left."""
        use = "a path that would begin there takes another way" if self._is_used else "no path of this job begins there"
        text = f"nothing that is sent from {rail.source} arrives there: {use}"
        return self.found(WARNING if self._is_used else NOTE, "paths", text, _REPAIR if self._is_used else "")

    def _size(self, rail: Rail) -> Finding:
        gone = f"from {rail.source} packets of {self.wanted} bytes disappear on the way, {rail.ip_bytes} arrive"
        text = f"{gone}: no path begins there"
        larger = "a larger MTU on the switches of that way"
        fix = f"{larger}, GRADWIRE_MTU={rail.ip_bytes} on every rank, or leave its interface out (GRADWIRE_INTERFACE)"
        return self.found(PROBLEM if self._is_used else NOTE, "mtu", text, fix)

    def _loss(self, rail: Rail) -> list[Finding]:
        counted = [("packets", rail.sent, rail.lost), ("packets of full size", *rail.large)]
        loss = worst(counted, self.loss_max)
        if not loss.lost:
            return []
        text = f"from {rail.source} {loss.text(self.loss_max)}"
        fix = f"{_REPAIR}; with several paths (GRADWIRE_PATHS) others take over"
        return [self.found(PROBLEM if loss.is_problem else WARNING, "paths", text, fix)]


def nearest(source: str, addresses: Sequence[str]) -> str:
    """The one that has most leading bits in common with a local address: that of the same network, where there is one."""
    own = ip_address(source)

    def different(address: str) -> int:
        other = ip_address(address)
        return int(own) ^ int(other) if other.version == own.version else 1 << own.max_prefixlen

    return min(addresses, key=lambda address: different(address).bit_length())
