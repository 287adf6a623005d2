"""A group that goes on without a lost rank, until those who are left and a new process form another one."""

from __future__ import annotations

import os
import signal

import gradwire.torch
import pytest
import torch
import torch.distributed as dist
from gradwire.errors import GroupError, PeerLostError
from rank import FOLDER, GROUP_TIMEOUT, RANK, WORLD_SIZE

HAS_IT = hasattr(dist, "_reconfigure")  # torch 2.14
DIES, COMES = 2, 3
FIRST, SECOND = [0, 1, DIES], [0, 1, COMES]
BOARD = dist.FileStore(str(FOLDER / "handles"))


def begin() -> None:
    store = dist.FileStore(str(FOLDER / "members"))
    dist.init_process_group(
        "gradwire", store=store, rank=RANK, world_size=WORLD_SIZE, timeout=GROUP_TIMEOUT, enable_reconfigure=True
    )


if HAS_IT:
    begin()


def handles_of(processes: list[int], name: str) -> list[str]:
    BOARD.set(f"{name}/{RANK}", dist._get_reconfigure_handle())
    return [BOARD.get(f"{name}/{process}").decode() for process in processes]


def mean() -> float:
    tensor = torch.tensor([RANK + 1.0])
    dist.all_reduce(tensor, dist.ReduceOp.AVG)
    return float(tensor)


def check_the_others_go_on_and_then_take_a_new_process_in() -> None:
    if not HAS_IT:
        return
    state = gradwire.torch.ElasticState(step=0, weights=torch.full((4,), float(RANK)))
    if RANK in FIRST:
        dist._reconfigure(uuid=1, handles=handles_of(FIRST, "first")).wait()
        assert state.sync()
        assert mean() == 2.0
    if RANK == DIES:
        os.kill(os.getpid(), signal.SIGKILL)
    if RANK != COMES:
        in_flight = torch.ones(1)
        with pytest.raises(PeerLostError):  # a sum over fewer ranks is another quantity
            dist.all_reduce(in_flight)
        assert mean() == 1.5, "of who is left, under the numbers that they began with"
        assert gradwire.torch.members() == (0, 1)
        assert dist.get_world_size() == len(FIRST)
        assert not state.sync()
        state.step = 7
    dist._reconfigure(uuid=2, handles=handles_of(SECOND, "second")).wait()
    assert dist.get_world_size() == len(SECOND)
    assert gradwire.torch.members() == (0, 1, 2), "all of the new group"
    assert state.sync()
    assert state.step == 7
    assert torch.equal(state.weights, torch.zeros(4))
    assert mean() == pytest.approx(sum(process + 1 for process in SECOND) / len(SECOND))
    rows = [torch.zeros(1) for _ in SECOND]
    dist.all_gather(rows, torch.tensor([float(RANK)]))  # needs every rank, and has it
    assert [int(row) for row in rows] == SECOND


def check_who_is_left_alone_forms_a_group_all_the_same() -> None:
    if not HAS_IT or RANK == DIES:
        return
    if RANK == 0:
        dist._reconfigure(uuid=3, handles=handles_of([0], "alone")).wait()
        assert dist.get_world_size() == 1
        assert mean() == 1.0
        return
    if RANK == 1:
        # The others have gone, or will: there is no majority that could go on.
        dist.group.WORLD.abort()
        with pytest.raises(GroupError):
            mean()
    dist._reconfigure(uuid=4, handles=handles_of([1, COMES], "two")).wait()
    assert mean() == (2.0 + COMES + 1) / 2
