"""A group with `on_peer_loss="continue"` that loses all of its ranks at once, and the ranks that are started in their place."""

from __future__ import annotations

import os
import signal

import torch
import torch.distributed as dist
from rank import WORLD_SIZE

IS_FIRST_LIFE = "GRADWIRE_TEST_DIES" in os.environ


def check_the_group_is_formed() -> None:
    tensor = torch.ones(10)
    try:
        dist.all_reduce(tensor)
    finally:
        if IS_FIRST_LIFE:
            os.kill(os.getpid(), signal.SIGKILL)
    assert torch.equal(tensor, torch.full((10,), float(WORLD_SIZE)))
