"""Loss tolerance together with what torch has for compression; parts of groups; timeouts and sequence numbers. Two ranks."""

from __future__ import annotations

import threading
from typing import Any

import gradwire.torch
import pytest
import torch
import torch.distributed as dist
from gradwire.torch import _compat
from rank import RANK, WORLD_SIZE
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import ddp_zero_hook, default_hooks, powerSGD_hook
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

GLOO = dist.new_group(backend="gloo")
TOLERANT = gradwire.torch.tolerant_group(loss_bound=0.1)


def model_on(group: dist.ProcessGroup, bucket_mb: float = 0.1) -> DistributedDataParallel:
    torch.manual_seed(3)
    layers = nn.Sequential(nn.Linear(200, 300), nn.ReLU(), nn.Linear(300, 200))
    return DistributedDataParallel(layers, process_group=group, bucket_cap_mb=bucket_mb)


def gradients(model: DistributedDataParallel, steps: int = 3) -> torch.Tensor:
    for step in range(steps):
        model.zero_grad()
        batch = torch.randn(8, 200, generator=torch.Generator().manual_seed(step * 10 + RANK))
        model(batch).square().mean().backward()
    return torch.cat([p.grad.reshape(-1) for p in model.parameters()])


def identical_everywhere(flat: torch.Tensor) -> None:
    rows = [torch.zeros_like(flat) for _ in range(WORLD_SIZE)]
    dist.all_gather(rows, flat, group=GLOO)
    assert all(torch.equal(flat, row) for row in rows)


def mean_of_halves(dtype: torch.dtype) -> torch.Tensor:
    """Every rank's gradients as halves, added in float32 and rounded once."""
    with (model := model_on(GLOO)).no_sync():
        own = gradients(model).to(dtype).float()
    rows = [torch.zeros_like(own) for _ in range(WORLD_SIZE)]
    dist.all_gather(rows, own, group=GLOO)
    return (sum(rows) / WORLD_SIZE).to(dtype).float()


def check_halves_tolerate_loss() -> None:
    for wrapper, dtype in (
        (default_hooks.bf16_compress_wrapper, torch.bfloat16),
        (default_hooks.fp16_compress_wrapper, torch.float16),
    ):
        model = model_on(dist.group.WORLD)
        state = gradwire.torch.tolerate_loss(model, compression=wrapper, preset="reliable")
        averaged = gradients(model)
        assert torch.equal(averaged, mean_of_halves(dtype))
        elems = sum(p.numel() for p in model.parameters())
        assert 0 < state.total.bytes_sent < 3 * elems * 4, "halves are sent, not float32"


def check_compression_hooks_on_a_tolerant_group() -> None:
    ours, reference = model_on(dist.group.WORLD), model_on(GLOO)
    ours.register_comm_hook(TOLERANT, default_hooks.bf16_compress_hook)
    reference.register_comm_hook(GLOO, default_hooks.bf16_compress_hook)
    torch.testing.assert_close(gradients(ours), gradients(reference), rtol=0, atol=1e-7)


def check_power_sgd_on_a_tolerant_group() -> None:
    results = []
    for group, reducing in ((dist.group.WORLD, TOLERANT), (GLOO, GLOO)):
        model = model_on(group, bucket_mb=25)  # with more than one bucket gloo itself aborts in nested calls
        state = powerSGD_hook.PowerSGDState(reducing, matrix_approximation_rank=2, start_powerSGD_iter=2)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        results.append(gradients(model, 4))
    identical_everywhere(results[0])
    torch.testing.assert_close(*results)


def check_power_sgd_with_several_buckets_on_the_group_of_the_model() -> None:
    """Of the first bucket's callbacks and the second bucket's calls no rank may change the order."""
    torch.manual_seed(3)
    layers = [nn.Linear(200, 300), nn.Linear(300, 300), nn.Linear(300, 300), nn.Linear(300, 200)]
    model = DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=0.4)
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    identical_everywhere(gradients(model, 4))


def check_an_optimizer_that_steps_in_the_callbacks_of_several_buckets() -> None:
    torch.manual_seed(3)
    layers = [nn.Linear(200, 300), nn.Linear(300, 300), nn.Linear(300, 300), nn.Linear(300, 200)]
    model = DistributedDataParallel(nn.Sequential(*layers), bucket_cap_mb=0.4)
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.SGD, overlap_with_ddp=True, lr=0.1)
    hook = ddp_zero_hook.hook_with_zero_step_interleaved(default_hooks.allreduce_hook, model, optimizer)
    model.register_comm_hook(None, hook)
    threads, broadcast = set(), dist.broadcast

    def note(*args: Any, **kwargs: Any) -> Any:
        threads.add(threading.current_thread())
        return broadcast(*args, **kwargs)

    before = [p.detach().clone() for p in model.parameters()]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "broadcast", note)
        gradients(model, 5)
    assert threads == {threading.current_thread()}, "ranks would call in different orders"
    assert not any(torch.equal(then, now) for then, now in zip(before, model.parameters(), strict=True))
    identical_everywhere(torch.cat([p.detach().reshape(-1) for p in model.parameters()]))


def check_a_callback_may_wait_for_a_collective_that_it_started() -> None:
    def again(future: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
        nested = dist.all_reduce(future.value()[0].clone(), async_op=True)
        return nested.get_future().wait()[0]

    tensor = torch.ones(1000)
    future = dist.all_reduce(tensor, async_op=True).get_future().then(again)
    assert torch.equal(future.wait(), torch.full((1000,), float(WORLD_SIZE**2)))


def check_only_sums_of_gradients_are_tolerant() -> None:
    link = gradwire.torch._tolerant.link_of(TOLERANT)
    op = dist.ReduceOp
    assert link.tolerance_of(torch.ones(1), op.SUM)["policy"]["loss_bound"] == 0.1
    assert link.tolerance_of(torch.ones(1, dtype=torch.bfloat16), op.AVG)
    for tensor, reduction in (
        (torch.ones(1, dtype=torch.int32), op.SUM),
        (torch.ones(1, dtype=torch.float64), op.SUM),
        (torch.ones(1), op.MAX),
        (torch.ones(1), op.PRODUCT),
    ):
        assert not link.tolerance_of(tensor, reduction), (tensor.dtype, reduction)
    assert not gradwire.torch._tolerant.link_of(None).tolerance_of(torch.ones(1), op.SUM)


def check_what_a_synchronised_batch_norm_calls_is_as_with_gloo() -> None:
    """SyncBatchNorm refuses CPU tensors; these are the calls that it makes for others."""
    values = torch.randn(5 + RANK, 6, generator=torch.Generator().manual_seed(RANK))
    own = torch.cat([values.mean(0), values.var(0, unbiased=False), torch.tensor([float(len(values))])])
    results = []
    for group in (dist.group.WORLD, GLOO):
        rows, total = torch.zeros(WORLD_SIZE, 13), own.clone()
        dist.all_gather_into_tensor(rows, own.view(1, -1), group=group)
        dist.all_reduce(total, group=group)
        results.append(torch.cat([rows.flatten(), total]))
    assert torch.equal(*results)


def check_groups_merge() -> None:
    if not hasattr(dist.ProcessGroup, "merge_remote_group") or _compat.backend_class() is None:
        return  # before torch 2.14 only backends of torch's own merge
    groups = [dist.new_group([rank]) for rank in range(2)]
    store = dist.PrefixStore("merged", dist.distributed_c10d._get_default_store())
    whole: Any = groups[RANK].merge_remote_group(store, 2, dist.default_pg_timeout, "both")  # type: ignore[union-attr]
    tensor = torch.ones(3) * (RANK + 1)
    whole.allreduce([tensor]).wait()
    assert torch.equal(tensor, torch.full((3,), 3.0))
    assert whole.size() == 2
    whole.shutdown()


def check_a_group_splits() -> None:
    if _compat.backend_class() is None:
        return  # before torch 2.14 only backends of torch's own split
    if torch.__version__.startswith("2.14."):
        with pytest.raises(RuntimeError, match="No device associated"):  # unless init_process_group had a device_id
            dist.split_group(split_ranks=[[1, 0]])
        return
    whole = dist.split_group(split_ranks=[[1, 0]])
    assert dist.get_rank(whole) == 1 - RANK
    tensor = torch.ones(3) * (RANK + 1)
    dist.all_reduce(tensor, group=whole)
    assert torch.equal(tensor, torch.full((3,), 3.0))
    rows = [torch.zeros(1) for _ in range(2)]
    dist.all_gather(rows, torch.tensor([float(RANK)]), group=whole)
    assert [float(row) for row in rows] == [1.0, 0.0], "the order of the split's list counts"
    own = dist.split_group(split_ranks=[[0], [1]])
    dist.all_reduce(tensor, group=own)
    assert torch.equal(tensor, torch.full((3,), 3.0))
    gradwire.torch.all_reduce(tensor, group=whole)  # the group is known to gradwire under torch's name
    some = dist.split_group(split_ranks=[[1]])
    assert (some is dist.GroupMember.NON_GROUP_MEMBER) == (RANK == 0)
    for group in (whole, own):
        dist.destroy_process_group(group)
