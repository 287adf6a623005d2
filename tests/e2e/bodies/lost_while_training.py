"""DDP goes on when a rank is killed, with the buckets of the others in flight: `on_peer_loss="continue"`."""

from __future__ import annotations

import os
import signal
from datetime import timedelta

import gradwire.torch
import pytest
import torch
import torch.distributed as dist
from gradwire.errors import GroupError, PeerLostError, UnsupportedError
from gradwire.torch import _compat
from rank import RANK, WORLD_SIZE
from torch import nn
from torch.nn.parallel import DistributedDataParallel

VICTIM, LOST_AT, STEPS = 2, 4, 8
SURVIVORS = tuple(rank for rank in range(WORLD_SIZE) if rank != VICTIM)
RATE = 0.01


def network() -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(64, 200), nn.Tanh(), nn.Linear(200, 200), nn.Tanh(), nn.Linear(200, 1))


def loss_of(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    inputs = torch.randn(16, 64, generator=torch.Generator().manual_seed(1000 * rank + step))
    return (model(inputs) - inputs.sum(1, keepdim=True)).pow(2).mean()


def reference() -> list[torch.Tensor]:
    """One process that takes the mean of the gradients of who is left."""
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for step in range(STEPS):
        members = range(WORLD_SIZE) if step < LOST_AT else SURVIVORS
        optimizer.zero_grad()
        (sum(loss_of(model, rank, step) for rank in members) / len(members)).backward()
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def check_sparse_gradients_which_cannot_go_on_are_refused() -> None:
    ddp = DistributedDataParallel(nn.Sequential(nn.EmbeddingBag(4, 2, sparse=True), nn.Linear(2, 2)))
    with pytest.raises(UnsupportedError, match=r"sparse=True.*on_peer_loss"):
        gradwire.torch.tolerate_loss(ddp)


def check_comparisons_of_replicas_which_cannot_go_on_are_refused() -> None:
    with pytest.raises(UnsupportedError, match=r"drift_every.*on_peer_loss"):
        gradwire.torch.tolerate_loss(DistributedDataParallel(nn.Linear(2, 2)), drift_every=10)


def check_who_waits_for_others_between_two_steps_waits_as_long_as_the_group_says() -> None:
    group = dist.new_group(timeout=timedelta(minutes=10))
    adapter = group if _compat.backend_class() is None else group._get_backend(torch.device("cpu"))
    adapter.set_timeout(timedelta(seconds=1))
    if RANK:
        with pytest.raises(GroupError, match="timed out"):
            gradwire.torch.ElasticState(group).sync()
    dist.barrier()


def check_the_survivors_train_on_with_the_mean_of_their_gradients() -> None:
    model = network()
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.05)
    # Exact, so that nothing but the lost rank is missing.
    gradwire.torch.tolerate_loss(ddp, preset="reliable")
    optimizer = torch.optim.SGD(ddp.parameters(), lr=RATE)
    for step in range(STEPS):
        if step == LOST_AT:
            # Not sooner: until all have the last bucket, they may wait for its word that it has come, and take the mean again without it.
            dist.barrier()
            if RANK == VICTIM:
                # Not later: buckets that it had sent could have been averaged over all.
                os.kill(os.getpid(), signal.SIGKILL)
        optimizer.zero_grad()
        loss_of(ddp, RANK, step).backward()
        optimizer.step()
    assert gradwire.torch.members() == SURVIVORS
    for parameter, expected in zip(model.parameters(), reference(), strict=True):
        torch.testing.assert_close(parameter.detach(), expected)
        least, most = parameter.detach().clone(), parameter.detach().clone()
        dist.all_reduce(least, dist.ReduceOp.MIN)
        dist.all_reduce(most, dist.ReduceOp.MAX)
        assert torch.equal(least, most), "replicas differ"


def check_a_barrier_that_names_who_does_not_come_names_the_lost_rank_on_all_and_the_group_goes_on() -> None:
    if _compat.backend_class() is None:
        return  # before 2.14 torch allows the call to gloo alone
    for _ in range(2):
        with pytest.raises(PeerLostError, match=rf"Rank {VICTIM} failed to pass monitoredBarrier") as caught:
            dist.monitored_barrier(timeout=timedelta(seconds=60))
        assert caught.value.rank == VICTIM
        mean = torch.tensor([float(RANK)])
        dist.all_reduce(mean, dist.ReduceOp.AVG)
        assert mean.item() == pytest.approx(sum(SURVIVORS) / len(SURVIVORS))
