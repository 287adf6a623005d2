"""Random loss in the kernel's packet filter (nftables), spoken to over netlink so that no program must be installed.

What is built is `table bridge gradwire_lab { chain loss { type filter hook forward; counter; numgen random mod M < N
counter drop } }`: each frame that crosses the bridge draws a number of its own, so losses are independent and of single
packets. A change of the rate replaces the table within one transaction: no packet sees a half-built filter.

Layout of the messages: linux/netfilter/nfnetlink.h and nf_tables.h. Attributes are type, length and value; numbers in them
are big-endian.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from gradwire.lab.errors import LabError

MODULUS = 1_000_000  # loss is set in steps of one in a million
_NETLINK_NETFILTER = 12
_BATCH_BEGIN, _BATCH_END = 0x10, 0x11
_ERROR, _DONE = 0x2, 0x3
_NFT = 10 << 8  # the subsystem is the upper byte of a message's type
_NEW_TABLE, _DELETE_TABLE, _NEW_CHAIN, _NEW_RULE, _GET_RULE = _NFT | 0, _NFT | 2, _NFT | 3, _NFT | 6, _NFT | 7
_REQUEST, _ACKNOWLEDGE, _CREATE, _APPEND, _DUMP = 0x1, 0x4, 0x400, 0x800, 0x300
_FAMILY_BRIDGE = 7
_HOOK_FORWARD = 2
_NESTED = 0x8000
_OUTPUT_NAME = 7  # key of the expression `meta`
_ANSWER_S = 60.0  # the kernel answers within `send`, so only what it has not understood is waited for
_TABLE, _CHAIN = b"gradwire_lab\0", b"loss\0"


@dataclass(frozen=True)
class LossCounters:
    """Frames that crossed the bridge since the loss was last set, and those of them that were dropped."""

    seen: int
    dropped: int


class LossFilter:
    """Drops frames on the bridges of this network namespace. Use it from one thread."""

    def __init__(self) -> None:
        """Sets the loss to 0. Raises LabError where the kernel has no packet filters for bridges."""
        try:
            self._socket = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, _NETLINK_NETFILTER)
            self._socket.bind((0, 0))
            self._socket.settimeout(_ANSWER_S)
        except OSError as error:
            raise LabError(f"this kernel has neither nftables nor netem to lose packets with ({error})") from error
        self._sequence = 0
        self.set_loss(0)

    def set_loss(self, share: float) -> None:
        """Drops each frame with probability `share` (0 to 1) from now on, and sets the counters to zero.

        Raises:
            ValueError: not a probability.
            LabError: the kernel refused the filter, for example as it lacks bridge filters.
        """
        if not 0.0 <= share <= 1.0:
            raise ValueError(f"loss is a share between 0 and 1, not {share}")
        self._replace(_nest(4, _COUNT), _drop_rule(round(share * MODULUS)))

    def set_port_losses(self, shares: Mapping[str, float]) -> None:
        """Drops frames that are to leave through these ports of a bridge with their probabilities; zeroes all counters."""
        rules = []
        for port, share in shares.items():
            if not 0.0 <= share <= 1.0:
                raise ValueError(f"loss is a share between 0 and 1, not {share}")
            rules += [
                _nest(4, _leaves_through(port), _COUNT),
                _drop_rule(round(share * MODULUS), _leaves_through(port)),
            ]
        self._replace(*rules)

    def _replace(self, *rules: bytes) -> None:
        """Puts these rules in the place of all that were there."""
        table = _attribute(1, _TABLE)
        hook = _nest(4, _number(1, _HOOK_FORWARD), _number(2, 0))
        chain = table + _attribute(3, _CHAIN) + hook + _attribute(7, b"filter\0")
        rules = tuple(table + _attribute(2, _CHAIN) + rule for rule in rules)
        self._transaction(
            (_NEW_TABLE, _CREATE, table),  # made, so that the deletion below never fails
            (_DELETE_TABLE, 0, table),
            (_NEW_TABLE, _CREATE, table),
            (_NEW_CHAIN, _CREATE, chain),
            *((_NEW_RULE, _CREATE | _APPEND, rule) for rule in rules),
        )

    def counters(self) -> LossCounters:
        """Reads the counters of `set_loss`. Raises LabError before it."""
        counts = self._counts()
        if len(counts) != 2:
            raise LabError("the loss filter is not set up")
        return LossCounters(*counts)

    def port_counters(self, ports: Sequence[str]) -> dict[str, LossCounters]:
        """Reads the counters of `set_port_losses`, which had these ports in this order."""
        counts = self._counts()
        if len(counts) != 2 * len(ports):
            raise LabError("the loss filter is not set up for these ports")
        return {port: LossCounters(*counts[2 * i : 2 * i + 2]) for i, port in enumerate(ports)}

    def _counts(self) -> list[int]:
        """The counter of each rule, in order."""
        message = self._message(_GET_RULE, _REQUEST | _DUMP, _attribute(1, _TABLE) + _attribute(2, _CHAIN))
        self._socket.send(message)
        counts: list[int] = []
        while True:
            for kind, body in self._answers():
                if kind == _DONE:
                    return counts
                _raise_if_error(kind, body)
                counts += [_packets_in(counter) for counter in _counters_of(body)]

    def close(self) -> None:
        """Leaves the filter as it is; it goes with the network namespace."""
        self._socket.close()

    def _transaction(self, *changes: tuple[int, int, bytes]) -> None:
        """Applies all of the changes `(message type, flags, attributes)` or none; waits for the kernel's verdicts."""
        batch = self._message(_BATCH_BEGIN, _REQUEST, b"", family=0, resource=_NFT >> 8)
        for kind, flags, attributes in changes:
            batch += self._message(kind, _REQUEST | _ACKNOWLEDGE | flags, attributes)
        batch += self._message(_BATCH_END, _REQUEST, b"", family=0, resource=_NFT >> 8)
        self._socket.send(batch)
        verdicts = 0
        while verdicts < len(changes):
            for kind, body in self._answers():
                _raise_if_error(kind, body)
                verdicts += 1

    def _answers(self) -> Iterator[tuple[int, bytes]]:
        try:
            answered = self._socket.recv(1 << 16)
        except TimeoutError:
            raise LabError(f"the kernel's packet filter has not answered for {_ANSWER_S:g} s: see dmesg") from None
        return _messages(answered)

    def _message(
        self, kind: int, flags: int, attributes: bytes, family: int = _FAMILY_BRIDGE, resource: int = 0
    ) -> bytes:
        self._sequence += 1
        body = struct.pack(">BBH", family, 0, resource) + attributes
        return struct.pack("=IHHII", 16 + len(body), kind, flags, self._sequence, 0) + body


def _attribute(kind: int, value: bytes) -> bytes:
    return struct.pack("=HH", 4 + len(value), kind) + value + b"\0" * (-len(value) % 4)


def _nest(kind: int, *attributes: bytes) -> bytes:
    return _attribute(kind | _NESTED, b"".join(attributes))


def _number(kind: int, value: int) -> bytes:
    return _attribute(kind, struct.pack(">I", value))


def _expression(name: bytes, *attributes: bytes) -> bytes:
    """One instruction of a rule; its operands are numbered attributes of its own."""
    return _nest(1, _attribute(1, name + b"\0"), _nest(2, *attributes))


_COUNT = _expression(b"counter", _attribute(1, bytes(8)), _attribute(2, bytes(8)))


def _leaves_through(port: str) -> bytes:
    """`oifname port`, on register 1."""
    load = _expression(b"meta", _number(1, 1), _number(2, _OUTPUT_NAME))
    name = _attribute(1, port.encode().ljust(16, b"\0"))
    return load + _expression(b"cmp", _number(1, 1), _number(2, 0), _nest(3, name))


def _drop_rule(numerator: int, condition: bytes = b"") -> bytes:
    """`condition numgen random mod MODULUS < numerator counter drop`, on register 1."""
    draw = _expression(b"numgen", _number(1, 1), _number(2, MODULUS), _number(3, 1))
    to_network_order = (_number(1, 1), _number(2, 1), _number(3, 1), _number(4, 4), _number(5, 4))
    swap = _expression(b"byteorder", *to_network_order)  # comparisons are made byte by byte
    below = _expression(b"cmp", _number(1, 1), _number(2, 2), _nest(3, _number(1, numerator)))
    drop = _expression(b"immediate", _number(1, 0), _nest(2, _nest(2, _number(1, 0))))
    return _nest(4, condition, draw, swap, below, _COUNT, drop)


def _messages(datagram: bytes) -> Iterator[tuple[int, bytes]]:
    """Splits what the kernel answered into `(type, body)`."""
    while len(datagram) >= 16:
        length, kind = struct.unpack_from("=IH", datagram)
        yield kind, datagram[16:length]
        datagram = datagram[(length + 3) & ~3 :]


def _raise_if_error(kind: int, body: bytes) -> None:
    code = struct.unpack_from("=i", body)[0] if kind == _ERROR else 0
    if code:
        raise LabError(f"the kernel refused the packet filter: {os.strerror(-code)} (it needs nftables for bridges)")


def _attributes(data: bytes) -> Iterator[tuple[int, bytes]]:
    while len(data) >= 4:
        length, kind = struct.unpack_from("=HH", data)
        yield kind & ~_NESTED, data[4:length]
        data = data[(max(length, 4) + 3) & ~3 :]


def _counters_of(rule: bytes) -> Iterator[bytes]:
    """The operands of the counters in a rule, as the kernel describes it (after its 4-byte header)."""
    for kind, listed in _attributes(rule[4:]):
        if kind == 4:
            for _, expression in _attributes(listed):
                parts = dict(_attributes(expression))
                if parts.get(1) == b"counter\0":
                    yield parts[2]


def _packets_in(counter: bytes) -> int:
    return int(struct.unpack(">Q", dict(_attributes(counter))[2])[0])
