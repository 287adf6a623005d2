"""A dedicated parameter server that is interrupted or terminated, while idle and while a call is under way."""

from __future__ import annotations

import os
import select
import signal
from typing import Any

import gradwire.torch
import torch
import torch.distributed as dist
from gradwire.errors import PeerLeftError
from rank import FOLDER, RANK

DESTROY = False
GLOO = dist.new_group(backend="gloo")
SERVER = int(os.environ["GRADWIRE_TEST_SERVER"])
SIGNAL = signal.Signals[os.environ["GRADWIRE_TEST_SIGNAL"]]
DURING = os.environ["GRADWIRE_TEST_DURING"]


def start() -> Any:
    """One reduction over the server."""
    tensor = torch.ones(200_000)
    return gradwire.torch.all_reduce(
        tensor, dist.ReduceOp.SUM, preset="reliable", algorithm="parameter_server", async_op=True
    )


def stop_the_server() -> None:
    """When it has said that it serves: it answers calls a moment sooner, and has no numbers to write then. Returns when it has ended."""
    while "serves" not in (FOLDER / "server-0.errors").read_text():
        os.sched_yield()
    end = os.pidfd_open(SERVER)
    signal.pidfd_send_signal(end, SIGNAL)
    select.select([end], [], [])
    os.close(end)


def check_the_next_call_names_the_server() -> None:
    start().wait()
    dist.barrier(GLOO)
    if DURING == "call" and RANK == 0:
        # The other rank does not come: the call stays under way at the server, which has said that it is there.
        work = start()
        while not any(peer["bytes_sent"] for peer in gradwire.torch.stats()["group"]["peers"][-1:]):
            os.sched_yield()
    dist.barrier(GLOO)
    if RANK == 1:
        stop_the_server()
    dist.barrier(GLOO)
    try:
        (work if DURING == "call" and RANK == 0 else start()).wait()
    except PeerLeftError as error:
        told = error
    assert told.rank == 2, told
    assert told.host.startswith("parameter server 0 on "), told
    # Where nothing is under way the group fails while it is idle, and the next call has that error.
    if DURING == "call" and RANK == 0:
        assert told.during.startswith("all_reduce"), told
        assert told.waited_s > 0, told
        assert "bytes from it arrived" in told.detail, told
    else:
        assert "; it " in told.detail, told
