"""Calls that nobody waits for, whose results go through a buffer: who waits for a later one finds them, as with gloo."""

from __future__ import annotations

import contextlib
import gc
import itertools
import logging
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable, Iterator

import gradwire.torch
import pytest
import torch
import torch.distributed as dist
from gradwire.errors import ForkedError, InvalidRequestError, MismatchError
from gradwire.torch import _staging
from gradwire.torch._deliveries import ALL, Deliveries
from gradwire.torch._tolerant import link_of
from lazy_streams import LazyStreams, on
from rank import RANK, WORLD_SIZE

GLOO = dist.new_group(backend="gloo")
WORLD = dist.group.WORLD
LARGE = 4_000_000
PATIENCE_S = 20.0
TOTAL = float(sum(range(1, WORLD_SIZE + 1)))


def own(elems: int = 100) -> torch.Tensor:
    return torch.full((elems,), RANK + 1.0)


def with_gaps(value: float = RANK + 1.0) -> torch.Tensor:
    return torch.full((8, 8), value)[:, ::2]


def rows(elems: int = 100) -> list[torch.Tensor]:
    return [torch.full((elems,), -1.0) for _ in range(WORLD_SIZE)]


def everybodys(found: list[torch.Tensor]) -> bool:
    return all(bool((row == rank + 1).all()) for rank, row in enumerate(found))


def filled(tensor: torch.Tensor, value: float = TOTAL) -> bool:
    return bool((tensor == value).all())


def _monitored_barrier() -> None:
    link = link_of(WORLD)
    link.owner.backends[link.name].monitored_barrier()  # torch before 2.14 calls it for gloo alone


def start_all() -> dict[str, Callable[[], bool]]:
    """Calls of every kind, all dropped: what is true when the result of each has come."""
    gathered, at_root, exchanged = rows(), rows(), rows()
    total, at_zero, from_zero, mine = with_gaps(), with_gaps(), with_gaps(), with_gaps(-1.0)
    tolerant, coalesced = with_gaps(), [with_gaps() for _ in range(3)]
    sparse = torch.sparse_coo_tensor([[RANK]], [1.0], (WORLD_SIZE,))
    is_root = RANK == 0
    dist.all_gather(gathered, own(), async_op=True)
    dist.gather(own(), at_root if is_root else None, 0, async_op=True)
    dist.all_to_all(exchanged, [own() for _ in range(WORLD_SIZE)], async_op=True)
    dist.all_reduce(total, async_op=True)
    dist.reduce(at_zero, 0, async_op=True)
    dist.broadcast(from_zero, 0, async_op=True)
    dist.scatter(mine, [with_gaps(5.0) for _ in range(WORLD_SIZE)] if is_root else None, 0, async_op=True)
    dist.all_reduce(sparse, async_op=True)
    gradwire.torch.all_reduce(tolerant, dist.ReduceOp.SUM, preset="reliable", async_op=True)
    with dist._coalescing_manager(device=torch.device("cpu"), async_ops=True):
        for tensor in coalesced:
            dist.all_reduce(tensor)
    return {
        "all_gather": lambda: everybodys(gathered),
        "gather": lambda: not is_root or everybodys(at_root),
        "all_to_all": lambda: everybodys(exchanged),
        "all_reduce": lambda: filled(total),
        "reduce": lambda: not is_root or filled(at_zero),
        "broadcast": lambda: filled(from_zero, 1.0),
        "scatter": lambda: filled(mine, 5.0),
        "sparse all_reduce": lambda: filled(sparse.to_dense(), 1.0),
        "tolerant all_reduce": lambda: filled(tolerant),
        "coalesced": lambda: all(filled(tensor) for tensor in coalesced),
    }


def check_a_barrier_brings_the_results_of_works_that_were_dropped() -> None:
    delivered = start_all()
    gc.collect()
    dist.barrier()
    assert [name for name, has_come in delivered.items() if not has_come()] == []


def check_so_does_a_call_without_a_buffer() -> None:
    delivered = start_all()
    dist.all_reduce(own())
    assert [name for name, has_come in delivered.items() if not has_come()] == []


def check_results_are_there_however_the_end_of_a_later_call_is_seen() -> None:
    def poll(work: dist.Work) -> None:
        end = time.monotonic() + PATIENCE_S
        while not work.is_completed() and time.monotonic() < end:
            os.sched_yield()

    for see in (lambda work: work.wait(), poll, lambda work: work.get_future().wait()):
        found, whole = rows(LARGE), own(8 * LARGE)
        dist.all_gather(found, own(LARGE), async_op=True)
        dist.all_reduce(whole, async_op=True)
        see(dist.barrier(async_op=True))
        assert everybodys(found)
        assert filled(whole), "the engine writes it itself, and a barrier could be faster"
        found = rows(LARGE)
        dist.all_gather(found, own(LARGE), async_op=True)
        see(dist.all_reduce(own(), async_op=True))
        assert everybodys(found)


def check_a_monitored_barrier_waits_for_the_calls_before_it() -> None:
    found, whole = rows(LARGE), own(8 * LARGE)
    dist.all_gather(found, own(LARGE), async_op=True)
    dist.all_reduce(whole, async_op=True)
    _monitored_barrier()
    assert everybodys(found)
    assert filled(whole)


def check_who_waits_for_the_last_of_large_calls_finds_the_results_of_all() -> None:
    found = [rows(LARGE // 4) for _ in range(6)]
    for each in found:
        work = dist.all_gather(each, own(LARGE // 4), async_op=True)
    work.wait()
    assert all(everybodys(each) for each in found)


def check_of_two_results_for_one_tensor_the_later_call_has_the_last_word() -> None:
    found = []
    for _ in range(20):
        tensor = with_gaps(-1.0)
        works = [dist.broadcast(tensor if RANK else with_gaps(value), 0, async_op=True) for value in (1.0, 2.0)]
        for work in reversed(works):
            work.wait()
            found.append(RANK == 0 or filled(tensor, 2.0))
    assert all(found)


def check_an_old_result_never_comes_into_a_later_call() -> None:
    elems, source = LARGE // 4, torch.full((WORLD_SIZE * LARGE // 4,), 7.0)
    flat = torch.empty_like(source)
    rows_of_flat = list(flat.split(elems))
    later: list[tuple[Callable[[], object], Callable[[], bool]]] = [
        (lambda: dist.broadcast(flat, 0), lambda: everybodys(rows_of_flat)),
        (lambda: dist.broadcast(flat, 0, async_op=True).wait(), lambda: everybodys(rows_of_flat)),
        (lambda: gradwire.torch.all_reduce(flat, preset="reliable"), lambda: everybodys(rows_of_flat)),
        (
            lambda: gradwire.torch.reduce_scatter(rows_of_flat[0], source, preset="reliable"),
            lambda: filled(rows_of_flat[0], 7.0),
        ),
    ]
    seen = []
    for call, is_right in later:
        dist.all_gather(rows_of_flat, own(elems), async_op=True)
        assert link_of(WORLD).deliveries._owed[-1].wait_until(time.monotonic() + PATIENCE_S), (
            "it has ended, undelivered"
        )
        flat.fill_(-RANK)
        call()
        seen.append(is_right())
        dist.barrier()
    assert seen == [True] * len(later)


def check_messages_stand_apart() -> None:
    store = dist.distributed_c10d._get_default_store()
    found, message = rows(), torch.zeros(1)
    if RANK == 0:
        work = dist.all_gather(found, own(), async_op=True)
        dist.recv(message, 1)  # who sends it makes the other call only when this has come
        store.set("received", "")
        work.wait()
    else:
        dist.send(message, 0) if RANK == 1 else None
        store.wait(["received"])
        dist.all_gather(found, own())
    assert everybodys(found)
    pending = dist.irecv(with_gaps(), (RANK + 1) % WORLD_SIZE)
    dist.barrier()  # does not wait for what comes behind it
    dist.send(with_gaps(), (RANK - 1) % WORLD_SIZE)
    pending.wait()


def check_the_failure_of_a_call_that_nobody_waited_for_is_its_own() -> None:
    class Broken(LazyStreams):
        def synchronize(self, event: object) -> None:  # noqa: ARG002
            raise RuntimeError("an illegal memory access was encountered")

    failed: list[dist.Work] = []
    on(Broken(), lambda: failed.append(dist.all_reduce(torch.ones(10), async_op=True)))
    dist.barrier()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="illegal memory access"):
            failed[0].wait()


def check_calls_that_could_not_be_made_are_not_kept() -> None:
    def run() -> None:
        refused = torch.ones(64 << 10, 256).t()  # in pieces, which are copied together again in the end
        work = dist.all_reduce(refused, dist.ReduceOp.BAND, async_op=True)
        assert not link_of(WORLD).deliveries._owed
        with pytest.raises(gradwire.errors.GradwireError):
            work.wait()
        dist.barrier()

    on(LazyStreams(eager_reader=True), run)


def check_streams_are_ordered_behind_results_that_a_later_wait_brought() -> None:
    later: list[Callable[[], object]] = [
        dist.barrier,
        lambda: dist.all_reduce(own()),
        lambda: dist.broadcast(own(), 0),
        lambda: dist.barrier(async_op=True).wait(),
    ]
    for number, wait in enumerate(later):
        streams = LazyStreams()

        def run(wait: Callable[[], object] = wait, streams: LazyStreams = streams, number: int = number) -> None:
            found, tensor = rows(), with_gaps()
            large = torch.full((64 << 10, 256), RANK + 1.0).t() if number == 0 else with_gaps()
            dist.all_gather(found, own(), async_op=True)
            dist.all_reduce(tensor, async_op=True)
            dist.all_reduce(large, async_op=True)
            wait()
            assert filled(tensor, RANK + 1.0), "no stream has been read that waits for it"
            assert filled(streams.read(tensor))
            assert everybodys(found)
            assert filled(large), "in pieces, made of them on a stream of the thread that brought them"

        on(streams, run)


def check_streams_are_ordered_on_all_ways_by_which_a_result_is_brought() -> None:
    for way in (_monitored_barrier, lambda: link_of(WORLD).finish()):
        streams = LazyStreams()

        def run(way: Callable[[], None] = way, streams: LazyStreams = streams) -> None:
            tensor = with_gaps()
            dist.all_reduce(tensor, async_op=True)
            way()
            assert filled(streams.read(tensor))

        on(streams, run)


def check_a_call_has_not_ended_before_results_that_it_brought_have_arrived() -> None:
    streams = LazyStreams()

    def run() -> None:
        tensor = with_gaps()
        dist.all_reduce(tensor, async_op=True)
        barrier = dist.barrier(async_op=True)
        link_of(WORLD).deliveries.wait(ALL, None, is_barrier=True)
        assert not barrier.is_completed()
        streams.end()
        assert barrier.is_completed()
        assert filled(tensor)

    on(streams, run)


def check_so_is_the_stream_of_another_thread() -> None:
    streams = LazyStreams()

    def run() -> None:
        large, brought, seen = torch.full((64 << 10, 256), RANK + 1.0).t(), threading.Event(), []

        def read() -> None:
            brought.wait(PATIENCE_S)
            dist.barrier()
            seen.append(filled(streams.read(large)))

        reader = threading.Thread(target=read)
        reader.start()
        dist.all_reduce(large, async_op=True)
        dist.barrier()
        brought.set()
        reader.join()
        assert seen == [True]

    on(streams, run)


def check_tensors_of_inference_mode_are_written_outside_of_it() -> None:
    with torch.inference_mode():
        tensor, sparse = with_gaps(), torch.sparse_coo_tensor([[RANK]], [1.0], (WORLD_SIZE,))
        dist.all_reduce(tensor, async_op=True)
        kept = [dist.all_reduce(sparse, async_op=True)]
    dist.barrier()
    assert filled(tensor)
    kept[0].wait()
    assert filled(sparse.to_dense(), 1.0)


def check_a_delivered_result_is_held_by_nobody() -> None:
    tensor = with_gaps()
    alive = weakref.ref(tensor)
    dist.all_reduce(tensor, async_op=True)
    del tensor
    dist.barrier()
    gc.collect()
    assert alive() is None


def _handled_while_its_thread_delivers(handle: Callable[[], bool]) -> None:
    found, handled, copy = [rows() for _ in range(3)], [], _staging.copy_into

    def handler(*_: object) -> None:
        handled.append(handle())

    def interrupted(target: torch.Tensor, source: torch.Tensor) -> None:
        if not handled and threading.current_thread() is threading.main_thread():
            handled.append(True)
            os.kill(os.getpid(), signal.SIGUSR1)
        copy(target, source)

    before = signal.signal(signal.SIGUSR1, handler)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_staging, "copy_into", interrupted)
            patch.setattr(
                Deliveries, "bring", lambda _: None
            )  # ranks have to make the handler's calls at the same place
            for each in found:
                dist.all_gather(each, own(), async_op=True)
            dist.barrier()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert handled == [True, True]
    assert all(everybodys(each) for each in found)


def check_a_signal_handler_may_make_calls_while_its_thread_delivers() -> None:
    def handle() -> bool:
        later = rows()
        dist.all_gather(later, own())
        dist.barrier()
        return everybodys(later)

    _handled_while_its_thread_delivers(handle)


def check_a_signal_handler_may_wait_for_futures_while_its_thread_delivers() -> None:
    def handle() -> bool:
        tensors = [own(), with_gaps()]
        futures = [dist.all_reduce(tensor, async_op=True).get_future() for tensor in tensors]
        torch.futures.wait_all(futures)
        futures.append(dist.barrier(async_op=True).get_future())
        futures[-1].wait()
        return all(filled(tensor) for tensor in tensors)

    _handled_while_its_thread_delivers(handle)


def check_a_result_for_memory_that_was_given_back_is_an_error() -> None:
    streams = LazyStreams()
    for around, left in itertools.product((lambda run: run(), lambda run: on(streams, run)), (0, 8 * 7 * 4)):

        def run(left: int = left) -> None:
            given_back, kept = with_gaps(), with_gaps()
            works = [dist.all_reduce(tensor, async_op=True) for tensor in (kept, given_back)]
            assert works[1].ending.wait_until(time.monotonic() + PATIENCE_S)
            given_back.untyped_storage().resize_(left)
            with pytest.raises(InvalidRequestError, match="was given back"):
                works[1].wait()
            assert filled(streams.read(kept))

        around(run)


def check_a_call_in_flight_keeps_the_memory_of_a_tensor_that_gets_another() -> None:
    tensor, pattern = torch.empty(LARGE), 7.0
    if RANK == 0:
        work = dist.broadcast(tensor, src=1, async_op=True)
        tensor.data = torch.zeros(1)
        others = [torch.full((LARGE,), pattern) for _ in range(4)]  # in memory that is free
        GLOO.barrier().wait()
        work.wait()
        assert all(filled(other, pattern) for other in others)
    else:
        GLOO.barrier().wait()
        dist.broadcast(tensor, src=1)


def check_a_tensor_whose_memory_was_given_back_is_refused() -> None:
    tensor = own()[50:]
    tensor.untyped_storage().resize_(50 * 4)
    work = dist.all_reduce(tensor, async_op=True)
    with pytest.raises(InvalidRequestError, match="given back"):
        work.wait()


def check_a_forked_child_is_refused() -> None:
    work = dist.all_gather(rows(), own(), async_op=True)
    last = dist.all_reduce(own(), async_op=True)
    child = os.fork()
    if child == 0:
        signal.alarm(60)  # ends one that waits
        refused = 0
        for ask in (work.wait, last.wait, dist.barrier):
            try:
                ask()
            except ForkedError:
                refused += 1
        os._exit(refused)
    _, status = os.waitpid(child, 0)
    dist.barrier()
    assert os.waitstatus_to_exitcode(status) >= 1, "what had been delivered before the fork it is told of"
    work.wait()


def check_destroying_a_group_brings_results() -> None:
    group = dist.new_group()
    found, whole = rows(LARGE), own(LARGE)
    dist.all_gather(found, own(LARGE), group=group, async_op=True)
    dist.all_reduce(whole, group=group, async_op=True)
    dist.destroy_process_group(group)
    assert everybodys(found)
    assert filled(whole)


def check_an_abort_writes_nothing_and_what_had_ended_comes_later() -> None:
    for comes in (lambda _, work: work.wait(), lambda group, _: dist.destroy_process_group(group)):
        group = dist.new_group()
        link, found = link_of(group), [rows(), rows()]
        for each in found:
            work = dist.all_gather(each, own(), group=group, async_op=True)
        assert link.deliveries._owed[-1].wait_until(time.monotonic() + PATIENCE_S)
        dist.barrier()  # of another group: all have ended it
        link.owner.backends[link.name].abort()
        assert all(filled(row, -1.0) for row in found[-1])
        comes(group, work)
        assert all(everybodys(each) for each in found)


@contextlib.contextmanager
def _told_by_barriers() -> Iterator[list[str]]:
    told: list[str] = []

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if "nobody has waited for it" in record.getMessage():
                told.append(record.getMessage())

    handler = Handler()
    logging.getLogger("gradwire").addHandler(handler)
    try:
        yield told
    finally:
        logging.getLogger("gradwire").removeHandler(handler)


def check_a_barrier_tells_of_calls_that_failed_and_were_dropped() -> None:
    def could_not_be_made() -> dist.Work:
        return dist.all_reduce(own(), dist.ReduceOp.BAND, async_op=True)

    with _told_by_barriers() as told:
        could_not_be_made()
        dist.barrier()
        dist.barrier()
        assert len(told) == 1
        assert "BAND" in told[0]
        with contextlib.suppress(gradwire.errors.GradwireError):
            could_not_be_made().wait()
        dist.barrier()
        assert len(told) == 1


def check_a_call_that_could_not_be_made_holds_nothing_of_its_step() -> None:
    def step(*, is_waited_for: bool) -> weakref.ref[torch.Tensor]:
        batch = own()
        work = dist.all_reduce(own(), dist.ReduceOp.BAND, async_op=True)
        if is_waited_for:
            with contextlib.suppress(gradwire.errors.GradwireError):
                work.wait()
        return weakref.ref(batch)

    alive = [step(is_waited_for=is_waited_for) for is_waited_for in (False, True)]
    gc.collect()
    assert [batch() for batch in alive] == [None, None]


def check_so_it_does_of_dense_calls_that_failed_on_their_way() -> None:
    groups = [dist.new_group() for _ in range(3)]
    with _told_by_barriers() as told:
        works = [dist.all_reduce(torch.ones(RANK + 2), group=group, async_op=True) for group in groups]
        with pytest.raises(MismatchError):
            works[1].wait()
        with pytest.raises(RuntimeError):
            works[2].get_future().wait()
        for group in groups:
            with contextlib.suppress(gradwire.errors.GradwireError):  # it may have ended with the call
                dist.barrier(group)
        assert len(told) == 1
        assert "MismatchError" in told[0]


def check_the_error_of_a_group_reaches_who_waits_for_a_call_that_a_later_wait_has_seen() -> None:
    group = dist.new_group()
    tensor = torch.full((RANK + 2, 4), 1.0)[:, ::2]
    work = dist.all_reduce(tensor, group=group, async_op=True)
    with contextlib.suppress(gradwire.errors.GradwireError):  # the group may have ended with it
        dist.barrier(group)
    for _ in range(2):
        with pytest.raises(MismatchError):
            work.wait()
    with pytest.raises(RuntimeError):
        work.get_future().wait()
    assert filled(tensor, 1.0)
