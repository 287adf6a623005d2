"""Death around dedicated parameter servers: of a server, or of a worker, as GRADWIRE_TEST_VICTIM says."""

from __future__ import annotations

import os
import signal
from typing import Any

import gradwire.torch
import torch
import torch.distributed as dist
from gradwire.errors import PeerLostError
from rank import RANK

DESTROY = False
VICTIM = os.environ["GRADWIRE_TEST_VICTIM"]


def all_reduce() -> Any:
    """One reduction over the servers."""
    tensor = torch.ones(200_000)
    return gradwire.torch.all_reduce(tensor, dist.ReduceOp.SUM, preset="reliable", algorithm="parameter_server")


def check_whoever_survives_is_told_who_died() -> None:
    all_reduce()
    dist.barrier()
    if RANK == 1:
        os.kill(os.getpid() if VICTIM == "worker" else int(VICTIM), signal.SIGKILL)
    try:
        while True:
            all_reduce()
    except PeerLostError as error:
        told = error
    assert told.rank == (1 if VICTIM == "worker" else 2), told
    assert told.host.startswith("parameter server 0 on ") == (VICTIM != "worker"), told
