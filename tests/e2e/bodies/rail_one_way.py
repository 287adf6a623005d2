"""Sums of a group whose ranks reach each other both ways by their second rail alone; see test_rail_one_way.py."""

from __future__ import annotations

from datetime import timedelta

import torch
import torch.distributed as dist
from rank import RANK


def check_large_sums_are_exact() -> None:
    # Far less than the default time for a call: one that nothing large reaches would wait for all of it.
    group = dist.new_group(timeout=timedelta(seconds=30))
    tensor = torch.full((1 << 18,), float(RANK + 1))
    dist.all_reduce(tensor, group=group)
    assert torch.equal(tensor, torch.full((1 << 18,), 3.0))
