"""Callbacks that start collectives, with `sync_futures`. PowerSGD needs no setting: see composition.py."""

from __future__ import annotations

import torch
import torch.distributed as dist
from rank import WORLD_SIZE

GLOO = dist.new_group(backend="gloo")


def check_nested_collectives_run_in_issue_order() -> None:
    works = [dist.all_reduce(torch.full((10,), float(i)), async_op=True) for i in range(5)]
    futures = []
    for work in works:

        def again(future: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
            tensor = future.value()[0]
            dist.all_reduce(tensor)
            return tensor

        futures.append(work.get_future().then(again))
    for i, future in enumerate(futures):
        assert torch.equal(future.wait(), torch.full((10,), float(i * WORLD_SIZE**2)))
