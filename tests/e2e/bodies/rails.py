"""Exact sums over two rails, one of which is gray from the start; see test_rails.py."""

from __future__ import annotations

import gradwire.torch
import torch
import torch.distributed as dist
from rank import RANK, WORLD_SIZE

ROUNDS, ELEMS = 20, 1 << 19


def check_sums_over_a_gray_rail_are_exact() -> None:
    # test of: mlt/gray-path
    expected = torch.full((ELEMS,), float(sum(range(1, WORLD_SIZE + 1))))
    for _ in range(ROUNDS):
        tensor = torch.full((ELEMS,), float(RANK + 1))
        dist.all_reduce(tensor)
        assert torch.equal(tensor, expected)
    print(gradwire.torch.stats()["group"]["peers"][0]["paths"])
