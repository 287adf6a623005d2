"""What a network card says of its wire: speed, duplex, and whether there is a wire at all.

By the ioctl of ethtool, which asks the network namespace of this process; the files under /sys may be those of another.
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
_SETTINGS = struct.Struct("<4x4x4xHB13xH14x")  # struct ethtool_cmd: the speed's low half, duplex, the speed's high half
_UNKNOWN_SPEED = 0xFFFF_FFFF
_HALF, _FULL = 0, 1
_WIRELESS = Path("/proc/self/net/wireless")
_FALLEN_BACK = 10  # as from 1 Gbit/s to 100 Mbit/s: what cards negotiate over a cable with a broken pair


@dataclass(frozen=True)
class Card:
    """One network card.

    Attributes:
        speed_mbit: that it has agreed on with the other end of its cable; None: it does not say.
        half_duplex: it sends and receives by turns only.
        wireless: radio.
    """

    speed_mbit: int | None = None
    half_duplex: bool = False
    wireless: bool = False


def examine(control: socket.socket, name: str) -> Card:
    """Asks the card of this name, by any socket. What a card does not say is left at what harms nobody."""
    speed, duplex = _settings(control, name)
    return Card(speed or None, bool(speed) and duplex == _HALF, name in _radios())


def judge(name: str, card: Card, rank: int) -> list[Finding]:
    """What follows from what one used card says."""
    if card.half_duplex:
        text = f"{name} sends and receives by turns only (half duplex)"
        fix = f"let both ends negotiate speed and duplex (ethtool -s {name} autoneg on), or change the cable"
        return [Finding(PROBLEM, "card", text, fix, rank)]
    if card.wireless:
        text = f"{name} is a radio: its rate varies, and it holds packets back to send them again"
        return [Finding(WARNING, "card", text, "a cable, or GRADWIRE_INTERFACE", rank)]
    return []


def judge_speeds(hosts: Sequence[Mapping[str, Any]], rank: int) -> list[Finding]:
    """What it means for the job that this rank's slowest card is slower than that of others.

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
    fix = f"change the cable or the port of {name} and see what is negotiated (ethtool {name}), or name a faster one in GRADWIRE_INTERFACE"
    return [Finding(PROBLEM if speed * _FALLEN_BACK <= most else WARNING, "card", text, fix, rank)]


def _speeds(host: Mapping[str, Any]) -> list[tuple[int, str]]:
    return [(i["speed_mbit"], i["name"]) for i in host["interfaces"] if i["used"] and i["speed_mbit"]]


def _settings(control: socket.socket, name: str) -> tuple[int, int]:
    """Speed in Mbit/s, 0 where it is not known, and duplex."""
    answer = ctypes.create_string_buffer(struct.pack("I", _GET_SETTINGS), _SETTINGS.size)
    try:
        fcntl.ioctl(control, _SIOCETHTOOL, struct.pack("16sP16x", name.encode(), ctypes.addressof(answer)))
    except OSError:
        return 0, _FULL
    low, duplex, high = _SETTINGS.unpack(answer.raw)
    speed = high << 16 | low
    return (0 if speed == _UNKNOWN_SPEED else speed), duplex


def _radios() -> list[str]:
    with suppress(OSError):
        return [line.split(":")[0].strip() for line in _WIRELESS.read_text().splitlines() if ":" in line]
    return []
