"""What must hold under TORCH_DISTRIBUTED_DEBUG=DETAIL, where torch wraps the backend and drops its Python part."""

from __future__ import annotations

import gc
from typing import Any

import gradwire.torch
import pytest
import torch
import torch.distributed as dist
from coalesced import leaves_later_calls_alone
from gradwire import _runtime
from gradwire.errors import GroupError
from gradwire.torch import _compat
from rank import RANK, WORLD_SIZE
from torch import nn
from torch.nn.parallel import DistributedDataParallel

SEES_THE_ADAPTER = hasattr(dist, "gather_single")  # torch 2.15: before, what is wrapped comes without its Python part


def check_ddp_waits_without_the_gil() -> None:
    """A wait that kept the GIL would never let the completer in: the future could not complete."""
    model = DistributedDataParallel(nn.Linear(100, 100))

    def hook(_state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        work = dist.all_reduce(bucket.buffer(), async_op=True)
        return work.get_future().then(lambda future: future.value()[0] / WORLD_SIZE)

    hook.__annotations__ = {}
    model.register_comm_hook(None, hook)
    model(torch.ones(2, 100)).sum().backward()


def check_a_group_is_found_under_any_debug_level() -> None:
    work = gradwire.torch.all_reduce(torch.ones(10), preset="reliable")
    assert work.report().elems == 10
    assert dist.get_backend() == "gradwire"


def check_a_report_tells_both_stages_and_every_peer() -> None:
    tensor = torch.ones(1000 * WORLD_SIZE)
    report = gradwire.torch.all_reduce(tensor, preset="reliable", algorithm="transpose").report()
    others = [rank for rank in range(WORLD_SIZE) if rank != RANK]
    for peers in (report.peers, report.sources):
        assert [peer.rank for peer in peers] == others, peers
        assert all(peer.elems_received == peer.elems_expected > 0 for peer in peers), peers
        assert all(peer.closed_by == "all_arrived" for peer in peers), peers
    assert report.contributors == report.contributors_least == WORLD_SIZE
    assert abs(report.compute_wait_s + report.network_wait_s - report.elapsed_s) < 1e-6


def check_statistics_name_the_rank() -> None:
    assert gradwire.torch.stats()["group"]["rank"] == RANK


def check_a_rank_that_is_in_no_part_of_a_split_goes_on() -> None:
    if not SEES_THE_ADAPTER or torch.__version__.startswith("2.14."):  # which splits only groups that have a device
        return
    part = dist.split_group(split_ranks=[[1]])
    assert (part is dist.GroupMember.NON_GROUP_MEMBER) == (RANK == 0)
    if RANK == 1:
        tensor = torch.ones(3)
        dist.all_reduce(tensor, group=part)
        assert torch.equal(tensor, torch.ones(3))
        gradwire.torch.all_reduce(tensor, group=part)
        dist.destroy_process_group(part)


def check_what_raises_between_coalesced_calls_leaves_later_ones_alone() -> None:
    if not SEES_THE_ADAPTER:
        return
    leaves_later_calls_alone()


def check_rows_are_gathered_into_one_tensor() -> None:
    if not SEES_THE_ADAPTER:
        return
    rows = torch.zeros(WORLD_SIZE * 2) if RANK == 0 else None
    dist.gather_single(torch.full((2,), RANK + 1.0), rows, dst=0)
    if RANK == 0:
        assert torch.equal(rows, torch.arange(1.0, WORLD_SIZE + 1).repeat_interleave(2))


def check_an_aborted_group_is_forgotten_by_its_name_and_may_still_be_called() -> None:
    aborted, destroyed = dist.new_group(), dist.new_group()
    owner = _runtime.current()
    dist.distributed_c10d._abort_process_group(aborted)
    name = destroyed.group_name
    (destroyed if _compat.backend_class() is None else destroyed._get_backend(torch.device("cpu"))).abort()
    assert list(owner.backends) == [dist.group.WORLD.group_name]
    gc.collect()
    with pytest.raises(GroupError):
        dist.all_reduce(torch.ones(3), group=destroyed)
    dist.destroy_process_group(destroyed)
    assert name not in owner.backends
    dist.all_reduce(torch.ones(3))
