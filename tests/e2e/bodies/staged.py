"""Collectives on tensors of a device whose streams are as lazy as its interface allows: a missing wait is a wrong number."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import gradwire.torch
import pytest
import torch
import torch.distributed as dist
from gradwire._outbox import Outbox
from gradwire.errors import DeadlineError, EngineError, GradwireError, MismatchError, ShutDownError, WaitTimeoutError
from gradwire.torch import _sparse, _staging
from gradwire.torch._tolerant import link_of
from lazy_streams import LazyStreams, on
from rank import RANK, WORLD_SIZE
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

GLOO = dist.new_group(backend="gloo")
WORLD = dist.group.WORLD
PATIENCE_S = 60.0
# No address space has room for it: the system refuses such a thread as it does at its limit.
NO_SUCH_STACK = 1 << 46


def whole(elems: int, rank: int = RANK) -> torch.Tensor:
    return torch.arange(elems, dtype=torch.float32) + 1000 * rank


def check_buckets_are_fetched_sent_and_brought_back_in_order() -> None:
    streams = LazyStreams()

    def run() -> None:
        buckets = [torch.zeros(50_000 + k) for k in range(6)]
        for bucket in buckets:  # the "kernel" that computes it has not run yet when it is handed over
            streams.compute(lambda bucket=bucket: bucket.copy_(whole(bucket.numel())))
        works = [dist.all_reduce(bucket, async_op=True) for bucket in buckets]
        dist.barrier()  # needs no copy, and may not overtake
        for work in works:
            work.wait()
        for bucket in buckets:
            expected = sum(whole(bucket.numel(), r) for r in range(WORLD_SIZE))
            assert torch.equal(streams.read(bucket), expected)
        held = set(streams.held)
        assert {(b.data_ptr(), side) for b in buckets for side in ("out", "back")} <= held

    on(streams, run)


def check_a_call_that_no_thread_can_take_fails_and_is_no_call_less() -> None:
    group = dist.new_group(timeout=timedelta(seconds=60))

    def run() -> None:
        with pytest.raises(EngineError if RANK == 0 else MismatchError):
            dist.all_reduce(torch.ones(1000), group=group)

    with pytest.MonkeyPatch.context() as patch:
        if RANK == 0:
            patch.setattr(link_of(group).owner, "outbox", Outbox())
            threading.stack_size(NO_SUCH_STACK)
        try:
            on(LazyStreams(), run)
        finally:
            threading.stack_size(0)


def check_the_caller_never_waits_for_a_copy_out() -> None:
    streams = LazyStreams()

    def run() -> None:
        tensor = torch.ones(1000)
        before = streams.log.count("synchronize out")
        caller_blocked = streams.synchronize
        here = threading.current_thread()

        def synchronize(event: object) -> None:
            assert threading.current_thread() is not here
            caller_blocked(event)

        streams.synchronize = synchronize  # type: ignore[method-assign]
        dist.all_reduce(tensor, async_op=True).wait()
        assert torch.equal(streams.read(tensor), torch.full((1000,), float(WORLD_SIZE)))
        assert streams.log.count("synchronize out") == before + 1

    on(streams, run)


def check_a_result_reaches_a_stream_only_through_its_wait() -> None:
    streams = LazyStreams()

    def run() -> None:
        tensor = torch.zeros(100)
        work = dist.broadcast(tensor if RANK else tensor + 7, 0, async_op=True)
        while not work.ending.has_come():  # the operation, not the copy
            pass
        if RANK:
            assert not work.is_completed(), "the copy back has not run: nobody waited for it"
            assert torch.equal(streams.read(tensor), torch.zeros(100))
        work.wait()
        if RANK:
            assert torch.equal(streams.read(tensor), torch.full((100,), 7.0))
            assert work.is_completed()

    on(streams, run)


def check_every_collective_moves_what_the_stream_computed() -> None:
    streams = LazyStreams(eager_reader=True)

    def run() -> None:
        elems = 3000
        rows = [torch.zeros(elems) for _ in range(WORLD_SIZE)]
        dist.all_gather(rows, whole(elems))
        assert all(torch.equal(row, whole(elems, r)) for r, row in enumerate(rows))
        flat = torch.zeros(WORLD_SIZE * elems)
        dist.all_gather_into_tensor(flat, whole(elems))
        assert torch.equal(flat, torch.cat([whole(elems, r) for r in range(WORLD_SIZE)]))
        part = torch.zeros(elems)
        dist.reduce_scatter_tensor(part, whole(WORLD_SIZE * elems))
        mine = slice(RANK * elems, (RANK + 1) * elems)
        assert torch.equal(part, sum(whole(WORLD_SIZE * elems, r)[mine] for r in range(WORLD_SIZE)))
        given = [whole(10 + r) for r in range(WORLD_SIZE)]
        taken = [torch.zeros(10 + RANK) for _ in range(WORLD_SIZE)]
        dist.all_to_all(taken, given)
        assert all(torch.equal(t, whole(10 + RANK, r)) for r, t in enumerate(taken))
        matrix = whole(64).view(8, 8).t()  # not contiguous
        dist.all_reduce(matrix)
        assert torch.equal(matrix, sum(whole(64, r).view(8, 8).t() for r in range(WORLD_SIZE)))
        total = whole(elems)
        dist.reduce(total, 0)
        if RANK == 0:
            assert torch.equal(total, sum(whole(elems, r) for r in range(WORLD_SIZE)))
        box = torch.zeros(5)
        if RANK == 0:
            for other in range(1, WORLD_SIZE):
                dist.send(whole(5), other)
        else:
            dist.recv(box, 0)
            assert torch.equal(box, whole(5, 0))

    on(streams, run)


def check_sparse_sums() -> None:
    def run() -> None:
        tensor = torch.sparse_coo_tensor([[RANK, 5]], [1.0, 2.0], (8,))
        dist.all_reduce(tensor)
        expected = torch.zeros(8)
        expected[:WORLD_SIZE] += 1.0
        expected[5] += 2.0 * WORLD_SIZE
        assert torch.equal(tensor.to_dense(), expected)

    on(LazyStreams(eager_reader=True), run)


def check_a_future_of_a_sparse_sum_is_ready_after_the_kernels_that_add() -> None:
    streams, start = LazyStreams(eager_reader=True), _sparse.start

    def with_kernels(*args: Any) -> tuple[list[Any], Callable[[], None]]:
        works, add = start(*args)
        return works, lambda: streams.compute(add)

    def run() -> None:
        tensor = torch.sparse_coo_tensor([[RANK]], [1.0], (4,))
        (total,) = dist.all_reduce(tensor, async_op=True).get_future().wait()
        assert torch.equal(total.to_dense(), torch.tensor([1.0, 1.0, 0.0, 0.0]))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_sparse, "start", with_kernels)
        on(streams, run)


def check_models_train_as_on_the_host() -> None:
    def trained(tolerant: bool) -> list[torch.Tensor]:
        torch.manual_seed(1)
        model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8)), bucket_cap_mb=0.01)
        if tolerant:
            gradwire.torch.tolerate_loss(model, preset="reliable")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(4):
            optimizer.zero_grad()
            model(whole(64) / 1000 + step).square().mean().backward()
            optimizer.step()
        return [p.detach().clone() for p in model.parameters()]

    for tolerant in (False, True):
        expected = trained(tolerant)
        found: list[torch.Tensor] = []
        on(LazyStreams(eager_reader=True), lambda tolerant=tolerant, found=found: found.extend(trained(tolerant)))
        assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def check_sharded_models_train_as_on_the_host() -> None:
    def trained() -> list[torch.Tensor]:
        torch.manual_seed(1)
        mesh = DeviceMesh.from_group(WORLD, "cpu", mesh_dim_names=("shard",))
        model = fully_shard(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 8)), mesh=mesh)
        gradwire.torch.tolerate_loss(model, preset="reliable")
        for step in range(3):
            model(whole(64).view(1, -1) / 1000 + step).square().mean().backward()
        return [p.grad.full_tensor().clone() for p in model.parameters()]

    expected = trained()
    found: list[torch.Tensor] = []
    on(LazyStreams(eager_reader=True), lambda: found.extend(trained()))
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def check_buffers_are_used_again() -> None:
    streams = LazyStreams(eager_reader=True)

    def run() -> None:
        for _ in range(20):
            works = [dist.all_reduce(torch.ones(10_000), async_op=True) for _ in range(2)]
            for work in works:
                work.wait()
        assert streams.pinned_bytes == 2 * 65536
        assert _staging.pool_of(streams).held_bytes == streams.pinned_bytes

    on(streams, run)


def check_tensors_of_inference_mode_may_be_waited_for_outside_of_it() -> None:
    def run(make: Callable[[], torch.Tensor]) -> None:
        for finish in (lambda work: work.wait(), lambda work: work.get_future().wait()):
            with torch.inference_mode():
                tensor = make()
                work = dist.all_reduce(tensor, async_op=True)
            finish(work)
            assert torch.equal(tensor, torch.full_like(tensor, WORLD_SIZE))

    run(lambda: torch.ones(4, 4).t()[1:])  # not contiguous
    on(LazyStreams(eager_reader=True), lambda: run(lambda: torch.ones(100)))


def check_a_call_that_has_ended_holds_no_memory() -> None:
    def run() -> None:
        tensor = torch.ones(1000)
        alive = weakref.ref(tensor)
        future = dist.all_reduce(tensor, async_op=True).get_future()
        del tensor
        future.wait()
        del future
        end = time.monotonic() + PATIENCE_S
        while alive() is not None and time.monotonic() < end:  # the threads may not have returned from the call yet
            gc.collect()
        assert alive() is None

    on(LazyStreams(eager_reader=True), run)


class Broken(LazyStreams):
    """A device whose copies fail."""

    def synchronize(self, event: object) -> None:  # noqa: ARG002
        raise RuntimeError("CUDA error: an illegal memory access was encountered")


def check_a_copy_that_fails_is_the_works_error_and_where_all_fail_the_group_goes_on() -> None:
    def run() -> None:
        works = [dist.all_reduce(torch.ones(10), async_op=True) for _ in range(2)]
        for work in works:
            with pytest.raises(RuntimeError, match="illegal memory access"):
                work.wait()
        future = dist.all_reduce(torch.ones(10), async_op=True).get_future()
        with pytest.raises(RuntimeError, match="illegal memory access"):
            future.wait()

    on(Broken(), run)
    tensor = torch.ones(10)
    dist.all_reduce(tensor)
    assert torch.equal(tensor, torch.full((10,), float(WORLD_SIZE)))


class Hung(LazyStreams):
    """A device that comes to a copy out only when it is told to."""

    def __init__(self) -> None:
        super().__init__(eager_reader=True)
        self.go_on = threading.Event()

    def synchronize(self, event: object) -> None:
        self.go_on.wait()
        super().synchronize(event)  # type: ignore[arg-type]


def check_abort_ends_calls_whose_device_never_comes_to_the_copy() -> None:
    group, streams = dist.new_group(), Hung()
    link, submitted = link_of(group), []
    submit = link._submit

    def run() -> None:
        works = [dist.all_reduce(torch.ones(10), group=group, async_op=True) for _ in range(2)]
        works.append(dist.barrier(group, async_op=True))
        link.abort()
        for work in works:
            with pytest.raises(ShutDownError, match="copied"):
                work.wait()
        assert not submitted
        late = dist.all_reduce(torch.ones(10), group=group, async_op=True)
        with pytest.raises(GradwireError):
            late.wait()
        assert len(submitted) == 1
        other = dist.all_reduce(
            tensor := torch.ones(10), async_op=True
        )  # in the thread's queue behind what it waits for
        streams.go_on.set()
        other.wait()
        assert torch.equal(tensor, torch.full((10,), float(WORLD_SIZE)))
        assert len(submitted) == 1, "what was dropped is not submitted"

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(link, "_submit", lambda call, timeout: submitted.append(call) or submit(call, timeout))
        on(streams, run)


def check_a_wait_ends_by_its_own_timeout_where_the_device_has_not_come_to_the_copy() -> None:
    streams = Hung()

    def run() -> None:
        work = dist.all_reduce(tensor := torch.ones(10), async_op=True)
        with pytest.raises(WaitTimeoutError, match="still in flight"):
            work.wait(timedelta(milliseconds=1))
        streams.go_on.set()
        work.wait()
        assert torch.equal(tensor, torch.full((10,), float(WORLD_SIZE)))

    on(streams, run)


def check_a_device_that_never_comes_to_the_copy_ends_the_call_and_its_group_by_the_timeout() -> None:
    group, streams = dist.new_group(), Hung()
    link_of(group).timeout = timedelta(seconds=1)  # of every call that names none

    def run() -> None:
        works = [dist.all_reduce(torch.ones(10), group=group, async_op=True) for _ in range(2)]
        works.append(dist.barrier(group, async_op=True))  # needs no copy, but its place is behind them
        with pytest.raises(RuntimeError, match="had not been copied"):
            works[1].get_future().wait()
        for work in works:
            with pytest.raises(DeadlineError, match=r"had not been copied .* 1 s after the call") as caught:
                work.wait()
            assert caught.value.fields["waited_s"] == 1.0
        with pytest.raises(GradwireError):
            dist.barrier(group)
        streams.go_on.set()
        dist.all_reduce(tensor := torch.ones(10))
        assert torch.equal(tensor, torch.full((10,), float(WORLD_SIZE))), "other groups go on"

    on(streams, run)


class BrokenAtTheEnd(LazyStreams):
    """A device on which nothing can be ordered once the results are on their way."""

    def entered(self, stream: object) -> Any:  # noqa: ARG002
        raise RuntimeError("CUDA error: unspecified launch failure")


def check_what_fails_while_a_future_is_completed_is_the_futures_error() -> None:
    def run() -> None:
        future = dist.all_reduce(torch.ones(10), async_op=True).get_future()
        with pytest.raises(RuntimeError, match="unspecified launch failure"):
            future.wait()

    on(BrokenAtTheEnd(), run)
    work = gradwire.torch.all_reduce(tensor := torch.ones(10), preset="reliable", async_op=True)
    work.observer = lambda _: 1 // 0
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        work.future_of(tensor).wait()


def check_a_copy_that_fails_on_one_rank_alone_is_an_error_on_all() -> None:
    group = dist.new_group()
    streams = Broken() if RANK == 0 else LazyStreams()

    def run() -> None:
        with pytest.raises((RuntimeError, MismatchError)):
            dist.all_reduce(torch.ones(10), group=group, async_op=True).wait()

    on(streams, run)
