"""One rank of `test_communicator.py`: every collective against NumPy, without torch anywhere."""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

sys.modules["torch"] = None  # type: ignore[assignment]  whoever imports it gets an ImportError

import gradwire  # noqa: E402
import numpy as np  # noqa: E402
from gradwire.errors import (  # noqa: E402
    ConfigError,
    GroupError,
    InvalidRequestError,
    MismatchError,
    ShutDownError,
    UnsupportedError,
    WaitTimeoutError,
)

FOLDER = Path(os.environ["GRADWIRE_TEST_FOLDER"])
RANK, WORLD_SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
ELEMS = 1003
DTYPES = (
    "float16", "float32", "float64", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
)  # fmt: skip
NUMPY = {"sum": np.add, "product": np.multiply, "min": np.minimum, "max": np.maximum}


def value(rank: int, dtype: Any = "float32", shape: tuple[int, ...] = (ELEMS,)) -> np.ndarray:
    """Small whole numbers: sums and products are exact in every dtype, whatever the order."""
    return (np.arange(np.prod(shape)).reshape(shape) % 3 + rank + 1).astype(dtype)


def everybody(dtype: Any = "float32", shape: tuple[int, ...] = (ELEMS,)) -> list[np.ndarray]:
    return [value(rank, dtype, shape) for rank in range(WORLD_SIZE)]


def reduced(op: str, rows: list[np.ndarray]) -> np.ndarray:
    """NumPy's result in the dtype of the rows, where it would take a larger one."""
    return NUMPY[op].reduce(rows, dtype=rows[0].dtype)


def same(found: Any, expected: Any) -> None:
    np.testing.assert_array_equal(found, expected, strict=True)


def raises(kind: type[BaseException], call: Callable[[], Any]) -> Any:
    try:
        call()
    except kind as error:
        return error
    raise AssertionError(f"{kind.__name__} was not raised")


def check_all_reduce_of_every_dtype(comm: gradwire.Communicator) -> None:
    for dtype in DTYPES:
        for op in NUMPY:
            array = value(RANK, dtype)
            comm.all_reduce(array, op)
            same(array, reduced(op, everybody(dtype)))


def check_all_reduce_of_means_complex_numbers_and_booleans(comm: gradwire.Communicator) -> None:
    for dtype in ("float16", "float32", "float64"):
        array = value(RANK, dtype) * WORLD_SIZE
        comm.all_reduce(array, "mean")
        same(array, reduced("sum", everybody(dtype)))
    for dtype in ("complex64", "complex128"):
        array = value(RANK, dtype) * np.array(1 + 2j, dtype)
        comm.all_reduce(array)
        same(array, reduced("sum", everybody(dtype)) * np.array(1 + 2j, dtype))
    truth = value(RANK) > 2
    comm.all_reduce(truth, "max")
    same(truth, np.logical_or.reduce([row > 2 for row in everybody()]))


def check_results_go_to_out_and_the_array_stays(comm: gradwire.Communicator) -> None:
    array, out = value(RANK), np.zeros(ELEMS, "float32")
    operation = comm.all_reduce(array, out=out)
    assert operation.result is out
    same(out, reduced("sum", everybody()))
    same(array, value(RANK))


def check_arrays_of_any_strides_and_byte_order(comm: gradwire.Communicator) -> None:
    whole = np.zeros((40, 30), "float32")
    part = whole[::2, ::-3].T
    part[...] = value(RANK, shape=part.shape)
    comm.all_reduce(part)
    same(part, reduced("sum", everybody(shape=part.shape)))
    assert np.count_nonzero(whole) == part.size
    swapped = value(RANK, np.dtype("float32").newbyteorder())
    comm.all_reduce(swapped)
    same(swapped.astype("float32"), reduced("sum", everybody()))
    scalar = np.array(RANK + 1, "int64")
    comm.all_reduce(scalar)
    assert scalar == sum(range(1, WORLD_SIZE + 1))
    comm.all_reduce(np.zeros((0, 3), "float32"))


def check_overlapping_input_and_output(comm: gradwire.Communicator) -> None:
    memory = np.zeros(ELEMS + 1, "float32")
    memory[:-1] = value(RANK)
    comm.all_reduce(memory[:-1], out=memory[1:])
    same(memory[1:], reduced("sum", everybody()))


def check_reduce(comm: gradwire.Communicator) -> None:
    for root in range(WORLD_SIZE):
        array = value(RANK)
        comm.reduce(array, "sum", root)
        same(array, reduced("sum", everybody()) if root == RANK else value(RANK))
        result = comm.reduce(value(RANK), "max", root, out=np.zeros(ELEMS, "float32")).result
        if root == RANK:
            same(result, reduced("max", everybody()))
        else:
            assert result is None


def check_large_reduce(comm: gradwire.Communicator) -> None:
    """Among three ranks each of the others sums a part of it, in memory of its own."""
    many = (100_003,)
    for root in range(WORLD_SIZE):
        array = value(RANK, shape=many)
        comm.reduce(array, "sum", root)
        rows = everybody(shape=many)
        same(array, reduced("sum", rows) if root == RANK else rows[RANK])


def check_broadcast(comm: gradwire.Communicator) -> None:
    for root in range(WORLD_SIZE):
        array = value(RANK, shape=(4, 5))[:, ::2]
        comm.broadcast(array, root)
        same(array, value(root, shape=(4, 5))[:, ::2])
    times = np.array(["2020-01-01", "2021-01-01"], "datetime64[D]") + RANK
    comm.broadcast(times)
    same(times, np.array(["2020-01-01", "2021-01-01"], "datetime64[D]"))


def check_all_gather(comm: gradwire.Communicator) -> None:
    for dtype in (*DTYPES, "bool", "complex128"):
        same(comm.all_gather(value(RANK, dtype, (3, 2))).result, np.stack(everybody(dtype, (3, 2))))
    out = np.zeros((ELEMS, WORLD_SIZE), "float32").T
    comm.all_gather(value(RANK), out=out)
    same(out, np.stack(everybody()))


def check_gather(comm: gradwire.Communicator) -> None:
    for root in range(WORLD_SIZE):
        result = comm.gather(value(RANK, shape=(3, 2)), root).result
        if root == RANK:
            same(result, np.stack(everybody(shape=(3, 2))))
        else:
            assert result is None


def check_scatter(comm: gradwire.Communicator) -> None:
    for root in range(WORLD_SIZE):
        rows = value(root, shape=(WORLD_SIZE, 7)) if root == RANK else None
        out = np.zeros(7, "float32")
        comm.scatter(rows, out, root)
        same(out, value(root, shape=(WORLD_SIZE, 7))[RANK])


def check_reduce_scatter(comm: gradwire.Communicator) -> None:
    shape = (WORLD_SIZE, 11, 2)
    for op in NUMPY:
        same(comm.reduce_scatter(value(RANK, shape=shape), op).result, reduced(op, everybody(shape=shape))[RANK])


def check_all_to_all(comm: gradwire.Communicator) -> None:
    shape = (2 * WORLD_SIZE, 3)
    expected = np.concatenate([row[2 * RANK : 2 * RANK + 2] for row in everybody(shape=shape)])
    same(comm.all_to_all(value(RANK, shape=shape)).result, expected)
    for rows in (value(RANK, shape=shape), np.asfortranarray(value(RANK, shape=shape))):
        comm.all_to_all(rows, out=rows)
        same(rows, expected)
    # Rank s sends s + r rows, all of the value 10 s + r, to rank r.
    counts = [[s + r for r in range(WORLD_SIZE)] for s in range(WORLD_SIZE)]
    rows = np.concatenate([np.full((n, 2), 10 * RANK + r, "int32") for r, n in enumerate(counts[RANK])])
    received = [counts[s][RANK] for s in range(WORLD_SIZE)]
    result = comm.all_to_all(rows, send_rows=counts[RANK], receive_rows=received).result
    same(result, np.concatenate([np.full((n, 2), 10 * s + RANK, "int32") for s, n in enumerate(received)]))


def check_send_and_receive(comm: gradwire.Communicator) -> None:
    right, left = (RANK + 1) % WORLD_SIZE, (RANK - 1) % WORLD_SIZE
    sent = comm.send(value(RANK), right, tag=5, async_op=True)
    array = np.zeros(ELEMS, "float32")
    comm.recv(array, left, tag=5)
    sent.wait()
    same(array, value(left))
    if RANK == 0:
        found = np.zeros(WORLD_SIZE, "int64")
        for _ in range(WORLD_SIZE - 1):
            number = np.zeros((), "int64")
            comm.recv(number)
            found[number] += 1
        assert found.tolist() == [0] + [1] * (WORLD_SIZE - 1)
    else:
        comm.send(np.array(RANK, "int64"), 0)


def check_calls_in_flight_end_in_any_order_of_waiting(comm: gradwire.Communicator) -> None:
    arrays = [value(RANK, shape=(300, 200))[:, ::2] for _ in range(6)]
    operations = [comm.all_reduce(array, async_op=True) for array in arrays]
    for operation in reversed(operations):
        operation.wait(timedelta(seconds=60))
        assert operation.is_completed()
        same(operation.result, reduced("sum", everybody(shape=(300, 200)))[:, ::2])


def check_a_wait_that_gives_up_may_be_repeated(comm: gradwire.Communicator) -> None:
    if RANK == 0:
        array = np.zeros(3, "float32")
        operation = comm.recv(array, 1, tag=9, async_op=True)
        raises(WaitTimeoutError, lambda: operation.wait(timedelta(milliseconds=1)))
        comm.barrier()
        operation.wait()
        same(array, value(1, shape=(3,)))
    else:
        comm.barrier()
        if RANK == 1:
            comm.send(value(1, shape=(3,)), 0, tag=9)


def check_loss_must_be_asked_for(comm: gradwire.Communicator) -> None:
    array = value(RANK)
    error = raises(InvalidRequestError, lambda: comm.all_reduce(array, "mean", loss_bound=0.1))
    assert "tolerate_loss=True" in str(error)
    raises(UnsupportedError, lambda: comm.all_reduce(array.astype("int32"), tolerate_loss=True))
    raises(UnsupportedError, lambda: comm.all_reduce(array, "max", tolerate_loss=True))
    rows = value(RANK, shape=(WORLD_SIZE, 5))
    for more in ({"loss_bound": 0.1}, {"preset": "mlt"}, {"deadline": timedelta(0)}, {"residual": np.zeros_like(rows)}):
        error = raises(InvalidRequestError, lambda more=more: comm.reduce_scatter(rows, "mean", **more))
        assert f"{next(iter(more))} without tolerate_loss=True" in str(error)
    raises(UnsupportedError, lambda: comm.reduce_scatter(rows.astype("float64"), tolerate_loss=True))
    raises(UnsupportedError, lambda: comm.reduce_scatter(rows, "min", tolerate_loss=True))


def check_an_argument_of_another_type_is_a_typed_error(comm: gradwire.Communicator) -> None:
    error = raises(UnsupportedError, lambda: comm.all_reduce(np.ones(4, "int8"), "mean"))
    assert (error.fields["dtype"], error.fields["op"]) == ("int8", "mean")
    raises(UnsupportedError, lambda: comm.all_reduce(np.ones(4, "bool"), "mean"))
    error = raises(ConfigError, lambda: comm.all_reduce(value(RANK), tolerate_loss=True, deadline=5))  # type: ignore[arg-type]
    assert "deadline = 5 is not allowed: a datetime.timedelta" in str(error)
    raises(ConfigError, lambda: comm.barrier(async_op=True).wait(5))  # type: ignore[arg-type]
    raises(InvalidRequestError, lambda: comm.split(1.7))  # type: ignore[arg-type]
    for root in (1.0, "0", None):
        raises(InvalidRequestError, lambda root=root: comm.broadcast(value(RANK), root))
        raises(InvalidRequestError, lambda root=root: comm.gather(value(RANK), root))
    raises(InvalidRequestError, lambda: comm.send(value(RANK), 1 - RANK, tag=0.5))  # type: ignore[arg-type]
    rows = value(RANK, shape=(WORLD_SIZE, 2))
    raises(InvalidRequestError, lambda: comm.all_to_all(rows, send_rows=[1.5] + [1.0] * (WORLD_SIZE - 1)))  # type: ignore[list-item]
    same(comm.broadcast(value(RANK), np.int64(0)).result, value(0))  # type: ignore[arg-type]


def check_what_has_another_shape_or_dtype_is_named(comm: gradwire.Communicator) -> None:
    array, wrong = value(RANK), np.zeros(10)
    error = raises(InvalidRequestError, lambda: comm.all_reduce(array, tolerate_loss=True, residual=wrong))
    assert str(error) == f"residual is float64 (10,), the array is float32 ({ELEMS},)"
    error = raises(InvalidRequestError, lambda: comm.all_reduce(array, out=wrong))
    assert str(error) == f"out is float64 (10,), the result is float32 ({ELEMS},)"
    rows = np.zeros((WORLD_SIZE, 2))
    if RANK == 0:
        error = raises(InvalidRequestError, lambda: comm.scatter(rows, np.zeros(2, "float32")))
        assert str(error) == "out is float32 (2,), a row of the array is float64 (2,)"
    else:
        raises(InvalidRequestError, lambda: comm.scatter(None, np.zeros(2), 1.0))  # so that all ranks have failed


def check_rows_that_are_no_counts_of_rows_are_refused(comm: gradwire.Communicator) -> None:
    array = value(RANK, shape=(WORLD_SIZE, 2))
    ones = [1] * WORLD_SIZE
    for wrong in (2, WORLD_SIZE, [1.0] * WORLD_SIZE, np.ones((WORLD_SIZE, 1), int), [1], [2, *[-1] * (WORLD_SIZE - 1)]):
        for name in ("send_rows", "receive_rows"):
            raises(InvalidRequestError, lambda name=name, wrong=wrong: comm.all_to_all(array, **{name: wrong}))
    for rows in (1 << 70, 1 << 48):
        raises(InvalidRequestError, lambda rows=rows: comm.all_to_all(array, receive_rows=[rows, *ones[1:]]))
    counts = np.array(ones)
    expected = np.stack([row[RANK] for row in everybody(shape=(WORLD_SIZE, 2))])
    same(comm.all_to_all(array, send_rows=counts, receive_rows=counts).result, expected)


def check_a_residual_may_lie_between_the_elements_of_the_array(comm: gradwire.Communicator) -> None:
    both = np.zeros((ELEMS, 2), "float32")
    both[:, 0] = value(RANK)
    comm.all_reduce(both[:, 0], tolerate_loss=True, preset="reliable", residual=both[:, 1])
    same(both[:, 0], reduced("sum", everybody()))
    same(both[:, 1], np.zeros(ELEMS, "float32"))


def check_a_result_needs_a_place_for_each_of_its_elements(comm: gradwire.Communicator) -> None:
    memory = np.zeros(2 * ELEMS, "float32")
    window = np.lib.stride_tricks.as_strided(memory, (ELEMS, 3), (4, 4))
    raises(InvalidRequestError, lambda: comm.all_reduce(window))
    raises(InvalidRequestError, lambda: comm.all_gather(value(RANK, shape=(3,)), out=window[:WORLD_SIZE]))
    assert not memory.any()


def check_the_root_of_a_broadcast_only_reads(comm: gradwire.Communicator) -> None:
    array = np.zeros(ELEMS, "float32")
    if RANK == 1:
        array = np.lib.stride_tricks.as_strided(np.full(1, 7.0, "float32"), (ELEMS,), (0,))
        array.flags.writeable = False
    same(comm.broadcast(array, 1).result, np.full(ELEMS, 7.0, "float32"))


def check_a_result_that_could_not_be_written_is_written_by_the_next_wait(comm: gradwire.Communicator) -> None:
    array = np.repeat(value(RANK), 2)[::2]
    operation = comm.all_reduce(array, async_op=True)
    array.flags.writeable = False
    for _ in range(2):
        raises(ValueError, operation.wait)
    array.flags.writeable = True
    operation.wait()
    same(array, reduced("sum", everybody()))


def check_a_communicator_needs_arguments_of_their_type(_comm: gradwire.Communicator) -> None:
    for name, wrong in (("timeout", 8), ("timeout", timedelta(0)), ("timeout", timedelta(seconds=-1)), ("config", {}),
                        ("rank", 0.9), ("rank", 0.0), ("world_size", WORLD_SIZE + 0.5)):  # fmt: skip
        error = raises(ConfigError, lambda name=name, wrong=wrong: gradwire.Communicator(**{name: wrong}))
        assert (error.field, error.value) == (name, wrong)
        assert f"{name} = " in str(error)


def check_a_tolerant_all_reduce_reports_what_was_delivered(comm: gradwire.Communicator) -> None:
    array = value(RANK, shape=(200_000,)) * WORLD_SIZE
    residual = np.zeros_like(array)
    operation = comm.all_reduce(
        array, "mean", tolerate_loss=True, preset="mlt", loss_bound=0.2, deadline=timedelta(0), residual=residual
    )
    report = operation.report()
    assert report.elems == array.size
    assert report.elems_uncounted <= 0.2 * array.size
    uncounted = np.zeros(array.size, bool)
    for start, end in report.uncounted:
        uncounted[start:end] = True
    assert not residual[~uncounted].any()
    comm.all_reduce(uncounted, "max")
    # Without faults too a transfer may end before the last packet, once the bound is met.
    assert uncounted.any() or "GRADWIRE_CHAOS" not in os.environ
    known = ~uncounted
    for start, end in report.filled:
        known[start:end] = False
    same(array[known], reduced("sum", everybody(shape=array.shape))[known])


def check_a_tolerant_reduce_scatter_that_loses_nothing_is_the_exact_one(comm: gradwire.Communicator) -> None:
    shape = (WORLD_SIZE, 300, 70)
    for dtype in ("float32", "float16"):
        given, residual = value(RANK, dtype, shape), np.zeros(shape, dtype)
        exact = comm.reduce_scatter(given).result
        out = np.zeros((70, 300), dtype).T  # its strides are the caller's business
        operation = comm.reduce_scatter(given, out=out, tolerate_loss=True, preset="reliable", residual=residual)
        same(operation.result, exact)
        same(out, reduced("sum", everybody(dtype, shape))[RANK])
        assert operation.report().elems_uncounted == 0
        assert not residual.any()


def check_a_tolerant_reduce_scatter_is_what_arrived_at_the_owner(comm: gradwire.Communicator) -> None:
    """The owner's mean and what each rank owes, from the ranks that the senders' reports say did count."""
    shape = (WORLD_SIZE, 200_000)
    rows = [60 * row for row in everybody(shape=shape)]  # every mean is a whole number
    for feeds_back in (False, True):
        given, residual = rows[RANK].copy(), np.zeros(shape, "float32")
        operation = comm.reduce_scatter(
            given, "mean", tolerate_loss=True, preset="mlt", loss_bound=0.2, deadline=timedelta(0),
            residual=residual if feeds_back else None,
        )  # fmt: skip
        report = operation.report()
        uncounted = np.zeros(given.size, bool)
        for start, end in report.uncounted:
            uncounted[start:end] = True
        uncounted = uncounted.reshape(shape)
        assert report.elems_uncounted == uncounted.sum() <= 0.2 * given.size
        assert uncounted.any() or "GRADWIRE_CHAOS" not in os.environ
        assert not uncounted[RANK].any(), "a rank's own values are there"
        same(given, rows[RANK])
        missing = comm.all_gather(uncounted).result[:, RANK]  # for each rank, of this one's row
        count = WORLD_SIZE - missing.sum(0)
        total = sum(np.where(missing[rank], 0.0, rows[rank][RANK]) for rank in range(WORLD_SIZE))
        few = feeds_back & (2 * count <= WORLD_SIZE)
        same(operation.result, (total / np.where(few, WORLD_SIZE, count)).astype("float32"))
        owed = np.where(uncounted, given, np.float32(0.0))
        owed[RANK] = np.where(few, 0.0, -(WORLD_SIZE - count) * operation.result)
        np.testing.assert_array_equal(residual, owed if feeds_back else np.zeros_like(owed))


def check_a_residual_of_a_reduce_scatter_is_like_its_array(comm: gradwire.Communicator) -> None:
    rows = value(RANK, shape=(WORLD_SIZE, 6))
    for wrong in (np.zeros(6, "float32"), np.zeros((WORLD_SIZE, 6)), rows):
        raises(InvalidRequestError, lambda wrong=wrong: comm.reduce_scatter(rows, tolerate_loss=True, residual=wrong))
    comm.barrier()


def check_all_ranks_of_a_reduce_scatter_feed_back_or_none_does(comm: gradwire.Communicator) -> None:
    del comm
    with gradwire.Communicator(timeout=timedelta(seconds=30)) as second:
        rows = value(RANK, shape=(WORLD_SIZE, 6))
        residual = np.zeros_like(rows) if RANK == 0 else None
        raises(MismatchError, lambda: second.reduce_scatter(rows, tolerate_loss=True, residual=residual))


def check_a_call_that_one_rank_cannot_make_is_no_other_call(comm: gradwire.Communicator) -> None:
    raises(InvalidRequestError, lambda: comm.all_reduce(value(RANK), out=np.zeros(3)))  # on all alike: they go on
    raises(InvalidRequestError, lambda: comm.reduce_scatter(np.zeros(WORLD_SIZE + 1)))
    raises(InvalidRequestError, lambda: comm.broadcast(value(RANK), WORLD_SIZE))
    raises(UnsupportedError, lambda: comm.broadcast(np.array([object()])))
    raises(UnsupportedError, lambda: comm.all_reduce([1.0, 2.0]))  # type: ignore[arg-type]
    frozen = value(RANK)
    frozen.flags.writeable = False
    raises(InvalidRequestError, lambda: comm.all_reduce(frozen))
    comm.barrier()


def check_what_cannot_be_written_is_refused_by_a_sync_that_nobody_joins_in(comm: gradwire.Communicator) -> None:
    frozen = np.frombuffer(bytes(16), "float64")
    repeated = np.lib.stride_tricks.as_strided(np.zeros(3), (2, 2), (8, 8))
    for array in (frozen, repeated):
        raises(InvalidRequestError, lambda array=array: comm.sync(np.zeros(3), array))
    assert not comm.sync(np.zeros(3))


def check_a_call_that_only_one_rank_cannot_make_fails_on_all(comm: gradwire.Communicator) -> None:
    del comm
    with gradwire.Communicator(timeout=timedelta(seconds=30)) as second:
        if RANK == 0:
            raises(InvalidRequestError, lambda: second.all_reduce(value(RANK), out=np.zeros(3)))
        # For rank 0 this is its next call: it must not pass for the one that it could not make.
        raises(GroupError, lambda: second.all_reduce(value(RANK)))


def check_bits_are_reduced(comm: gradwire.Communicator) -> None:
    bitwise = {"band": np.bitwise_and, "bor": np.bitwise_or, "bxor": np.bitwise_xor}
    for op, expected in bitwise.items():
        for dtype in ("uint8", "int16", "int32", "uint64", "bool"):
            rows = [
                (np.arange(ELEMS) * (rank + 3) % 7 > 2 if dtype == "bool" else value(rank, dtype))
                for rank in range(WORLD_SIZE)
            ]
            array = rows[RANK].copy()
            comm.all_reduce(array, op)
            same(array, expected.reduce(rows))
        raises(UnsupportedError, lambda op=op: comm.all_reduce(np.ones(3, "float32"), op))


def check_parts_of_a_communicator(comm: gradwire.Communicator) -> None:
    """Ranks 0 and up in reverse order, the last one in a part of its own; then a part without rank 0."""
    last = WORLD_SIZE - 1
    part = comm.split(1 if last == RANK else 0, key=-RANK)
    assert (part.rank, part.world_size) == ((0, 1) if last == RANK else (last - 1 - RANK, last))
    members = [last] if last == RANK else list(range(last - 1, -1, -1))
    same(part.all_gather(np.array([RANK])).result[:, 0], np.array(members))
    without = comm.split(None if RANK == 0 else 7)
    assert (without is None) == (RANK == 0)
    if without is not None:
        array = value(RANK)
        without.all_reduce(array)
        same(array, reduced("sum", everybody()[1:]))
        raises(UnsupportedError, lambda: without.split(0))
        without.barrier()  # all have refused: the part goes on
        without.close()
    comm.barrier()
    part.close()
    array = value(RANK)
    comm.all_reduce(array)
    same(array, reduced("sum", everybody()))


def check_a_color_that_is_none_is_refused(comm: gradwire.Communicator) -> None:
    for color, key in ((-1, 0), (1 << 70, 0), ("a", 0), (0, "first")):
        raises(InvalidRequestError, lambda color=color, key=key: comm.split(color, key))


def check_statistics(comm: gradwire.Communicator) -> None:
    stats = comm.stats()
    assert {"group", "engine", "features"} <= stats.keys()
    assert (comm.rank, comm.world_size) == (RANK, WORLD_SIZE)


def check_a_second_communicator_at_the_same_address(comm: gradwire.Communicator) -> None:
    with gradwire.Communicator(timeout=timedelta(seconds=30)) as second:
        array = value(RANK)
        second.all_reduce(array)
        same(array, reduced("sum", everybody()))
        comm.barrier()
    raises(ShutDownError, lambda: second.sync(array))
    error = raises(ShutDownError, second.barrier)
    assert "closed" in str(error)
    second.close()


def check_a_mismatch_is_known_everywhere_last(comm: gradwire.Communicator) -> None:
    elems = ELEMS if RANK else ELEMS + 1
    raises(MismatchError, lambda: comm.all_reduce(np.zeros(elems, "float32")))
    raises(GroupError, comm.barrier)


def record(name: str, result: str) -> None:
    with (FOLDER / f"results-{RANK}").open("a") as file:
        file.write(json.dumps([name, result]) + "\n")


def main() -> None:
    comm = gradwire.Communicator(timeout=timedelta(seconds=60))
    for name, check in list(globals().items()):
        if name.startswith("check_"):
            try:
                check(comm)
            except BaseException:
                record(name, traceback.format_exc())
                raise
            record(name, "ok")
    comm.close()


if __name__ == "__main__":
    main()
