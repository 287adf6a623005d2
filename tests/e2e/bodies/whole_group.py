"""What torch asks of a default group that is gradwire's as a whole: all before torch 2.14, and those that change their members.

Two ranks. `GRADWIRE_TEST_GROUP` says which of both it is; the former is had with any torch, as if Python could not subclass a backend.
"""

from __future__ import annotations

import os
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from coalesced import leaves_later_calls_alone
from gradwire.errors import DeadlineError
from gradwire.torch import _compat
from rank import FOLDER, GROUP_TIMEOUT, RANK, WORLD_SIZE
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

CHANGES_ITS_MEMBERS = os.environ["GRADWIRE_TEST_GROUP"] == "reconfigured"
HAS_IT = not CHANGES_ITS_MEMBERS or hasattr(dist, "_reconfigure")  # torch 2.14
OTHER = 1 - RANK
if not CHANGES_ITS_MEMBERS:
    _compat.backend_class = lambda: None


def begin(name: str, **options: Any) -> None:
    if CHANGES_ITS_MEMBERS:
        options["enable_reconfigure"] = True
    store = dist.FileStore(str(FOLDER / name))
    dist.init_process_group("gradwire", store=store, rank=RANK, world_size=WORLD_SIZE, timeout=GROUP_TIMEOUT, **options)
    if CHANGES_ITS_MEMBERS:
        board = dist.FileStore(str(FOLDER / f"handles of {name}"))
        board.set(str(RANK), dist._get_reconfigure_handle())
        dist._reconfigure(uuid=1, handles=[board.get(str(rank)).decode() for rank in range(WORLD_SIZE)]).wait()


if HAS_IT:
    begin("first")


def check_the_group_is_the_adapter() -> None:
    if HAS_IT:
        assert type(dist.group.WORLD).__module__.startswith("gradwire."), "these checks test nothing"


def check_a_whole_checkpoint_of_rank_0_is_loaded_into_a_sharded_model() -> None:
    if not HAS_IT:
        return
    model = fully_shard(nn.Linear(4, 4), mesh=init_device_mesh("cpu", (WORLD_SIZE,)))
    whole = {"weight": torch.arange(16.0).view(4, 4), "bias": torch.ones(4)} if RANK == 0 else {}
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(model, whole, options=options)
    assert torch.equal(model.weight.full_tensor(), torch.arange(16.0).view(4, 4))


def check_a_checkpoint_is_saved_beside() -> None:
    if not HAS_IT:
        return
    folder = FOLDER / "checkpoint"
    dcp.async_save({"a": torch.full((3,), 5.0)}, checkpoint_id=folder).result()
    loaded = {"a": torch.zeros(3)}
    dcp.load(loaded, checkpoint_id=folder)
    assert torch.equal(loaded["a"], torch.full((3,), 5.0))


def check_messages_go_in_batches() -> None:
    if not HAS_IT:
        return
    received = torch.zeros(3)
    sent = torch.full((3,), RANK + 1.0)
    requests = dist.batch_isend_irecv([dist.P2POp(dist.isend, sent, OTHER), dist.P2POp(dist.irecv, received, OTHER)])
    for request in requests:
        request.wait()
    assert torch.equal(received, torch.full((3,), OTHER + 1.0))


def check_an_error_within_coalesced_calls_leaves_later_ones_alone() -> None:
    if not HAS_IT:
        return
    leaves_later_calls_alone()


def check_a_monitored_barrier_keeps_its_time() -> None:
    if not HAS_IT or not CHANGES_ITS_MEMBERS:
        return  # before 2.14 torch allows it to gloo alone
    dist.monitored_barrier()
    store = dist.FileStore(str(FOLDER / "barrier"))
    if RANK == 0:
        with pytest.raises(DeadlineError, match="Rank 1 failed to pass"):
            dist.monitored_barrier(timeout=timedelta(milliseconds=200))
        store.set("has failed", "")
    store.wait(["has failed"])  # and the group with it, which the next check destroys


def check_a_group_is_bound_to_its_device() -> None:
    if not HAS_IT:
        return
    dist.destroy_process_group()
    device = torch.device("cpu", 0)
    if [int(part) for part in torch.__version__.split(".")[:2]] < [2, 15]:  # torch itself takes no processor
        with pytest.raises(ValueError, match="must be an accelerator"):
            begin("refused", device_id=device)
        begin("first, again")
        return
    begin("second", device_id=device)
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    group = dist.new_group([0, 1])
    dist.all_reduce(tensor, group=group)
    assert torch.equal(tensor, torch.full((3,), float(WORLD_SIZE**2)))
    dist.distributed_c10d._abort_process_group()
    assert not dist.is_initialized()
