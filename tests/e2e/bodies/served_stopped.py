"""A dedicated parameter server that is interrupted or terminated, while idle and while a call is under way."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import gradwire.torch
import torch
import torch.distributed as dist
from gradwire.errors import PeerLeftError
from rank import RANK

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


def wait_for_the_end_of_the_server() -> None:
    """It is the child of the test, which has not waited for it: then it stays as a zombie."""
    while Path(f"/proc/{SERVER}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z":
        os.sched_yield()


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
        os.kill(SERVER, SIGNAL)
        wait_for_the_end_of_the_server()
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
