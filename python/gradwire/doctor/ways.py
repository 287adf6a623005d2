"""One way to a peer, from one local address of this rank, and what is counted on it.

Every way is measured in the same manner. Each count has a number of its own, by which the peer tells it from all others.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from gradwire.doctor.chance import is_more, is_open
from gradwire.doctor.probe import Count, End, Prober

LOSS_TEST, BURST_TEST, LARGE_TEST = 1, 2, 3
MARK_TESTS, SIZE_TESTS = (
    64,
    128,
)  # numbered on: one for each code point, of which there are 64, and for each size that is tried
_LOOK_SHIFT, _RAIL_SHIFT = 8, 16

LOOKS_MORE = 4  # of a way that loses twice the allowed share six of seven are found by full packets alone, and 49 of 50 by small ones
LARGE_SHARE = 4  # one large packet for so many small ones
_BATCH, _PAUSE_SECONDS, SMALL_BYTES = 10, 2e-3, 200  # 5,000 small packets a second: 8 Mbit/s, which fills no buffer
_LARGE_BIT_SECONDS = 1 / 8e6  # large ones come at the same rate in bits
_SURE_PACKETS = 10  # of which none arrives: over a way that loses 30 % that is chance once in 100,000 times
_FEW_SECONDS = 0.25  # a count of so few packets, where some are missing: the peer is asked twice
_SIZES_MOST = 16  # that a search tries


class Tally(NamedTuple):
    """Packets sent, those of them that were lost, and those that came after a later one."""

    sent: int
    lost: int
    reordered: int = 0


@dataclass(frozen=True)
class Plan:
    """How losses are counted.

    Attributes:
        packets: small ones of a first look, and packets of any size of each further one.
        loss_max: share lost, 0 to 1, beyond which training would suffer.
        tell: what is told meanwhile.
    """

    packets: int
    loss_max: float
    tell: Callable[[str], None] = lambda _text: None


@dataclass(frozen=True)
class Way:
    """A way to a peer.

    Attributes:
        prober: this rank's socket.
        to: the peer's place.
        rail: 0 for the way that the kernel chooses; the others are numbered from 1 on.
        source: the local address; empty: the kernel chooses it.
        asked_at: where the peer is asked what has arrived; None: on this way.
    """

    prober: Prober
    to: End
    rail: int = 0
    source: str = ""
    asked_at: End | None = None

    def count(
        self, test: int, packets: int, size_bytes: int, *, batch: int, pause_s: float = _PAUSE_SECONDS, octet: int = 0
    ) -> Count | None:
        """What the peer counts of so many packets, IP packets of this size; None: it does not say."""
        test |= self.rail << _RAIL_SHIFT
        return self.prober.count(
            self.to, test, packets, size_bytes=size_bytes, batch=batch, pause_s=pause_s, octet=octet, source=self.source,
            asked_at=self.asked_at,
        )  # fmt: skip

    def small_loss(self, plan: Plan) -> Tally:
        """Of small packets, ten behind each other."""

        def look(number: int, packets: int) -> Count | None:
            return self.count(LOSS_TEST | number << _LOOK_SHIFT, packets, SMALL_BYTES, batch=_BATCH)

        return self._counted(plan, plan.packets, look)

    def large_loss(self, plan: Plan, ip_bytes: int) -> Tally:
        """Of packets of this size, one by one: what damages bits, or counts them, takes these first."""
        # Jumbo frames come over links for which more bits are little.
        pause_s = min(8 * ip_bytes * _LARGE_BIT_SECONDS, _PAUSE_SECONDS)

        def look(number: int, packets: int) -> Count | None:
            return self.count(LARGE_TEST | number << _LOOK_SHIFT, packets, ip_bytes, batch=1, pause_s=pause_s)

        return self._counted(plan, plan.packets // LARGE_SHARE, look)

    def arriving(self, octet: int, number: int) -> tuple[int, int | None] | None:
        """What packets of this traffic class octet arrive with, where any do, behind the octet itself; None: the peer does not say.

        Counted, so that nothing need come back on this way.
        """
        found = self.count(MARK_TESTS + number, _SURE_PACKETS, SMALL_BYTES, batch=_SURE_PACKETS, octet=octet)
        return None if found is None else (octet, found.octet if found.arrived else None)

    def largest(self, wanted: int) -> int:
        """The largest IP packet up to `wanted` that arrives, on a way that small ones pass; one of which the peer does not say counts."""
        tried: list[int] = []

        def passes(ip_bytes: int) -> bool:
            tried.append(ip_bytes)
            found = self.count(SIZE_TESTS + len(tried), _SURE_PACKETS, ip_bytes, batch=_SURE_PACKETS)
            return found is None or found.arrived > 0

        return wanted if passes(wanted) else largest_passing(passes, SMALL_BYTES, wanted)

    def _counted(self, plan: Plan, packets: int, look: Callable[[int, int], Count | None]) -> Tally:
        """Looks again, and at the sum, as long as more seems to be lost than the plan allows and that may be chance.

        All is lost of a look that the peer never says a count of.
        """
        total = _tally(packets, look(0, packets))
        for number in range(1, 1 + LOOKS_MORE):
            if not is_open(total.lost, total.sent, plan.loss_max):
                break
            plan.tell(
                f"{total.lost} of {total.sent} packets to rank {self.to.rank} lost, which may be chance: counts again"
            )
            more = _tally(plan.packets, look(number, plan.packets))
            total = Tally(*map(sum, zip(total, more, strict=True)))
        return total


class Loss(NamedTuple):
    """What is lost of one kind of packets; `is_problem`: certainly more than is allowed."""

    is_problem: bool
    share: float
    what: str
    sent: int
    lost: int

    def text(self, loss_max: float) -> str:
        """For people, with a word about chance where it is above the allowed share and not certain."""
        may_be = "; that it is more than the limit may be chance" if is_open(self.lost, self.sent, loss_max) else ""
        return f"{self.lost} of {self.sent} {self.what} lost ({self.share:.2%}) at a rate that fills no buffer{may_be}"


def worst(counted: Sequence[tuple[str, int, int]], loss_max: float) -> Loss:
    """Of kinds of packets, each with how many were sent and lost, the one that shows most."""
    return max(
        Loss(is_more(lost, sent, loss_max), lost / sent, what, sent, lost) for what, sent, lost in counted if sent
    )


def largest_passing(passes: Callable[[int], bool], least: int, most: int) -> int:
    """The largest size for which `passes` is true: `least` is known to, `most` not to. Those that networks have are tried first."""
    low, high = least, most
    for likely in (1500, 1450, 1400, 1280):
        if low < likely < high:
            low, high = (likely, high) if passes(likely) else (low, likely)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if passes(middle) else (low, middle)
    return low


def planned_s(packets: int, *, again: bool) -> float:
    """How long the losses of one way are counted at least; `again`: at most, with all else that may have to be tried on it."""
    small_s, large_s = packets / _BATCH * _PAUSE_SECONDS, packets * _PAUSE_SECONDS
    first_s = small_s + large_s / LARGE_SHARE
    return first_s + (LOOKS_MORE * (small_s + large_s) + _SIZES_MOST * _FEW_SECONDS if again else 0.0)


def _tally(packets: int, found: Count | None) -> Tally:
    return Tally(packets, packets) if found is None else Tally(packets, packets - found.arrived, found.reordered)
