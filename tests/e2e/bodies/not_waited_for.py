"""Calls that nobody waits for, whose results go through a buffer: they come to the caller's tensors all the same, as gloo's do."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections.abc import Callable
from typing import Any

import gradwire.torch
import pytest
import torch
import torch.distributed as dist
from gradwire.errors import MismatchError
from gradwire.torch._tolerant import link_of
from lazy_streams import LazyStreams, on
from rank import RANK, WORLD_SIZE

GLOO = dist.new_group(backend="gloo")
WORLD = dist.group.WORLD
PATIENCE_S = 20.0
TOTAL = float(sum(range(1, WORLD_SIZE + 1)))


def own() -> torch.Tensor:
    return torch.full((100,), RANK + 1.0)


def with_gaps(value: float = RANK + 1.0) -> torch.Tensor:
    return torch.full((8, 8), value)[:, ::2]


def rows() -> list[torch.Tensor]:
    return [torch.full((100,), -1.0) for _ in range(WORLD_SIZE)]


def come(delivered: Callable[[], bool]) -> bool:
    """Whether it is delivered in the end."""
    end = time.monotonic() + PATIENCE_S
    while not delivered() and time.monotonic() < end:
        time.sleep(0.001)  # lets other threads have the interpreter
    return delivered()


def everybodys(found: list[torch.Tensor]) -> bool:
    return all(bool((row == rank + 1).all()) for rank, row in enumerate(found))


def filled(tensor: torch.Tensor, value: float) -> bool:
    return bool((tensor == value).all())


def start_all() -> dict[str, Callable[[], bool]]:
    """Calls of every kind, all dropped: what is true when the result of each has come."""
    gathered, at_root, exchanged = rows(), rows(), rows()
    total, at_zero, from_zero, mine = with_gaps(), with_gaps(), with_gaps(), with_gaps(-1.0)
    tolerant = with_gaps()
    sparse = torch.sparse_coo_tensor([[RANK]], [1.0], (WORLD_SIZE,))
    dist.all_gather(gathered, own(), async_op=True)
    dist.gather(own(), at_root if RANK == 0 else None, 0, async_op=True)
    dist.all_to_all(exchanged, [own() for _ in range(WORLD_SIZE)], async_op=True)
    dist.all_reduce(total, async_op=True)
    dist.reduce(at_zero, 0, async_op=True)
    dist.broadcast(from_zero, 0, async_op=True)
    dist.scatter(mine, [with_gaps(5.0) for _ in range(WORLD_SIZE)] if RANK == 0 else None, 0, async_op=True)
    dist.all_reduce(sparse, async_op=True)
    gradwire.torch.all_reduce(tolerant, dist.ReduceOp.SUM, preset="reliable", async_op=True)
    is_root = RANK == 0
    return {
        "all_gather": lambda: everybodys(gathered),
        "gather": lambda: not is_root or everybodys(at_root),
        "all_to_all": lambda: everybodys(exchanged),
        "all_reduce": lambda: filled(total, TOTAL),
        "reduce": lambda: not is_root or filled(at_zero, TOTAL),
        "broadcast": lambda: filled(from_zero, 1.0),
        "scatter": lambda: filled(mine, 5.0),
        "sparse all_reduce": lambda: filled(sparse.to_dense(), 1.0),
        "tolerant all_reduce": lambda: filled(tolerant, TOTAL),
    }


def check_results_of_works_that_were_dropped_come() -> None:
    delivered = start_all()
    gc.collect()
    assert [name for name, has_come in delivered.items() if not come(has_come)] == []


def check_results_of_works_that_are_kept_and_not_waited_for_come() -> None:
    gathered, tensors = rows(), [with_gaps() for _ in range(3)]
    kept = [dist.all_gather(gathered, own(), async_op=True)]
    kept += [dist.all_reduce(tensor, async_op=True) for tensor in tensors]
    dist.barrier()
    assert come(lambda: everybodys(gathered) and all(filled(tensor, TOTAL) for tensor in tensors))
    for work in kept:
        work.wait()
        assert work.is_completed()
        work.get_future().wait()
    assert all(filled(tensor, TOTAL) for tensor in tensors), "once, whoever asks later"


def check_results_of_coalesced_calls_that_were_dropped_come() -> None:
    tensors = [with_gaps() for _ in range(3)]
    with dist._coalescing_manager(device=torch.device("cpu"), async_ops=True):
        for tensor in tensors:
            dist.all_reduce(tensor)
    assert come(lambda: all(filled(tensor, TOTAL) for tensor in tensors))


def check_who_waits_for_the_last_call_finds_the_results_of_those_before() -> None:
    may_end = threading.Event()
    # Holds up the thread that would deliver them.
    dist.all_reduce(own(), async_op=True).on_end(lambda: may_end.wait(PATIENCE_S))
    found = [rows() for _ in range(20)]
    works = [dist.all_gather(each, own(), async_op=True) for each in found]
    assert come(lambda: all(work.ending.has_come() for work in works[:-1]))
    works[-1].wait()
    is_there = [everybodys(each) for each in found]
    may_end.set()
    assert all(is_there)


def check_of_two_results_for_one_tensor_the_later_call_has_the_last_word() -> None:
    for _ in range(50):
        tensor = with_gaps(-1.0)
        for value in (1.0, 2.0):
            source = tensor if RANK else with_gaps(value)
            works = [dist.broadcast(source, 0, async_op=True)]
        works[-1].wait()
        assert RANK == 0 or filled(tensor, 2.0)


def check_a_call_that_is_waited_for_at_once_is_nothing_for_another_thread() -> None:
    watched: list[Any] = []
    completer = link_of(WORLD).owner.completer
    watch = completer.watch
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(completer, "watch", lambda ops, callback: watched.append(ops) or watch(ops, callback))
        dist.all_reduce(with_gaps())
        dist.all_gather(rows(), own())
        gradwire.torch.all_reduce(with_gaps(), preset="reliable")
        sent = dist.isend(with_gaps(), (RANK + 1) % WORLD_SIZE)
        dist.recv(with_gaps(), (RANK - 1) % WORLD_SIZE)
        sent.wait()
        dist.all_reduce(own(), async_op=True).wait()  # without a buffer
        assert watched == []
        dist.all_gather(rows(), own(), async_op=True).wait()
        assert len(watched) == 1


def check_a_delivered_result_is_held_by_nobody() -> None:
    tensor = with_gaps()
    alive = weakref.ref(tensor)
    dist.all_reduce(tensor, async_op=True)
    del tensor
    assert come(lambda: gc.collect() >= 0 and alive() is None)


def check_results_on_a_device_are_on_their_way_before_that_of_a_later_call() -> None:
    streams = LazyStreams()

    def run() -> None:
        gathered, tensor = rows(), with_gaps()
        works = [dist.all_gather(gathered, own(), async_op=True), dist.all_reduce(tensor, async_op=True)]
        last = dist.all_reduce(own(), async_op=True)
        assert come(lambda: all(work.ending.has_come() for work in works))
        last.wait()
        assert filled(tensor, RANK + 1.0), "no stream has been read that waits for it"
        assert filled(streams.read(tensor), TOTAL)
        assert everybodys(gathered)

    on(streams, run)


def check_results_on_a_device_that_nobody_waits_for_are_on_their_way() -> None:
    streams = LazyStreams()

    def run() -> None:
        dist.all_gather(rows(), own(), async_op=True)
        assert come(lambda: streams.log.count("copy on back") == WORLD_SIZE)

    on(streams, run)


def check_the_error_of_a_call_that_nobody_waited_for_reaches_who_waits_later() -> None:
    group = dist.new_group()
    tensor = torch.full((RANK + 2, 4), 1.0)[:, ::2]
    work = dist.all_reduce(tensor, group=group, async_op=True)
    assert come(lambda: isinstance(gradwire.torch.last_error(), MismatchError))
    for _ in range(2):
        with pytest.raises(MismatchError):
            work.wait()
    with pytest.raises(RuntimeError):
        work.get_future().wait()
    assert filled(tensor, 1.0)
