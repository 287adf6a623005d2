"""Calls on a device's tensors that are cut into pieces, with packets lost: to the caller each is one call."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta

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
# With pieces of 1 MiB: three, the last of which is shorter.
ELEMS = 700_001
PIECES = 3
PATIENCE_S = 20.0


def whole(elems: int = ELEMS, rank: int = RANK) -> torch.Tensor:
    return torch.arange(elems, dtype=torch.float32) % 4096 + 1000 * rank


def total(elems: int = ELEMS) -> torch.Tensor:
    return sum((whole(elems, r) for r in range(WORLD_SIZE)), torch.zeros(elems))


class OneByOne(LazyStreams):
    """Copies a piece out only when those before it have been sent, reduced, and sent on their way back."""

    def __init__(self) -> None:
        super().__init__(eager_reader=True)
        self.fetched = 0
        self.in_vain = 0

    def synchronize(self, event: object) -> None:
        if event.stream.name == "out":  # type: ignore[attr-defined]
            end = time.monotonic() + PATIENCE_S
            while self.log.count("copy on back") < self.fetched and not self.in_vain:
                self.in_vain += time.monotonic() > end
                time.sleep(0.001)
            self.fetched += 1
        super().synchronize(event)  # type: ignore[arg-type]


def check_a_piece_is_sent_and_brought_back_before_the_next_has_been_copied() -> None:
    def finished_by(finish: Callable[[dist.Work], object]) -> None:
        streams, tensor = OneByOne(), whole()
        on(streams, lambda: finish(dist.all_reduce(tensor, async_op=True)))
        assert (streams.fetched, streams.in_vain) == (PIECES, 0)
        assert torch.equal(tensor, total())

    finished_by(lambda work: work.wait())
    finished_by(lambda work: work.get_future().wait())


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
    def run() -> None:
        matrix = whole(800 * 900).view(800, 900).t()
        dist.all_reduce(matrix)
        assert torch.equal(matrix, total(800 * 900).view(800, 900).t())
        every_other = whole(2 * ELEMS)[::2]
        dist.broadcast(every_other, 0)
        assert torch.equal(every_other, whole(2 * ELEMS, 0)[::2])
        future = dist.all_reduce(matrix, dist.ReduceOp.MAX, async_op=True).get_future()
        assert torch.equal(future.wait()[0], total(800 * 900).view(800, 900).t())

    on(LazyStreams(eager_reader=True), run)


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


def check_small_ones_may_differ() -> None:
    tensor = whole(1000)
    if RANK:
        dist.all_reduce(tensor)
    else:
        on(LazyStreams(eager_reader=True), lambda: dist.all_reduce(tensor))
    assert torch.equal(tensor, total(1000))
