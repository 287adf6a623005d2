"""The process ends while a collective is in flight that can never end."""

from __future__ import annotations

import torch
import torch.distributed as dist
from rank import RANK

DESTROY = False
KEPT = []


def check_starts_what_never_ends() -> None:
    if RANK == 0:
        work = dist.all_reduce(torch.ones(10), async_op=True)
        future = work.get_future()
        KEPT.extend([work, future])
        assert not future.done()
    else:
        store = dist.distributed_c10d._get_default_store()
        store.wait(["rank 0 has left"])


def check_leaves() -> None:
    if RANK == 0:
        dist.distributed_c10d._get_default_store().set("rank 0 has left", "")
