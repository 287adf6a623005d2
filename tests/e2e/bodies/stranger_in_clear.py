"""Ranks of one host, in clear, one of which has a socket of another host's; see test_stranger_in_clear.py."""

from __future__ import annotations

import os
import socket
import struct

import torch
import torch.distributed as dist
from gradwire.torch import stats
from rank import RANK

ABORT, GOODBYE = 7, 6
RECORD_BYTES = 64
# A connection id is a place in a table, which fills from the first on, and one of 255 numbers above.
PLACES = 4


def _refused() -> int:
    return int(stats()["engine"]["datagrams_not_authentic"])


def _sum() -> None:
    tensor = torch.full((1000,), float(RANK + 1))
    dist.all_reduce(tensor)
    assert torch.equal(tensor, torch.full((1000,), 3.0))


def _forged(kind: int, place: int, high: int) -> bytes:
    """A header of version 1, as from the rank whose connection it is; with what an abort has to say."""
    header = struct.pack("<BBH", 1 << 4 | kind, 0, 0) + (high << 16 | place).to_bytes(3, "little")
    return header.ljust(24, b"\0") + bytes(RECORD_BYTES if kind == ABORT else 0)


def _forge_all(stranger: socket.socket) -> None:
    address = (os.environ["ADDRESS_OF_THE_RANKS"], int(os.environ["GRADWIRE_PORT"]))
    for kind in (ABORT, GOODBYE):
        for number in range(PLACES * 255):
            stranger.sendto(_forged(kind, number % PLACES, number // PLACES + 1), address)


def check_what_another_host_forges_ends_nothing() -> None:
    _sum()
    security = stats()["group"]["security"]
    assert (security["cipher"], security["all_local"]) == (None, True)
    before = _refused()
    with socket.socket(fileno=int(os.environ["STRANGERS_SOCKET"])) as stranger:
        for _ in range(3):
            if RANK == 0:
                _forge_all(stranger)
            _sum()
    assert RANK != 0 or _refused() > before, "none named the connection"
