"""Each option of each call, and what a Work, a group and a mesh are asked for. Two ranks."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import gradwire.torch
import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from gradwire.errors import (
    DeadlineError,
    GradwireError,
    GroupError,
    InvalidRequestError,
    MismatchError,
    WaitTimeoutError,
)
from gradwire.torch import GradwireWork, _compat
from rank import RANK, WORLD_SIZE
from torch._C import _distributed_c10d as c10d
from torch.distributed.device_mesh import init_device_mesh

GLOO = dist.new_group(backend="gloo")
WORLD = dist.group.WORLD
OTHER = 1 - RANK
IS_WHOLE = _compat.backend_class() is None  # before torch 2.14
SHORT = timedelta(milliseconds=300)


def own(elems: int = 6) -> torch.Tensor:
    return torch.arange(elems, dtype=torch.float32) + 10 * RANK


def total(elems: int = 6, factor: float = 1.0) -> torch.Tensor:
    return (torch.arange(elems, dtype=torch.float32) * WORLD_SIZE + 10 * sum(range(WORLD_SIZE))) * factor


def with_options(options: Any, timeout: timedelta | None = None, **more: Any) -> Any:
    for name, value in more.items():
        setattr(options, name, value)
    if timeout is not None:
        options.timeout = timeout
    return options


def calls_of(group: Any, timeout: timedelta) -> dict[str, Callable[[], Any]]:
    """Every kind of call in which rank 1 waits for rank 0, with a timeout of its own."""

    def rows() -> list[torch.Tensor]:
        return [own() for _ in range(WORLD_SIZE)]

    whole = torch.zeros(6 * WORLD_SIZE)
    return {
        "allreduce": lambda: group.allreduce([own()], with_options(c10d.AllreduceOptions(), timeout)),
        "broadcast": lambda: group.broadcast([own()], with_options(c10d.BroadcastOptions(), timeout, rootRank=0)),
        "reduce": lambda: group.reduce([own()], with_options(c10d.ReduceOptions(), timeout, rootRank=1)),
        "allgather": lambda: group.allgather([rows()], [own()], with_options(c10d.AllgatherOptions(), timeout)),
        "gather": lambda: group.gather([rows()], [own()], with_options(c10d.GatherOptions(), timeout, rootRank=1)),
        "scatter": lambda: group.scatter([own()], [], with_options(c10d.ScatterOptions(), timeout, rootRank=0)),
        "reduce_scatter": lambda: group.reduce_scatter(
            [own()], [rows()], with_options(c10d.ReduceScatterOptions(), timeout)
        ),
        "_reduce_scatter_base": lambda: group._reduce_scatter_base(
            own(), whole, with_options(c10d.ReduceScatterOptions(), timeout)
        ),
        "_allgather_base": lambda: group._allgather_base(whole, own(), with_options(c10d.AllgatherOptions(), timeout)),
        "alltoall_base": lambda: group.alltoall_base(
            torch.zeros(6), own(), [], [], with_options(c10d.AllToAllOptions(), timeout)
        ),
        "alltoall": lambda: group.alltoall(rows(), rows(), with_options(c10d.AllToAllOptions(), timeout)),
        "barrier": lambda: group.barrier(with_options(c10d.BarrierOptions(), timeout)),
    }


def impatient_group(timeout: timedelta = SHORT) -> Any:
    """Whose calls have a short timeout; to meet takes longer on a busy machine."""
    group = dist.new_group(timeout=timedelta(seconds=60))
    (group if IS_WHOLE else group._get_backend(torch.device("cpu"))).set_timeout(timeout)
    return group


def check_the_timeout_of_every_kind_of_call_is_its_own() -> None:
    for name in calls_of(None, SHORT):
        group = dist.new_group(timeout=timedelta(seconds=60))
        if RANK:
            work = calls_of(group, SHORT)[name]()
            with pytest.raises(GroupError, match="timed out"):
                work.wait()
        dist.barrier(GLOO)
        dist.destroy_process_group(group)


def check_a_send_and_a_receive_have_the_timeout_of_their_group() -> None:
    group = impatient_group()
    with pytest.raises(GroupError, match="timed out"):
        dist.recv(torch.ones(3), OTHER, group=group, tag=RANK)
    dist.barrier(GLOO)


def check_torch_sets_the_timeout_of_a_group() -> None:
    if not hasattr(dist, "set_timeout"):  # torch 2.15
        return
    group = dist.new_group(timeout=timedelta(seconds=60))
    dist.set_timeout(SHORT, group)
    if RANK:
        with pytest.raises(DeadlineError):
            dist.all_reduce(own(), group=group)
    dist.barrier(GLOO)


def check_every_reduction_takes_a_mean_and_a_factor() -> None:
    operations = [(dist.ReduceOp.AVG, 1 / WORLD_SIZE)]
    if not IS_WHOLE:  # before 2.14 torch hides the factor
        operations.append((dist._make_nccl_premul_sum(0.5), 0.5))
        operations.append((dist._make_nccl_premul_sum(torch.tensor([4.0])), 4.0))
    expected = total(6)
    for op, factor in operations:
        tensor = own()
        dist.all_reduce(tensor, op)
        assert torch.equal(tensor, expected * factor)
        tensors = [own(), own(3)]
        dist.all_reduce_coalesced(tensors, op)
        assert torch.equal(tensors[0], expected * factor)
        assert torch.equal(tensors[1], total(3) * factor)
        for root in range(WORLD_SIZE):
            tensor = own()
            dist.reduce(tensor, root, op)
            assert root != RANK or torch.equal(tensor, expected * factor)
        part, mine = torch.zeros(3), slice(3 * RANK, 3 * RANK + 3)
        dist.reduce_scatter(part, list(own().chunk(WORLD_SIZE)), op)
        assert torch.equal(part, expected[mine] * factor)
        part = torch.zeros(3)
        dist.reduce_scatter_tensor(part, own(), op)
        assert torch.equal(part, expected[mine] * factor)


def check_a_factor_that_differs_between_ranks_is_refused() -> None:
    if IS_WHOLE:
        return
    group = dist.new_group()
    with pytest.raises(MismatchError):
        dist.all_reduce(torch.ones(4), dist._make_nccl_premul_sum(float(RANK + 2)), group=group)


def check_every_work_answers_every_question() -> None:
    for name in calls_of(None, SHORT):
        group = dist.group.WORLD
        if name == "scatter":
            rows = [own() for _ in range(WORLD_SIZE)] if RANK == 0 else None
            work = dist.scatter(own(), rows, 0, async_op=True)
        elif name == "gather":
            rows = [own() for _ in range(WORLD_SIZE)] if RANK == 1 else None
            work = dist.gather(own(), rows, 1, async_op=True)
        else:
            work = calls_of(group, timedelta(seconds=20))[name]()
        assert isinstance(work, GradwireWork), name
        assert work.wait(timedelta(seconds=20)), name
        assert work.is_completed(), name
        assert work.is_success(), name
        assert work.exception() is None, name
        assert all(isinstance(tensor, torch.Tensor) for tensor in work.result()), name
        assert work.get_future().done(), name
        held = zip(work.get_future().value(), work.result(), strict=True)
        assert all(a.data_ptr() == b.data_ptr() for a, b in held), name


def check_a_work_that_failed_says_so() -> None:
    group = impatient_group(timedelta(seconds=1))  # in which it is looked at while it still runs
    if RANK:
        work = dist.all_reduce(own(), group=group, async_op=True)
        assert work.exception() is None
        with pytest.raises(DeadlineError) as caught:
            work.wait()
        assert work.is_completed()
        assert not work.is_success()
        assert work.exception() is caught.value
        with pytest.raises(RuntimeError, match="timed out"):
            work.get_future().wait()
        with pytest.raises(DeadlineError):
            work.report()
        last = gradwire.torch.last_error()
        assert isinstance(last, DeadlineError)
        assert (str(last), last.fields) == (str(caught.value), caught.value.fields)
    dist.barrier(GLOO)


def check_what_a_failed_step_held_is_free_once_its_error_has_been_caught() -> None:
    group = impatient_group(timedelta(seconds=1))
    held: list[weakref.ref[torch.Tensor]] = []

    def step() -> None:
        activations = own()
        held.append(weakref.ref(activations))
        dist.all_reduce(activations.clone(), group=group)

    if RANK:
        with pytest.raises(DeadlineError):
            step()
    dist.barrier(GLOO)
    gc.collect()
    if RANK:
        assert held[0]() is None
        assert isinstance(gradwire.torch.last_error(), DeadlineError)


def check_a_wait_that_is_over_leaves_every_kind_of_call_running() -> None:
    for name in calls_of(None, SHORT):
        group = dist.new_group()
        work = None
        if RANK and name not in ("scatter", "gather"):
            work = calls_of(group, timedelta(seconds=20))[name]()
            with pytest.raises(WaitTimeoutError):
                work.wait(timedelta(milliseconds=20))
            assert not work.is_completed()
        dist.barrier(GLOO)
        if not RANK and name not in ("scatter", "gather"):
            work = calls_of(group, timedelta(seconds=20))[name]()
        if work is not None:
            work.wait()
        dist.destroy_process_group(group)


def check_calls_and_their_works_are_numbered() -> None:
    group = dist.new_group()
    before = group._get_sequence_number_for_group()
    works = [dist.all_reduce(own(), group=group, async_op=True) for _ in range(3)]
    assert group._get_sequence_number_for_group() == before + 3
    assert [work._get_sequence_number() for work in works] == [before + 1, before + 2, before + 3]
    for work in works:
        work.wait()


def check_a_work_knows_its_timeout_and_what_it_is_not() -> None:
    group = dist.new_group(timeout=timedelta(seconds=21))
    work = dist.all_reduce(own(), group=group, async_op=True)
    assert work.timeout() == timedelta(seconds=21)
    work.wait()
    with pytest.raises(InvalidRequestError, match="receive"):
        work.source_rank()
    work = group.allreduce([own()], with_options(c10d.AllreduceOptions(), timedelta(seconds=22)))
    assert work.timeout() == timedelta(seconds=22)
    work.wait()


def check_a_gather_into_one_tensor() -> None:
    if not hasattr(dist, "gather_single"):  # torch 2.15
        return
    for root in range(WORLD_SIZE):
        for async_op in (False, True):
            whole = torch.zeros(WORLD_SIZE, 6) if root == RANK else None
            work = dist.gather_single(own(), whole, root, async_op=async_op)
            if async_op:
                work.wait()
            if whole is not None:
                assert torch.equal(whole, torch.stack([own() + 10 * (rank - RANK) for rank in range(WORLD_SIZE)]))


def check_objects_go_every_way() -> None:
    def thing(rank: int) -> dict[str, Any]:
        return {"rank": rank, "list": [None] * rank, "text": "é" * 100 * rank}

    for root in range(WORLD_SIZE):
        gathered: list[Any] | None = [None] * WORLD_SIZE if root == RANK else None
        dist.gather_object(thing(RANK), gathered, root)
        assert gathered is None or gathered == [thing(rank) for rank in range(WORLD_SIZE)]
        told = [thing(root), 7] if root == RANK else [None, None]
        dist.broadcast_object_list(told, root)
        assert told == [thing(root), 7]
        mine: list[Any] = [None]
        dist.scatter_object_list(mine, [thing(r) for r in range(WORLD_SIZE)] if root == RANK else None, root)
        assert mine == [thing(RANK)]
        if root == RANK:
            dist.send_object_list([thing(root)], OTHER)
        else:
            dist.recv_object_list(mine, root)
            assert mine == [thing(root)]
    rows: list[Any] = [None] * WORLD_SIZE
    dist.all_gather_object(rows, thing(RANK))
    assert rows == [thing(rank) for rank in range(WORLD_SIZE)]


def check_ranks_within_a_group_name_roots_and_peers() -> None:
    group = dist.new_group([1, 0], use_local_synchronization=True)
    tensor = own()
    dist.broadcast(tensor, group=group, group_src=1)
    assert torch.equal(tensor, own() - 10 * RANK + 10 * dist.get_global_rank(group, 1))
    received = torch.zeros(6)
    peer = 1 - dist.get_group_rank(group, RANK)
    works = dist.batch_isend_irecv(
        [
            dist.P2POp(dist.isend, own(), group=group, group_peer=peer, tag=4),
            dist.P2POp(dist.irecv, received, group=group, group_peer=peer, tag=4),
        ]
    )
    for work in works:
        work.wait()
    assert torch.equal(received, own() + 10 * (OTHER - RANK))


def check_a_tensor_without_dimensions_has_no_rows_to_exchange() -> None:
    result = torch.zeros(())
    with pytest.raises(InvalidRequestError, match="no rows"):
        dist.all_to_all_single(result, torch.ones(()))
    assert float(result) == 0.0
    dist.all_reduce(result)


def check_coalesced_calls_block_where_they_are_asked_to() -> None:
    device = None if IS_WHOLE else torch.device("cpu")
    tensors = [own(n) for n in (1, 6, 300)]
    with dist._coalescing_manager(device=device):
        for tensor in tensors:
            dist.all_reduce(tensor)
    for tensor in tensors:
        assert torch.equal(tensor, total(tensor.numel()))
    with dist._coalescing_manager(device=device, async_ops=True) as manager:
        pass
    manager.wait()
    received = [torch.zeros(6), torch.zeros(6)]
    ops = [dist.P2POp(dist.isend, own() + tag, OTHER, tag=tag) for tag in (2, 1)]
    ops += [dist.P2POp(dist.irecv, received[tag - 1], OTHER, tag=tag) for tag in (1, 2)]
    for work in dist.batch_isend_irecv(ops):
        work.wait()
    for tag in (1, 2):
        assert torch.equal(received[tag - 1], own() + 10 * (OTHER - RANK) + tag)


def check_an_error_within_coalesced_calls_leaves_the_group_as_it_was() -> None:
    if IS_WHOLE:
        return

    def fail() -> None:
        with dist._coalescing_manager(device=torch.device("cpu"), async_ops=True):
            dist.all_reduce(own())
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    dist.distributed_c10d._world.pg_coalesce_state.pop(WORLD, None)  # torch leaves its own list as it was
    tensor = own()
    work = dist.all_reduce(tensor, async_op=True)
    work.wait()
    assert torch.equal(tensor, total())


def check_every_functional_collective() -> None:
    expected, everybody = total(), torch.cat([own() + 10 * (rank - RANK) for rank in range(WORLD_SIZE)])
    assert torch.equal(functional.all_reduce(own(), "avg", WORLD) + 0, expected / WORLD_SIZE)
    assert torch.equal(functional.all_gather_tensor(own(), 0, WORLD) + 0, everybody)
    assert torch.equal(functional.reduce_scatter_tensor(own(), "sum", 0, WORLD) + 0, expected[3 * RANK : 3 * RANK + 3])
    assert torch.equal(functional.broadcast(own(), 1, WORLD) + 0, everybody[6:])
    swapped = functional.all_to_all_single(own(), None, None, WORLD) + 0
    assert torch.equal(swapped, everybody.view(WORLD_SIZE, 6)[:, 3 * RANK : 3 * RANK + 3].flatten())
    sizes = [[1, 5], [2, 4]]  # of what each rank sends to each
    theirs = [sizes[rank][RANK] for rank in range(WORLD_SIZE)]
    uneven = functional.all_to_all_single(own(), theirs, sizes[RANK], WORLD) + 0
    sent = [(own() + 10 * (rank - RANK)).split(sizes[rank])[RANK] for rank in range(WORLD_SIZE)]
    assert torch.equal(uneven, torch.cat(sent))
    around = functional.permute_tensor(own(), [1, 0], WORLD) + 0
    assert torch.equal(around, own() + 10 * (OTHER - RANK))
    for result, size in zip(functional.all_reduce_coalesced([own(), own(2)], "sum", WORLD), (6, 2), strict=True):
        assert torch.equal(result + 0, total(size))
    gathered = functional.all_gather_into_tensor_coalesced([own(), own(2)], WORLD)
    assert torch.equal(gathered[0] + 0, everybody)
    scattered = functional.reduce_scatter_tensor_coalesced([own(), own(2)], "sum", [0, 0], WORLD)
    assert torch.equal(scattered[1] + 0, total(2)[RANK : RANK + 1])


def check_functional_collectives_have_gradients() -> None:
    tensor = own().requires_grad_()
    (functional.all_gather_tensor_autograd(tensor, 0, WORLD) * torch.arange(12.0)).sum().backward()
    assert torch.equal(tensor.grad, WORLD_SIZE * torch.arange(12.0)[6 * RANK : 6 * RANK + 6])
    tensor = own().requires_grad_()
    (functional.reduce_scatter_tensor_autograd(tensor, "sum", 0, WORLD) * (RANK + 1.0)).sum().backward()
    assert torch.equal(tensor.grad, torch.tensor([1.0, 1.0, 1.0, 2.0, 2.0, 2.0]))
    tensor = own().requires_grad_()
    (functional.all_to_all_single_autograd(tensor, [3, 3], [3, 3], WORLD) * (RANK + 1.0)).sum().backward()
    assert torch.equal(tensor.grad, torch.tensor([1.0, 1.0, 1.0, 2.0, 2.0, 2.0]))


def check_a_mesh_and_its_tensors() -> None:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (1, WORLD_SIZE), mesh_dim_names=("dp", "tp"))
    assert [dist.get_backend(mesh.get_group(name)) for name in ("dp", "tp")] == ["gradwire", "gradwire"]
    whole = torch.arange(24.0).reshape(6, 4)
    sharded = distribute_tensor(whole, mesh["tp"], [Shard(0)])
    assert torch.equal(sharded.to_local(), whole.chunk(WORLD_SIZE)[RANK])
    assert torch.equal(sharded.full_tensor(), whole)
    assert torch.equal(sharded.redistribute(placements=[Shard(1)]).to_local(), whole.chunk(WORLD_SIZE, 1)[RANK])
    assert torch.equal(sharded.redistribute(placements=[Replicate()]).to_local(), whole)
    assert torch.equal(sharded.sum().full_tensor(), whole.sum())
    product = distribute_tensor(whole.t().contiguous(), mesh["tp"], [Shard(1)]) @ sharded
    assert torch.equal(product.full_tensor(), whole.t() @ whole)
    assert torch.equal(
        (sharded @ distribute_tensor(whole.t(), mesh["tp"], [Replicate()])).full_tensor(), whole @ whole.t()
    )


def check_a_group_of_two_backends_trains_in_the_default_group() -> None:
    if IS_WHOLE:
        return
    import rank
    from torch.nn.parallel import DistributedDataParallel

    dist.destroy_process_group()
    rank.init("cpu:gradwire,cuda:gloo", store="mixed")
    try:
        assert dist.get_backend(None) == "gradwire" or "gradwire" in str(dist.get_backend_config())
        model = DistributedDataParallel(torch.nn.Linear(6, 1, bias=False))
        state = gradwire.torch.tolerate_loss(model, preset="reliable")
        model(own().view(1, 6)).sum().backward()
        assert torch.allclose(model.module.weight.grad, (total() / WORLD_SIZE).view(1, 6))
        assert state.bytes_expected > 0
        rows: list[Any] = [None] * WORLD_SIZE
        dist.all_gather_object(rows, RANK)
        assert rows == list(range(WORLD_SIZE))
        dist.barrier()
    finally:
        dist.destroy_process_group()
        rank.init(store="again")
        globals()["GLOO"] = dist.new_group(backend="gloo")


def check_everything_is_destroyed_at_once_with_calls_in_flight() -> None:
    import rank

    groups = [dist.new_group() for _ in range(2)]
    works = [dist.all_reduce(own(), group=group, async_op=True) for group in (*groups, dist.group.WORLD)]
    if RANK == 0:
        late = dist.irecv(own(), 1, tag=77)
    for work in works:
        work.wait()
    dist.barrier(GLOO)
    dist.destroy_process_group()
    if RANK == 0:
        with pytest.raises(GradwireError):
            late.wait()
    rank.init(store="afresh")
    globals()["GLOO"] = dist.new_group(backend="gloo")
    tensor = own()
    dist.all_reduce(tensor)
    assert torch.equal(tensor, total())
