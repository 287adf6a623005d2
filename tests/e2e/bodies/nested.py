"""Hooks that start collectives in the callbacks of others (PowerSGD), with `sync_futures`."""

from __future__ import annotations

import torch
import torch.distributed as dist
from rank import WORLD_SIZE
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

GLOO = dist.new_group(backend="gloo")


def check_power_sgd_with_several_buckets_ends() -> None:
    torch.manual_seed(3)
    layers = [nn.Linear(300, 300) for _ in range(4)]
    model = DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=0.4)
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    for _ in range(4):
        model(torch.ones(8, 300)).square().mean().backward()
    flat = torch.cat([p.grad.reshape(-1) for p in model.parameters()])
    everybody = [torch.zeros_like(flat) for _ in range(WORLD_SIZE)]
    dist.all_gather(everybody, flat, group=GLOO)
    assert all(torch.equal(flat, other) for other in everybody)


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
