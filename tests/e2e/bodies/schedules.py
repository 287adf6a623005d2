"""The schedule that GRADWIRE_ALGORITHM names, in every exact all-reduce of torch."""

from __future__ import annotations

import os
from typing import Any

import gradwire.torch
import torch
import torch.distributed as dist
from gradwire.torch import _compat
from rank import RANK, WORLD_SIZE
from torch.distributed.device_mesh import init_device_mesh

ALGORITHM = os.environ["GRADWIRE_ALGORITHM"]
ROUNDS = ALGORITHM in ("ring", "halving_doubling")  # partial sums of halves, so a transpose takes their place
ADDS = (dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.PRODUCT)
BITS = (dist.ReduceOp.BAND, dist.ReduceOp.BOR, dist.ReduceOp.BXOR)
EXTREMES = (dist.ReduceOp.MIN, dist.ReduceOp.MAX)
DTYPES = {
    torch.float32: (*ADDS, *EXTREMES),
    torch.float64: (*ADDS, *EXTREMES),
    torch.bfloat16: (*ADDS, *EXTREMES),
    torch.float16: (*ADDS, *EXTREMES),
    torch.int64: (*ADDS, *EXTREMES, *BITS),
    torch.uint8: (*EXTREMES, *BITS),
    torch.bool: (*EXTREMES, *BITS),
    torch.complex64: (dist.ReduceOp.SUM,),
}
OPS = {dist.ReduceOp.PRODUCT: "prod", dist.ReduceOp.MIN: "amin", dist.ReduceOp.MAX: "amax"}


def numbers(elems: int, dtype: torch.dtype, rank: int = RANK) -> torch.Tensor:
    """Small integers, so that every order of summation gives the same bits; a mean of three ranks' is one too."""
    return (3 * ((torch.arange(elems) + rank) % 3)).to(dtype)


def expected(elems: int, dtype: torch.dtype, op: Any) -> torch.Tensor:
    rows = torch.stack([numbers(elems, dtype, rank) for rank in range(WORLD_SIZE)])
    if op in BITS:
        combine = {BITS[0]: torch.bitwise_and, BITS[1]: torch.bitwise_or, BITS[2]: torch.bitwise_xor}[op]
        whole = rows[0]
        for row in rows[1:]:
            whole = combine(whole, row)
        return whole
    if op in OPS:
        return getattr(rows, OPS[op])(0)
    total = rows.sum(0)
    return (total // WORLD_SIZE if dtype == torch.int64 else total / WORLD_SIZE) if op == ADDS[1] else total


def schedules_of(group: Any) -> set[str]:
    """Of all-reduces that this rank has made there."""
    calls = gradwire.torch.stats(group)["group"]["calls"]
    return {call["collective"] for call in calls if call["collective"].startswith("all_reduce")}


def check_every_reduction_takes_it_and_is_exact() -> None:
    for dtype, ops in DTYPES.items():
        for op in ops:
            for elems in (0, 1, 1000, 70_001):
                tensor = numbers(elems, dtype)
                work = dist.all_reduce(tensor, op, async_op=True)
                work.wait()
                assert torch.equal(tensor, expected(elems, dtype, op)), (dtype, op, elems)
                is_rounded = ROUNDS and dtype in (torch.bfloat16, torch.float16) and op not in EXTREMES
                is_too_large = ALGORITHM == "one_shot" and elems * dtype.itemsize > 64 << 10
                taken = "transpose" if is_rounded or is_too_large else ALGORITHM
                assert work.report().collective == f"all_reduce/{taken}", (dtype, op, elems)


def check_a_sum_by_a_factor_takes_it() -> None:
    if _compat.backend_class() is None:  # before 2.14 torch hides the factor
        return
    tensor = torch.ones(1000)
    work = dist.all_reduce(tensor, dist._make_nccl_premul_sum(2.0), async_op=True)
    work.wait()
    assert torch.equal(tensor, torch.full((1000,), 2.0 * WORLD_SIZE))
    assert work.report().collective == f"all_reduce/{ALGORITHM}"


def check_new_groups_and_meshes_take_it() -> None:
    for group in (dist.new_group(), init_device_mesh("cpu", (WORLD_SIZE,)).get_group()):
        tensor = torch.ones(1000)
        work = dist.all_reduce(tensor, group=group, async_op=True)
        work.wait()
        assert torch.equal(tensor, torch.full((1000,), float(WORLD_SIZE)))
        assert work.report().collective == f"all_reduce/{ALGORITHM}"


def check_calls_of_a_coalescing_manager_take_it() -> None:
    group = dist.new_group()
    tensors = [torch.ones(elems) for elems in (1, 1000)]
    with dist._coalescing_manager(group, async_ops=True) as manager:
        for tensor in tensors:
            dist.all_reduce(tensor, group=group)
    manager.wait()
    assert all(torch.equal(tensor, torch.full_like(tensor, WORLD_SIZE)) for tensor in tensors)
    assert schedules_of(group) == {f"all_reduce/{ALGORITHM}"}


def check_the_reducer_of_a_model_without_a_hook_takes_it() -> None:
    group = dist.new_group()
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8, bias=False), process_group=group)
    model(torch.full((1, 8), float(RANK))).sum().backward()
    assert torch.equal(model.module.weight.grad, torch.full((8, 8), (WORLD_SIZE - 1) / 2))
    assert schedules_of(group) == {f"all_reduce/{ALGORITHM}"}
