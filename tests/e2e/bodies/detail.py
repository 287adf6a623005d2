"""What must hold under TORCH_DISTRIBUTED_DEBUG=DETAIL, where torch wraps the backend and drops its Python part."""

from __future__ import annotations

from typing import Any

import gradwire.torch
import torch
import torch.distributed as dist
from rank import RANK, WORLD_SIZE
from torch import nn
from torch.nn.parallel import DistributedDataParallel


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
