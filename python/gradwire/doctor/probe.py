"""A UDP socket on the job's own port: it answers the probes of other ranks and sends this rank's.

One socket for both, since firewalls and switches shall see what they see in training. A thread receives: questions are
answered at once with what arrived (traffic class octet, this host's clock), counted packets are counted by who sent them
for which test, and answers go to whoever waits for them. Packets of another run, or of nobody, change nothing.
"""

from __future__ import annotations

import collections
import socket
import statistics
import struct
import sys
import threading
import time
from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from gradwire.doctor.family import IPV4, IPV6, Family, family_of

# Magic, kind, octet (in an answer) or call, rank, token, sequence, sender's time; last, in a question, the rank that is asked and the
# test, in an answer the answerer's time. Times are in ns.
_HEADER = struct.Struct("<4sBBHIIqq")
_MAGIC = b"gwd3"
_ECHO, _COUNT, _ASK, _ANSWER = range(4)
_COUNTS = struct.Struct("<IIIII")
_TIMESPEC = struct.Struct("@ll")  # seconds and nanoseconds
_FORCED_RECEIVE_BUFFER = 33  # SO_RCVBUFFORCE
_MTU_PROBE = 3  # IP_PMTUDISC_PROBE, IPV6_PMTUDISC_PROBE
_ASKED_SHIFT, _TEST_MASK = 32, (1 << 32) - 1
_TIMESTAMPS = 35  # SO_TIMESTAMPNS, and the kind of what comes with each packet: when the kernel got it
_SEGMENT, _JOINED_BYTES = 103, 60_000  # UDP_SEGMENT; bytes of one call, a little below what IP can say
_CALLS = 255  # numbers of calls fill an octet, 0: no number
_SEND_TRIES = 4  # of a packet that looks for a router: two answers may come between two tries, hardly more
_LOOK_UP_MICROSECONDS = 300_000  # after which the thread looks whether it should end
_STUCK_SECONDS = 1  # after which a card that takes no packets is not waited for
_UNKNOWN_NS = (1 << 32) - 1
_TELLING_PACKETS = 6  # of one call; of fewer a card may collect all before the kernel hears of any
WAIT_SECONDS = 0.2  # for an answer, where the way is not known to be longer
_ROUNDS = 5  # of probes that nobody answers, plain ones neither: five seconds of a peer that stands still
_ROUND_TRIPS = 3  # that an answer is waited for over a long way: queues may double it
_STRAGGLING_SECONDS = 0.1  # and a round trip: how much later than a question a packet that left before it may come


class End(NamedTuple):
    """Where a rank is asked, and which: at one address there may be another, or this one itself, as behind bridges of containers.

    `rtt_s`: round trip; 0: not known yet.
    """

    address: str
    port: int
    rank: int
    rtt_s: float = 0.0

    @property
    def place(self) -> tuple[str, int]:
        """As a socket takes it."""
        return self.address, self.port

    @property
    def wait_s(self) -> float:
        """How long an answer is waited for."""
        return max(WAIT_SECONDS, _ROUND_TRIPS * self.rtt_s)

    @property
    def header_bytes(self) -> int:
        """Of IP and UDP, of a packet to it."""
        return family_of(self.address).header_bytes

    @property
    def least_bytes(self) -> int:
        """Of a probe to it, as an IP packet."""
        return _HEADER.size + self.header_bytes


@dataclass(frozen=True)
class Answer:
    """What a peer said about one probe.

    Attributes:
        rtt_s: from sending to the answer.
        octet: traffic class octet that the probe arrived with.
        offset_s: the peer's wall clock minus this one's, but for half of the way's asymmetry.
    """

    rtt_s: float
    octet: int
    offset_s: float


@dataclass(frozen=True)
class _Probe:
    """A packet to send: what for, how large as an IP packet (0: the least), with which octet; of a count for which test, by which call.

    `source`: the local address to send from; empty: the kernel chooses it.
    """

    kind: int
    size_bytes: int = 0
    octet: int = 0
    test: int = 0
    call: int = 0
    source: str = ""


@dataclass(frozen=True)
class Count:
    """What a peer counted of a test.

    Attributes:
        arrived: different packets.
        reordered: those that came after a later one.
        duplicated: copies.
        spacing_ns: between packets that left in one call, the median of these calls; None: it is not known.
        octet: traffic class octet of the one that arrived last.
    """

    arrived: int
    reordered: int
    duplicated: int
    spacing_ns: int | None = None
    octet: int = 0


def bound(port: int, address: str = IPV4.anywhere) -> socket.socket:
    """A socket for probes at this port, 0: any, at one local address or at all of a family. Raises OSError where the port is taken."""
    family = family_of(address)
    found = socket.socket(family.number, socket.SOCK_DGRAM)
    try:
        with suppress(OSError):
            found.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16 << 20)
            found.setsockopt(socket.SOL_SOCKET, _FORCED_RECEIVE_BUFFER, 16 << 20)
        found.setsockopt(family.level, family.class_of_received, 1)
        # Never in parts, and not bounded by what the kernel has learned about the way.
        found.setsockopt(family.level, family.mtu_discover, _MTU_PROBE)
        with suppress(OSError):
            found.setsockopt(socket.SOL_SOCKET, _TIMESTAMPS, 1)
        # Sending waits for the card, but not for one that stands still.
        found.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", _STUCK_SECONDS, 0))
        found.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", 0, _LOOK_UP_MICROSECONDS))
        found.bind((address, port))
    except OSError:
        found.close()
        raise
    return found


class Prober:
    """The socket and its thread. A context manager."""

    def __init__(self, port: int | socket.socket, rank: int, token: int, address: str = IPV4.anywhere) -> None:
        """At a port, or by a socket of `bound`, which this closes at its end. Raises OSError where the port is taken."""
        self.rank, self.token = rank, token
        self.socket = port if isinstance(port, socket.socket) else bound(port, address)
        self._family = IPV6 if self.socket.family == socket.AF_INET6 else IPV4
        self.port: int = self.socket.getsockname()[1]
        self.heard: set[int] = set()  # ranks from which anything came
        self._sequence = 0
        self._answers: dict[tuple[int, int], tuple[Answer, bytes]] = {}
        self._counted: dict[tuple[int, int], _Counting] = collections.defaultdict(_Counting)
        self._changed = threading.Condition()
        self._gone: set[int] = set()
        self._ends = False
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def find(self, ends: Sequence[End], tries: int) -> End | None:
        """The first of these places that answers, with its round trip; each is asked so often.

        Answers to earlier questions count: over a long way each of them comes after its own wait.
        """
        asked: dict[tuple[int, int], End] = {}
        for _ in range(tries):
            for end in ends:
                question = self._question(_Probe(_ECHO), end)
                if question is None:
                    continue
                asked[question] = end
                answered = self._answered(asked, end.wait_s)
                if answered is not None:
                    return asked[answered]._replace(rtt_s=self._answers.pop(answered)[0].rtt_s)
        return None

    def ask(self, to: End, size_bytes: int = 0, octet: int = 0, wait_s: float | None = None) -> Answer | None:
        """Sends one probe, an IP packet of this size (0: the least) and class; None: no answer in time, or too large for the device."""
        found = self._exchange(_Probe(_ECHO, size_bytes, octet), to, to.wait_s if wait_s is None else wait_s)
        return None if found is None else found[0]

    def ask_for_certain(self, to: End, tries: int, *, size_bytes: int = 0, octet: int = 0) -> Answer | None:
        """Sends so many probes of this size and class until one is answered; None: they are lost on the way, where others are not.

        A peer may stand still for longer than all of them are waited for. So a plain probe follows: who answers it has read those before
        it that have come, and answered them first. Where it is not answered either nothing is known, and all begins again, until the
        peer has been silent in so many rounds; then it counts as gone, and is not waited for so long again.
        """
        asked: list[tuple[int, int]] = []
        for _ in range(1 if self.is_gone(to) else _ROUNDS):
            answered = self._try(_Probe(_ECHO, size_bytes, octet), to, tries, asked)
            is_there = answered is not None or self.ask(to) is not None
            answered = answered or self._answered(asked, 0)
            if answered is not None or is_there:
                self._gone.discard(to.rank)
                return None if answered is None else self._answers.pop(answered)[0]
        self._gone.add(to.rank)
        return None

    def is_gone(self, to: End) -> bool:
        """Whether it was silent when it was last asked for certain: what was not answered then may not be lost on the way."""
        return to.rank in self._gone

    def _try(self, probe: _Probe, to: End, tries: int, asked: list[tuple[int, int]]) -> tuple[int, int] | None:
        """Asks so often, and says which question has an answer, of those that were `asked` before, too."""
        for _ in range(tries):
            question = self._question(probe, to)
            if question is None:
                continue
            asked.append(question)
            answered = self._answered(asked, to.wait_s)
            if answered is not None:
                return answered
        return None

    def count(
        self,
        to: End,
        test: int,
        packets: int,
        *,
        size_bytes: int,
        batch: int,
        pause_s: float,
        joined: bool = False,
        octet: int = 0,
        source: str = "",
        asked_at: End | None = None,
    ) -> Count | None:
        """Sends numbered packets, so many at once and then a pause, and asks what arrived; None: the peer does not say.

        The question may overtake the last of them, so where some are missing it is asked again until no more come.

        Args:
            to: the peer.
            test: tells this count from others of this rank.
            packets: to send.
            size_bytes: of each, as an IP packet.
            batch: packets behind each other.
            pause_s: after each batch.
            joined: hand many packets to the kernel in one call, as the engine does where the kernel cuts them apart. Between two calls
                another program may run, so only then is their spacing known; links without a wire may lose all packets of a call at once.
            octet: traffic class octet of each.
            source: a local address to send from, as the engine does on a path of its own: by this socket, so from its port. Empty: the
                kernel chooses it.
            asked_at: where the peer is asked, from the kernel's choice of address: a way that is known to work both ways, so that only
                what is lost on the way there counts. None: by the way of the packets.
        """
        probe = _Probe(_COUNT, size_bytes, octet, test=test, source=source)
        calls = 0
        with suppress(BlockingIOError):  # the card stands still: what it has not taken is lost
            for first in range(0, packets, batch):
                numbers = range(first, min(first + batch, packets))
                if joined:
                    calls, joined = self._send_joined(probe, to, numbers, calls)
                else:
                    for number in numbers:
                        self._send(probe, to, number)
                time.sleep(pause_s)
        question = _Probe(_ASK, test=test, source="" if asked_at else source)
        found = self._ask_count(asked_at or to, question, packets)
        return found if found is None or joined else replace(found, spacing_ns=None)

    def _ask_count(self, to: End, question: _Probe, packets: int) -> Count | None:
        known: Count | None = None
        for _ in range(10):
            found = self._exchange(question, to, to.wait_s)
            if found is None:
                continue
            arrived, reordered, duplicated, spacing_ns, octet = _COUNTS.unpack_from(found[1])
            is_known = spacing_ns != _UNKNOWN_NS
            before, known = known, Count(arrived, reordered, duplicated, spacing_ns if is_known else None, octet)
            if known.arrived >= packets or known == before:
                break
            time.sleep(found[0].rtt_s + _STRAGGLING_SECONDS)
        return known

    def close(self) -> None:
        """Ends the thread."""
        self._ends = True
        with suppress(OSError):
            self.socket.shutdown(socket.SHUT_RD)
        self._thread.join(timeout=2)
        self.socket.close()

    def __enter__(self) -> Prober:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _exchange(self, probe: _Probe, to: End, wait_s: float) -> tuple[Answer, bytes] | None:
        question = self._question(probe, to)
        if question is None or self._answered([question], wait_s) is None:
            return None
        return self._answers.pop(question)

    def _question(self, probe: _Probe, to: End) -> tuple[int, int] | None:
        """Sends it; by this its answer is known. None: it has not left."""
        self._sequence += 1
        with suppress(BlockingIOError):
            if self._send(probe, to, self._sequence):
                return to.rank, self._sequence
        return None

    def _answered(self, questions: Collection[tuple[int, int]], wait_s: float) -> tuple[int, int] | None:
        """One of them whose answer comes within the time, or is there."""
        with self._changed:
            return self._changed.wait_for(lambda: next((q for q in questions if q in self._answers), None), wait_s)

    def _send_joined(self, probe: _Probe, to: End, numbers: range, calls: int) -> tuple[int, bool]:
        """In as few calls as the kernel allows, numbered on from `calls`; the number of the last one, and whether it can do so at all."""
        size = probe.size_bytes - to.header_bytes
        most = max(1, _JOINED_BYTES // size)
        segment = [*self._ancillary(probe), (socket.IPPROTO_UDP, _SEGMENT, struct.pack("H", size))]
        for first in range(0, len(numbers), most):
            some, calls = numbers[first : first + most], calls % _CALLS + 1
            this = replace(probe, call=calls)
            try:
                self.socket.sendmsg([self._content(this, to, number) for number in some], segment, 0, to.place)
            except BlockingIOError:
                raise
            except OSError:  # the device cannot take them, whatever the kernel can
                for number in numbers[first:]:
                    self._send(probe, to, number)
                return calls, False
        return calls, True

    def _content(self, probe: _Probe, to: End, number: int) -> bytes:
        asked = to.rank << _ASKED_SHIFT | probe.test
        header = _HEADER.pack(_MAGIC, probe.kind, probe.call, self.rank, self.token, number, time.time_ns(), asked)
        return header.ljust(probe.size_bytes - to.header_bytes, b"\0")

    def _send(self, probe: _Probe, to: End, number: int) -> bool:
        """Whether it is on its way. Raises BlockingIOError where the card takes nothing."""
        content = self._content(probe, to, number)
        try:
            self.socket.sendmsg([content], self._ancillary(probe), 0, to.place)
        except BlockingIOError:
            raise
        except OSError:  # too large for the device, no way there, or the source is gone: as if it were lost
            return False
        return True

    def _ancillary(self, probe: _Probe) -> list[tuple[int, int, bytes]]:
        octet = (self._family.level, self._family.class_of_sent, struct.pack("i", probe.octet))
        source = [self._family.from_address(probe.source)] if probe.source else []
        return [octet, *source] if probe.octet else source

    def _serve(self) -> None:
        while not self._ends:
            try:
                data, ancillary, _, sender = self.socket.recvmsg(10_000, 128)
            except OSError:  # nothing came for a while, or an error of an earlier packet is told
                continue
            told = {(level, kind): value for level, kind, value in ancillary}
            # A byte of IPv4, a whole number of IPv6.
            octet = int.from_bytes(told.get((self._family.level, self._family.class_of_sent), b"\0"), sys.byteorder)
            with suppress(struct.error, OSError):
                came_ns = _nanoseconds(told.get((socket.SOL_SOCKET, _TIMESTAMPS)))
                self._handle(data, octet, sender, came_ns)

    def _handle(self, data: bytes, octet: int, sender: tuple[Any, ...], came_ns: int | None) -> None:
        magic, kind, said, rank, token, number, sent, value = _HEADER.unpack_from(data)
        if magic != _MAGIC or token != self.token:
            return
        if kind == _ANSWER and len(data) >= _HEADER.size + _COUNTS.size:
            now = time.time_ns()
            answer = Answer((now - sent) / 1e9, said, (value - (sent + now) / 2) / 1e9)
            with self._changed:
                self._answers[rank, number] = answer, data[_HEADER.size :]
                self._changed.notify_all()
        elif kind in (_COUNT, _ECHO, _ASK) and value >> _ASKED_SHIFT == self.rank:
            self.heard.add(rank)
            counting = self._counted[rank, value & _TEST_MASK]
            if kind == _COUNT:
                counting.add(number, said, came_ns, octet)
                return
            counts = counting.counts() if kind == _ASK else (0, 0, 0, _UNKNOWN_NS, 0)
            header = _HEADER.pack(_MAGIC, _ANSWER, octet, self.rank, self.token, number, sent, time.time_ns())
            self.socket.sendto(header + _COUNTS.pack(*counts), sender)


class _Counting:
    """The numbered packets of one test from one rank."""

    def __init__(self) -> None:
        self._seen: set[int] = set()
        self._highest, self._reordered, self._duplicated = -1, 0, 0
        self._octet = 0
        self._call: _Call | None = None
        self._spacings_ns: list[int] = []

    def add(self, number: int, call: int, came_ns: int | None, octet: int = 0) -> None:
        """A packet came, which left in the call of this number (0: by itself), with this traffic class octet."""
        self._octet = octet
        if number in self._seen:
            self._duplicated += 1
            return
        self._seen.add(number)
        self._reordered += number < self._highest
        self._highest = max(self._highest, number)
        if call == 0 or came_ns is None:
            return
        if self._call is None or call != self._call.number:
            self._end_call()
            self._call = _Call(call, (number, came_ns), (number, came_ns))
        self._call.add(number, came_ns)

    def counts(self) -> tuple[int, int, int, int, int]:
        """As they are sent to who asks."""
        self._end_call()
        spacing_ns = (
            min(_UNKNOWN_NS - 1, statistics.median_low(self._spacings_ns)) if self._spacings_ns else _UNKNOWN_NS
        )
        return len(self._seen), self._reordered, self._duplicated, spacing_ns, self._octet

    def _end_call(self) -> None:
        if self._call is not None and self._call.packets >= _TELLING_PACKETS:
            self._spacings_ns.append(self._call.spacing_ns)
        self._call = None


@dataclass
class _Call:
    """Packets that left in one call: numbers and times of the first and the last one that came."""

    number: int
    first: tuple[int, int]
    last: tuple[int, int]

    def add(self, number: int, came_ns: int) -> None:
        self.first, self.last = min(self.first, (number, came_ns)), max(self.last, (number, came_ns))

    @property
    def packets(self) -> int:
        """Between the first and the last one, those that were lost too: they took their time."""
        return self.last[0] - self.first[0] + 1

    @property
    def spacing_ns(self) -> int:
        return max(0, self.last[1] - self.first[1]) // (self.packets - 1)


def _nanoseconds(timespec: bytes | None) -> int | None:
    """When the kernel says that a packet came. The clock of a thread that reads it later would say nothing."""
    if timespec is None or len(timespec) != _TIMESPEC.size:
        return None
    seconds, nanoseconds = _TIMESPEC.unpack(timespec)
    return int(seconds * 1_000_000_000 + nanoseconds)


def trace(source: str, to: tuple[str, int], flows: int, hops: int, wait_s: float) -> list[dict[int, str]]:
    """The routers that some flows (a source address and a fresh port each) meet, by hop from 1 on.

    Their addresses are told by what they say about packets whose time to live ends there. A hop is missing where no router
    says anything, as in a network of switches alone, or not enough: a router limits what it says, and may not repeat the
    payload, which is what tells its hop.
    """
    family = family_of(source)
    sockets = [socket.socket(family.number, socket.SOCK_DGRAM) for _ in range(flows)]
    try:
        for flow in sockets:
            flow.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", _STUCK_SECONDS, 0))
            flow.setsockopt(family.level, family.errors, 1)
            flow.bind((source, 0))
            for hop in range(1, hops + 1):
                flow.setsockopt(family.level, family.hops, hop)
                _send_in_spite_of_errors(flow, bytes([hop]), to)
        time.sleep(wait_s)  # routers answer when they like; who is later is not counted
        return [_routers(flow, family) for flow in sockets]
    except OSError:  # the source is gone
        return []
    finally:
        for flow in sockets:
            flow.close()


def _send_in_spite_of_errors(flow: socket.socket, content: bytes, to: tuple[str, int]) -> None:
    """What a router said about an earlier packet fails the next call, which then sends nothing; the error is gone after that."""
    for _ in range(_SEND_TRIES):
        with suppress(OSError):
            flow.sendto(content, to)
            return


def _routers(flow: socket.socket, family: Family) -> dict[int, str]:
    """Who said that a packet's time to live has ended, by the hop that the packet carried as its payload."""
    found: dict[int, str] = {}
    flow.setblocking(False)
    while True:
        try:
            payload, ancillary, _, _ = flow.recvmsg(64, 512, socket.MSG_ERRQUEUE)
        except OSError:
            return found
        for level, kind, value in ancillary:
            if (level, kind) != (family.level, family.errors) or len(value) < family.router.stop or not payload:
                continue
            # struct sock_extended_err (16 bytes; origin and type in the fifth and sixth), then the address of who says it
            if tuple(value[4:6]) == family.hops_ended:
                found[payload[0]] = socket.inet_ntop(family.number, value[family.router])
