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
    assert gradwire.torch.stats()["group"]["rank"] == RANK
