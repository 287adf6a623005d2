"""Delay, and losses where there is no packet filter, by the kernel's network emulator (a queueing discipline of `tc`)."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass

from gradwire.lab import iproute
from gradwire.lab.errors import LabError
from gradwire.lab.loss_filter import LossCounters
from gradwire.lab.namespaces import Namespaces

_FRAME_BYTES_MIN = 42  # Ethernet, IPv4 and UDP headers: a virtual link does not fill it up


def available() -> bool:
    """Whether this kernel has netem and `tc` is there to set it.

    It is tried on the loopback device of a network namespace that is made for it, since the current one may be the machine's own.
    Who may make none has no netem either: inside the lab's sandbox everybody may.
    """
    try:
        with closing(Namespaces()) as own, own.on_host(own.add()):
            iproute.tc("qdisc add dev lo root netem delay 1ms")
    except (LabError, OSError):
        return False
    return True


def loss_words(loss: float, burst: float = 1.0) -> str:
    """Loss with this probability, 0 to 1, in runs of `burst` packets on average, as words of netem.

    Runs are Gilbert's model: a good state, a bad one in which everything is lost, and a chance to change at each packet.
    """
    if burst <= 1.0 or loss in (0.0, 1.0):
        return f"loss {100 * loss}%"
    leave = 1 / burst
    enter = leave * loss / (1 - loss)
    return f"loss gemodel {100 * enter}% {100 * leave}%"


def packets_of(held_bytes: float) -> int:
    """The limit of netem, which is of packets, for a port that holds so many bytes: with room for the smallest it is never what drops."""
    return int(held_bytes / _FRAME_BYTES_MIN) + 1


def port_queue(
    device: str, rate_mbit: float, delay_ms: float, buffer_bytes: int, *, loss: float, burst: float, bucket_bytes: int
) -> list[str]:
    """Lines for `tc` that make a device a switch's port, or change one that they have made.

        tbf (rate) > netem (delay, loss) > bfifo (buffer)

    A packet is under way in netem first, and waits for its turn when it comes out of it, where there is room: the buffer is of bytes,
    whatever their packets' size, and what the delay keeps under way takes none of it.

    Args:
        device: its name.
        rate_mbit: rate in millions of bits a second.
        delay_ms: added one-way delay.
        buffer_bytes: bytes that it holds before it drops.
        loss: probability, 0 to 1, with which a packet is lost.
        burst: mean number of packets that are lost one after the other; 1: each by itself.
        bucket_bytes: what leaves at once after the port was idle.
    """
    held = int(buffer_bytes + rate_mbit * 1e3 * delay_ms / 8)
    # The limit of tbf says nothing while it has netem below it.
    wire = f"limit {packets_of(held)} delay {delay_ms}ms {loss_words(loss, burst)}"
    return [
        f"qdisc replace dev {device} root handle 1: tbf rate {rate_mbit}mbit burst {bucket_bytes} limit {held}",
        f"qdisc replace dev {device} parent 1: handle 2: netem {wire}",
        f"qdisc replace dev {device} parent 2: handle 4: bfifo limit {buffer_bytes}",
    ]


@dataclass(frozen=True)
class Emulation:
    """What netem does to each packet besides losing it: delay in milliseconds, and room for so many packets in all."""

    delay_ms: float
    limit_packets: int

    def command(self, verb: str, device: str, loss: float = 0.0) -> str:
        """A line for `tc`. A change must repeat everything: netem takes what is not named as zero."""
        what = f"delay {self.delay_ms}ms limit {self.limit_packets} loss {loss * 100}%"
        return f"qdisc {verb} dev {device} parent 1: handle 2: netem {what}"


class NetemLoss:
    """Loses packets at the switch's ports; the same calls as `LossFilter`, with the ports' netem doing it."""

    def __init__(self, ports: Sequence[str], emulation: Emulation) -> None:
        self._ports, self._emulation = ports, emulation
        self._before = (0, 0)

    def set_loss(self, share: float) -> None:
        """Loses each packet with this probability, 0 to 1, from now on, and sets the counters to zero."""
        if not 0.0 <= share <= 1.0:
            raise ValueError(f"loss is a share between 0 and 1, not {share}")
        iproute.tc(*(self._emulation.command("change", port, share) for port in self._ports))
        self._before = self._read()

    def counters(self) -> LossCounters:
        """Packets that reached the ports, and those of them that netem dropped (a full buffer's among them)."""
        passed, dropped = (now - before for now, before in zip(self._read(), self._before, strict=True))
        return LossCounters(passed + dropped, dropped)

    def _read(self) -> tuple[int, int]:
        mine = [q for q in iproute.tc_statistics() if q["kind"] == "netem" and q["dev"] in self._ports]
        return sum(q["packets"] for q in mine), sum(q["drops"] for q in mine)

    def close(self) -> None:
        """Leaves netem as it is; it goes with the network namespace."""
