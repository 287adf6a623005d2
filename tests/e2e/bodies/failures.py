"""Calls that ranks disagree about. Each poisons its group, so each check makes one of its own."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import gradwire.torch
import pytest
import torch
import torch.distributed as dist
from gradwire.errors import (
    AbortedError,
    DeadlineError,
    GradwireError,
    GroupError,
    InvalidRequestError,
    MismatchError,
    UnsupportedError,
)
from gradwire.torch import _compat, _memory
from rank import RANK, WORLD_SIZE
from torch import nn
from torch.nn.parallel import DistributedDataParallel

GLOO = dist.new_group(backend="gloo")
IS_WHOLE = _compat.backend_class() is None  # before torch 2.14


def error_of(call: Callable[[], Any], kind: type[Exception] = GradwireError) -> Any:
    """The error that `call` ends with."""
    with pytest.raises(kind) as caught:
        call()
    return caught.value


def mismatch(call: Callable[[Any], Any]) -> None:
    """Every rank's `call(group)` ends with a MismatchError that names two ranks, and so does the next call."""
    group = dist.new_group(timeout=timedelta(seconds=20))
    error = error_of(lambda: call(group), MismatchError)
    assert {error.rank_a, error.rank_b} <= set(range(WORLD_SIZE)), error
    assert error.a != error.b
    later = error_of(lambda: dist.all_reduce(torch.ones(3), group=group), GroupError)
    assert str(later) == str(error), f"{later} after {error}"


def check_shapes_that_differ_are_named_on_every_rank() -> None:
    mismatch(lambda group: dist.all_reduce(torch.ones(10 + RANK), group=group))
    mismatch(lambda group: dist.all_reduce(torch.ones(100_000 + (RANK == 1)), group=group))


def in_another_order(group: Any, *, beside: bool) -> str:
    """What the first of two calls ends with that rank 0 makes in another order than the rest; `beside`: one is made by another thread."""
    works: list[dist.Work] = []

    def call(elems: int) -> None:
        works.append(dist.all_reduce(torch.ones(elems), group=group, async_op=True))

    for elems in (4, 3) if RANK == 0 else (3, 4):
        if beside and elems == 4:
            thread = threading.Thread(target=call, args=(elems,))
            thread.start()
            thread.join()
        else:
            call(elems)
    return str(error_of(works[0].wait, MismatchError))


def check_an_order_that_differs_is_said_to_come_of_threads_where_there_were_several() -> None:
    for beside in (False, True):
        text = in_another_order(dist.new_group(timeout=timedelta(seconds=20)), beside=beside)
        assert ("several threads of this process" in text) == beside, text


def check_sparse_shapes_that_differ_are_named_and_the_group_goes_on() -> None:
    is_other = RANK == 1
    group = dist.new_group(timeout=timedelta(seconds=20))
    for shape, sparse_dim in (
        ((20 if is_other else 10,), 1),
        ((4, 3) if is_other else (4,), 1),
        ((4, 6) if is_other else (6, 4), 2),
        ((4, 3), 2 if is_other else 1),
    ):
        sparse = torch.ones(shape).to_sparse(sparse_dim)
        error = error_of(lambda sparse=sparse: dist.all_reduce(sparse, group=group), MismatchError)
        assert (error.rank_a, error.rank_b) == (0, 1)
        mine = error.b if is_other else error.a
        assert (mine["shape"], mine["sparse_dim"]) == (shape, sparse_dim)
        assert torch.equal(sparse.to_dense(), torch.ones(shape)), "changed"
    total = torch.ones(2, 2).to_sparse(1)
    dist.all_reduce(total, group=group)
    assert torch.equal(total.to_dense(), torch.full((2, 2), float(WORLD_SIZE)))
    mismatch(lambda group: dist.all_reduce(torch.ones((1,) * (9 + is_other)).to_sparse(), group=group))


def check_dtypes_that_differ_are_named_on_every_rank() -> None:
    dtype = torch.float32 if RANK == 0 else torch.int32
    mismatch(lambda group: dist.all_reduce(torch.ones(10, dtype=dtype), group=group))


def check_collectives_that_differ_are_named_on_every_rank() -> None:
    def call(group: Any) -> None:
        if RANK == 0:
            dist.broadcast(torch.ones(10), 0, group=group)
            dist.barrier(group)  # the root of a broadcast may be done before it learns of the others
        else:
            dist.all_reduce(torch.ones(10), group=group)

    mismatch(call)


def check_roots_and_reductions_that_differ_are_named_on_every_rank() -> None:
    mismatch(
        lambda group: dist.all_reduce(torch.ones(10), dist.ReduceOp.MAX if RANK else dist.ReduceOp.SUM, group=group)
    )


def check_a_message_that_differs_is_named_by_its_tag() -> None:
    group = dist.new_group(timeout=timedelta(seconds=20))
    if RANK == 0:
        error = error_of(lambda: dist.send(torch.zeros(5), 1, tag=7, group=group), MismatchError)
    elif RANK == 1:
        error = error_of(lambda: dist.recv(torch.zeros(4), 0, tag=7, group=group), MismatchError)
    if RANK < 2:
        assert "at message 0" in str(error), error
        assert [(side["tag"], side["root"]) for side in (error.a, error.b)] == [(7, None)] * 2


def check_factors_that_differ_are_said_to_differ_and_no_other_one_is_named() -> None:
    group = dist.new_group(timeout=timedelta(seconds=20))
    scaled = dist._make_nccl_premul_sum(2.0 if RANK else 3.0)
    text = str(error_of(lambda: dist.all_reduce(torch.ones(10), scaled, group=group), MismatchError))
    assert "1.0" not in text, text
    assert "the factor of the scaled sum" in text, text


def check_loss_policies_that_differ_are_named_on_every_rank() -> None:
    bound = 0.1 if RANK == 0 else 0.2
    mismatch(lambda group: gradwire.torch.all_reduce(torch.ones(10), loss_bound=bound, group=group))


def check_a_call_that_fails_on_one_rank_alone_cannot_corrupt_the_next() -> None:
    group = dist.new_group(timeout=timedelta(seconds=20))
    if RANK == 0:
        work = gradwire.torch.all_reduce(torch.ones(10, dtype=torch.float64), group=group, async_op=True)
        error_of(work.wait, UnsupportedError)
    # Without a stand-in for the failed call, rank 0 would now be one call behind the others, with equal shapes.
    failed = []
    for _ in range(2):
        tensor = torch.full((10,), float(RANK))
        try:
            gradwire.torch.all_reduce(tensor, group=group)
        except GroupError as error:
            failed.append(error)
    assert failed, "rank 0 skipped a call and nobody noticed"


def check_lists_that_are_too_short_on_one_rank_fail_its_call_and_move_no_later_one() -> None:
    """Its next call would else meet the other ranks' present one, and return the values of that."""
    group = dist.new_group(timeout=timedelta(seconds=20))

    def gather(step: int) -> list[list[float]]:
        outputs = [[torch.zeros(4), torch.zeros(4)] for _ in range(WORLD_SIZE)]
        if step == 0 and RANK == 1:
            outputs[1].pop()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch: it may go one day
            dist.all_gather_coalesced(outputs, [torch.full((4,), 10.0 * step + i) for i in range(2)], group=group)
        return [[float(tensor[0]) for tensor in rows] for rows in outputs]

    error = error_of(lambda: gather(0))
    assert isinstance(error, InvalidRequestError if RANK == 1 else MismatchError), error
    for step in (1, 2):
        error_of(lambda step=step: gather(step), GroupError)


def check_lists_of_different_lengths_are_refused_alike_and_the_group_goes_on() -> None:
    group = dist.new_group(timeout=timedelta(seconds=20))
    adapter = group if IS_WHOLE else _compat.peeled(group._get_backend(torch.device("cpu")))
    part, whole = torch.ones(4), torch.zeros(4 * WORLD_SIZE)
    rows = [torch.zeros(4) for _ in range(WORLD_SIZE)]
    for method, outputs, inputs in (
        (adapter.allgather, [rows, rows], [part]),
        (adapter.allgather_coalesced, [[part]] * WORLD_SIZE, [part, part]),
        (adapter.allgather_into_tensor_coalesced, [whole], [part, part]),
        (adapter.reduce_scatter, [part], [rows, rows]),
        (adapter.reduce_scatter_tensor_coalesced, [part, part], [whole]),
    ):
        error_of(method(outputs, inputs).wait, InvalidRequestError)
    tensor = torch.ones(4)
    dist.all_reduce(tensor, group=group)
    assert torch.equal(tensor, torch.full((4,), float(WORLD_SIZE)))


def check_a_copy_that_fails_on_one_rank_is_an_error_of_its_call_on_all() -> None:
    def copied(*_: object) -> torch.Tensor:
        raise MemoryError("none left")

    def gather(group: Any) -> None:
        both = torch.zeros(WORLD_SIZE * 10)
        work = dist.all_gather_into_tensor(both, both[5:15], group=group, async_op=True)
        work.wait()

    group = dist.new_group(timeout=timedelta(seconds=20))
    with pytest.MonkeyPatch.context() as patched:
        if RANK == 0:
            patched.setattr(_memory, "kept_from", copied)
        with pytest.raises(MemoryError if RANK == 0 else GroupError):
            gather(group)
    with pytest.raises(GroupError):  # no rank is one call behind the others
        gather(group)


def check_a_refused_request_fails_alike_and_the_group_goes_on() -> None:
    group = dist.new_group()
    error_of(lambda: dist.all_to_all_single(torch.zeros(7), torch.zeros(7), group=group), InvalidRequestError)
    error_of(lambda: dist.all_gather([torch.zeros(2)] * WORLD_SIZE, torch.zeros(3), group=group))
    tensor = torch.ones(4)
    dist.all_reduce(tensor, group=group)
    assert torch.equal(tensor, torch.full((4,), float(WORLD_SIZE)))


def check_a_rank_that_does_not_come_ends_in_a_timeout_that_names_the_call() -> None:
    group = dist.new_group(timeout=timedelta(seconds=60))  # to meet takes longer on a busy machine
    (group if IS_WHOLE else group._get_backend(torch.device("cpu"))).set_timeout(timedelta(seconds=2))
    if RANK != 0:
        error = error_of(lambda: dist.all_reduce(torch.ones(10), group=group), GroupError)
        assert "all_reduce" in str(error), error
        assert "timed out" in str(error), error
        if isinstance(error, DeadlineError):  # the first to notice; it tells the others, whose call is then aborted
            assert isinstance(error, TimeoutError)
        else:  # which says what was seen here: the same rank is behind
            assert isinstance(error, AbortedError), error
            assert error.rank in range(1, WORLD_SIZE), error
            assert error.host, error
            assert "timed out there after" in error.cause, error
        assert "all_reduce" in error.during, error
        assert error.waited_s > 0, error
        assert "rank 0 (" in error.detail, error
    dist.barrier(GLOO)


def check_an_error_in_backward_keeps_the_reducer_alive() -> None:
    """A future that holds an exception crashes the reducer; an exception out of the collective breaks it for good."""
    group = dist.new_group(timeout=timedelta(seconds=20))
    model = DistributedDataParallel(nn.Linear(50, 50), process_group=group)
    gradwire.torch.tolerate_loss(model)
    model(torch.ones(2, 50)).sum().backward()
    # Rank 0 calls something in between: the groups' sequences part.
    if RANK == 0:
        dist.broadcast(torch.ones(1), 0, group=group, async_op=True)
    for attempt in range(2):
        try:
            model(torch.ones(2, 50)).sum().backward()
        except (RuntimeError, GroupError) as error:
            text = str(error)
        else:
            raise AssertionError(f"attempt {attempt}: no error")
        assert "INTERNAL ASSERT" not in text, text
        assert "disagree" in text, text
    assert isinstance(gradwire.torch.last_error(), MismatchError)


def check_waiting_with_a_timeout_leaves_the_collective_running() -> None:
    group = dist.new_group()
    if RANK == 0:
        dist.barrier(GLOO)  # come after the others have given up once
    tensor = torch.ones(10)
    work = dist.all_reduce(tensor, group=group, async_op=True)
    if RANK != 0:
        error_of(lambda: work.wait(timedelta(milliseconds=50)), TimeoutError)
        dist.barrier(GLOO)
    work.wait()
    assert torch.equal(tensor, torch.full((10,), float(WORLD_SIZE)))
