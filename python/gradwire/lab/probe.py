"""Counts at the receiver what the lab's switch does to packets, so that its losses are known and not believed.

Packets are handed to the kernel in batches of many segments (UDP_SEGMENT) as fast senders do. If an offload had been left on,
such a batch would cross the switch as one piece and be lost as one; the length of the runs of lost packets would show it.
"""

from __future__ import annotations

import math
import select
import socket
import struct
import time
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from typing import Protocol

from gradwire.lab.cluster import Link
from gradwire.lab.loss_filter import LossCounters

_UDP_SEGMENT = 103  # linux/udp.h
_RECEIVE_BUFFER_FORCE = 33  # SO_RCVBUFFORCE: room for all packets, so that a busy machine is not taken for a lossy link
_PAYLOAD_BYTES = 400  # short, so that thousands of packets take a second and not a minute
_BATCH_PACKETS = 40
_QUIET_S = 1.0  # after which the network is asked whether more is to come
_QUIET_MAX_S = 10.0  # what comes later than this after all others is lost; a busy machine may hold packets for a while
_ANSWER_S = 30.0  # of a packet that nothing loses, however busy the machine is
_PACE = 0.5  # share of the link's rate: half, so that no packet is lost to a full buffer


class Probed(Protocol):
    """A network that can be probed, such as a `Cluster`, with nothing else under way; `link` is what its links do now."""

    link: Link

    def address(self, host: int, /) -> str:
        """IPv4 address of a host."""
        ...

    def on_host(self, host: int, /) -> AbstractContextManager[None]:
        """Within it, new sockets belong to the host."""
        ...

    def loss_counters(self) -> LossCounters:
        """Packets that the switch has seen, and those of them that it lost, since some time in the past."""
        ...


@dataclass(frozen=True)
class LossProbe:
    """Packets sent from one host to another, and those that did not arrive."""

    sent: int
    lost: int
    longest_run: int

    @property
    def share(self) -> float:
        """Lost packets as a share of those sent."""
        return self.lost / self.sent

    def agrees_with(self, loss: float) -> bool:
        """Whether independent losses of single packets with this probability explain the count, but for one in a million.

        The count must lie within five standard deviations. A run of `r` losses in a row has probability `loss**r` at
        each packet; runs so long that fewer than one in a million of them is expected in the whole probe must not occur.
        """
        deviation = math.sqrt(self.sent * loss * (1 - loss))
        if abs(self.lost - self.sent * loss) > 5 * deviation:
            return False
        return self.sent * loss**self.longest_run >= 1e-6 if self.longest_run else True

    def __str__(self) -> str:
        return f"{self.lost} of {self.sent} single packets lost ({self.share:.2%}), at most {self.longest_run} in a row"


def probe_loss(cluster: Probed, packets: int = 8_000, sender: int = 0, receiver: int = 1) -> LossProbe:
    """Sends numbered packets at half the link's rate and counts those that arrive.

    It is over when all have arrived that the switch did not lose. Where its counters do not say so, what has not arrived after ten
    quiet seconds is lost.
    """
    with cluster.on_host(receiver):
        inbox = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    with cluster.on_host(sender):
        outbox = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    with inbox, outbox:
        with suppress(PermissionError):  # then the default room must do
            inbox.setsockopt(socket.SOL_SOCKET, _RECEIVE_BUFFER_FORCE, 4096 * packets)
        inbox.bind((cluster.address(receiver), 0))
        outbox.connect(inbox.getsockname())
        segmented = _enable_segmentation(outbox)
        batch_seconds = _BATCH_PACKETS * (_PAYLOAD_BYTES + 42) * 8 / (cluster.link.rate_mbit * 1e6 * _PACE)
        inflow = _Inflow(inbox, cluster, packets)
        ahead = _BATCH_PACKETS * (8 + int(2e-3 * cluster.link.delay_ms / batch_seconds))
        due = time.monotonic()
        for first in range(0, packets, _BATCH_PACKETS):
            _send(outbox, range(first, min(first + _BATCH_PACKETS, packets)), segmented)
            due = max(due, time.monotonic()) + batch_seconds  # no catching up: a late batch must not double the rate
            inflow.receive(due)
            # A busy machine may pass packets on late: more of them would overflow the switch's buffer.
            while inflow.arrived.rfind(1) < first - ahead and inflow.receive_late(min(first + _BATCH_PACKETS, packets)):
                pass
        while 0 in inflow.arrived and inflow.receive_late(packets):
            pass
    runs = bytes(inflow.arrived).split(b"\1")
    return LossProbe(packets, inflow.arrived.count(0), max(len(run) for run in runs))


def _enable_segmentation(outbox: socket.socket) -> bool:
    try:
        outbox.setsockopt(socket.IPPROTO_UDP, _UDP_SEGMENT, _PAYLOAD_BYTES)
    except OSError:
        return False  # a kernel before 4.18: then packets are handed over one by one
    return True


def _send(outbox: socket.socket, numbers: range, segmented: bool) -> None:
    payloads = [struct.pack("<I", number).ljust(_PAYLOAD_BYTES, b"\0") for number in numbers]
    if segmented:
        try:
            outbox.send(b"".join(payloads))
            return
        except OSError:  # before 6.11 a device without transmit checksums refuses segmentation
            outbox.setsockopt(socket.IPPROTO_UDP, _UDP_SEGMENT, 0)
    for payload in payloads:
        outbox.send(payload)


class _Inflow:
    """Numbered packets that come to a socket; `arrived` has a 1 for each that has."""

    def __init__(self, inbox: socket.socket, cluster: Probed, packets: int) -> None:
        self.arrived = bytearray(packets)
        self._inbox, self._cluster = inbox, cluster
        self._quiet_s = _QUIET_S + 4e-3 * cluster.link.delay_ms
        self._before = cluster.loss_counters()

    def receive(self, until: float) -> None:
        """Marks arriving packets until the time is over, and then those that are there already.

        A busy machine may not run this for a while; the sender is this same thread, so nothing piles up meanwhile.
        """
        while self._receive_one(max(0.0, until - time.monotonic())):
            pass

    def receive_late(self, sent: int) -> bool:
        """Marks the next packet that arrives; `False` when none will any more of so many that were sent."""
        end = time.monotonic() + self._quiet_s + _QUIET_MAX_S - _QUIET_S
        while not self._receive_one(self._quiet_s):
            if self._is_all_here(sent) or time.monotonic() >= end:
                return False
        return True

    def _is_all_here(self, sent: int) -> bool:
        """Whether the switch has seen all that was sent, and what it did not lose has arrived."""
        now = self._cluster.loss_counters()
        seen, lost = now.seen - self._before.seen, now.dropped - self._before.dropped
        return seen >= sent and self.arrived.count(1) >= seen - lost

    def _receive_one(self, timeout_s: float) -> bool:
        """Marks the next packet that arrives; `False` when none does in time."""
        if not select.select([self._inbox], [], [], timeout_s)[0]:
            return False
        (number,) = struct.unpack_from("<I", self._inbox.recv(2048))
        self.arrived[number] = 1
        return True


def probe_round_trip_ms(cluster: Probed, times: int = 50) -> float:
    """Median time of a small packet from host 0 to host 1 and back, in milliseconds, with losses switched off."""
    with cluster.on_host(0):
        near = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    with cluster.on_host(1):
        far = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    with near, far:
        far.bind((cluster.address(1), 0))
        near.connect(far.getsockname())
        far.settimeout(_ANSWER_S)
        near.settimeout(_ANSWER_S)
        samples = []
        for _ in range(times):
            started = time.perf_counter()
            near.send(b"ping")
            _, sender = far.recvfrom(16)
            far.sendto(b"pong", sender)
            near.recv(16)
            samples.append(time.perf_counter() - started)
    return sorted(samples)[times // 2] * 1e3
