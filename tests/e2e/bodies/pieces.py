"""Calls on a device's tensors that are cut into pieces, with packets lost: to the caller each is one call."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta

import gradwire.torch
import pytest
import torch
import torch.distributed as dist
from gradwire.errors import GradwireError, InvalidRequestError, MismatchError, PeerLeftError, ShutDownError
from gradwire.report import DeliveryReport, DeliveryTotals
from gradwire.torch import _staging
from gradwire.torch._tolerant import link_of, reduce_scatter
from lazy_streams import LazyStreams, Stream, on
from rank import RANK, WORLD_SIZE
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

GLOO = dist.new_group(backend="gloo")
WORLD = dist.group.WORLD
# With pieces of 1 MiB: three, the last of which is shorter.
ELEMS = 700_001
PIECES = 3
# As many pieces, of a row for each of two ranks.
ROW_ELEMS = ELEMS // 2
PATIENCE_S = 20.0


def whole(elems: int = ELEMS, rank: int = RANK) -> torch.Tensor:
    return torch.arange(elems, dtype=torch.float32) % 4096 + 1000 * rank


def own_row(rank: int = RANK) -> torch.Tensor:
    return whole(ROW_ELEMS, rank)


def total(elems: int = ELEMS) -> torch.Tensor:
    return sum((whole(elems, r) for r in range(WORLD_SIZE)), torch.zeros(elems))


def totals_of(report: DeliveryReport) -> DeliveryTotals:
    """As `StepMeter` counts them, of a report that names every peer."""
    delivered = [part.contributions_delivered for part in report.parts]
    by_time = ("soft_threshold", "early_timeout", "deadline")
    return DeliveryTotals(
        elems_expected=sum(expected for expected, _ in delivered),
        elems_received=sum(received for _, received in delivered),
        elems_uncounted=report.elems_uncounted,
        bytes_sent=report.bytes_sent,
        bytes_retransmitted=report.bytes_retransmitted,
        ended_by_time=sum(peer.closed_by in by_time for part in report.parts for peer in part.peers),
        elapsed_s=report.elapsed_s,
        elems_filled=sum(end - start for part in report.parts for start, end in part.filled),
        elems=sum(part.rotated_elems or part.elems for part in report.parts),
    )


class OneByOne(LazyStreams):
    """Copies a piece out only when those before it have been sent, reduced, and sent on their way back."""

    def __init__(self) -> None:
        super().__init__(eager_reader=True)
        self.fetched = 0
        self.in_vain = 0

    def synchronize(self, event: object) -> None:
        if event.stream.name == "out":  # type: ignore[attr-defined]
            with self.copied:
                self.in_vain += not self.copied.wait_for(self.is_brought_back, 0 if self.in_vain else PATIENCE_S)
            self.fetched += 1
        super().synchronize(event)  # type: ignore[arg-type]

    def is_brought_back(self) -> bool:
        return self.log.count("copy on back") >= self.fetched


class BackAtOnce(OneByOne):
    """Has a piece's result where it belongs before the next piece is copied out, as a device may."""

    def copy(self, stream: Stream, target: torch.Tensor, source: torch.Tensor) -> None:
        super().copy(stream, target, source)
        if stream.name == "back":
            with self.copied:
                stream.run(len(stream.todo))


def check_a_piece_is_sent_and_brought_back_before_the_next_has_been_copied() -> None:
    def finished_by(finish: Callable[[dist.Work], object]) -> None:
        streams, tensor = OneByOne(), whole()
        on(streams, lambda: finish(dist.all_reduce(tensor, async_op=True)))
        assert (streams.fetched, streams.in_vain) == (PIECES, 0)
        assert torch.equal(tensor, total())

    finished_by(lambda work: work.wait())
    finished_by(lambda work: work.get_future().wait())


def check_so_is_a_piece_of_all_rows() -> None:
    def run(streams: OneByOne, call: Callable[[], dist.Work]) -> None:
        on(streams, lambda: call().wait())
        assert (streams.fetched, streams.in_vain) == (PIECES, 0)

    row = own_row()
    gathered = torch.zeros(WORLD_SIZE * ROW_ELEMS)
    run(OneByOne(), lambda: dist.all_gather_into_tensor(gathered, row, async_op=True))
    assert torch.equal(gathered, torch.cat([own_row(r) for r in range(WORLD_SIZE)]))
    scattered = torch.zeros(ROW_ELEMS)
    run(OneByOne(), lambda: dist.reduce_scatter_tensor(scattered, gathered + RANK, async_op=True))
    assert torch.equal(scattered, WORLD_SIZE * row + sum(range(WORLD_SIZE)))
    copied = whole()
    on(streams := LazyStreams(eager_reader=True), lambda: dist.broadcast(copied, 1, async_op=True).wait())
    assert torch.equal(copied, whole(rank=1))
    # The root has the result already, and nothing else is of use to it.
    copies = [streams.log.count(f"copy on {way}") for way in ("out", "back")]
    assert copies == ([PIECES, 0] if RANK == 1 else [0, PIECES])


def check_what_overlaps_at_other_columns_is_read_before_it_is_written() -> None:
    flat, other_columns = torch.zeros(WORLD_SIZE * ROW_ELEMS), slice(ROW_ELEMS // 2, ROW_ELEMS // 2 + ROW_ELEMS)
    flat[other_columns] = own_row()
    on(BackAtOnce(), lambda: dist.all_gather_into_tensor(flat, flat[other_columns], async_op=True).wait())
    assert torch.equal(flat, torch.cat([own_row(r) for r in range(WORLD_SIZE)]))
    expected = WORLD_SIZE * own_row()
    on(BackAtOnce(), lambda: dist.reduce_scatter_tensor(flat[other_columns], flat, async_op=True).wait())
    assert torch.equal(flat[other_columns], expected)


def check_rows_are_gathered_and_scattered_whole_in_every_form() -> None:
    def run() -> None:
        calls = link_of(WORLD).calls
        rows = [own_row(r) for r in range(WORLD_SIZE)]
        found = [torch.zeros(ROW_ELEMS) for _ in rows]
        work = dist.all_gather(found, own_row(), async_op=True)
        future = work.get_future().wait()
        assert all(torch.equal(a, b) for a, b in zip(found, rows, strict=True))
        assert [t.data_ptr() for t in future] == [t.data_ptr() for t in found], "a future of the results as a whole"
        table = torch.zeros(WORLD_SIZE, ROW_ELEMS)
        table[RANK] = own_row()
        dist.all_gather_into_tensor(table, table[RANK])  # in place
        assert torch.equal(table, torch.stack(rows))
        columns = torch.zeros(2 * ROW_ELEMS, WORLD_SIZE).t()  # a row is in no place of its own
        dist.all_gather_into_tensor(columns, torch.cat([own_row(), own_row()])[::2].repeat(2))
        halves = torch.stack([torch.cat([row, row])[::2].repeat(2) for row in rows])
        assert torch.equal(columns, halves)
        part = torch.zeros(2 * ROW_ELEMS)[::2]
        dist.reduce_scatter_tensor(part, table, dist.ReduceOp.AVG)
        assert torch.equal(part, own_row())
        parts = torch.zeros(ROW_ELEMS, dtype=torch.bfloat16)
        dist.reduce_scatter(parts, [(row + RANK).to(torch.bfloat16) for row in rows], dist.ReduceOp.MAX)
        assert torch.equal(parts, (own_row() + WORLD_SIZE - 1).to(torch.bfloat16))
        dist.reduce_scatter_tensor(table[RANK], table)  # in place
        assert torch.equal(table[RANK], WORLD_SIZE * own_row())
        assert link_of(WORLD).calls == calls + 6, "to the caller they are six calls"

    on(LazyStreams(eager_reader=True), run)


def check_several_of_them_as_one() -> None:
    def run() -> None:
        tensors = [own_row(), own_row() + 1]
        with dist._coalescing_manager(async_ops=True) as manager:
            found = [torch.zeros(WORLD_SIZE * ROW_ELEMS) for _ in tensors]
            for tensor, into in zip(tensors, found, strict=True):
                dist.all_gather_into_tensor(into, tensor)
        manager.wait()
        for more, into in enumerate(found):
            assert torch.equal(into, torch.cat([own_row(r) + more for r in range(WORLD_SIZE)]))

    on(LazyStreams(eager_reader=True), run)


def check_a_sharded_model_trains_as_on_the_host() -> None:
    def trained() -> list[torch.Tensor]:
        torch.manual_seed(1)
        mesh = DeviceMesh.from_group(WORLD, "cpu", mesh_dim_names=("shard",))
        model = fully_shard(nn.Sequential(nn.Linear(800, 800), nn.Linear(800, 8)), mesh=mesh)
        for step in range(2):
            model(torch.linspace(step, 1 + RANK, 800).view(1, -1)).square().mean().backward()
        return [p.grad.full_tensor().clone() for p in model.parameters()]

    expected = trained()
    streams = LazyStreams(eager_reader=True)
    found: list[torch.Tensor] = []
    on(streams, lambda: found.extend(trained()))
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def check_rows_that_do_not_fit_are_refused_as_a_whole() -> None:
    def run() -> None:
        calls = link_of(WORLD).calls
        with pytest.raises(InvalidRequestError, match="elements"):
            dist.all_gather_into_tensor(torch.zeros(WORLD_SIZE * ROW_ELEMS + 1), own_row())
        with pytest.raises(InvalidRequestError, match="of the list is"):
            dist.reduce_scatter(own_row(), [own_row(), own_row()[1:]])
        assert link_of(WORLD).calls == calls
        check = torch.zeros(WORLD_SIZE)
        dist.all_gather_into_tensor(check, torch.ones(1))
        assert check.sum() == WORLD_SIZE, "the group goes on"

    on(LazyStreams(eager_reader=True), run)


def check_results_are_those_of_the_whole() -> None:
    def run() -> None:
        calls = link_of(WORLD).calls
        tensor = whole()
        dist.all_reduce(tensor)
        assert torch.equal(tensor, total())
        halves = whole().to(torch.bfloat16)
        dist.all_reduce(halves, dist.ReduceOp.MAX)
        assert torch.equal(halves, whole(rank=WORLD_SIZE - 1).to(torch.bfloat16))
        dist.broadcast(tensor := whole(), 1)
        assert torch.equal(tensor, whole(rank=1))
        dist.reduce(tensor := whole(), 0)
        assert torch.equal(tensor, whole() if RANK else total())
        assert link_of(WORLD).calls == calls + 4, "to the caller they are four calls"

    on(LazyStreams(eager_reader=True), run)


def check_tensors_that_are_not_contiguous() -> None:
    streams = LazyStreams(eager_reader=True)

    def run() -> None:
        matrix = whole(800 * 900).view(800, 900).t()
        dist.all_reduce(matrix)
        assert torch.equal(matrix, total(800 * 900).view(800, 900).t())
        every_other = whole(2 * ELEMS)[::2]
        dist.broadcast(every_other, 0)
        assert torch.equal(every_other, whole(2 * ELEMS, 0)[::2])
        matrix = whole(800 * 900).view(800, 900).t()
        future = dist.all_reduce(matrix, async_op=True).get_future()
        assert torch.equal(future.wait()[0], total(800 * 900).view(800, 900).t())
        # The root of the broadcast only reads its tensor.
        held = {(t.data_ptr(), "caller") for t in (matrix, every_other)[: 2 if RANK else 1]}
        assert held <= set(streams.held), "whoever drops them gives their memory away before the copies on the device"

    on(streams, run)


class StopsAt(LazyStreams):
    """A device that comes to the copy of one piece only when it is told to, and may fail then."""

    def __init__(self, at: int, error: str = "") -> None:
        super().__init__(eager_reader=True)
        self.reached, self.go_on = threading.Event(), threading.Event()
        self._at, self._error, self._seen = at, error, 0

    def synchronize(self, event: object) -> None:
        if event.stream.name == "out":  # type: ignore[attr-defined]
            self._seen += 1
            if self._seen == self._at + 1:
                self.reached.set()
                if self._error:
                    raise RuntimeError(self._error)
                self.go_on.wait()
        super().synchronize(event)  # type: ignore[arg-type]


def check_a_piece_that_cannot_be_copied_is_the_error_of_the_call_and_not_what_follows_from_it() -> None:
    groups = [dist.new_group() for _ in range(PIECES)]
    for at, group in enumerate(groups):
        streams = StopsAt(at, "CUDA error: an illegal memory access was encountered")

        def run(group=group) -> None:
            works = [dist.all_reduce(whole(), group=group, async_op=True) for _ in range(2)]
            expected = MismatchError if RANK else RuntimeError
            with pytest.raises(expected, match="disagree" if RANK else "illegal memory access"):
                works[0].wait()
            with pytest.raises((GradwireError, RuntimeError)):
                works[1].get_future().wait()

        on(LazyStreams(eager_reader=True) if RANK else streams, run)
        pool = _staging.pool_of(streams)
        idle = sum(size * len(kept) for size, kept in pool._idle.items())
        assert pool.held_bytes == idle, "a buffer was not given back"


def check_abort_while_a_piece_is_being_copied_ends_the_call() -> None:
    group, streams = dist.new_group(), StopsAt(1)

    def run() -> None:
        work = dist.all_reduce(whole(), group=group, async_op=True)
        assert streams.reached.wait(PATIENCE_S)  # the first piece is with the engine
        link_of(group).abort()
        with pytest.raises((ShutDownError, PeerLeftError)):  # the other rank's abort may be there first
            work.wait()
        used = {memory.data_ptr() for kept in _staging.pool_of(streams)._idle.values() for memory, _ in kept}
        assert len(used) == PIECES, "a buffer was not given back"
        others = [_staging.Staging() for _ in range(PIECES)]
        free = {other.buffer([ELEMS // PIECES], torch.ones(1)).data_ptr() for other in others}
        assert len(used & free) <= 1, "copies of the other pieces still write there"
        streams.go_on.set()
        dist.all_reduce(tensor := torch.ones(10))
        assert torch.equal(tensor, torch.full((10,), float(WORLD_SIZE))), "other groups go on"

    on(streams, run)


def check_what_a_tolerant_call_leaves_behind_is_owed() -> None:
    for rotated in ("off", "on"):
        values, residual, output = whole() / 4096, torch.zeros(ELEMS), torch.zeros(ELEMS)
        reports = []

        def run(values=values, residual=residual, output=output, rotated=rotated, reports=reports) -> None:
            options = {"preset": "mlt", "gather_loss_bound": 0.0, "loss_bound": 0.3, "hadamard": rotated}
            work = gradwire.torch.all_reduce(
                values, output=output, residual=residual, important=[True, False], contributions=True, **options
            )
            reports.append(work.report())
            assert work.totals() == totals_of(reports[-1])

        on(LazyStreams(eager_reader=True), run)
        kept = torch.stack([values, residual])
        dist.all_reduce(kept, group=GLOO)
        torch.testing.assert_close(WORLD_SIZE * output + kept[1], kept[0], rtol=1e-5, atol=1e-4)
        (report,) = reports
        assert (report.elems, len(report.parts)) == (ELEMS, PIECES)
        assert report.bytes_expected == sum(part.bytes_expected for part in report.parts)
        assert bool(report.uncounted) == bool(residual.any())
        assert all(part.contributions is not None for part in report.parts)
        if rotated == "off":
            outside = torch.ones(ELEMS, dtype=torch.bool)
            for start, end in report.uncounted:
                outside[start:end] = False
            assert not residual[outside].any(), "a range is at the wrong place"
        lost = torch.tensor(float(bool(report.uncounted)))
        dist.all_reduce(lost, group=GLOO)
        assert lost, "nothing was lost: this tests nothing"


def check_what_a_tolerant_reduce_scatter_leaves_behind_is_owed() -> None:
    values, residual, output = whole(2 * ROW_ELEMS) / 4096, torch.zeros(2 * ROW_ELEMS), torch.zeros(ROW_ELEMS)
    reports = []

    def run() -> None:
        work = reduce_scatter(output, values, preset="mlt", loss_bound=0.3, residual=residual)
        work.wait()
        reports.append(work.report())
        assert work.totals() == totals_of(reports[-1])

    on(LazyStreams(eager_reader=True), run)
    kept = torch.stack([values, residual])
    dist.all_reduce(kept, group=GLOO)
    mine = slice(RANK * ROW_ELEMS, (RANK + 1) * ROW_ELEMS)
    torch.testing.assert_close(WORLD_SIZE * output + kept[1, mine], kept[0, mine], rtol=1e-5, atol=1e-4)
    (report,) = reports
    assert (report.elems, len(report.parts)) == (ROW_ELEMS, PIECES)
    outside = torch.ones(2 * ROW_ELEMS, dtype=torch.bool)
    for start, end in report.uncounted:
        outside[start:end] = False
    assert torch.equal(residual, torch.where(outside, 0.0, values)), "a range is at the wrong place"
    lost = torch.tensor(float(bool(report.uncounted)))
    dist.all_reduce(lost, group=GLOO)
    assert lost, "nothing was lost: this tests nothing"


def check_calls_in_a_tolerant_group_may_be_cut() -> None:
    group = gradwire.torch.tolerant_group(preset="reliable", step_delay_max=timedelta(seconds=1))

    def run() -> None:
        tensor = whole()
        dist.all_reduce(tensor, group=group)
        assert torch.equal(tensor, total())

    on(LazyStreams(eager_reader=True), run)


def check_host_and_device_memory_in_one_call_are_an_error_that_says_so() -> None:
    group = dist.new_group()

    def run() -> None:
        with pytest.raises(MismatchError, match="gpu_chunk_mb"):
            dist.all_reduce(whole(), group=group)

    if RANK:
        run()
    else:
        on(LazyStreams(), run)


def check_so_they_are_where_rows_are_gathered() -> None:
    group = dist.new_group()

    def run() -> None:
        with pytest.raises(MismatchError, match="gpu_chunk_mb"):
            dist.all_gather_into_tensor(torch.zeros(WORLD_SIZE * ROW_ELEMS), own_row(), group=group)

    if RANK:
        run()
    else:
        on(LazyStreams(), run)


def check_small_ones_may_differ() -> None:
    tensor = whole(1000)
    if RANK:
        dist.all_reduce(tensor)
    else:
        on(LazyStreams(eager_reader=True), lambda: dist.all_reduce(tensor))
    assert torch.equal(tensor, total(1000))
