"""Every collective of torch.distributed, against gloo in the same process."""

from __future__ import annotations

import os
from typing import Any

import gradwire.torch
import pytest
import torch
import torch.distributed as dist
from gradwire.errors import InvalidRequestError, UnsupportedError
from gradwire.torch import _compat
from rank import RANK, WORLD_SIZE

GLOO = dist.new_group(backend="gloo")
SIZES = (0, 1, 5, 1000, 70_001)
REDUCTIONS = (dist.ReduceOp.SUM, dist.ReduceOp.PRODUCT, dist.ReduceOp.MIN, dist.ReduceOp.MAX)
COPIED = (
    torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.bool, torch.complex64, torch.uint16, torch.float8_e4m3fn,
)  # fmt: skip


def numbers(elems: int, dtype: torch.dtype = torch.float32, rank: int = RANK) -> torch.Tensor:
    """Small integers, so that every order of summation gives the same bits."""
    return ((torch.arange(elems) * 7 + rank * 3) % 5 + 1).to(dtype)


def same(ours: Any, reference: Any) -> None:
    """Equal bit for bit, tensor by tensor."""
    for index, (a, b) in enumerate(zip(ours, reference, strict=True)):
        assert a.dtype == b.dtype, f"tensor {index}: {a.dtype} where gloo has {b.dtype}"
        assert torch.equal(a, b), f"tensor {index}: {a} where gloo has {b}"


def against_gloo(call: Any) -> None:
    """Runs `call(group, async_op) -> (work, tensors)` on gloo, then on gradwire in all the ways to wait."""
    work, reference = call(GLOO, True)
    work.wait()
    for wait in ("sync", "wait", "future"):
        work, tensors = call(dist.group.WORLD, wait != "sync")
        if wait == "wait":
            work.wait()
        elif wait == "future":
            work.get_future().wait()
        same(tensors, reference)


def check_all_reduce_equals_gloo_for_every_size_and_reduction() -> None:
    for elems in SIZES:
        for op in REDUCTIONS:

            def call(group: Any, async_op: bool, elems: int = elems, op: Any = op) -> Any:
                tensor = numbers(elems)
                return dist.all_reduce(tensor, op, group=group, async_op=async_op), [tensor]

            against_gloo(call)


def check_all_reduce_of_every_dtype_has_the_exact_sum() -> None:
    for dtype in (
        torch.float64,
        torch.float16,
        torch.bfloat16,
        torch.uint8,
        torch.int8,
        torch.int16,
        torch.int32,
        torch.int64,
    ):
        tensor = numbers(1000, dtype)
        dist.all_reduce(tensor)
        same([tensor], [sum(numbers(1000, dtype, r) for r in range(WORLD_SIZE)).to(dtype)])


def check_all_reduce_averages_and_scales() -> None:
    tensor = numbers(100)
    dist.all_reduce(tensor, dist.ReduceOp.AVG)
    total = sum(numbers(100, rank=r) for r in range(WORLD_SIZE))
    torch.testing.assert_close(tensor, total / WORLD_SIZE)
    tensor = numbers(100)
    if _compat.backend_class() is None:  # before 2.14 torch hides the factor
        with pytest.raises(UnsupportedError, match="PREMUL_SUM"):
            dist.all_reduce(tensor, dist._make_nccl_premul_sum(2.0))
        return
    dist.all_reduce(tensor, dist._make_nccl_premul_sum(2.0))
    same([tensor], [2 * total])


def check_all_reduce_of_bits_and_booleans() -> None:
    for op, combine in (
        (dist.ReduceOp.BAND, torch.bitwise_and),
        (dist.ReduceOp.BOR, torch.bitwise_or),
        (dist.ReduceOp.BXOR, torch.bitwise_xor),
    ):
        tensor = numbers(100, torch.int32)
        dist.all_reduce(tensor, op)
        expected = numbers(100, torch.int32, 0)
        for rank in range(1, WORLD_SIZE):
            expected = combine(expected, numbers(100, torch.int32, rank))
        same([tensor], [expected])
    flags = torch.tensor([RANK == 0, False, True])
    dist.all_reduce(flags, dist.ReduceOp.MAX)
    same([flags], [torch.tensor([True, False, True])])


def check_all_reduce_of_complex_and_unsigned_numbers() -> None:
    tensor = torch.complex(numbers(50), -numbers(50))
    dist.all_reduce(tensor)
    total = sum(numbers(50, rank=r) for r in range(WORLD_SIZE))
    same([tensor], [torch.complex(total, -total)])
    tensor = torch.full((9,), 40_000, dtype=torch.uint16)  # wraps around like every 16 bit sum
    dist.all_reduce(tensor)
    same([tensor.to(torch.int64)], [torch.full((9,), 40_000 * WORLD_SIZE % 65_536)])
    for dtype, large in ((torch.uint16, 65_000), (torch.uint32, 4_000_000_000)):  # negative, if they were signed
        tensor = torch.tensor([large if RANK == 0 else 7], dtype=dtype)
        dist.all_reduce(tensor, dist.ReduceOp.MAX)
        same([tensor.to(torch.int64)], [torch.tensor([large])])


def check_all_reduce_of_tensors_that_are_not_contiguous() -> None:
    whole = numbers(60).reshape(6, 10)
    view = whole.t()[::2]
    dist.all_reduce(view)
    total = sum(numbers(60, rank=r) for r in range(WORLD_SIZE)).reshape(6, 10)
    expected = numbers(60).reshape(6, 10)
    expected[:, ::2] = total[:, ::2]
    same([whole], [expected])


def check_broadcast_equals_gloo_for_every_dtype_and_root() -> None:
    for root in range(WORLD_SIZE):
        for dtype in COPIED:
            tensor = numbers(1000, rank=RANK + 1).to(dtype)
            dist.broadcast(tensor, root)
            same([tensor.view(torch.uint8)], [numbers(1000, rank=root + 1).to(dtype).view(torch.uint8)])


def check_all_gather_equals_gloo() -> None:
    def lists(group: Any, async_op: bool) -> Any:
        rows = [torch.zeros(3, 5) for _ in range(WORLD_SIZE)]
        return dist.all_gather(rows, numbers(15).reshape(3, 5), group=group, async_op=async_op), rows

    against_gloo(lists)

    def single(group: Any, async_op: bool) -> Any:
        whole = torch.zeros(WORLD_SIZE * 7)
        return dist.all_gather_into_tensor(whole, numbers(7), group=group, async_op=async_op), [whole]

    against_gloo(single)


def check_all_gather_into_the_own_row() -> None:
    whole = torch.zeros(WORLD_SIZE, 100)
    whole[RANK] = numbers(100)
    dist.all_gather_into_tensor(whole, whole[RANK])
    same(whole, [numbers(100, rank=r) for r in range(WORLD_SIZE)])


def check_reduce_scatter_sums_the_own_row() -> None:
    total = sum(numbers(WORLD_SIZE * 11, rank=r) for r in range(WORLD_SIZE))
    expected = total.reshape(WORLD_SIZE, 11)[RANK]
    for async_op in (False, True):
        output = torch.zeros(11)
        work = dist.reduce_scatter_tensor(output, numbers(WORLD_SIZE * 11), async_op=async_op)
        if async_op:
            work.wait()
        same([output], [expected])
        output = torch.zeros(11)
        rows = list(numbers(WORLD_SIZE * 11).reshape(WORLD_SIZE, 11))
        work = dist.reduce_scatter(output, rows, async_op=async_op)
        if async_op:
            work.get_future().wait()
        same([output], [expected])


def check_reduce_gather_and_scatter_equal_gloo_at_every_root() -> None:
    for root in range(WORLD_SIZE):

        def reduce(group: Any, async_op: bool, root: int = root) -> Any:
            tensor = numbers(33)
            work = dist.reduce(tensor, root, group=group, async_op=async_op)
            return work, [tensor] if root == RANK else []  # elsewhere torch leaves the contents open

        def gather(group: Any, async_op: bool, root: int = root) -> Any:
            rows = [torch.zeros(9) for _ in range(WORLD_SIZE)] if root == RANK else None
            return dist.gather(numbers(9), rows, root, group=group, async_op=async_op), rows or []

        def scatter(group: Any, async_op: bool, root: int = root) -> Any:
            rows = [numbers(8, rank=r) for r in range(WORLD_SIZE)] if root == RANK else None
            output = torch.zeros(8)
            return dist.scatter(output, rows, root, group=group, async_op=async_op), [output]

        for call in (reduce, gather, scatter):
            against_gloo(call)


def check_all_to_all_equals_gloo_with_equal_and_unequal_splits() -> None:
    def equal(group: Any, async_op: bool) -> Any:
        output = torch.zeros(WORLD_SIZE * 4, 3)
        return dist.all_to_all_single(
            output, numbers(WORLD_SIZE * 12).reshape(-1, 3), group=group, async_op=async_op
        ), [output]

    def unequal(group: Any, async_op: bool) -> Any:
        to_each = [RANK + r for r in range(WORLD_SIZE)]
        output = torch.zeros(sum(to_each), 2)
        source = numbers(2 * sum(to_each)).reshape(-1, 2)
        return dist.all_to_all_single(output, source, to_each, to_each, group=group, async_op=async_op), [output]

    against_gloo(equal)
    against_gloo(unequal)
    outputs = [torch.zeros(r + RANK + 1) for r in range(WORLD_SIZE)]
    dist.all_to_all(outputs, [numbers(r + RANK + 1) for r in range(WORLD_SIZE)])
    same(outputs, [numbers(r + RANK + 1, rank=r) for r in range(WORLD_SIZE)])


def check_what_single_tensors_share_is_read_before_it_is_written() -> None:
    both = numbers(WORLD_SIZE * 4)
    rows = [numbers(WORLD_SIZE * 4, rank=r).view(WORLD_SIZE, 4) for r in range(WORLD_SIZE)]
    dist.all_to_all_single(both, both)
    same([both.view(WORLD_SIZE, 4)], [torch.stack([row[RANK] for row in rows])])

    whole = torch.zeros(WORLD_SIZE, 4)
    other = (RANK + 1) % WORLD_SIZE
    whole[other] = numbers(4)
    dist.all_gather_into_tensor(whole, whole[other])
    same(whole, [numbers(4, rank=r) for r in range(WORLD_SIZE)])

    flat = numbers(WORLD_SIZE * 4)
    result = flat[2:6]  # of two rows a half each
    dist.reduce_scatter_tensor(result, flat)
    same([result], [sum(row[RANK] for row in rows)])


def check_memory_that_was_given_back_is_refused_also_where_input_and_output_share_it() -> None:
    freed = torch.zeros(WORLD_SIZE * 8)
    shifted = freed[4:12]
    freed.untyped_storage().resize_(0)
    for call in (
        lambda: dist.all_to_all_single(freed, freed),
        lambda: dist.all_gather_into_tensor(freed, shifted),
        lambda: dist.reduce_scatter_tensor(shifted, freed),
    ):
        with pytest.raises(InvalidRequestError, match="given back"):
            call()


def check_send_and_receive_match_by_tag_in_any_order() -> None:
    following, previous = (RANK + 1) % WORLD_SIZE, (RANK - 1) % WORLD_SIZE
    works = [dist.isend(numbers(500 + tag), following, tag=tag) for tag in (1, 2)]
    for tag in (2, 1):
        tensor = torch.zeros(500 + tag)
        dist.recv(tensor, previous, tag=tag)
        same([tensor], [numbers(500 + tag, rank=previous)])
    for work in works:
        work.wait()


def check_numbers_below_zero_are_refused_as_tags_and_splits_and_the_group_goes_on() -> None:
    following, previous = (RANK + 1) % WORLD_SIZE, (RANK - 1) % WORLD_SIZE
    with pytest.raises(InvalidRequestError, match="0 or more, not -65536"):
        dist.isend(numbers(1), following, tag=-65536).wait()
    with pytest.raises(InvalidRequestError, match="0 or more, not -1"):
        dist.recv(numbers(1), previous, tag=-1)
    splits = [WORLD_SIZE + 1, *([0] * (WORLD_SIZE - 2)), -1]
    with pytest.raises(InvalidRequestError, match="do not divide"):
        dist.all_to_all_single(numbers(WORLD_SIZE), numbers(WORLD_SIZE), splits, splits)
    tensor = torch.ones(4)
    dist.all_reduce(tensor)
    assert torch.equal(tensor, torch.full((4,), float(WORLD_SIZE)))


def check_receive_from_any_rank() -> None:
    if RANK == 0:
        total = torch.zeros(3)
        for _ in range(WORLD_SIZE - 1):
            tensor = torch.zeros(3)
            work = dist.irecv(tensor, None, tag=9)
            work.wait()
            total += tensor
        same([total], [sum(numbers(3, rank=r) for r in range(1, WORLD_SIZE))])
    else:
        dist.send(numbers(3), 0, tag=9)


def check_batched_sends_and_receives() -> None:
    following, previous = (RANK + 1) % WORLD_SIZE, (RANK - 1) % WORLD_SIZE
    received = torch.zeros(64)
    ops = [dist.P2POp(dist.isend, numbers(64), following), dist.P2POp(dist.irecv, received, previous)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    same([received], [numbers(64, rank=previous)])


def check_coalesced_all_reduces() -> None:
    tensors = [numbers(elems) for elems in (1, 30, 4000)]
    with dist._coalescing_manager(async_ops=True) as manager:
        for tensor in tensors:
            dist.all_reduce(tensor)
    manager.wait()
    same(tensors, [sum(numbers(t.numel(), rank=r) for r in range(WORLD_SIZE)) for t in tensors])
    tensors = [numbers(elems) for elems in (2, 31)]
    with dist._coalescing_manager(device=torch.device("cpu"), async_ops=True) as manager:
        for tensor in tensors:
            dist.all_reduce(tensor)
    manager.wait()
    same(tensors, [sum(numbers(t.numel(), rank=r) for r in range(WORLD_SIZE)) for t in tensors])


def check_what_raises_between_coalesced_calls_leaves_later_ones_alone() -> None:
    def broken(device: torch.device | None) -> None:
        with dist._coalescing_manager(device=device, async_ops=True):
            if device is None:
                dist.all_reduce(numbers(3))
            raise KeyError

    # A group that is gradwire's as a whole has one backend, of which torch may ask anything.
    of_meta = KeyError if _compat.backend_class() is None else RuntimeError
    for device, error in ((None, KeyError), (torch.device("cpu"), KeyError), (torch.device("meta"), of_meta)):
        with pytest.raises(error):
            broken(device)
        tensor = numbers(5)
        dist.all_reduce(tensor)
        same([tensor], [sum(numbers(5, rank=r) for r in range(WORLD_SIZE))])
    if _compat.backend_class() is not None:
        sparse = torch.sparse_coo_tensor([[0]], [1.0], (2,))
        # Its tensor is refused by torch, which finds no operator for it, before this library sees the call.
        with pytest.raises(RuntimeError, match="SparseCPU"):
            dist.batch_isend_irecv([dist.P2POp(dist.isend, sparse, (RANK + 1) % WORLD_SIZE)])
    tensor = numbers(5)
    assert dist.all_reduce(tensor, async_op=True) is not None
    dist.barrier()
    same([tensor], [sum(numbers(5, rank=r) for r in range(WORLD_SIZE))])


def check_what_raises_in_a_coalescing_manager_of_a_group_that_this_rank_is_not_in_comes_out() -> None:
    def broken(group: object) -> None:
        with dist._coalescing_manager(group=group):
            raise KeyError

    with pytest.raises(KeyError):
        broken(dist.GroupMember.NON_GROUP_MEMBER)


def check_a_coalescing_manager_within_another_is_torchs_error_and_the_outer_one_goes_on() -> None:
    tensor = numbers(5)
    with dist._coalescing_manager(async_ops=True) as manager:
        dist.all_reduce(tensor)
        with pytest.raises(ValueError, match="non-empty"), dist._coalescing_manager(async_ops=True):
            pass
    manager.wait()
    same([tensor], [sum(numbers(5, rank=r) for r in range(WORLD_SIZE))])


def check_a_result_whose_elements_share_memory_is_refused_before_anything_is_sent() -> None:
    for tensor in (torch.ones(1).expand(5), torch.zeros(8).as_strided((4, 3), (1, 1))):
        with pytest.raises(InvalidRequestError, match="share memory"):
            dist.all_reduce(tensor)
    for windows in (torch.zeros(12).as_strided((3, 2), (4, 2)), torch.zeros(40).unfold(0, 5, 3)[:, ::2]):
        windows.fill_(RANK + 1)
        dist.broadcast(windows, 1)
        same([windows], [torch.full_like(windows, 2.0)])


def check_the_root_of_a_broadcast_may_send_elements_that_share_memory() -> None:
    tensor = torch.arange(8.0).unfold(0, 3, 1) if RANK == 0 else torch.zeros(6, 3)
    dist.broadcast(tensor, 0)
    same([tensor], [torch.arange(8.0).unfold(0, 3, 1)])


def check_lists_of_results_whose_elements_share_memory_are_refused() -> None:
    rows = [torch.ones(1).expand(5) for _ in range(WORLD_SIZE)]
    with pytest.raises(InvalidRequestError, match="share memory"):
        dist.all_gather(rows, torch.zeros(5))


def check_a_list_of_another_size_is_named_by_its_index() -> None:
    rows = [torch.zeros(4) for _ in range(WORLD_SIZE)]
    rows[1] = torch.zeros(3)
    with pytest.raises(
        InvalidRequestError, match=r"tensor 1 of the list is .* with 3 elements, the tensor beside it is .* with 4"
    ):
        dist.all_gather(rows, torch.zeros(4))


def check_object_collectives() -> None:
    everybody: list[Any] = [None] * WORLD_SIZE
    dist.all_gather_object(everybody, {"rank": RANK})
    assert everybody == [{"rank": r} for r in range(WORLD_SIZE)]
    objects = ["from zero" if RANK == 0 else None]
    dist.broadcast_object_list(objects, 0)
    assert objects == ["from zero"]


def check_barrier_waits_for_the_last_rank() -> None:
    for _ in range(20):
        dist.barrier()
    work = dist.barrier(async_op=True)
    work.wait()
    if _compat.backend_class() is not None:  # before 2.14 torch allows it to gloo alone
        dist.monitored_barrier()


def check_functional_collectives() -> None:
    import torch.distributed._functional_collectives as functional

    total = functional.all_reduce(numbers(10), "sum", dist.group.WORLD)
    same([total + 0], [sum(numbers(10, rank=r) for r in range(WORLD_SIZE))])
    whole = functional.all_gather_tensor(numbers(4), 0, dist.group.WORLD)
    same([whole + 0], [torch.cat([numbers(4, rank=r) for r in range(WORLD_SIZE)])])


def check_a_compiled_all_reduce_leaves_the_adapter_alone() -> None:
    import torch.distributed._functional_collectives as functional
    from torch._dynamo.utils import counters

    @torch.compile(backend="aot_eager", fullgraph=True)
    def step(tensor: torch.Tensor) -> torch.Tensor:
        return functional.all_reduce(tensor * 2, "sum", dist.group.WORLD) + 1

    total = sum(numbers(10, rank=r) for r in range(WORLD_SIZE))
    same([step(numbers(10))], [total * 2 + 1])
    compiled = counters["stats"]["unique_graphs"]
    for _ in range(3):
        same([step(numbers(10))], [total * 2 + 1])
    dist.all_reduce(numbers(3))
    assert counters["stats"]["unique_graphs"] == compiled, "Dynamo compiled something in the adapter"


def check_new_groups_work_beside_each_other() -> None:
    pairs = [dist.new_group([0, r]) for r in range(1, WORLD_SIZE)]
    for other, group in zip(range(1, WORLD_SIZE), pairs, strict=True):
        if RANK in (0, other):
            tensor = numbers(10)
            dist.all_reduce(tensor, group=group)
            same([tensor], [numbers(10, rank=0) + numbers(10, rank=other)])
    alone = [dist.new_group([r]) for r in range(WORLD_SIZE)][RANK]
    tensor = numbers(10)
    dist.all_reduce(tensor, group=alone)
    same([tensor], [numbers(10)])
    for group in reversed(pairs):
        if RANK == 0 or dist.get_rank(group) >= 0:
            dist.destroy_process_group(group)


def check_many_asynchronous_calls_end_in_order() -> None:
    tensors = [numbers(100 + i) for i in range(50)]
    works = [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    for work in reversed(works):
        work.wait()
    same(tensors, [sum(numbers(t.numel(), rank=r) for r in range(WORLD_SIZE)) for t in tensors])


def check_all_ranks_know_whether_they_share_the_cores_of_their_host() -> None:
    for _ in range(60):  # the first exchange is the ninth collective, and holds from the forty-first on
        dist.all_reduce(numbers(10))
    cores = os.sysconf("SC_NPROCESSORS_ONLN")
    assert gradwire.torch.stats()["group"]["agreed"]["shares_cores"] == (cores < WORLD_SIZE)


def check_a_destroyed_group_can_be_formed_again() -> None:
    import rank

    dist.destroy_process_group()
    rank.init()
    tensor = numbers(10)
    dist.all_reduce(tensor)
    same([tensor], [sum(numbers(10, rank=r) for r in range(WORLD_SIZE))])
