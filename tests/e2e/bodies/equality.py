"""Every collective beside gloo in the same processes: the same bits, for each dtype, reduction, layout and number of ranks.

Values are small integers, so that a sum or product is exact in whatever order it is made, in each dtype; what only moves or
compares has infinities and negative zeros among them. The table says what gloo cannot do; there gradwire is compared with gloo's
result in a wider dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from rank import RANK, WORLD_SIZE

SIZES = [size for size in (1, 2, 3, 4, 8) if size <= WORLD_SIZE]
GROUPS = {size: (dist.new_group(range(size), backend="gloo"), dist.new_group(range(size))) for size in SIZES}
GLOO = dist.new_group(backend="gloo")

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
INTEGERS = (torch.uint8, torch.int8, torch.int32, torch.int64)
# What gloo refuses, and a dtype that it takes: its result is turned back.
WIDER = {torch.int16: torch.int32, torch.uint16: torch.int32}
MOVED_IN = {**WIDER, torch.complex64: torch.float32}
SUM, PRODUCT, MIN, MAX = (dist.ReduceOp.SUM, dist.ReduceOp.PRODUCT, dist.ReduceOp.MIN, dist.ReduceOp.MAX)
BITS = (dist.ReduceOp.BAND, dist.ReduceOp.BOR, dist.ReduceOp.BXOR)
LAYOUTS = ("dense", "transposed", "strided", "empty")
ROWS, COLUMNS = 7, 10  # of a tensor; a multiple of no group's size


@dataclass(frozen=True)
class Case:
    """One row of the table."""

    dtype: torch.dtype
    layout: str
    op: Any = None

    def __str__(self) -> str:
        return f"{str(self.dtype).removeprefix('torch.')} {self.layout}" + (f" {self.op}" if self.op else "")

    @property
    def compared_in(self) -> torch.dtype:
        """The dtype that gloo gets."""
        return MOVED_IN.get(self.dtype, self.dtype)


def reductions() -> Iterator[Case]:
    for dtype in (*FLOATS, *INTEGERS, *WIDER):
        bits = () if dtype.is_floating_point else BITS
        for op in (SUM, PRODUCT, MIN, MAX, *bits):
            yield from (Case(dtype, layout, op) for layout in LAYOUTS)


def moves() -> Iterator[Case]:
    for dtype in (*FLOATS, *INTEGERS, *MOVED_IN, torch.bool):
        yield from (Case(dtype, layout) for layout in LAYOUTS)


def values(case: Case, rank: int, dtype: torch.dtype, place: int = 0) -> torch.Tensor:
    """`[ROWS, COLUMNS]`, in the case's layout, different for each rank and each `place` in a list."""
    rows = 0 if case.layout == "empty" else ROWS
    many = 2 if case.op == PRODUCT else 5
    numbers = (torch.arange(rows * COLUMNS) * 7 + rank * 3 + place) % many + 1
    if case.dtype.is_floating_point and case.op not in (SUM, PRODUCT) and rows:
        numbers = numbers.double()
        numbers[rank % 3] = float("inf") if rank % 2 else -float("inf")
        numbers[5] = -0.0
    if dtype == torch.bool:
        numbers = numbers % 2
    return laid_out(numbers.to(dtype).reshape(rows, COLUMNS), case.layout)


def laid_out(tensor: torch.Tensor, layout: str) -> torch.Tensor:
    """The same values in other memory."""
    if layout == "transposed":
        return tensor.t().contiguous().t()
    if layout == "strided":
        wide = torch.zeros(tensor.shape[0], 2 * tensor.shape[1], dtype=tensor.dtype)
        wide[:, ::2] = tensor
        return wide[:, ::2]
    return tensor


def dense(layout: str) -> str:
    return layout if layout == "empty" else "dense"


def blank(like: torch.Tensor, layout: str) -> torch.Tensor:
    return laid_out(torch.zeros(like.shape, dtype=like.dtype), layout)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8) if tensor.numel() else tensor


# (group, case, dtype of the tensors) -> what the collective must have written
Collective = Callable[[Any, int, Case, torch.dtype], list[torch.Tensor]]


def beside_gloo(collective: Collective, cases: Iterator[Case]) -> None:
    """Runs the collective for each case in groups of each size, on both backends, and names the cases that differ."""
    wrong, table = [], list(cases)
    for size, (gloo, ours) in GROUPS.items():
        if size <= RANK:
            continue
        for case in table:
            # gloo takes the memory of a view with gaps for a dense one, so it gets none
            reference = collective(gloo, size, replace(case, layout=dense(case.layout)), case.compared_in)
            result = collective(ours, size, case, case.dtype)
            for index, (a, b) in enumerate(zip(result, reference, strict=True)):
                if a.dtype != case.dtype or a.shape != b.shape or not torch.equal(bits(a), bits(b.to(case.dtype))):
                    wrong.append(
                        f"{size} ranks, {case}, tensor {index}: {a.flatten()[:12].tolist()} where gloo has {b.flatten()[:12].tolist()}"
                    )
    assert not wrong, f"{len(wrong)} differ:\n" + "\n".join(wrong[:8])


def all_reduce(group: Any, size: int, case: Case, dtype: torch.dtype) -> list[torch.Tensor]:
    del size
    tensor = values(case, RANK, dtype)
    dist.all_reduce(tensor, case.op, group=group)
    return [tensor]


def all_reduce_coalesced(group: Any, size: int, case: Case, dtype: torch.dtype) -> list[torch.Tensor]:
    del size
    tensors = [values(case, RANK, dtype, place) for place in range(3)]
    dist.all_reduce_coalesced(tensors, case.op, group=group)
    return tensors


def reduce(root: int, group: Any, size: int, case: Case, dtype: torch.dtype) -> list[torch.Tensor]:
    root %= size
    tensor = values(case, RANK, dtype)
    dist.reduce(tensor, root, case.op, group=group)
    return [tensor] if root == RANK else []  # elsewhere torch leaves the contents open


def reduce_scatter(group: Any, size: int, case: Case, dtype: torch.dtype) -> list[torch.Tensor]:
    rows = [values(case, RANK, dtype, place) for place in range(size)]
    output = blank(rows[0], case.layout)
    dist.reduce_scatter(output, rows, case.op, group=group)
    return [output]


def reduce_scatter_tensor(group: Any, size: int, case: Case, dtype: torch.dtype) -> list[torch.Tensor]:
    whole = torch.cat([values(case, RANK, dtype, place) for place in range(size)])
    output = blank(values(case, RANK, dtype), case.layout)
    dist.reduce_scatter_tensor(output, laid_out(whole, case.layout), case.op, group=group)
    return [output]


def broadcast(root: int, group: Any, size: int, case: Case, dtype: torch.dtype) -> list[torch.Tensor]:
    tensor = values(case, RANK, dtype)
    dist.broadcast(tensor, root % size, group=group)
    return [tensor]


def all_gather(group: Any, size: int, case: Case, dtype: torch.dtype) -> list[torch.Tensor]:
    own = values(case, RANK, dtype)
    rows = [blank(own, case.layout) for _ in range(size)]
    dist.all_gather(rows, own, group=group)
    return rows


def all_gather_into_tensor(group: Any, size: int, case: Case, dtype: torch.dtype) -> list[torch.Tensor]:
    own = values(case, RANK, dtype)
    whole = torch.zeros(size * own.shape[0], COLUMNS, dtype=dtype)
    dist.all_gather_into_tensor(whole, own, group=group)
    return [whole]


def all_gather_into_the_own_row(group: Any, size: int, case: Case, dtype: torch.dtype) -> list[torch.Tensor]:
    own = values(case, RANK, dtype)
    whole = torch.zeros(size, *own.shape, dtype=dtype)
    whole[RANK] = own
    dist.all_gather_into_tensor(whole.view(-1, COLUMNS), whole[RANK], group=group)
    return [whole]


def gather(root: int, group: Any, size: int, case: Case, dtype: torch.dtype) -> list[torch.Tensor]:
    own = values(case, RANK, dtype)
    rows = [blank(own, case.layout) for _ in range(size)] if root % size == RANK else None
    dist.gather(own, rows, root % size, group=group)
    return rows or []


def scatter(root: int, group: Any, size: int, case: Case, dtype: torch.dtype) -> list[torch.Tensor]:
    rows = [values(case, RANK, dtype, place) for place in range(size)] if root % size == RANK else None
    output = blank(values(case, RANK, dtype), case.layout)
    dist.scatter(output, rows, root % size, group=group)
    return [output]


def all_to_all_single(group: Any, size: int, case: Case, dtype: torch.dtype) -> list[torch.Tensor]:
    source = torch.cat([values(case, RANK, dtype, place) for place in range(size)])
    output = torch.zeros_like(source)
    dist.all_to_all_single(output, source, group=group)
    return [output]


def all_to_all_with_splits(group: Any, size: int, case: Case, dtype: torch.dtype) -> list[torch.Tensor]:
    rows = [0 if case.layout == "empty" else (RANK + other) % 3 for other in range(size)]  # symmetric, some without any
    source = (torch.arange(sum(rows) * COLUMNS) % 5 + RANK).to(dtype).reshape(-1, COLUMNS)
    output = torch.zeros_like(source)
    dist.all_to_all_single(output, source, rows, rows, group=group)
    return [output]


def send_around(group: Any, size: int, case: Case, dtype: torch.dtype) -> list[torch.Tensor]:
    if size == 1:
        return []
    own = values(case, RANK, dtype)
    received = torch.zeros(own.shape, dtype=dtype)
    work = dist.isend(own.contiguous(), (RANK + 1) % size, group=group)  # gloo sends nothing else
    dist.recv(received, (RANK - 1) % size, group=group)
    work.wait()
    return [received]


def check_all_reduce() -> None:
    beside_gloo(all_reduce, reductions())


def check_all_reduce_coalesced() -> None:
    beside_gloo(all_reduce_coalesced, reductions())


def check_reduce_to_the_first_and_the_last() -> None:
    for root in (0, -1):
        beside_gloo(partial(reduce, root), reductions())


def check_reduce_scatter_of_lists() -> None:
    beside_gloo(reduce_scatter, reductions())


def check_reduce_scatter_of_one_tensor() -> None:
    beside_gloo(reduce_scatter_tensor, reductions())


def check_broadcast_from_the_first_and_the_last() -> None:
    for root in (0, -1):
        beside_gloo(partial(broadcast, root), moves())


def check_all_gather_to_lists() -> None:
    beside_gloo(all_gather, moves())


def check_all_gather_to_one_tensor() -> None:
    beside_gloo(all_gather_into_tensor, moves())


def check_all_gather_in_place() -> None:
    beside_gloo(all_gather_into_the_own_row, moves())


def check_gather_and_scatter() -> None:
    for root in (0, -1):
        beside_gloo(partial(gather, root), moves())
        beside_gloo(partial(scatter, root), moves())


def check_all_to_all_with_equal_parts() -> None:
    beside_gloo(all_to_all_single, moves())


def check_all_to_all_with_splits() -> None:
    beside_gloo(all_to_all_with_splits, moves())


def check_send_and_receive() -> None:
    beside_gloo(send_around, moves())
