"""Ports for tests that need a number before its owner binds it.

They lie below those that the kernel gives to whoever asks for any (from 32768 on), and each process of pytest-xdist has its own: what was
free when it was asked for stays so until its owner comes.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import socket

_FIRST, _OF_EACH_WORKER, _WORKERS = 20_000, 4_000, 3
_NEXT = itertools.count(os.getpid())  # two runs on one machine begin at different ones


def free_port() -> int:
    """A port that nobody has, for TCP or UDP, at any address of this machine."""
    return free_ports(1)


def free_ports(count: int) -> int:
    """The first of so many in a row."""
    base = _FIRST + _OF_EACH_WORKER * (_worker() % _WORKERS)
    for _ in range(_OF_EACH_WORKER):
        offsets = [next(_NEXT) % _OF_EACH_WORKER for _ in range(count)]
        if offsets == sorted(offsets) and all(_is_free(base + offset) for offset in offsets):
            return base + offsets[0]
    raise RuntimeError(f"no {count} ports in a row from {base} on are free")


def _is_free(port: int) -> bool:
    kinds = (socket.SOCK_STREAM, socket.SOCK_DGRAM)
    with contextlib.ExitStack() as probes:
        try:
            for kind in kinds:
                probes.enter_context(socket.socket(socket.AF_INET, kind)).bind(("", port))
        except OSError:
            return False
    return True


def _worker() -> int:
    """Number of this process of pytest-xdist; 0 without it."""
    return int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
