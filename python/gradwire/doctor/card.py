"""What a network card says of its wire: the speed that it has negotiated, the one that it can, and duplex.

By the ioctl of ethtool, which asks the network namespace of this process; the files under /sys may be those of another. Cards without a
wire (veth, tun, virtio) say a speed that somebody made up, and no modes that they support: theirs is not told.
"""

from __future__ import annotations

import ctypes
import fcntl
import socket
import struct
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gradwire.doctor.findings import PROBLEM, WARNING, Finding

_SIOCETHTOOL, _GET_SETTINGS = 0x8946, 0x1
_SETTINGS = struct.Struct(
    "=4xI4xHB13xH14x"
)  # struct ethtool_cmd: supported modes, the speed's low half, duplex, the speed's high half
_UNKNOWN_SPEED = 0xFFFF_FFFF
_HALF, _FULL = 0, 1
_HALF_MOST_MBIT = 1000  # faster ones have no such mode; drivers that do not say look as if they had
_MODES = {
    10: 0b11,
    100: 0b11 << 2,
    1000: 0b11 << 4 | 1 << 17,
    2500: 1 << 15,
    10_000: 1 << 12 | 0b111 << 18,
    40_000: 0b1111 << 23,
}
_WIRELESS = Path("/proc/self/net/wireless")
_UNLIKE = 4  # times the speed of another card; those of one purpose differ by less, as two ports of 10 and 25 Gbit/s
_FALLEN_BACK_MBIT, _GIGABIT = 100, 1000  # what cards of a gigabit negotiate over a cable with a broken pair


@dataclass(frozen=True)
class Card:
    """One network card.

    Attributes:
        speed_mbit: that it has agreed on with the other end of its cable; None: it does not say.
        able_mbit: the fastest that it can, of those up to 40 Gbit/s; 0: it does not say.
        half_duplex: it sends and receives by turns only.
        wireless: radio.
    """

    speed_mbit: int | None = None
    able_mbit: int = 0
    half_duplex: bool = False
    wireless: bool = False


def examine(control: socket.socket, name: str) -> Card:
    """Asks the card of this name, by any socket. What a card does not say is left at what harms nobody."""
    speed, duplex, supported = settings(control, name)
    if not speed or not supported:
        return Card(wireless=name in _radios())
    able = max((mbit for mbit, modes in _MODES.items() if supported & modes), default=0)
    return Card(speed, able, duplex == _HALF and speed <= _HALF_MOST_MBIT, name in _radios())


def judge(name: str, card: Card, rank: int) -> list[Finding]:
    """What follows from what one used card says."""
    renew = f"change the cable or the port of {name} and see what is negotiated (ethtool {name})"
    if card.half_duplex:
        text = f"{name} sends and receives by turns only (half duplex)"
        return [Finding(PROBLEM, "card", text, renew, rank)]
    if card.speed_mbit is not None and card.speed_mbit <= _FALLEN_BACK_MBIT and card.able_mbit >= _GIGABIT:
        text = f"{name} runs at {card.speed_mbit} Mbit/s and can {card.able_mbit}"
        return [Finding(PROBLEM, "card", text, renew, rank)]
    if card.wireless:
        text = f"{name} is a radio: its rate varies, and it holds packets back to send them again"
        return [Finding(WARNING, "card", text, "a cable, or GRADWIRE_INTERFACE", rank)]
    return []


def judge_speeds(hosts: Sequence[Mapping[str, Any]], rank: int) -> list[Finding]:
    """What it means for the job that this rank's slowest card is slower than every card of another rank.

    Args:
        hosts: of all ranks, as described.
        rank: this one.
    """
    slowest = [min(speeds, default=None) for speeds in map(_speeds, hosts)]
    own, most = slowest[rank], max((speed for speed, _ in filter(None, slowest)), default=0)
    if own is None or own[0] >= most:
        return []
    speed, name = own
    text = f"{name} runs at {speed} Mbit/s, every card of another rank at {most} or more: the slowest link is what all wait for"
    fix = f"see what is negotiated (ethtool {name}), or name a faster one in GRADWIRE_INTERFACE"
    return [Finding(WARNING, "card", text, fix, rank)]


def judge_choice(cards: Sequence[tuple[str, Card]], rank: int) -> list[Finding]:
    """What it means that several unlike cards are used and nobody has said which: all hosts may have both.

    Args:
        cards: those that gradwire uses, by name.
        rank: this one.
    """
    known = [(card.speed_mbit, name) for name, card in cards if card.speed_mbit]
    if not known or max(known)[0] < _UNLIKE * min(known)[0]:
        return []
    (least, slow), (most, fast) = min(known), max(known)
    text = (
        f"{slow} runs at {least} Mbit/s and {fast} at {most}, and both are used: each two ranks take the one that answers first, "
        "and the slowest two are what all wait for"
    )
    return [
        Finding(
            WARNING,
            "card",
            text,
            f"GRADWIRE_INTERFACE={fast} on this host, and on each of the others the name of its fast one",
            rank,
        )
    ]


def settings(control: socket.socket, name: str) -> tuple[int, int, int]:
    """Speed in Mbit/s, 0 where it is not known, duplex, and the bits of the modes that it supports."""
    answer = ctypes.create_string_buffer(struct.pack("I", _GET_SETTINGS), _SETTINGS.size)
    try:
        fcntl.ioctl(control, _SIOCETHTOOL, struct.pack("16sP16x", name.encode(), ctypes.addressof(answer)))
    except OSError:
        return 0, _FULL, 0
    supported, low, duplex, high = _SETTINGS.unpack(answer.raw)
    speed = high << 16 | low
    return (0 if speed == _UNKNOWN_SPEED else speed), duplex, supported


def rate_mbit(host: Mapping[str, Any]) -> int | None:
    """Of the cards that a host uses, together; None: one of them does not say, as those without a wire.

    Args:
        host: as described.
    """
    known, count = _speeds(host), sum(i["used"] for i in host["interfaces"])
    return sum(speed for speed, _ in known) if known and len(known) == count else None


def _speeds(host: Mapping[str, Any]) -> list[tuple[int, str]]:
    return [(i["card"]["speed_mbit"], i["name"]) for i in host["interfaces"] if i["used"] and i["card"]["speed_mbit"]]


def _radios() -> list[str]:
    with suppress(OSError):
        return [line.split(":")[0].strip() for line in _WIRELESS.read_text().splitlines() if ":" in line]
    return []
