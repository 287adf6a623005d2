"""Collectives of ranks that have a GPU each: what gradwire's threads do for a rank leaves the other GPUs alone."""

from __future__ import annotations

from collections.abc import Callable

import gradwire.torch
import torch
import torch.distributed as dist
from rank import RANK, WORLD_SIZE
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

GPU = torch.device("cuda", RANK)
LARGE = 5_000_001  # elements of float32: three pieces

torch.cuda.set_device(GPU)


def only_here(run: Callable[[], object]) -> None:
    """A context takes hundreds of MB of a GPU, which is another rank's."""
    run()
    torch.cuda.synchronize(GPU)
    found = [index for index in range(torch.cuda.device_count()) if torch._C._cuda_hasPrimaryContext(index)]
    assert found == [RANK], f"contexts on GPUs {found}"


def check_a_collective_makes_a_context_on_no_other_gpu() -> None:
    def run() -> None:
        for elems in (100, LARGE):
            tensor = torch.ones(elems, device=GPU)
            dist.all_reduce(tensor)
            assert torch.equal(tensor.cpu(), torch.full((elems,), float(WORLD_SIZE)))

    only_here(run)


def check_a_future_and_a_poll_make_a_context_on_no_other_gpu() -> None:
    def run() -> None:
        (result,) = dist.all_reduce(torch.ones(LARGE, device=GPU), async_op=True).get_future().wait()
        assert torch.equal((result * 1).cpu(), torch.full((LARGE,), float(WORLD_SIZE)))
        work = dist.all_reduce(torch.ones(100, device=GPU), async_op=True)
        while not work.is_completed():
            pass

    only_here(run)


def check_models_make_a_context_on_no_other_gpu() -> None:
    def trained(model: nn.Module) -> None:
        gradwire.torch.tolerate_loss(model)  # type: ignore[arg-type]
        for _ in range(3):
            model(torch.ones(4, 64, device=GPU)).sum().backward()

    only_here(lambda: trained(DistributedDataParallel(nn.Linear(64, 64).to(GPU))))
    only_here(lambda: trained(fully_shard(nn.Linear(64, 64).to(GPU))))
