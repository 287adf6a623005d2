"""DDP with a rank that is killed, started again and joins: `gradwire.torch.ElasticState`."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

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
    ddp = None
    while state.together < TOGETHER and state.step < STEPS_MAX:
        if state.sync():
            ddp = DistributedDataParallel(model, init_sync=False, broadcast_buffers=False)
            gradwire.torch.tolerate_loss(ddp, preset="reliable")
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
    monitored_barrier()
    assert_the_same_everywhere(model, optimizer)


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
