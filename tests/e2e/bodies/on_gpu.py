"""Collectives on a GPU's tensors. `staged.py` has the same order of events over streams that need no GPU."""

from __future__ import annotations

import gradwire.torch
import pytest
import torch
import torch.distributed as dist
from gradwire.errors import UnsupportedError
from rank import RANK, WORLD_SIZE
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

GPU = torch.device("cuda", 0)
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
    for _ in range(20):
        work = dist.all_reduce(torch.ones(1 << 18, device=GPU), async_op=True)
        work.wait()
        del work
        other = torch.full((1 << 18,), 5.0, device=GPU)
        torch.cuda.synchronize()
        assert torch.equal(other.cpu(), torch.full((1 << 18,), 5.0))


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


def check_a_captured_graph_is_refused() -> None:
    tensor = torch.ones(4, device=GPU)
    side = torch.cuda.Stream(GPU)
    with torch.cuda.stream(side):
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin()
        work = dist.all_reduce(tensor, async_op=True)
        graph.capture_end()
    with pytest.raises(UnsupportedError, match="captured"):
        work.wait()
