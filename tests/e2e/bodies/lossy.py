"""Over links that lose packets: what is exact stays exact, and every gradient value counts once, now or later."""

from __future__ import annotations

import gradwire.torch
import torch
import torch.distributed as dist
from rank import RANK, WORLD_SIZE

GLOO = dist.new_group(backend="gloo")
ELEMS = 150_001
ROUNDS = 10


def everybodys(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensor of every rank, exchanged over TCP."""
    rows = [torch.zeros_like(tensor) for _ in range(WORLD_SIZE)]
    dist.all_gather(rows, tensor, group=GLOO)
    return rows


def check_exact_collectives_are_exact() -> None:
    for _ in range(ROUNDS):
        tensor = torch.full((ELEMS,), float(RANK + 1))
        dist.all_reduce(tensor)
        assert torch.equal(tensor, torch.full((ELEMS,), float(sum(range(1, WORLD_SIZE + 1)))))
        dist.broadcast(tensor, 0)


def check_every_value_counts_exactly_once_and_replicas_agree() -> None:
    # test of: auto/error-feedback
    # Rank r contributes 2**r to each element. What did not count is in its residual, so the mean over what
    # counted is known for each element, bit for bit: sums of powers of two are exact, and so is their order.
    lost = 0
    for preset in ("auto", "mlt", "reliable"):
        for _ in range(ROUNDS):
            tensor = torch.full((ELEMS,), 2.0**RANK)
            residual = torch.zeros(ELEMS)
            work = gradwire.torch.all_reduce(tensor, preset=preset, residual=residual)
            means, residuals = everybodys(tensor), everybodys(residual)
            counted = torch.stack([2.0**r - part for r, part in enumerate(residuals)])
            assert set(residual.unique().tolist()) <= {0.0, 2.0**RANK}
            expected = counted.sum(0) / (counted > 0).sum(0)
            for r, mean in enumerate(means):
                assert torch.equal(mean, expected), f"{preset}: rank {r} has another mean than what counted"
            uncounted = int((residual > 0).sum())
            assert work.report().elems_uncounted == uncounted
            assert preset != "reliable" or uncounted == 0
            lost += uncounted
    total = torch.tensor(float(lost))
    dist.all_reduce(total, group=GLOO)
    assert total > 0, "nothing was lost: the test has shown nothing"
