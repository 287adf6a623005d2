"""Exact sums over two rails, of which one takes nothing more from rank 0 after a while; see test_rails.py."""

from __future__ import annotations

import os
import socket
from contextlib import suppress

import gradwire.torch
import torch
import torch.distributed as dist
from gradwire.lab import iproute
from rank import RANK, WORLD_SIZE

ROUNDS, STOPS_AT, ELEMS = 60, 10, 1 << 18
# A bit in a millisecond, and room for more than anybody sends: the device has its carrier, drops nothing and takes nothing.
STUCK = "qdisc change dev eth1 root handle 1: tbf rate 1kbit burst 6056 limit 100000000"
# The kernel's least, a few packets. A larger one may never be full: nothing comes back from this rail, so that only a window's
# worth goes there, and now and then a copy.
SEND_BUFFER_BYTES = 1


def take_small_buffers() -> None:
    for name in os.listdir("/proc/self/fd"):
        with (
            suppress(OSError),
            socket.socket(fileno=os.dup(int(name))) as opened,
        ):  # what is no socket, or closed by now
            if opened.type == socket.SOCK_DGRAM and opened.family != socket.AF_UNIX:
                opened.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)


def check_sums_go_on_over_the_rail_that_works() -> None:
    # test of: mlt/gray-path
    take_small_buffers()
    expected = torch.full((ELEMS,), float(sum(range(1, WORLD_SIZE + 1))))
    for turn in range(ROUNDS):
        if turn == STOPS_AT and RANK == 0:
            iproute.tc(STUCK)
        tensor = torch.full((ELEMS,), float(RANK + 1))
        dist.all_reduce(tensor)
        assert torch.equal(tensor, expected)
    if RANK == 0:
        assert gradwire.torch.stats()["engine"]["send_refused"] > 0, "the kernel took all"
