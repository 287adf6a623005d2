"""Collectives on a GPU's tensors. `staged.py` has the same order of events over streams that need no GPU."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable

import gradwire.torch
import pytest
import torch
import torch.distributed as dist
from gradwire.errors import MismatchError, UnsupportedError
from gradwire.torch import _compat, _streams
from gradwire.torch._streams import BACK
from owed import owed_in
from rank import RANK, WORLD_SIZE
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

GLOO = dist.new_group(backend="gloo")
GPU = torch.device("cuda", 0)
LARGE = 5_000_001  # elements of float32: three pieces
LATE_CYCLES = 200_000_000  # of a kernel that idles: some 0.1 s


def whole(elems: int, rank: int = RANK) -> torch.Tensor:
    return torch.arange(elems, dtype=torch.float32) % 4096 + 1000 * rank


def total(elems: int) -> torch.Tensor:
    return sum((whole(elems, r) for r in range(WORLD_SIZE)), torch.zeros(elems))


def check_a_sum_has_what_a_late_kernel_computed() -> None:
    tensor = torch.zeros(1 << 20, device=GPU)
    values = whole(1 << 20).to(GPU)
    torch.cuda._sleep(LATE_CYCLES)
    tensor.copy_(values)
    work = dist.all_reduce(tensor, async_op=True)
    work.wait()
    assert torch.equal(tensor.cpu(), total(1 << 20))


def check_a_result_may_be_read_on_another_stream_that_waited() -> None:
    tensor = whole(1 << 20).to(GPU)
    work = dist.all_reduce(tensor, async_op=True)
    with torch.cuda.stream(torch.cuda.Stream(GPU)):
        work.wait()
        assert torch.equal(tensor.cpu(), total(1 << 20))


def check_memory_of_a_tensor_that_was_dropped_is_not_written_into_the_next() -> None:
    for _ in range(3):
        dropped_before_its_copy_back(lambda: torch.ones(1 << 18, device=GPU))


def dropped_before_its_copy_back(make: Callable[[], torch.Tensor]) -> None:
    """Nobody waits, so that nothing but `hold` keeps the memory of the tensor from its stream's next one."""
    back = _streams._of_type["cuda"].side(GPU, BACK)
    with torch.cuda.stream(torch.cuda.Stream(GPU)):
        tensor = make()
        elems, alive = tensor.untyped_storage().nbytes() // 4, weakref.ref(tensor)
        with torch.cuda.stream(back):
            torch.cuda._sleep(10 * LATE_CYCLES)
        future = dist.all_reduce(tensor, async_op=True).get_future()
        del tensor
        end = time.monotonic() + 60.0
        while not future.done():  # on the host: its copy back has not begun
            assert time.monotonic() < end, "the call has not ended"
            time.sleep(0.001)
        del future
        end = time.monotonic() + 0.5
        while alive() is not None:
            assert time.monotonic() < end, "the tensor is still held: this tests nothing"
        other = torch.full((elems,), 5.0, device=GPU)
        torch.cuda.synchronize()
        assert torch.equal(other.cpu(), torch.full((elems,), 5.0))


def check_futures_are_ready_on_the_stream_that_waits_for_them() -> None:
    tensor = whole(1 << 20).to(GPU)
    (result,) = dist.all_reduce(tensor, async_op=True).get_future().wait()
    assert torch.equal((result * 1).cpu(), total(1 << 20))


def check_a_poll_says_so_when_the_result_is_there() -> None:
    tensor = whole(1 << 20).to(GPU)
    work = dist.all_reduce(tensor, async_op=True)
    while not work.is_completed():
        pass
    assert torch.equal(tensor.cpu(), total(1 << 20))


def check_dtypes_layouts_and_both_kinds_of_memory() -> None:
    for dtype in (torch.float16, torch.bfloat16, torch.int64, torch.bool):
        tensor = torch.ones(100, device=GPU).to(dtype)
        dist.broadcast(tensor, 0)
        assert torch.equal(tensor.cpu(), torch.ones(100).to(dtype))
    matrix = whole(64).to(GPU).view(8, 8).t()
    dist.all_reduce(matrix)
    assert torch.equal(matrix.cpu(), total(64).view(8, 8).t())
    tensor = whole(100).to(GPU) if RANK else whole(100)
    dist.all_reduce(tensor)
    assert torch.equal(tensor.cpu(), total(100))


def check_the_default_device_may_be_the_gpu() -> None:
    tensor, matrix = whole(1000).to(GPU), whole(64).view(8, 8).t()
    sparse = torch.sparse_coo_tensor([[RANK]], [1.0], (WORLD_SIZE,)).to(GPU)
    values = torch.full((100,), float(RANK), device=GPU)
    with torch.device(GPU):
        dist.all_reduce(tensor)
        dist.all_reduce(matrix)
        dist.all_reduce(sparse)
        gradwire.torch.all_reduce(values, preset="reliable", important=[True, False])
    assert torch.equal(tensor.cpu(), total(1000))
    assert torch.equal(matrix, total(64).view(8, 8).t())
    assert torch.equal(sparse.to_dense().cpu(), torch.ones(WORLD_SIZE))
    assert torch.equal(values.cpu(), torch.full((100,), (WORLD_SIZE - 1) / 2))


def check_models_train_as_on_the_host() -> None:
    def trained(device: torch.device | str, *, tolerant: bool) -> list[torch.Tensor]:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8)).to(device)
        parallel = DistributedDataParallel(model, bucket_cap_mb=0.01)
        if tolerant:
            gradwire.torch.tolerate_loss(parallel, preset="reliable")
        optimizer = torch.optim.SGD(parallel.parameters(), lr=0.1)
        for step in range(4):
            optimizer.zero_grad()
            parallel(whole(64).to(device) / 1000 + step).square().mean().backward()
            optimizer.step()
        return [p.detach().cpu() for p in parallel.parameters()]

    for tolerant in (False, True):
        for host, gpu in zip(trained("cpu", tolerant=tolerant), trained(GPU, tolerant=tolerant), strict=True):
            torch.testing.assert_close(gpu, host, rtol=1e-3, atol=1e-4)


def check_sharded_models_train() -> None:
    torch.manual_seed(1)
    mesh = dist.init_device_mesh("cuda", (WORLD_SIZE,))
    model = fully_shard(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8)).to(GPU), mesh=mesh)
    gradwire.torch.tolerate_loss(model, preset="reliable")
    losses = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for _ in range(5):
        optimizer.zero_grad()
        loss = model(torch.ones(4, 64, device=GPU)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    assert losses[-1] < losses[0]


def check_residuals_of_a_sharded_model_may_come_from_host_memory() -> None:
    mesh = dist.init_device_mesh("cuda", (WORLD_SIZE,))
    model = fully_shard(nn.Linear(64, 8).to(GPU), mesh=mesh)
    state = gradwire.torch.tolerate_loss(model, preset="reliable")

    def gradients() -> list[torch.Tensor]:
        model(torch.ones(4, 64, device=GPU)).sum().backward()
        found = [p.grad.to_local() for p in model.parameters()]
        for parameter in model.parameters():
            parameter.grad = None
        return found

    before, saved = gradients(), state.state_dict()
    owed = {
        name: torch.full_like(part, 2.0).cpu() for name, part in owed_in(saved).items()
    }  # as torch.load(map_location="cpu")
    state.load_state_dict(dict.fromkeys(saved, owed))
    for ours, plain in zip(gradients(), before, strict=True):
        torch.testing.assert_close(ours, plain + 2.0)
    assert all(part.device.type == "cpu" and not part.any() for part in owed_in(state.state_dict()).values())


def check_a_step_that_is_not_finite_leaves_nothing() -> None:
    model = DistributedDataParallel(nn.Linear(64, 8).to(GPU), bucket_cap_mb=0.0001)  # two buckets
    state = gradwire.torch.tolerate_loss(model, preset="reliable")

    def gradients(value: float) -> list[torch.Tensor]:
        model.zero_grad()
        model(torch.full((4, 64), value, device=GPU)).sum().backward()
        return [p.grad.clone() for p in model.parameters()]

    gradients(1.0)  # behind which the buckets are rebuilt
    before, saved = gradients(1.0), state.state_dict()
    owed = {name: torch.full_like(part, 2.0) for name, part in owed_in(saved).items()}
    state.load_state_dict(dict.fromkeys(saved, owed))
    for _ in range(2):
        weight, bias = gradients(float("inf"))
        assert not weight.isfinite().any()
        assert bias.isfinite().all(), "another bucket"
    for ours, plain in zip(gradients(1.0), before, strict=True):
        torch.testing.assert_close(ours, plain)
    assert not any(part.any() for part in owed_in(state.state_dict()).values())


def check_a_captured_graph_is_refused() -> None:
    tensor = torch.ones(4, device=GPU)
    side = torch.cuda.Stream(GPU)
    with torch.cuda.stream(side):
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin()
        works = [dist.all_reduce(tensor, async_op=True)]
        works.append(dist.all_to_all([tensor] * WORLD_SIZE, [tensor] * WORLD_SIZE, async_op=True))
        graph.capture_end()
    for work in works:
        with pytest.raises(UnsupportedError, match="captured"):
            work.wait()


def check_large_tensors_go_in_pieces() -> None:
    tensor = torch.zeros(LARGE, device=GPU)
    values = whole(LARGE).to(GPU)
    torch.cuda._sleep(LATE_CYCLES)
    tensor.copy_(values)
    dist.all_reduce(tensor)
    assert torch.equal(tensor.cpu(), total(LARGE))
    (tensor,) = dist.all_reduce(values, async_op=True).get_future().wait()
    assert torch.equal((tensor * 1).cpu(), total(LARGE))
    dist.broadcast(tensor := whole(LARGE).to(GPU), 1)
    assert torch.equal(tensor.cpu(), whole(LARGE, 1))
    dist.reduce(tensor := whole(LARGE).to(GPU), 0)
    assert torch.equal(tensor.cpu(), whole(LARGE) if RANK else total(LARGE))
    every_other = whole(2 * LARGE).to(GPU)[::2]
    work = dist.all_reduce(every_other, async_op=True)
    with torch.cuda.stream(torch.cuda.Stream(GPU)):
        work.wait()
        assert torch.equal(every_other.cpu(), total(2 * LARGE)[::2])


def check_rows_of_large_tensors_go_in_pieces() -> None:
    rows = torch.stack([whole(LARGE, r) for r in range(WORLD_SIZE)])
    gathered = torch.zeros_like(rows, device=GPU)
    own = torch.zeros(LARGE, device=GPU)
    torch.cuda._sleep(LATE_CYCLES)
    own.copy_(whole(LARGE))
    dist.all_gather_into_tensor(gathered, own)
    assert torch.equal(gathered.cpu(), rows)
    lists = [torch.zeros(LARGE, device=GPU) for _ in range(WORLD_SIZE)]
    dist.all_gather(lists, own)
    assert torch.equal(torch.stack(lists).cpu(), rows)
    scattered = torch.zeros(2 * LARGE, device=GPU)[::2]
    torch.cuda._sleep(LATE_CYCLES)
    gathered.mul_(2)
    dist.reduce_scatter_tensor(scattered, gathered)
    assert torch.equal(scattered.cpu(), 2 * WORLD_SIZE * whole(LARGE))
    dist.reduce_scatter_tensor(gathered[RANK], gathered)  # in place
    assert torch.equal(gathered[RANK].cpu(), 2 * WORLD_SIZE * whole(LARGE))


def check_memory_of_a_large_tensor_that_was_dropped_is_not_written_into_the_next() -> None:
    for _ in range(3):
        dropped_before_its_copy_back(lambda: torch.ones(2 * LARGE, device=GPU)[::2])


def check_a_large_reduction_that_tolerates_loss() -> None:
    for rotated in ("off", "on"):
        tensor, residual, output = (
            whole(LARGE).to(GPU),
            torch.zeros(LARGE, device=GPU),
            torch.zeros(LARGE, device=GPU),
        )
        options = {"preset": "ltp", "gather_loss_bound": 0.0, "hadamard": rotated}
        work = gradwire.torch.all_reduce(tensor, output=output, residual=residual, **options)
        report = work.report()
        assert (report.elems, len(report.parts)) == (LARGE, 3)
        assert (report.rotated_elems > 0) == (rotated == "on")
        if not report.uncounted:
            torch.testing.assert_close(output.cpu(), total(LARGE) / WORLD_SIZE, rtol=1e-3, atol=1e-2)
        assert torch.equal(tensor.cpu(), whole(LARGE))


def check_host_and_device_memory_in_one_large_call_are_an_error_that_says_so() -> None:
    group = dist.new_group()
    with pytest.raises(MismatchError, match="gpu_chunk_mb"):
        dist.all_reduce(whole(LARGE).to(GPU) if RANK else whole(LARGE), group=group)


def check_collectives_are_ranges_of_nvtx() -> None:
    begun: list[int] = []
    ended: list[int] = []
    start, end = torch.cuda.nvtx.range_start, torch.cuda.nvtx.range_end
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda.nvtx, "range_start", lambda said: begun.append(start(said)) or begun[-1])
        patch.setattr(torch.cuda.nvtx, "range_end", lambda handle: ended.append(handle) or end(handle))
        dist.all_reduce(torch.ones(100, device=GPU))
        dist.all_reduce(torch.ones(LARGE, device=GPU), async_op=True).get_future().wait()
        dist.barrier()
    assert len(begun) == 3
    assert sorted(ended) == sorted(begun)


def wide(*, buckets_mb: float = 25) -> DistributedDataParallel:
    """A model whose buckets go in pieces."""
    torch.manual_seed(1)
    layers = nn.Sequential(nn.Linear(64, 4096), nn.ReLU(), nn.Linear(4096, 1024), nn.ReLU(), nn.Linear(1024, 8)).to(GPU)
    return DistributedDataParallel(layers, bucket_cap_mb=buckets_mb)


def batch(step: int) -> torch.Tensor:
    return torch.randn(32, 64, generator=torch.Generator().manual_seed(10 * step + RANK)).to(GPU)


def replicas_are_equal(model: nn.Module) -> bool:
    flat = torch.cat([p.detach().flatten() for p in model.parameters()])
    first = flat.clone()
    dist.broadcast(first, 0)
    same = torch.tensor(float(torch.equal(flat, first)))
    dist.all_reduce(same, dist.ReduceOp.MIN)
    return bool(same)


def train(model: nn.Module, steps: int = 4) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = (model(batch(0)) - 1).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    return losses


def check_a_compiled_model_trains() -> None:
    plain, model = wide(), wide()
    expected = train(plain)
    found = train(torch.compile(model, backend="aot_eager"))
    assert found == pytest.approx(expected, rel=1e-4)
    assert replicas_are_equal(model)


def check_fp16_autocast_with_a_scaler_while_gradients_may_be_lost() -> None:
    model = wide()
    state = gradwire.torch.tolerate_loss(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**32, growth_interval=3)  # the first steps overflow
    scales, losses = [], []
    for _ in range(40):
        optimizer.zero_grad()
        with torch.autocast("cuda", torch.float16):
            loss = (model(batch(0)) - 1).square().mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        before = scaler.get_scale()
        scaler.update()
        state.rescale(scaler.get_scale() / before)
        scales.append(before)
        losses.append(float(loss))
    assert scales[-1] < scales[0], "it never overflowed: this tests nothing"
    assert losses[-1] < losses[0] / 2
    assert replicas_are_equal(model)


def check_powersgd_which_nests_collectives() -> None:
    model = wide()
    state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=2, start_powerSGD_iter=2)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    losses = train(model, 6)
    assert losses[-1] < losses[0]
    assert replicas_are_equal(model)


def check_a_step_in_the_forward_pass() -> None:
    def trained(*, early: bool) -> list[torch.Tensor]:
        torch.manual_seed(1)
        layers = nn.Sequential(nn.Linear(64, 4096), nn.ReLU(), nn.Linear(4096, 1024), nn.ReLU(), nn.Linear(1024, 8)).to(
            GPU
        )
        model = DistributedDataParallel(layers, gradient_as_bucket_view=True)
        state = gradwire.torch.tolerate_loss(model, preset="reliable")
        if not early:
            train(model)
        else:
            steps = state.step_in_forward(lambda parameters: torch.optim.SGD(parameters, lr=0.05))
            for _ in range(4):
                (model(batch(0)) - 1).square().mean().backward()
            steps.finish()
        return [p.detach().cpu() for p in model.parameters()]

    for one, other in zip(trained(early=False), trained(early=True), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def check_nccl_for_the_gpu_and_gradwire_for_the_host_in_one_group() -> None:
    groups = [
        dist.new_group([rank], backend="cpu:gradwire,cuda:nccl") for rank in range(WORLD_SIZE)
    ]  # NCCL: a GPU each
    group = groups[RANK]
    tensor = torch.ones(4)
    dist.all_reduce(tensor, group=group)
    assert torch.equal(tensor, torch.ones(4))
    if _compat.backend_class() is None:  # before torch 2.14
        with pytest.raises(UnsupportedError, match="nccl"):
            dist.all_reduce(torch.ones(4, device=GPU), group=group)
        return
    dist.all_reduce(tensor := torch.ones(4, device=GPU), group=group)
    assert torch.equal(tensor.cpu(), torch.ones(4))
