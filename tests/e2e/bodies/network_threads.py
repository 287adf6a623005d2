"""Large calls that each rank divides between three network threads, over links that lose packets."""

from __future__ import annotations

import gradwire.torch
import pytest
import torch
import torch.distributed as dist
from rank import RANK, WORLD_SIZE
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

GLOO = dist.new_group(backend="gloo")
THREADS = 3
ELEMS = 900_001  # of three parts and a rest
# Ranks tell each other every 64 collectives that their threads have connected, and divide from the 32nd behind that on.
ROUNDS = 3 * 64


def group() -> dict[str, object]:
    return gradwire.torch.stats()["group"]


def check_ranks_agree_to_divide() -> None:
    assert not group()["agreed"], "nothing has been measured yet"
    for _ in range(ROUNDS):
        dist.all_reduce(torch.ones(20_000))
    assert group()["agreed"]["threads"] == THREADS, group()["agreed"]


def check_exact_sums_are_exact_in_every_part() -> None:
    for dtype in (torch.float32, torch.float64, torch.int64):
        tensor = torch.arange(ELEMS, dtype=dtype) % 1000 * (RANK + 1)
        dist.all_reduce(tensor)
        assert torch.equal(tensor, torch.arange(ELEMS, dtype=dtype) % 1000 * sum(range(1, WORLD_SIZE + 1)))


def check_rows_of_every_rank_are_exact_in_every_part() -> None:
    ramp, everybody = torch.arange(ELEMS) % 1000, sum(range(1, WORLD_SIZE + 1))
    for dtype in (torch.float32, torch.bfloat16, torch.int64):
        row = (ramp % 50 * (RANK + 1)).to(dtype)
        rows = torch.empty(WORLD_SIZE * ELEMS, dtype=dtype)
        dist.all_gather_into_tensor(rows, row)
        assert all(torch.equal(got, (ramp % 50 * (of + 1)).to(dtype)) for of, got in enumerate(rows.chunk(WORLD_SIZE)))
        mine = torch.empty(ELEMS, dtype=dtype)
        given = torch.cat([ramp % 8 * (RANK + 1) + of for of in range(WORLD_SIZE)]).to(dtype)
        dist.reduce_scatter_tensor(mine, given)
        assert torch.equal(mine, (ramp % 8 * everybody + WORLD_SIZE * RANK).to(dtype))
        sent = rows.clone() if RANK == 1 else torch.zeros_like(rows)
        dist.broadcast(sent, 1)
        assert torch.equal(sent, rows)


def check_every_value_of_a_tolerant_part_counts_once_or_is_owed() -> None:
    # As of an all-reduce below; nobody but the owner of a row learns its mean, so that values that are in none are owed whole.
    lost = 0
    for _ in range(10):
        given, residual = torch.full((WORLD_SIZE * ELEMS,), 2.0**RANK), torch.zeros(WORLD_SIZE * ELEMS)
        mine = torch.empty(ELEMS)
        work = gradwire.torch.reduce_scatter(
            mine, given, preset="auto", residual=residual, divide_by="world", contributions=True
        )
        owed = residual.clone()
        dist.all_reduce(owed, group=GLOO)
        own = slice(RANK * ELEMS, (RANK + 1) * ELEMS)
        assert torch.equal(mine, (2.0**WORLD_SIZE - 1 - owed[own]) / WORLD_SIZE)
        report = work.report()
        uncounted = int((residual > 0).sum())
        assert (report.elems, report.elems_uncounted) == (ELEMS, uncounted)
        assert all(residual[first:last].gt(0).all() for first, last in report.uncounted)
        short = (owed[own] > 0).nonzero().flatten().tolist() or [0]
        # The first and the last lie in other parts, almost always.
        for elem in (short[0], short[len(short) // 2], short[-1]):
            assert report.contributions.of(elem) == bin(2**WORLD_SIZE - 1 - int(owed[own][elem])).count("1")
        lost += uncounted
    total = torch.tensor(float(lost))
    dist.all_reduce(total, group=GLOO)
    assert total > 0, "nothing was lost: the test has shown nothing"


def check_a_sharded_model_trains_as_with_gloo() -> None:
    def losses(group: dist.ProcessGroup) -> list[float]:
        torch.manual_seed(0)
        mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("shard",))
        model = fully_shard(nn.Sequential(nn.Linear(1000, 1000), nn.Linear(1000, 1000)), mesh=mesh)
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        found = []
        for step in range(5):
            torch.manual_seed(100 * step + RANK)
            loss = model(torch.randn(4, 1000)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(float(loss))
        return found

    # Sums of three ranks in another order.
    assert losses(dist.group.WORLD) == pytest.approx(losses(GLOO), rel=1e-5)


def check_every_value_of_a_tolerant_mean_counts_once_or_is_owed() -> None:
    # Rank r contributes 2**r, so the bits of a residual say whose values it holds, and what is in none is in the mean.
    lost = 0
    for _ in range(10):
        tensor, residual = torch.full((ELEMS,), 2.0**RANK), torch.zeros(ELEMS)
        work = gradwire.torch.all_reduce(
            tensor, preset="auto", algorithm="transpose", residual=residual, divide_by="world", hadamard="off"
        )
        rows = [torch.zeros(ELEMS) for _ in range(WORLD_SIZE)]
        dist.all_gather(rows, residual, group=GLOO)
        expected = (2.0**WORLD_SIZE - 1 - torch.stack(rows).sum(0)) / WORLD_SIZE
        assert torch.equal(tensor, expected)
        report = work.report()
        uncounted = int((residual > 0).sum())
        assert (report.elems, report.elems_uncounted) == (ELEMS, uncounted)
        assert all(residual[first:last].gt(0).all() for first, last in report.uncounted)
        lost += uncounted
    total = torch.tensor(float(lost))
    dist.all_reduce(total, group=GLOO)
    assert total > 0, "nothing was lost: the test has shown nothing"


def check_replicas_of_a_model_stay_alike() -> None:
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(1000, 1000), nn.Linear(1000, 1000)))
    gradwire.torch.tolerate_loss(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    for step in range(5):
        torch.manual_seed(100 * step + RANK)
        model(torch.randn(4, 1000)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    for parameter in model.parameters():
        rows = [torch.zeros_like(parameter) for _ in range(WORLD_SIZE)]
        dist.all_gather(rows, parameter.detach(), group=GLOO)
        assert all(torch.equal(row, rows[0]) for row in rows)


def check_calls_are_counted_once_with_all_their_elements() -> None:
    def exact(name: str) -> tuple[int, int]:
        calls = [c for c in group()["calls"] if c["collective"].startswith(name) and c["preset"] == "exact"]
        return sum(c["calls"] for c in calls), sum(c["elems"] for c in calls)

    row, rows = torch.ones(ELEMS), torch.ones(WORLD_SIZE * ELEMS)
    for name, elems, call in (
        ("all_reduce", ELEMS, lambda: dist.all_reduce(row)),
        ("all_gather", WORLD_SIZE * ELEMS, lambda: dist.all_gather_into_tensor(rows, row)),
        ("reduce_scatter", ELEMS, lambda: dist.reduce_scatter_tensor(row, rows)),
    ):
        before = exact(name)
        call()
        after = exact(name)
        assert (after[0] - before[0], after[1] - before[1]) == (1, elems), name
