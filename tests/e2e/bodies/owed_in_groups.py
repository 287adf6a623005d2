"""What replicas in a part of all ranks owe, beside other groups with another part of the model. Four ranks that lose packets."""

from __future__ import annotations

from typing import Any

import gradwire.torch
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from owed import owed_in
from rank import FOLDER, RANK
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

ELEMS = 200_000
GLOO = dist.new_group(backend="gloo")
MESH = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))


class Linear(nn.Module):
    """A loss whose gradient is what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(ELEMS))

    def forward(self, gradient: torch.Tensor) -> torch.Tensor:
        return (self.weight * gradient).sum()


def replicated(group: dist.ProcessGroup) -> tuple[DistributedDataParallel, Any]:
    model = DistributedDataParallel(Linear(), process_group=group)
    return model, gradwire.torch.tolerate_loss(model, loss_bound=0.5, preset="auto", hadamard="off")


def check_a_distributed_checkpoint_gives_each_rank_of_each_group_its_own_back() -> None:
    wrong = []
    for name in ("dp", "tp"):
        group = MESH.get_group(name)
        model, state = replicated(group)
        for _ in range(3):
            model.zero_grad()
            model(torch.full((ELEMS,), float((1 + RANK) ** 3))).backward()  # of no two groups the same
        owed = state.state_dict()
        checkpoint.save({"owed": owed}, checkpoint_id=FOLDER / f"checkpoint-{name}")
        _, fresh = replicated(group)
        found = {"owed": fresh.state_dict()}
        checkpoint.load(found, checkpoint_id=FOLDER / f"checkpoint-{name}")
        fresh.load_state_dict(found["owed"])
        expected, loaded = (owed_in(each)["weight"] for each in (owed, fresh.state_dict()))
        if not expected.any() or not torch.equal(loaded, expected):
            wrong.append(f"{name}: {loaded.double().sum()} is owed, and {expected.double().sum()} was")
    assert not wrong, wrong  # here, as other ranks may have nothing wrong


def check_what_earlier_versions_saved_by_the_rank_in_the_group_is_taken_up() -> None:
    group = MESH.get_group("dp")
    _, state = replicated(group)
    saved = {"weight": torch.full((ELEMS,), float(RANK))}
    state.load_state_dict({f"rank {dist.get_rank(group)} of 2": saved})
    assert torch.equal(owed_in(state.state_dict())["weight"], saved["weight"])


def check_the_key_of_a_model_on_all_ranks_is_what_it_was() -> None:
    for group in (dist.group.WORLD, dist.new_group()):
        _, state = replicated(group)
        assert list(state.state_dict()) == [f"rank {RANK} of 4"]
