"""DDP with a rank that is killed, started again and joins: `gradwire.torch.ElasticState`."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import gradwire.torch
import torch
import torch.distributed as dist
from gradwire.torch import _compat
from rank import FOLDER, RANK, WORLD_SIZE
from torch import nn
from torch.nn.parallel import DistributedDataParallel

VICTIM, LOST_AT, TOGETHER = 2, 3, 4
LIFE = int(os.environ.get("GRADWIRE_TEST_LIFE", "0"))
STEPS_MAX = 20_000
# A step's computation: the next life of the victim needs the processor.
PAUSE_S = 0.05
RATE = 0.01


def network() -> nn.Module:
    torch.manual_seed(1 + LIFE)  # whoever joins begins with other parameters
    return nn.Sequential(nn.Linear(16, 40), nn.BatchNorm1d(40), nn.Tanh(), nn.Linear(40, 1))


def loss_of(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    inputs = torch.randn(16, 16, generator=torch.Generator().manual_seed(1000 * rank + step))
    return (model(inputs) - inputs.sum(1, keepdim=True)).pow(2).mean()


def check_a_rank_that_joins_again_trains_on_with_the_same_bits() -> None:
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=RATE)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.9)
    state = gradwire.torch.ElasticState(model=model, optimizer=optimizer, schedule=schedule, step=0, together=0)
    ddp = tolerance = owed = None
    while state.together < TOGETHER and state.step < STEPS_MAX:
        if tolerance is not None and len(gradwire.torch.members()) < WORLD_SIZE:
            owe_something(tolerance)
        if state.sync():
            owed = None if tolerance is None else tolerance.state_dict()
            ddp = DistributedDataParallel(model, init_sync=False, broadcast_buffers=False)
            tolerance = gradwire.torch.tolerate_loss(ddp, preset="reliable")
            if owed is not None:
                tolerance.load_state_dict(owed)
                assert_the_same_is_owed(tolerance, owed)
            if LIFE:
                assert state.step > LOST_AT, "it begins where the others are"
        if state.step == 0:
            monitored_barrier()
        if state.step == LOST_AT and RANK == VICTIM:
            Path(FOLDER / "lost").write_text("")
            os.kill(os.getpid(), signal.SIGKILL)
        optimizer.zero_grad()
        assert ddp is not None
        loss_of(ddp, RANK, state.step).backward()
        optimizer.step()
        schedule.step()
        state.together += int(state.step > LOST_AT and len(gradwire.torch.members()) == WORLD_SIZE)
        state.step += 1
        time.sleep(PAUSE_S)
    assert gradwire.torch.members() == tuple(range(WORLD_SIZE))
    assert LIFE or owed is not None, "nobody has joined"
    monitored_barrier()
    assert_the_same_everywhere(model, optimizer)


def owe_something(tolerance: Any) -> None:
    """As if the latest step had lost something of this rank's."""
    ((key, parts),) = tolerance.state_dict().items()
    tolerance.load_state_dict({key: {name: torch.full_like(part, RANK + 1) for name, part in parts.items()}})


def assert_the_same_is_owed(tolerance: Any, owed: dict[str, dict[str, torch.Tensor]]) -> None:
    ((_, before),), ((_, now),) = owed.items(), tolerance.state_dict().items()
    assert before.keys() == now.keys()
    assert all(part.eq(RANK + 1).all() and torch.equal(part, now[name]) for name, part in before.items())


def monitored_barrier() -> None:
    if _compat.backend_class() is not None:  # before torch 2.14 it allows it to gloo alone
        dist.monitored_barrier()


def assert_the_same_everywhere(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    moments = [value for entry in optimizer.state.values() for value in entry.values()]
    for tensor in [*model.parameters(), *moments]:
        least, most = tensor.detach().clone(), tensor.detach().clone()
        dist.all_reduce(least, dist.ReduceOp.MIN)
        dist.all_reduce(most, dist.ReduceOp.MAX)
        assert torch.equal(least, most), "replicas differ"
