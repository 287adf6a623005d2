"""What broke other backends written in Python, one check for each."""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import gradwire.torch
import torch
import torch.distributed as dist
from gradwire.errors import ForkedError
from rank import RANK, WORLD_SIZE
from torch import nn
from torch._C import _distributed_c10d as c10d
from torch.distributed._functional_collectives import allow_inflight_collective_as_graph_input_ctx
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

GLOO = dist.new_group(backend="gloo")


# Of torch's, of gradwire's own, and one that only asks.
CALLS: list[Callable[[], Any]] = [
    lambda: dist.all_reduce(torch.ones(4)),
    lambda: gradwire.torch.all_reduce(torch.ones(4)),
    gradwire.torch.stats,
]


class TriesACollective(Dataset):  # type: ignore[type-arg]
    """In a DataLoader worker, a fork, every item tries to use the parent's group."""

    def __len__(self) -> int:
        return len(CALLS)

    def __getitem__(self, index: int) -> str:
        try:
            CALLS[index]()
        except ForkedError as error:
            return f"refused, owner {error.owner_pid}: {str(error).partition(': ')[2]}"
        return "worked"


def check_a_forked_dataloader_worker_is_refused_and_harms_nobody() -> None:
    loader = DataLoader(TriesACollective(), num_workers=1, batch_size=1, multiprocessing_context="fork")
    said = f"refused, owner {os.getpid()}: form groups in the process that uses them"
    assert [item[0] for item in loader] == [said] * len(CALLS)
    tensor = torch.ones(4)
    dist.all_reduce(tensor)
    assert torch.equal(tensor, torch.full((4,), float(WORLD_SIZE)))


def check_a_future_completes_on_one_thread_in_the_order_of_the_operations() -> None:
    seen: list[tuple[int, str]] = []
    works = [dist.all_reduce(torch.ones(10), async_op=True) for _ in range(20)]
    futures = [
        work.get_future().then(lambda _f, i=i: seen.append((i, threading.current_thread().name)))
        for i, work in enumerate(works)
    ]
    torch.futures.wait_all(futures)
    assert len(seen) == 20
    others = {name for _, name in seen} - {threading.current_thread().name}
    assert others <= {"gradwire-completer"}, others  # callbacks of what had ended already run here


class Within(torch.autograd.Function):
    """Runs the backward pass of a model within others: within 60 of them autograd does so on a C++ thread of its own."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, levels: int, innermost: Callable[[], None]) -> torch.Tensor:
        ctx.levels, ctx.innermost = levels, innermost
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        if not ctx.levels:
            ctx.innermost()
            return gradient, None, None
        with torch.enable_grad():
            inner = torch.ones(1, requires_grad=True)
            Within.apply(inner, ctx.levels - 1, ctx.innermost).backward()
        return gradient, None, None


def check_a_backward_pass_may_run_on_a_thread_of_autograds_without_a_python_frame() -> None:
    def trained(levels: int | None, *, tolerant: bool) -> tuple[list[torch.Tensor], set[bool]]:
        torch.manual_seed(1)
        model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8)), bucket_cap_mb=0.01)
        called: set[bool] = set()
        for parameter in model.parameters():
            parameter.register_hook(lambda _: called.add(sys._getframe().f_back is not None))
        if tolerant:
            gradwire.torch.tolerate_loss(model, preset="reliable")
        for step in range(3):
            loss = model(torch.full((4, 64), 1.0 + step + RANK)).square().mean()
            if levels is None:
                loss.backward()
            else:
                Within.apply(torch.ones(1, requires_grad=True), levels, loss.backward).backward()
        return [p.grad.clone() for p in model.parameters()], called

    for tolerant in (False, True):
        expected, _ = trained(None, tolerant=tolerant)
        found, called = trained(60, tolerant=tolerant)
        assert called == {False}, "Python's frames are below autograd's: this tests nothing"
        assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def check_a_busy_python_thread_does_not_stop_the_network() -> None:
    stop = threading.Event()
    spinner = threading.Thread(target=lambda: [None for _ in iter(stop.is_set, True)])
    spinner.start()
    try:
        for _ in range(5):
            tensor = torch.ones(50_000)
            dist.all_reduce(tensor, async_op=True).get_future().wait()
            assert tensor[0] == WORLD_SIZE
    finally:
        stop.set()
        spinner.join()


def check_the_memory_of_a_work_that_nobody_holds_stays_until_the_end() -> None:
    probe = torch.zeros(100_000)
    for _ in range(10):
        dist.all_reduce(torch.ones(100_000), async_op=True)  # neither tensor nor work is kept
    dist.all_reduce(probe)
    assert not probe.any()


def check_works_do_not_pile_up() -> None:
    import gc

    from gradwire.torch import GradwireWork

    for _ in range(50):
        dist.all_reduce(torch.ones(10), async_op=True).get_future().wait()
    dist.barrier()
    gc.collect()
    alive = sum(isinstance(thing, GradwireWork) for thing in gc.get_objects())
    assert alive <= 2, f"{alive} works are alive"


def check_works_that_a_compiled_graph_may_wait_for_do_not_pile_up() -> None:
    before = c10d._get_work_registry_size()
    with allow_inflight_collective_as_graph_input_ctx():
        for _ in range(10):
            tensor, rows = torch.ones(10), [torch.zeros(10) for _ in range(WORLD_SIZE)]
            dist.all_reduce(tensor, async_op=True).wait()
            dist.all_reduce(tensor)
            dist.all_gather(rows, tensor, async_op=True).wait()
            dist.barrier()
        assert torch.equal(rows[RANK], torch.full((10,), float(WORLD_SIZE**2)))
        assert c10d._get_work_registry_size() == before
        tensor = torch.ones(10)
        dist.all_reduce(tensor, async_op=True)
        assert torch.equal(torch.ops._c10d_functional.wait_tensor(tensor), torch.full((10,), float(WORLD_SIZE)))


def check_a_message_of_a_batch_is_waited_for_by_itself() -> None:
    if RANK == 0:
        sent, received = torch.ones(1_000_000), torch.zeros(3)
        send, receive = dist.batch_isend_irecv(
            [dist.P2POp(dist.isend, sent, 1, tag=1), dist.P2POp(dist.irecv, received, 1, tag=2)]
        )
        receive.wait()
        assert torch.equal(received, torch.full((3,), 2.0))
        assert not send.is_completed()
        dist.barrier(GLOO)
        send.wait()
    elif RANK == 1:
        dist.send(torch.full((3,), 2.0), 0, tag=2)
        dist.barrier(GLOO)
        dist.recv(torch.zeros(1_000_000), 0, tag=1)


def check_groups_may_be_destroyed_in_any_order() -> None:
    groups = [dist.new_group() for _ in range(3)]
    for group in groups:
        dist.all_reduce(torch.ones(3), group=group)
    for index in (1, 0, 2) if RANK == 0 else (2, 1, 0):
        dist.destroy_process_group(groups[index])
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    assert tensor[0] == WORLD_SIZE


def check_idle_groups_cost_no_processor_time() -> None:
    dist.barrier()
    before, started = time.process_time(), time.monotonic()
    dist.barrier(GLOO)
    time.sleep(1.0)  # the subject is what happens in this second, not a synchronisation
    used, passed = time.process_time() - before, time.monotonic() - started
    assert used < 0.3 * passed, f"{used:.2f} s of processor time in {passed:.2f} s of doing nothing"
