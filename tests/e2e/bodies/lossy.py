"""Over links that lose packets: what is exact stays exact, and every gradient value counts once, now or later."""

from __future__ import annotations

from functools import reduce
from itertools import product

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


def mean_of_the_rest(residuals: list[torch.Tensor]) -> torch.Tensor:
    """The sum of the values that are in no residual, divided by all ranks; no value may be in two."""
    late = reduce(torch.bitwise_or, residuals)
    assert torch.equal(late, torch.stack(residuals).sum(0)), "a value is in two residuals"
    counted = [(late >> r & 1 == 0).long() for r in range(WORLD_SIZE)]
    total = torch.stack([part << r for r, part in enumerate(counted)]).sum(0)
    return total.float() / torch.full_like(total, WORLD_SIZE)


def check_every_value_counts_exactly_once_and_replicas_agree() -> None:
    # test of: auto/error-feedback
    # Rank r contributes 2**r to each element, so the bits of a residual say whose values it holds: its own in a
    # transpose, those of a partial sum in a ring. Zero stands in for what is missing, so that all of it is owed. The result
    # of what is in nobody's residual is known for each element, bit for bit: sums of powers of two are exact, and so is
    # their order.
    lost = 0
    for preset, algorithm in product(("auto", "mlt", "reliable"), ("transpose", "ring")):
        for _ in range(ROUNDS // 2):
            tensor = torch.full((ELEMS,), 2.0**RANK)
            residual = torch.zeros(ELEMS)
            work = gradwire.torch.all_reduce(
                tensor,
                preset=preset,
                algorithm=algorithm,
                residual=residual,
                divide_by="world",
                hadamard="off",
                gather_loss_bound=0.0,
            )
            means, residuals = everybodys(tensor), everybodys(residual)
            assert algorithm == "ring" or set(residual.unique().tolist()) <= {0.0, 2.0**RANK}
            expected = mean_of_the_rest([part.long() for part in residuals])
            for r, mean in enumerate(means):
                assert torch.equal(mean, expected), f"{preset}: rank {r} has another mean than what counted"
            uncounted = int((residual > 0).sum())
            assert work.report().elems_uncounted == uncounted
            assert preset != "reliable" or uncounted == 0
            lost += uncounted
    total = torch.tensor(float(lost))
    dist.all_reduce(total, group=GLOO)
    assert total > 0, "nothing was lost: the test has shown nothing"


def check_the_counts_of_every_block_are_those_of_the_ranks_that_count() -> None:
    # test of: mlt/mean-over-contributions
    short = 0
    for algorithm, hadamard in product(("transpose", "parameter_server"), ("off", "on")):
        work = gradwire.torch.all_reduce(
            torch.ones(ELEMS),
            preset="mlt",
            algorithm=algorithm,
            hadamard=hadamard,
            contributions=True,
            gather_loss_bound=0.0,
        )
        report = work.report()
        found = report.contributions
        assert found is not None
        counts = torch.asarray(found.counts, dtype=torch.uint16).view(found.counts.shape).long()
        sent = report.rotated_elems or report.elems
        assert counts.shape[0] * found.shard_elems >= sent
        rows = counts.repeat_interleave(found.block_elems, 1)[:, : found.shard_elems]
        each = rows.reshape(-1)[:sent]
        uncounted = torch.zeros(sent)
        for start, end in report.uncounted:
            uncounted[start:end] = 1
        assert torch.equal(each, WORLD_SIZE - sum(everybodys(uncounted)).long()), (algorithm, hadamard)
        assert found.of(sent - 1) == int(each[-1])
        short += int((each < WORLD_SIZE).sum())
    total = torch.tensor(float(short))
    dist.all_reduce(total, group=GLOO)
    assert total > 0, "nothing was lost: the test has shown nothing"
    assert gradwire.torch.all_reduce(torch.ones(10)).report().contributions is None


def check_a_rotated_tensor_loses_a_little_of_every_element_and_replicas_agree() -> None:
    # test of: ultima/hadamard
    lost = 0
    for dtype, algorithm in product((torch.float32, torch.bfloat16), ("transpose", "ring")):
        for _ in range(ROUNDS // 2):
            own = torch.randn(ELEMS, generator=torch.Generator().manual_seed(RANK)).to(dtype)
            tensor, residual = own.clone(), torch.full_like(own, 7.0)
            work = gradwire.torch.all_reduce(
                tensor, preset="mlt", algorithm=algorithm, residual=residual, hadamard="on", gather_loss_bound=0.0
            )
            report = work.report()
            assert report.rotated_elems >= ELEMS
            means, inputs = everybodys(tensor), everybodys(own)
            assert all(torch.equal(mean, tensor) for mean in means)
            if report.elems_uncounted == 0:
                assert bool((residual == 7.0).all()), "nothing was lost: the residual stays as it was"
                continue
            lost += 1
            # What this rank lost has a part in every element, and together no more energy than it sent.
            assert (residual != 0).float().mean() > 0.5
            sent = torch.stack(inputs).float().norm()
            assert 0 < residual.float().norm() < sent
            error = (tensor.float() - torch.stack(inputs).float().mean(0)).abs().max()
            assert error < 2, "10 % of what is lost moves no element by as much as its size"
    total = torch.tensor(float(lost))
    dist.all_reduce(total, group=GLOO)
    assert total > 0, "nothing was lost: the test has shown nothing"
