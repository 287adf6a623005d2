"""Groups that end before their time, and what goes on after them. Three ranks; the last one is given up on the way."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gradwire.errors import GradwireError, GroupError, UnsupportedError
from gradwire.torch import _compat
from gradwire.torch._tolerant import link_of
from rank import RANK, WORLD_SIZE

GLOO = dist.new_group(backend="gloo")
# torch counts groups to name them, and a rank that a group shrank without no longer counts alike: no new group after that.
SHRINKING = [dist.new_group() for _ in range(2)]
CPU = torch.device("cpu")
IS_WHOLE = _compat.backend_class() is None  # before torch 2.14: the adapter is the group, which torch asks for less


def backend_of(group: Any) -> Any:
    return group if IS_WHOLE else group._get_backend(CPU)


SHRINKS = hasattr(dist, "shrink_group") and hasattr(backend_of(dist.group.WORLD), "shrink")


def total(group: Any = None) -> float:
    tensor = torch.tensor([float(RANK + 1)])
    dist.all_reduce(tensor, group=group)
    return float(tensor)


def check_a_barrier_names_the_rank_that_did_not_come() -> None:
    group = dist.new_group(timeout=timedelta(seconds=60))
    if IS_WHOLE:  # torch allows it to gloo alone
        return
    if RANK != WORLD_SIZE - 1:
        with pytest.raises(RuntimeError if RANK else GradwireError, match=f"{WORLD_SIZE - 1}|rank 0") as caught:
            dist.monitored_barrier(group, timeout=timedelta(seconds=15), wait_all_ranks=True)
        if RANK == 0:
            assert f"Rank {WORLD_SIZE - 1} failed to pass monitoredBarrier" in str(caught.value)


def check_sequence_numbers_count_the_calls_of_a_group() -> None:
    group = dist.new_group()
    backend = backend_of(group)
    before = backend._get_sequence_number_for_group()
    for _ in range(3):
        total(group)
    assert backend._get_sequence_number_for_group() == before + 3
    dist.barrier(group)
    assert backend._get_sequence_number_for_group() == before + 4


def check_the_timeout_of_a_group_can_be_changed() -> None:
    group = dist.new_group(timeout=timedelta(seconds=60))
    backend_of(group).set_timeout(timedelta(seconds=1))
    if RANK:
        with pytest.raises(GroupError, match="timed out"):
            total(group)
    dist.barrier(GLOO)


def check_the_timeout_of_a_call_is_its_own() -> None:
    group = dist.new_group(timeout=timedelta(seconds=60))
    if RANK:
        options = dist.AllreduceOptions()
        options.timeout = timedelta(seconds=1)
        with pytest.raises(GroupError, match="timed out"):
            group.allreduce([torch.ones(3)], options).wait()
    dist.barrier(GLOO)


def check_abort_ends_what_is_in_flight_and_other_groups_go_on() -> None:
    group = dist.new_group(timeout=timedelta(seconds=60))
    if RANK == 0:
        work = dist.all_reduce(torch.ones(3), group=group, async_op=True)
        backend_of(group).abort()
        with pytest.raises(GradwireError):
            work.wait()
    dist.barrier(GLOO)
    assert total() == WORLD_SIZE * (WORLD_SIZE + 1) / 2


def check_a_group_that_was_aborted_says_so_as_long_as_somebody_holds_it() -> None:
    group = dist.new_group()
    backend_of(group).abort()
    gc.collect()
    with pytest.raises(GroupError):
        total(group)
    assert link_of(group).world_size == WORLD_SIZE
    dist.destroy_process_group(group)


def check_torch_aborts_a_group_and_forgets_it() -> None:
    group = dist.new_group(timeout=timedelta(seconds=60))
    adapter = weakref.ref(backend_of(group))
    if RANK == 0:
        work = dist.all_reduce(torch.ones(3), group=group, async_op=True)
    dist.distributed_c10d._abort_process_group(group)
    if RANK == 0:
        with pytest.raises(GroupError):
            work.wait()
    with pytest.raises(ValueError, match="Invalid process group"):
        dist.destroy_process_group(group)
    del group
    gc.collect()
    assert adapter() is None, "nobody needs it any more"
    assert total() == WORLD_SIZE * (WORLD_SIZE + 1) / 2, "the others go on"


def check_a_group_that_was_not_made_to_change_its_members_says_so() -> None:
    if not hasattr(dist, "_reconfigure"):
        return
    assert not dist._supports_reconfigure()
    for refused in (dist._get_reconfigure_handle, lambda: dist._reconfigure(uuid=1, handles=["one"])):
        with pytest.raises(UnsupportedError, match="enable_reconfigure"):
            refused()
    assert total() == WORLD_SIZE * (WORLD_SIZE + 1) / 2, "the group goes on"


def check_coalesced_calls_of_every_kind_are_one_work() -> None:
    def run(group: Any) -> list[torch.Tensor]:
        rows = [torch.zeros(WORLD_SIZE * 4) for _ in range(2)]
        parts = [torch.zeros(4) for _ in range(2)]
        device = None if IS_WHOLE else CPU
        with dist._coalescing_manager(group=group, device=device, async_ops=True) as gathers:
            for i, row in enumerate(rows):
                dist.all_gather_into_tensor(row, torch.full((4,), float(RANK + i)), group=group)
        gathers.wait()
        with dist._coalescing_manager(group=group, device=device, async_ops=True) as scatters:
            for part, row in zip(parts, rows, strict=True):
                dist.reduce_scatter_tensor(part, row, group=group)
        scatters.wait()
        return [*rows, *parts]

    expected = [torch.arange(WORLD_SIZE).repeat_interleave(4).float() + i for i in range(2)]
    rows = run(dist.group.WORLD)
    assert torch.equal(torch.stack(rows[:2]), torch.stack(expected))
    for i in range(2):
        assert torch.equal(rows[2 + i], torch.full((4,), float(WORLD_SIZE * (RANK + i))))


def check_groups_are_destroyed_in_any_order_with_calls_in_flight() -> None:
    groups = [dist.new_group() for _ in range(3)]
    works = [dist.all_reduce(torch.ones(1000), group=group, async_op=True) for group in groups]
    for work in works:
        work.wait()
    order = [(RANK + i) % 3 for i in range(3)]
    for index in order:
        dist.destroy_process_group(groups[index])
    assert total() == WORLD_SIZE * (WORLD_SIZE + 1) / 2


def shrunk(survive: Callable[[], Any]) -> Any:
    group = survive()
    assert dist.get_world_size(group) == WORLD_SIZE - 1
    assert total(group) == (WORLD_SIZE - 1) * WORLD_SIZE / 2
    return group


def check_a_group_shrinks_to_the_others() -> None:
    if not SHRINKS:
        return
    import gradwire.torch

    parent = SHRINKING[0]
    if RANK != WORLD_SIZE - 1:
        group = shrunk(lambda: dist.shrink_group([WORLD_SIZE - 1], group=parent))
        gradwire.torch.all_reduce(torch.ones(3), group=group)  # known to gradwire, though torch named it later
        dist.destroy_process_group(group)
    else:
        dist.destroy_process_group(parent)


def check_a_group_whose_rank_has_failed_shrinks_too() -> None:
    if not SHRINKS:
        return
    parent = SHRINKING[1]
    if RANK != WORLD_SIZE - 1:
        options = dist.AllreduceOptions()
        options.timeout = timedelta(seconds=1)
        with pytest.raises(GroupError):
            parent.allreduce([torch.ones(3)], options).wait()  # the last one never comes
        dist.destroy_process_group(shrunk(lambda: dist.shrink_group([WORLD_SIZE - 1], group=parent, shrink_flags=1)))
