"""A group that changes its members, on five processes: four form it, one of them leaves, one is killed, and the fifth comes."""

from __future__ import annotations

import os
import signal
from datetime import timedelta
from typing import Any

import gradwire.torch
import pytest
import torch
import torch.distributed as dist
from gradwire.errors import GroupError, InvalidRequestError, MissingRankError, UnsupportedError
from rank import FOLDER, GROUP_TIMEOUT, RANK, WORLD_SIZE
from torch.nn.parallel import DistributedDataParallel

HAS_IT = hasattr(dist, "_reconfigure")  # torch 2.14
LEAVES, DIES, COMES = 2, 3, 4
FIRST, SECOND = [1, 0, LEAVES, DIES], [0, 1, COMES]
# Where the processes exchange their handles, which is the program's business.
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


def total(value: float = RANK + 1.0) -> float:
    tensor = torch.tensor([value])
    dist.all_reduce(tensor)
    return float(tensor)


def check_a_group_has_no_members_before_it_is_told_of_them() -> None:
    if not HAS_IT:
        return
    assert dist._supports_reconfigure()
    assert (dist.get_rank(), dist.get_world_size()) == (RANK, WORLD_SIZE), "as they were given, for want of others"
    assert dist._get_reconfigure_handle() == dist._get_reconfigure_handle()
    with pytest.raises(InvalidRequestError, match="no members yet"):
        total()
    with pytest.raises(InvalidRequestError, match="no members yet"):
        gradwire.torch.stats()


def check_handles_in_a_list_have_their_ranks_by_place() -> None:
    if not HAS_IT or RANK not in FIRST:
        return
    handles = handles_of(FIRST, "first")
    work = dist._reconfigure(uuid=1, handles=handles)
    work.wait()
    assert work.is_completed()
    assert (dist.get_rank(), dist.get_world_size()) == (FIRST.index(RANK), len(FIRST))
    assert total() == sum(process + 1 for process in FIRST)
    assert dist.get_process_group_ranks(dist.group.WORLD) == list(range(len(FIRST)))
    told: list[Any] = [None] * len(FIRST)
    dist.all_gather_object(told, RANK)
    assert told == FIRST
    assert gradwire.torch.stats()["group"]["world_size"] == len(FIRST)
    assert dist.group.WORLD.group_name == "0", "torch's name, whoever the members are"
    assert dist._get_reconfigure_handle() not in handles, "a handle is good for one group"


def check_handles_that_cannot_form_a_group_are_refused_and_the_group_goes_on() -> None:
    if not HAS_IT or RANK not in FIRST:
        return
    others = [f"gradwire:elsewhere:1:{n}" for n in range(2)]
    spent = [BOARD.get(f"first/{process}").decode() for process in FIRST]
    mine = dist._get_reconfigure_handle()
    for handles, number, text in (
        (spent, 2, "of an earlier group"),
        (others, 2, "not among the 2"),
        ([], 2, "not among the 0"),
        ([mine, mine], 2, "twice"),
        ([mine, "gloo:0:1:host"], 2, "no handle of gradwire's"),
        ([mine], 1, "uuid = 1 was used"),
    ):
        with pytest.raises(InvalidRequestError, match=text):
            dist._reconfigure(uuid=number, handles=handles)
    with pytest.raises(UnsupportedError, match="colour"):
        dist._reconfigure(uuid=2, handles=[mine], hints={"colour": "blue"})
    assert total() == sum(process + 1 for process in FIRST)


def check_one_leaves_one_dies_and_another_comes() -> None:
    if not HAS_IT:
        return
    if RANK == LEAVES:
        dist.destroy_process_group()
    if RANK == DIES:
        os.kill(os.getpid(), signal.SIGKILL)
    if RANK not in SECOND:
        return
    in_flight = None if RANK == COMES else dist.all_reduce(torch.ones(1), async_op=True)
    handles = handles_of(SECOND, "second")
    dist._reconfigure(uuid=3, handles=set(handles)).wait()
    # Right afterwards, whether or not anybody has noticed the death.
    assert total() == sum(process + 1 for process in SECOND)
    assert dist.get_rank() == sorted(handles).index(handles[SECOND.index(RANK)]), (
        "of a set: in the order of the handles"
    )
    assert dist.get_world_size() == len(SECOND)
    if in_flight is not None:
        with pytest.raises(GroupError):
            in_flight.wait()


def check_a_model_is_trained_with_those_who_came() -> None:
    if not HAS_IT or RANK not in SECOND:
        return
    torch.manual_seed(RANK)
    model = DistributedDataParallel(torch.nn.Linear(4, 1, bias=False))
    state = gradwire.torch.tolerate_loss(model, preset="reliable")
    model(torch.full((1, 4), float(RANK + 1))).sum().backward()
    mean = sum(process + 1 for process in SECOND) / len(SECOND)
    assert torch.allclose(model.module.weight.grad, torch.full((1, 4), mean))
    assert state.bytes_missing == 0 < state.bytes_expected


def check_a_member_that_does_not_come_is_named_in_time_and_the_next_attempt_works() -> None:
    if not HAS_IT or RANK not in SECOND:
        return
    handles = handles_of(SECOND, "third")
    if RANK != COMES:
        in_flight = dist.all_reduce(torch.ones(1), async_op=True)
        work = dist._reconfigure(uuid=4, handles=handles, timeout=timedelta(seconds=15))
        with pytest.raises(MissingRankError) as caught:
            work.wait()
        assert caught.value.ranks == [SECOND.index(COMES)]
        assert isinstance(caught.value, TimeoutError)
        with pytest.raises(GroupError):  # the old one has ended all the same
            in_flight.wait()
        with pytest.raises(InvalidRequestError, match=r"has failed: .*rank\(s\) 2 of 3"):
            total()
        assert dist._get_reconfigure_handle() in handles, "nothing was formed with it"
    dist._reconfigure(uuid=5, handles=handles).wait()
    assert total() == sum(process + 1 for process in SECOND)
    assert dist.get_rank() == SECOND.index(RANK)


def check_who_was_told_of_others_forms_no_group() -> None:
    if not HAS_IT or RANK not in SECOND:
        return
    handles = handles_of(SECOND, "fourth")
    told = ["gradwire:elsewhere:1:0", *handles[1:]] if RANK == COMES else handles
    with pytest.raises(MissingRankError):
        dist._reconfigure(uuid=6, handles=told, timeout=timedelta(seconds=1)).wait()
    dist._reconfigure(uuid=7, handles=handles).wait()
    assert total() == sum(process + 1 for process in SECOND)


def check_all_get_the_state_of_those_who_were_there_before() -> None:
    if not HAS_IT or RANK not in SECOND:
        return
    torch.manual_seed(RANK)
    model = torch.nn.Linear(3, 2)
    state = gradwire.torch.ElasticState(model=model, step=0)
    if RANK != COMES:
        handles = handles_of(SECOND[:2], "without")
        dist._reconfigure(uuid=8, handles=handles).wait()
        assert state.sync(), "the first time"
        assert state.step == 0
        assert not state.sync()
        state.step = 50 + RANK  # of a step that one has ended and another has not
    dist._reconfigure(uuid=9, handles=handles_of(SECOND, "with")).wait()
    assert state.sync(), "the group was formed anew"
    assert state.step == 50
    torch.manual_seed(SECOND[0])
    assert torch.equal(model.weight, torch.nn.Linear(3, 2).weight)
    assert not state.sync()


def check_what_those_who_stay_owe_goes_along() -> None:
    if not HAS_IT or RANK not in SECOND:
        return

    def wrapped(model: torch.nn.Module) -> tuple[DistributedDataParallel, Any]:
        ddp = DistributedDataParallel(model, init_sync=False)
        return ddp, gradwire.torch.tolerate_loss(ddp, preset="reliable")

    model, tolerance = torch.nn.Linear(3, 1, bias=False), None
    if RANK != COMES:
        dist._reconfigure(uuid=10, handles=handles_of(SECOND[:2], "who owe")).wait()
        _, tolerance = wrapped(model)
        (key,) = tolerance.state_dict()
        tolerance.load_state_dict({key: {"weight": torch.full((1, 3), RANK + 1.0)}})
    dist._reconfigure(uuid=11, handles=handles_of(list(reversed(SECOND)), "who do not")).wait()
    owed = None if tolerance is None else tolerance.state_dict()
    ddp, tolerance = wrapped(model)
    if owed is not None:
        tolerance.load_state_dict(owed)
    ddp(torch.zeros(1, 3)).sum().backward()
    mean = sum(process + 1 for process in SECOND[:2]) / len(SECOND)
    assert torch.allclose(model.weight.grad, torch.full((1, 3), mean))


def check_an_aborted_group_takes_other_members() -> None:
    if not HAS_IT or RANK not in SECOND:
        return
    in_flight = None if RANK == COMES else dist.all_reduce(torch.ones(1), async_op=True)
    dist.group.WORLD.abort()
    if in_flight is not None:
        with pytest.raises(GroupError):
            in_flight.wait()
    dist._reconfigure(uuid=12, handles=handles_of(SECOND, "after the abort")).wait()
    assert total() == sum(process + 1 for process in SECOND)
    gradwire.torch.all_reduce(torch.ones(3))


def check_a_part_of_the_new_members_is_a_group_too() -> None:
    if not HAS_IT or RANK not in SECOND[:2]:
        return
    # Torch's count of groups is not a newcomer's; by this word a group is named after its ranks.
    group = dist.new_group([0, 1], use_local_synchronization=True)
    tensor = torch.tensor([RANK + 1.0])
    dist.all_reduce(tensor, group=group)
    assert float(tensor) == sum(process + 1 for process in SECOND[:2])


def check_an_aborted_group_is_made_afresh() -> None:
    if not HAS_IT or RANK not in SECOND:
        return
    if RANK != COMES:
        in_flight = dist.all_reduce(torch.ones(1), async_op=True)
    dist.distributed_c10d._abort_process_group()
    if RANK != COMES:
        with pytest.raises(GroupError):
            in_flight.wait()
    assert not dist.is_initialized()
    begin()
    with pytest.raises(InvalidRequestError, match="no members yet"):
        total()
    dist._reconfigure(uuid=1, handles=handles_of(SECOND, "afresh")).wait()
    assert total() == sum(process + 1 for process in SECOND)
