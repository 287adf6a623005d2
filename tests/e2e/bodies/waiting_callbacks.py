"""Callbacks that wait for other calls: of their futures, which only the thread of the callback could complete, and otherwise."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from gradwire import _runtime
from gradwire._completer import PATIENCE_S, Completer
from rank import RANK, WORLD_SIZE

GLOO = dist.new_group(backend="gloo")
LONG_S = 60.0  # in which a busy machine has the others come, so that a callback that waits for them is no news


def completer() -> Completer:
    owner = _runtime.current()
    assert owner is not None
    return owner.completer


@contextmanager
def patience(seconds: float) -> Iterator[None]:
    """Within it a callback may hold up the others for so long."""
    owner = completer()
    owner._patience_s = seconds
    try:
        yield
    finally:
        with owner._lock:
            owner._patience_s = PATIENCE_S
            owner._changed.notify()  # whoever looks would sleep for the longer time


def sum_within_a_callback(name: str, *, by_future: bool) -> threading.Thread | None:
    """The first call ends when rank 0's callback is there, and the second one when that waits for it. The callback's thread."""
    store = dist.distributed_c10d._get_default_store()
    first, second = torch.full((10,), 1.0 + RANK), torch.full((10,), 10.0 + RANK)
    if RANK:
        store.wait([f"{name}: watches"])
        dist.all_reduce(first)
        store.wait([f"{name}: waits"])
        dist.all_reduce(second)
        return None
    threads: list[threading.Thread] = []
    works = [dist.all_reduce(tensor, async_op=True) for tensor in (first, second)]
    futures = [work.get_future() for work in works]

    def add(future: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
        threads.append(threading.current_thread())
        store.set(f"{name}: waits", "")
        if by_future:
            return future.value()[0] + futures[1].wait()[0]
        works[1].wait()
        return future.value()[0] + second

    total = futures[0].then(add)
    store.set(f"{name}: watches", "")
    expected = sum((1.0 + rank) + (10.0 + rank) for rank in range(WORLD_SIZE))
    assert torch.equal(total.wait(), torch.full((10,), expected))
    return threads[0]


def check_a_callback_may_wait_for_the_work_of_another_call() -> None:
    with patience(LONG_S):
        sum_within_a_callback("work", by_future=False)
        assert not completer()._has_warned


def check_a_callback_that_waits_for_the_future_of_another_call_ends() -> None:
    for number in range(2):
        started = time.monotonic()
        thread = sum_within_a_callback(f"future {number}", by_future=True)
        if thread is not None:
            assert time.monotonic() - started >= PATIENCE_S / 2, "the callback was not held up: this tests nothing"
            assert completer()._has_warned
            thread.join(30)
            assert not thread.is_alive()


def check_one_thread_goes_on_with_what_comes_afterwards() -> None:
    seen: list[tuple[int, threading.Thread]] = []
    works = [dist.all_reduce(torch.ones(10), async_op=True) for _ in range(20)]
    futures = [
        work.get_future().then(lambda _f, i=i: seen.append((i, threading.current_thread())))
        for i, work in enumerate(works)
    ]
    torch.futures.wait_all(futures)
    assert len(seen) == 20
    others = {thread for _, thread in seen} - {threading.current_thread()}
    assert others <= {completer()._thread}
    assert [thread.name for thread in threading.enumerate()].count("gradwire-completer") <= 1


def check_a_callback_that_never_ends_lets_the_process_end() -> None:
    """As all that is left: see test_every_rank_ends_cleanly."""
    began = threading.Event()

    def stay(_future: torch.futures.Future[list[torch.Tensor]]) -> None:
        began.set()
        threading.Event().wait()

    store = dist.distributed_c10d._get_default_store()
    if RANK:
        store.wait(["stays: watches"])
        dist.all_reduce(torch.ones(10))
        return
    work = dist.all_reduce(torch.ones(10), async_op=True)
    work.get_future().then(stay)
    store.set("stays: watches", "")
    assert began.wait(30)
