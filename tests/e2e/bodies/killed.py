"""A rank is killed in the middle of training; every survivor names it."""

from __future__ import annotations

import os
import signal
import time

import gradwire.torch
import pytest
import torch
import torch.distributed as dist
from gradwire.errors import GradwireError
from rank import RANK, WORLD_SIZE
from torch import nn
from torch.nn.parallel import DistributedDataParallel

DESTROY = False
VICTIM = 1
LIMIT_S = 10.0


def train(model: nn.Module) -> None:
    """Three steps without an optimizer."""
    for _ in range(3):
        model(torch.ones(2, 200)).sum().backward()


def check_survivors_name_the_killed_rank_within_ten_seconds() -> None:
    model = DistributedDataParallel(nn.Linear(200, 200))
    gradwire.torch.tolerate_loss(model)
    train(model)
    # The others may still need what the victim has yet to send, although its own step is done.
    store = dist.distributed_c10d._get_default_store()
    store.set(f"trained-{RANK}", "")
    if RANK == VICTIM:
        store.wait([f"trained-{rank}" for rank in range(WORLD_SIZE)])
        os.kill(os.getpid(), signal.SIGKILL)
    started = time.monotonic()
    with pytest.raises(RuntimeError, match=f"rank {VICTIM}"):
        train(model)
    assert time.monotonic() - started < LIMIT_S
    cause = gradwire.torch.last_error()
    assert isinstance(cause, GradwireError)
    assert getattr(cause, "rank", VICTIM) in range(WORLD_SIZE)
    with pytest.raises(GradwireError, match=f"rank {VICTIM}"):  # the group is poisoned: at once, with the same cause
        dist.all_reduce(torch.ones(3))
