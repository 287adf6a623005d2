"""The training example's model, sharded by FSDP2: its losses beside gloo's, without and with packets lost."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import gradwire.torch
import pytest
import torch
import torch.distributed as dist
from rank import RANK, WORLD_SIZE
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

sys.path.insert(0, str(Path(__file__).parents[3] / "examples"))

from gpt import Corpus, Gpt, ModelSize, batch_at, loss_of

GLOO = dist.new_group(backend="gloo")
LOSSY = "GRADWIRE_CHAOS" in os.environ
BOUND = 0.05 if LOSSY else None
SIZE = ModelSize(layers=2, width=64, heads=4, context=32)
CORPUS = Corpus.of_standard_library()
STEPS = 12
# How far losses may be apart. Without loss: sums of up to four ranks in another order, a few units in the last place, which Adam turns
# into steps of full size where a gradient is next to nothing.
EXACT, WITHIN = 1e-4, 0.01


def model_on(mesh: DeviceMesh) -> nn.Module:
    torch.manual_seed(1)
    model = Gpt(SIZE)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def line(group: dist.ProcessGroup) -> DeviceMesh:
    return DeviceMesh.from_group(group, "cpu", mesh_dim_names=("shard",))


def losses_of(model: nn.Module) -> list[float]:
    """The mean loss of all ranks, of each step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95))
    losses = []
    for step in range(STEPS):
        loss = loss_of(model, *batch_at(CORPUS.train, SIZE, 8, 1, step, RANK))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        dist.all_reduce(mean, group=GLOO)
        losses.append(float(mean) / WORLD_SIZE)
    assert losses[-1] < 0.95 * losses[0], "it learns"
    return losses


def missing_everywhere(state: gradwire.torch.ShardedLossTolerance) -> float:
    missing = torch.tensor([float(state.bytes_missing)])
    dist.all_reduce(missing, group=GLOO)
    return float(missing)


def check_losses_are_those_of_gloo() -> None:
    reference = losses_of(model_on(line(GLOO)))
    if not LOSSY:
        assert losses_of(model_on(line(dist.group.WORLD))) == pytest.approx(reference, rel=EXACT)
    tolerant = model_on(line(dist.group.WORLD))
    state = gradwire.torch.tolerate_loss(tolerant, preset="mlt" if LOSSY else "reliable", loss_bound=BOUND)
    assert losses_of(tolerant) == pytest.approx(reference, rel=WITHIN if LOSSY else EXACT)
    assert (missing_everywhere(state) > 0) == LOSSY


def check_losses_of_replicated_shards_are_those_of_gloo() -> None:
    if WORLD_SIZE != 4:
        return
    reference = losses_of(model_on(line(GLOO)))
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    hybrid = model_on(mesh)
    state = gradwire.torch.tolerate_loss(hybrid, preset="mlt" if LOSSY else "reliable", loss_bound=BOUND)
    assert losses_of(hybrid) == pytest.approx(reference, rel=WITHIN if LOSSY else EXACT)
    assert (missing_everywhere(state) > 0) == LOSSY
    for (
        parameter
    ) in hybrid.parameters():  # replicas of a shard are equal, bit by bit, and so is what is gathered of them
        whole = parameter.full_tensor()
        everywhere = [torch.empty_like(whole) for _ in range(WORLD_SIZE)]
        dist.all_gather(everywhere, whole, group=GLOO)
        assert all(torch.equal(whole, other) for other in everywhere)
