"""The process ends right behind calls that nobody waits for, some of which can never end."""

from __future__ import annotations

import torch
import torch.distributed as dist
from rank import RANK

DESTROY = False


def check_starts_what_nobody_waits_for() -> None:
    for _ in range(50):
        dist.all_reduce(torch.ones(100, 100).t()[::2], async_op=True)
    if RANK == 0:
        dist.all_reduce(torch.ones(100, 100).t()[::2], async_op=True)
