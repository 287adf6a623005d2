"""Replicas that drift apart because averaged gradients were lost on their way back, and how they are made equal again."""

from __future__ import annotations

import logging
from typing import Any

import gradwire.torch
import pytest
import torch
import torch.distributed as dist
from gradwire.errors import ConfigError, InvalidRequestError
from gradwire.torch import _hook
from gradwire.torch._drift import DriftMeter
from rank import RANK, WORLD_SIZE
from torch import nn
from torch.amp import GradScaler
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.nn.parallel import DistributedDataParallel

GLOO = dist.new_group(backend="gloo")
STEPS = 4


def model_of(**options: Any) -> tuple[DistributedDataParallel, gradwire.torch.LossTolerance]:
    torch.manual_seed(3)
    layers = nn.Sequential(nn.Linear(200, 400), nn.BatchNorm1d(400), nn.Linear(400, 200))
    model = DistributedDataParallel(layers, bucket_cap_mb=0.3)
    return model, gradwire.torch.tolerate_loss(model, preset="dlcp", gather_loss_bound=0.1, hadamard="off", **options)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = STEPS) -> None:
    generator = torch.Generator().manual_seed(RANK)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.randn(16, 200, generator=generator)).square().mean().backward()
        optimizer.step()


def bits(tensors: Any) -> torch.Tensor:
    return torch.cat([tensor.detach().flatten().view(torch.int32) for tensor in tensors])


def everybodys(mine: torch.Tensor) -> torch.Tensor:
    """The tensor of every rank, exchanged over TCP: `[world_size, elems]`."""
    rows = [torch.empty_like(mine) for _ in range(WORLD_SIZE)]
    dist.all_gather(rows, mine, group=GLOO)
    return torch.stack(rows)


def identical(tensors: Any) -> bool:
    rows = everybodys(bits(tensors))
    return bool((rows == rows[0]).all())


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [value for state in optimizer.state.values() for value in state.values()]


# test of: auto/drift-meter
def check_drift_is_measured_and_repaired_bit_for_bit() -> None:
    model, state = model_of()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    assert state.drift.check().identical
    assert state.drift.largest_difference() == gradwire.torch.Difference()
    train(model, optimizer)
    assert not identical(model.parameters()), "no result was lost: the test has shown nothing"

    report = state.drift.check()
    rows = everybodys(bits(model.parameters()))
    differ = int((rows != rows[0]).any(0).sum())
    assert 0 < 4 * differ <= report.bytes_differing <= report.bytes == 4 * rows.shape[1]
    assert (report.step, report.tensors) == (STEPS, 6)
    difference = state.drift.largest_difference()
    values = rows.view(torch.float32).double()
    assert difference.value == (values.max(0).values - values.min(0).values).max().item()
    assert difference.name in report.names

    assert state.resynchronize() == report
    assert identical(model.parameters())
    assert state.drift.check().identical
    assert (everybodys(bits(model.parameters()))[0] == rows).any(0).all(), "every value is one that a rank had"
    assert not identical(optimizer_tensors(optimizer)), "not covered unless it is asked for"
    repaired = state.resynchronize(optimizer=optimizer)
    assert repaired.names
    assert all(name.startswith("optimizer.") for name in repaired.names)
    assert identical(optimizer_tensors(optimizer))


# test of: mlt/lossy-pull, ultima/best-effort, auto/drift-meter
def check_presets_whose_papers_lose_results_drift_apart_and_only_what_differs_is_repaired() -> None:
    for preset in ("mlt", "ultima"):
        torch.manual_seed(5)
        model = DistributedDataParallel(nn.Sequential(nn.Linear(200, 400), nn.Linear(400, 200)))
        state = gradwire.torch.tolerate_loss(model, preset=preset, hadamard="off")
        # What differs is then in few places: one lost packet changes a gradient once.
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        train(model, optimizer, steps=1)
        while state.drift.check().identical and len(state.steps) < 20:
            train(model, optimizer, steps=1)
        before = everybodys(bits(model.parameters()))
        differ = int((before != before[0]).any(0).sum())
        report = state.resynchronize()
        assert differ > 0, f"{preset}: no result was lost, the test has shown nothing"
        assert 0 < 4 * differ <= report.bytes_differing <= report.bytes, preset
        after = everybodys(bits(model.parameters()))
        assert (after == after[0]).all(), preset
        agreed = (before == before[0]).all(0)
        assert torch.equal(after[0][agreed], before[0][agreed]), f"{preset}: what did not differ was changed"
        assert state.drift.check().identical


def check_buffers_are_covered_when_asked_for() -> None:
    model, state = model_of()
    with torch.no_grad():
        model.module[1].running_mean.fill_(float(RANK))
    assert state.drift.check().identical
    assert state.drift.check(buffers=True).names == ("buffer.1.running_mean",)
    assert state.resynchronize(buffers=True).bytes_differing == 400 * 4
    assert identical(model.buffers())


def check_most_ranks_decide_and_one_element_costs_one_block() -> None:
    model, state = model_of()
    before = bits(model.parameters()).clone()
    weight = model.module[2].weight
    with torch.no_grad():
        if RANK == 0:
            weight[-1, -1] += 1.0
    report = state.drift.check()
    assert (report.names, report.blocks_differing, report.ranks) == (("2.weight",), 1, (0,))
    assert abs(state.drift.largest_difference().value - 1.0) < 1e-6
    state.resynchronize()
    assert torch.equal(bits(model.parameters()), before)


def check_the_largest_difference_is_that_of_elements_which_differ_whatever_their_kind() -> None:
    infinite = float("inf")
    pairs = [
        (torch.tensor([-infinite, infinite, 0.0]), torch.tensor([-infinite, infinite, 1.0]), 1.0),
        (torch.tensor([infinite, 0.0]), torch.tensor([1.0, 5.0]), infinite),
        (torch.tensor([1.0, float("nan")]), torch.tensor([1.0, 2.0]), infinite),
        (torch.tensor([1.0 + 2.0j, 3.0]), torch.tensor([1.0 + 4.0j, 3.0]), 2.0),
        (torch.tensor([2**53, 7]), torch.tensor([2**53 + 1, 7]), 1.0),
        (torch.tensor([2**63 - 1]), torch.tensor([-(2**63)]), 2.0**64),
        (torch.tensor([True, False]), torch.tensor([True, True]), 1.0),
        (torch.tensor([0.25], dtype=torch.float64), torch.tensor([1.0], dtype=torch.float64), 0.75),
    ]
    for most, other, expected in pairs:
        mine = other if RANK == 1 else most
        module = nn.Module()
        module.register_buffer("kept", mine.clone())
        difference = DriftMeter(module, dist.group.WORLD).largest_difference(buffers=True)
        assert difference == gradwire.torch.Difference(expected, "buffer.kept"), (most, other)
        assert torch.equal(module.kept.nan_to_num(), mine.nan_to_num()), f"{mine.dtype}: changed by looking"


def check_tensors_that_are_not_dense_are_repaired_too() -> None:
    model, state = model_of()
    turned = model.module[0].weight.detach().t().contiguous().t()
    model.module[0].weight.data = turned
    with torch.no_grad():
        if RANK == 1:
            model.module[0].weight[5, 7] = 9.0
    assert state.resynchronize().ranks == (1,)
    assert identical([model.module[0].weight.contiguous()])


def check_the_hook_compares_every_so_many_steps_and_warns() -> None:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("gradwire").addHandler(handler)
    try:
        model, state = model_of(drift_every=2)
        train(model, torch.optim.SGD(model.parameters(), lr=0.1), steps=2)
        assert state.drift.latest is None
        train(model, torch.optim.SGD(model.parameters(), lr=0.1), steps=3)
    finally:
        logging.getLogger("gradwire").removeHandler(handler)
    assert state.drift.latest is not None
    assert state.drift.latest.step == 4
    warned = [line for line in lines if "replicas differ in" in line]
    assert not state.drift.latest.identical
    assert len(warned) == (2 if RANK == 0 else 0), lines


def check_steps_that_wait_for_the_next_forward_pass_are_taken_before_replicas_are_compared() -> None:
    torch.manual_seed(3)
    layers = nn.Sequential(nn.Linear(200, 400), nn.ReLU(), nn.Linear(400, 200))
    model = DistributedDataParallel(layers, bucket_cap_mb=0.3, gradient_as_bucket_view=True)
    state = gradwire.torch.tolerate_loss(model, preset="dlcp", gather_loss_bound=0.1, hadamard="off")
    steps = state.step_in_forward(lambda parameters: torch.optim.AdamW(parameters, lr=0.01))
    generator = torch.Generator().manual_seed(RANK)
    for look in (state.drift.check, state.drift.largest_difference, state.resynchronize):
        for _ in range(STEPS):
            model(torch.randn(16, 200, generator=generator)).square().mean().backward()
        look(optimizer=steps.optimizers)
        seen = bits(model.parameters())
        steps.finish()
        assert torch.equal(bits(model.parameters()), seen), f"{look.__name__} saw the parameters of the step before"
    assert identical(model.parameters())
    assert all(identical(optimizer_tensors(optimizer)) for optimizer in steps.optimizers)
    assert any(optimizer_tensors(optimizer) for optimizer in steps.optimizers)


def check_what_cannot_be_compared_is_refused_everywhere() -> None:
    model, state = model_of()
    if RANK == 1:
        model.module[0].register_parameter("only_here", nn.Parameter(torch.ones(3)))
    with pytest.raises(InvalidRequestError, match="blocks"):
        state.drift.check()
    with pytest.raises(ConfigError, match="drift_every"):
        model_of(drift_every=-1)
    with pytest.raises(ConfigError, match="steps_kept"):
        model_of(steps_kept=0)


def watch_works(patch: pytest.MonkeyPatch) -> list[Any]:
    """The work of every all-reduce of a hook from now on. The hook's own observer may be called after the step has ended."""
    works: list[Any] = []
    all_reduce = _hook.all_reduce

    def note(*values: Any, **arguments: Any) -> Any:
        works.append(all_reduce(*values, **arguments))
        return works[-1]

    patch.setattr(_hook, "all_reduce", note)
    return works


# test of: mlt/fill
def check_a_lost_average_holds_what_was_chosen_and_previous_is_that_of_the_step_before() -> None:
    options = {"preset": "dlcp", "gather_loss_bound": 0.1, "hadamard": "off", "error_feedback": False}
    for fill in ("zero", "previous", "local"):
        model = DistributedDataParallel(nn.Linear(700, 500, bias=False))
        gradwire.torch.tolerate_loss(model, gather_fill=fill, **options)
        generator, before, filled = torch.Generator().manual_seed(RANK), torch.zeros(350_000), 0
        for _ in range(STEPS):
            given = torch.randn(500, 700, generator=generator)
            with pytest.MonkeyPatch.context() as patch:
                works = watch_works(patch)
                (model(torch.eye(700)) * given.T).sum().backward()
            average = model.module.weight.grad.flatten().clone()
            expected = {"zero": torch.zeros(350_000), "previous": before, "local": given.flatten()}[fill]
            for start, end in works[-1].report().filled:
                assert torch.equal(average[start:end], expected[start:end]), f"{fill}: {start} to {end}"
                filled += end - start
            model.module.weight.grad, before = None, average
        assert int(everybodys(torch.tensor([filled])).sum()) > 0, "no result was lost: the test has shown nothing"


def check_previous_averages_follow_the_scale_and_not_a_step_that_was_skipped() -> None:
    model = DistributedDataParallel(nn.Linear(700, 500, bias=False))
    options = {"preset": "dlcp", "gather_loss_bound": 0.1, "gather_fill": "previous", "error_feedback": False}
    state = gradwire.torch.tolerate_loss(model, **options)
    filled = 0
    for step in range(2 * STEPS):
        scale = 0.5**step
        with pytest.MonkeyPatch.context() as patch:
            works = watch_works(patch)
            (model(torch.ones(4, 700)).sum() * (scale if step % 2 else torch.inf)).backward()
        average = model.module.weight.grad.flatten()
        if step % 2:
            assert torch.isin(average, torch.tensor([0.0, 4.0 * scale])).all(), average.unique()
            filled += sum(end - start for start, end in works[-1].report().filled)
        model.module.weight.grad = None
        state.rescale(0.5)
    assert int(everybodys(torch.tensor([filled])).sum()) > 0, "no result was lost: the test has shown nothing"


def check_the_previous_value_cannot_be_kept_in_place() -> None:
    with pytest.raises(InvalidRequestError, match="in place"):
        gradwire.torch.all_reduce(torch.ones(100), preset="dlcp", gather_fill="previous", hadamard="off")
    output = torch.full((100,), 7.0)
    gradwire.torch.all_reduce(torch.ones(100), preset="dlcp", gather_fill="previous", hadamard="off", output=output)
    assert torch.equal(output, torch.ones(100))


def check_previous_averages_which_cannot_fill_in_rotated_ones_are_refused() -> None:
    model = DistributedDataParallel(nn.Linear(7, 5))
    with pytest.raises(ConfigError, match="gather_fill = previous is not allowed with hadamard = on"):
        gradwire.torch.tolerate_loss(model, preset="mlt", gather_fill="previous", hadamard="on")
    gradwire.torch.tolerate_loss(model, preset="mlt", gather_fill="previous")


def check_a_scaler_that_asks_all_ranks_keeps_their_scales_equal() -> None:
    """Where one has lost the part of the gradients with an infinity, and another not."""
    for scaler, stay_equal in ((GradScaler("cpu"), False), (ShardedGradScaler("cpu"), True)):
        model, _ = model_of()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        scaler.scale(model(torch.ones(16, 200)).mean()).backward()
        if RANK == 0:
            next(model.parameters()).grad[0] = torch.inf
        scaler.step(optimizer)
        scaler.update()
        scales = everybodys(torch.tensor([scaler.get_scale()]))
        assert bool((scales == scales[0]).all()) == stay_equal, scales
