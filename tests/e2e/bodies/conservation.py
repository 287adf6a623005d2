"""Error feedback over real sockets that lose packets: over a run, what was applied and what is still owed add up to what every
rank computed, whatever was lost, where, and how often.

With N ranks, g a rank's gradients, a the mean that was applied and e what a rank is owed at the end:

    sum over ranks and steps of g  =  N * sum over steps of a  +  sum over ranks of e

Each term is added up in float64 here, so what is left is the rounding of each step's sum, mean and residual.
"""

from __future__ import annotations

import inspect
import os
from itertools import product
from pathlib import Path
from typing import Any

import gradwire.torch
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from counted_once import assert_counted_once
from gradwire.errors import ConfigError
from owed import owed_in
from rank import RANK, WORLD_SIZE
from torch import nn
from torch.nn.parallel import DistributedDataParallel

GLOO = dist.new_group(backend="gloo")
CARRY = Path(os.environ["GRADWIRE_TEST_CARRY"]) / f"rank-{RANK}.pt"
STEPS = 6
SIZES = {"first": 70_001, "second": 40_000, "sometimes": 50_003, "third": 30_000}
# Everything that was sent once may be all that there will be: at 10 % loss a tenth does not count.
TOLERANT = {"loss_bound": 0.5, "preset": "auto", "hadamard": "off"}


class Linear(nn.Module):
    """A loss whose gradient with respect to each parameter is what it is given."""

    def __init__(self, dtypes: dict[str, torch.dtype]) -> None:
        super().__init__()
        for name, size in SIZES.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(size, dtype=dtypes[name])))

    def forward(self, gradients: dict[str, torch.Tensor]) -> torch.Tensor:
        terms = [
            (parameter * gradients[name]).sum() for name, parameter in self.named_parameters() if name in gradients
        ]
        return torch.stack([term.float() for term in terms]).sum()


class Ledger:
    """Trains and adds up, in float64: what every rank gave, what was applied, and at last what is owed."""

    def __init__(
        self,
        dtype: torch.dtype = torch.float32,
        ddp: dict[str, Any] | None = None,
        zeroed_in_place: bool = False,
        frozen: str = "",
        halves: tuple[str, ...] = (),
        **options: Any,
    ) -> None:
        self.zeroed_in_place = zeroed_in_place
        self.dtypes = {name: torch.bfloat16 if name in halves else dtype for name in SIZES}
        self.model = DistributedDataParallel(Linear(self.dtypes), bucket_cap_mb=0.15, **(ddp or {}))
        self.frozen = frozen
        if frozen:  # by who has wrapped the model already
            self.model.module.get_parameter(frozen).requires_grad_(False)
        self.state = gradwire.torch.tolerate_loss(self.model, **{**TOLERANT, **options})
        self.given = {name: torch.zeros(size, dtype=torch.float64) for name, size in SIZES.items()}
        self.applied = {name: torch.zeros(size, dtype=torch.float64) for name, size in SIZES.items()}
        self.largest = 0.0
        self.steps = 0
        exchange = self.state.exchange

        def watched(bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
            for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
                name = next(n for n, p in self.model.module.named_parameters() if p is parameter)
                self.given[name] += gradient.flatten().double()
                self.largest = max(self.largest, gradient.abs().max().item())
            return exchange(bucket)

        self.state.exchange = watched  # type: ignore[method-assign]

    def gradients(self, names: Any) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(1000 * self.steps + RANK)
        return {name: torch.randn(SIZES[name], generator=generator).to(self.dtypes[name]) for name in names}

    def step(self, *, names: Any = tuple(SIZES), micro_batches: int = 1) -> None:
        for _ in range(micro_batches - 1):
            with self.model.no_sync():
                self.model(self.gradients(names)).backward()
        self.model(self.gradients(names)).backward()
        for name, parameter in self.model.module.named_parameters():
            if parameter.grad is not None:
                self.applied[name] += WORLD_SIZE * parameter.grad.double()
        self.model.zero_grad(set_to_none=not self.zeroed_in_place)
        self.steps += 1

    def skip(self, micro_batches: int = 1) -> None:
        """A step with a spike, of which one bucket is not finite on one rank: it leaves nothing, and what it was fed is gone."""
        before = (self.without_what_is_owed(), self.largest)
        spike = {name: gradient * 1e6 for name, gradient in self.gradients(SIZES).items()}
        if RANK == 0:
            spike["second"][:] = float("inf")  # of a single one nobody would know, were it lost
        for _ in range(micro_batches - 1):
            with self.model.no_sync():
                self.model(spike).backward()
        self.model(spike).backward()
        gradients = {name: parameter.grad for name, parameter in self.model.module.named_parameters()}
        assert not gradients["second"].isfinite().all()
        assert gradients["first"].isfinite().all()
        self.given, self.largest = before
        self.model.zero_grad()
        self.steps += 1

    def throw_away(self, apart: str) -> None:
        """A pass in another model's step, whose gradients nobody applies: large, and of one sign."""
        gradients = {name: torch.full((size,), -4.0 * (1 + RANK)) for name, size in SIZES.items()}
        gradients["first"].requires_grad_()  # of the model before this one
        if apart == "no_sync":
            with self.model.no_sync():
                self.model(gradients).backward()
        elif apart == "frozen":
            self.model.requires_grad_(False)
            self.model(gradients).backward()
            self.model.requires_grad_(True)
        else:
            before = ({name: given.clone() for name, given in self.given.items()}, self.largest)
            owed = self.state.state_dict()
            self.model(gradients).backward()
            self.state.load_state_dict(owed)
            self.given, self.largest = before
        self.model.zero_grad()

    def without_what_is_owed(self) -> dict[str, torch.Tensor]:
        """What this rank gave, but for what a step was fed that nobody has applied."""
        owed = owed_in(self.state.state_dict())
        return {name: given - owed[name].double() for name, given in self.given.items()}

    def check(self) -> None:
        owed = owed_in(self.state.state_dict())
        lost = torch.tensor(float(self.state.total.elems_uncounted))
        for name, size in SIZES.items():
            given, late = self.given[name].clone(), owed.get(name, torch.zeros(size)).double()
            dist.all_reduce(given, group=GLOO)
            dist.all_reduce(late, group=GLOO)
            if name == self.frozen:
                assert not given.any(), "nobody has a gradient of it"
                continue
            sums = (given, self.applied[name], late)
            assert_counted_once(name, sums, torch.finfo(self.dtypes[name]).eps, self.steps * self.largest)
        dist.all_reduce(lost, group=GLOO)
        assert lost > 0, "nothing was lost: the test has shown nothing"


# test of: auto/error-feedback
def check_what_was_lost_counts_exactly_once_later_in_every_schedule() -> None:
    schedules = ("transpose", "ring", "parameter_server")
    cases = [*product(("auto", "mlt"), schedules, ("contributions", "world"))]
    cases += [(preset, "transpose", "contributions") for preset in ("dlcp", "ltp")]
    # Ten steps: that of all parameters in one bucket, two warm-ups of three, and what is timed.
    cases += [("ultima", "transpose", "contributions")]
    for preset, algorithm, divide_by in cases:
        ledger = Ledger(preset=preset, algorithm=algorithm, divide_by=divide_by, gather_loss_bound=0.0)
        for _ in range(10 if preset == "ultima" else STEPS):
            ledger.step()
        ledger.check()


def check_what_was_lost_counts_exactly_once_later_over_servers() -> None:
    for preset, divide_by in (("auto", "contributions"), ("mlt", "world")):
        ledger = Ledger(preset=preset, algorithm="parameter_server", divide_by=divide_by, gather_loss_bound=0.0)
        for _ in range(STEPS):
            ledger.step()
        ledger.check()


def everybodys(mine: torch.Tensor) -> torch.Tensor:
    """The tensor of every rank, exchanged over TCP: `[world_size, elems]`."""
    rows = [torch.empty_like(mine) for _ in range(WORLD_SIZE)]
    dist.all_gather(rows, mine, group=GLOO)
    return torch.stack(rows)


def places(ranges: Any, elems: int) -> torch.Tensor:
    mask = torch.zeros(elems, dtype=torch.bool)
    for start, end in ranges:
        mask[start:end] = True
    return mask


# test of: auto/error-feedback, mlt/lossy-pull, ultima/best-effort
def check_a_value_counts_exactly_once_also_where_results_are_lost() -> None:
    # For each element of each step: the values of all ranks are what stands for them (the mean where they counted; what their
    # rank holds, be it filled in, where not) and what is owed.
    elems = 120_000
    over_servers = os.environ.get("GRADWIRE_SERVER_MODE") == "dedicated"
    schedules = ("parameter_server",) if over_servers else ("transpose", "parameter_server")
    for preset, algorithm in product(("dlcp", "mlt", "ultima"), schedules):
        residual, missed = torch.zeros(elems), [0, 0]
        for step in range(STEPS):
            generator = torch.Generator().manual_seed(1000 * step + RANK)
            value = torch.randn(elems, generator=generator) + residual
            result, residual = value.clone(), torch.zeros(elems)
            options = {"preset": preset, "algorithm": algorithm, "gather_fill": "local", "hadamard": "off"}
            if preset != "ultima":
                options["gather_loss_bound"] = 0.1
            report = gradwire.torch.all_reduce(result, residual=residual, **options).report()
            lost, holes = everybodys(places(report.uncounted, elems)), everybodys(places(report.filled, elems))
            values, held, owed = (everybodys(part).double() for part in (value, result, residual))
            means = held.masked_fill(holes, float("-inf")).max(0).values
            known = means.isfinite()
            stands = torch.where(lost, held, means)
            wrong = ((values - stands - owed).sum(0))[known].abs().max().item()
            # The mean, and what is owed, are rounded once on each rank.
            bound = 2 * WORLD_SIZE * values.abs().max().item() * torch.finfo(torch.float32).eps
            assert wrong <= bound, f"{preset} {algorithm} step {step}: {wrong} of {bound}"
            missed = [missed[0] + int(lost.sum()), missed[1] + int(holes.sum())]
        assert min(missed) > 0, f"{preset} {algorithm}: {missed} lost, the test has shown nothing"


def check_what_a_rotated_bucket_lost_counts_exactly_once_later() -> None:
    for algorithm, divide_by in (("transpose", "contributions"), ("ring", "contributions"), ("transpose", "world")):
        ledger = Ledger(algorithm=algorithm, divide_by=divide_by, hadamard="on")
        for _ in range(STEPS):
            ledger.step()
        ledger.check()


def check_the_divisor_is_the_one_that_was_asked_for() -> None:
    for divide_by in ("contributions", "world"):
        ledger = Ledger(divide_by=divide_by)
        ones = {name: torch.ones(size) for name, size in SIZES.items()}
        ledger.model(ones).backward()
        means = torch.cat([parameter.grad for parameter in ledger.model.parameters()]).unique()
        # A mean of ones is one; as a sum of c ones divided by all ranks it is c / N.
        possible = torch.arange(1, WORLD_SIZE + 1) / WORLD_SIZE if divide_by == "world" else torch.ones(1)
        assert torch.isin(means, possible).all(), means
        assert len(means) > 1 or divide_by != "world", "nothing was lost: the test has shown nothing"


def check_nothing_counts_twice_after_accumulation_without_exchange() -> None:
    for view, divide_by in ((False, "contributions"), (True, "world")):
        ledger = Ledger(ddp={"gradient_as_bucket_view": view}, divide_by=divide_by)
        for _ in range(STEPS):
            ledger.step(micro_batches=3)
        ledger.check()


def check_what_a_parameter_is_owed_waits_while_nobody_uses_it() -> None:
    # DDP throws away the mean of a parameter that no rank has used: fed back in such a step, it would be lost for good.
    without = [name for name in SIZES if name != "sometimes"]
    cases = (
        (True, "contributions", False),
        (False, "world", False),
        (True, "world", True),
        (False, "contributions", True),
    )
    for view, divide_by, zeroed_in_place in cases:
        ddp = {"find_unused_parameters": True, "gradient_as_bucket_view": view}
        ledger = Ledger(ddp=ddp, divide_by=divide_by, zeroed_in_place=zeroed_in_place)
        for step in range(STEPS + 3):
            used_here = step % 3 == 0 or (step % 3 == 1 and RANK == 0)
            ledger.step(names=tuple(SIZES) if used_here else without)
        ledger.check()
        # Rank 0 alone used it in the step before the last. A gradient of zeros that is a part of its bucket gets the mean of the last step
        # too, which pays what was owed.
        if RANK == 0 and not (view and zeroed_in_place):
            assert owed_in(ledger.state.state_dict())["sometimes"].any()


def check_what_a_parameter_is_owed_waits_also_where_another_was_frozen_late() -> None:
    without = [name for name in SIZES if name != "sometimes"]
    ledger = Ledger(ddp={"find_unused_parameters": True}, frozen="third")
    for step in range(STEPS):
        ledger.step(names=without if step % 2 else tuple(SIZES))
    ledger.check()
    assert owed_in(ledger.state.state_dict())["sometimes"].any()


def check_every_gradient_counts_once_in_a_static_graph_of_several_dtypes() -> None:
    # In its first step every bucket comes when `backward` ends, and has index 0.
    for divide_by in ("contributions", "world"):
        ledger = Ledger(ddp={"static_graph": True}, halves=("second", "third"), divide_by=divide_by)
        for _ in range(STEPS):
            ledger.step()
        ledger.check()
        assert len(ledger.state.steps) == STEPS
        assert ledger.state.steps[0].buckets == 2, "one of each dtype"


def check_every_gradient_counts_once_where_steps_have_no_bucket_in_common() -> None:
    name = "skip_all_reduce_unused_params"
    if name not in inspect.signature(DistributedDataParallel).parameters:
        return
    turns = ("first",), ("third",)
    for each, feeds_back in product((1, 2), (True, False)):
        ledger = Ledger(ddp={"find_unused_parameters": True, name: True}, error_feedback=feeds_back)
        ledger.step()
        for step in range(2 * STEPS):
            ledger.step(names=turns[step // each % 2], micro_batches=1 + step % 2)
        if feeds_back:
            ledger.check()
        assert [record.buckets for record in ledger.state.steps][1:] == [1] * 2 * STEPS


def check_what_a_rank_owes_for_a_parameter_that_it_seldom_uses_does_not_grow() -> None:
    without, steps = [name for name in SIZES if name != "sometimes"], 25
    for algorithm, divide_by in (("transpose", "contributions"), ("ring", "contributions"), ("transpose", "world")):
        ledger = Ledger(ddp={"find_unused_parameters": True}, algorithm=algorithm, divide_by=divide_by)
        for step in range(steps + 1):
            names = tuple(SIZES) if RANK == 0 or step == steps else without
            ledger.model({name: torch.ones(SIZES[name]) for name in names}).backward()
            mean = ledger.model.module.sometimes.grad.mean().item()
            ledger.model.zero_grad()
        # Of the gradients it is 1. It differs by what is owed before and after, a tenth or so of each rank's values, of at most 2 each;
        # a ring that loses a sum of two ranks' owes for both.
        assert abs(mean - 1.0) < 2 * 0.1 * 2, f"{algorithm} {divide_by}: {mean}"


def check_what_others_lost_is_never_owed_to_a_parameter_that_nobody_uses() -> None:
    # Rotated, every loss would be an error of its mean, which DDP throws away, and what makes up for it would be held.
    unused = {"find_unused_parameters": True}
    assert Ledger(ddp=unused, hadamard="auto").state.arguments["hadamard"] == "off"
    with pytest.raises(ConfigError, match="hadamard = on is not allowed with find_unused_parameters"):
        Ledger(ddp=unused, hadamard="on")
    for options in ({"ddp": {**unused, "static_graph": True}}, {"ddp": unused, "error_feedback": False}):
        rotated = Ledger(hadamard="on", **options)
        rotated.step()
        assert rotated.state.arguments["hadamard"] == "on"


def check_halves_are_fed_back_within_their_rounding() -> None:
    schedules = (("transpose", "contributions"), ("ring", "contributions"), ("transpose", "world"))
    for dtype, (algorithm, divide_by) in product((torch.bfloat16, torch.float16), schedules):
        ledger = Ledger(dtype, algorithm=algorithm, divide_by=divide_by)
        for _ in range(STEPS):
            ledger.step()
        ledger.check()


def check_a_checkpoint_carries_what_the_last_step_owes_to_another_process() -> None:
    ledger = Ledger()
    if not CARRY.exists():
        for _ in range(STEPS):
            ledger.step()
        state = ledger.state.state_dict()
        assert any(part.any() for part in owed_in(state).values())
        torch.save([state, ledger.given, ledger.applied, ledger.largest, ledger.steps], CARRY)
        return
    state, ledger.given, ledger.applied, ledger.largest, ledger.steps = torch.load(CARRY, weights_only=True)
    ledger.state.load_state_dict(state)
    kept = owed_in(ledger.state.state_dict())
    assert all(torch.equal(kept[name], part) for name, part in owed_in(state).items()), "not yet fed back"
    for _ in range(STEPS):
        ledger.step()
    ledger.check()


def check_a_distributed_checkpoint_gives_each_rank_its_own_back() -> None:
    first, second = Ledger(), Ledger()
    for _ in range(2):
        first.step()
    folder = CARRY.parent / "distributed"
    checkpoint.save({"owed": first.state}, checkpoint_id=folder, process_group=GLOO)
    checkpoint.load({"owed": second.state}, checkpoint_id=folder, process_group=GLOO)  # before its first backward
    saved, kept = owed_in(first.state.state_dict()), owed_in(second.state.state_dict())
    assert saved.keys() == kept.keys() == SIZES.keys()
    assert all(torch.equal(kept[name], part) for name, part in saved.items())
    assert any(part.any() for part in saved.values())


def check_a_gradient_that_overflows_does_not_come_back() -> None:
    ledger = Ledger()
    ledger.step()
    broken = ledger.gradients(SIZES)
    for gradient in broken.values():
        gradient[:] = float("inf")
    ledger.model(broken).backward()
    assert all(part.isfinite().all() for part in owed_in(ledger.state.state_dict()).values())
    for parameter in ledger.model.parameters():
        parameter.grad = None
    ledger.step()
    assert all(total.isfinite().all() for total in ledger.applied.values())


def check_a_step_that_is_not_finite_leaves_nothing_and_is_not_fed_again_what_it_was_fed() -> None:
    unused, views = {"find_unused_parameters": True}, {"gradient_as_bucket_view": True}
    cases: tuple[dict[str, Any], ...] = ({}, {"hadamard": "on"}, {"ddp": unused}, {"ddp": views, "divide_by": "world"})
    for options in cases:
        ledger = Ledger(**options)
        for at in range(STEPS):
            ledger.step(micro_batches=1 + at % 2)
            if at % 2:
                ledger.skip(micro_batches=1 + at // 2)
        ledger.check()


def check_a_step_that_is_not_finite_leaves_nothing_in_a_checkpoint_either() -> None:
    ledger = Ledger()
    ledger.step()
    assert any(part.any() for part in owed_in(ledger.state.state_dict()).values()), (
        "nothing was lost: the test has shown nothing"
    )
    ledger.skip()
    assert not any(part.any() for part in owed_in(ledger.state.state_dict()).values())


def check_a_step_that_the_loop_leaves_out_can_be_forgotten() -> None:
    ledger = Ledger()
    for at in range(STEPS):
        ledger.step()
        if at % 2:
            given = ledger.without_what_is_owed()
            applied = {name: total.clone() for name, total in ledger.applied.items()}
            ledger.step()  # finite
            ledger.given, ledger.applied = given, applied
            ledger.state.forget_step()
    ledger.check()


def check_gradients_that_no_optimizer_gets_are_kept_apart() -> None:
    for apart in ("no_sync", "frozen", "what was owed before is loaded"):
        ledger = Ledger()
        for _ in range(STEPS):
            ledger.step()
            ledger.throw_away(apart)
        ledger.check()


def check_a_step_that_a_scaler_skips_does_not_come_back() -> None:
    ledger = Ledger()
    optimizer = torch.optim.SGD(ledger.model.parameters(), lr=1.0)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    for step in range(STEPS):
        is_spike = step == STEPS // 2
        value = 1.0 if not is_spike else 1e6 if RANK == 0 else -9e5
        gradients = {name: torch.full((size,), value) for name, size in SIZES.items()}
        if is_spike and RANK == 0:
            gradients["third"][:] = float("inf")
        optimizer.zero_grad()
        before = [parameter.detach().clone() for parameter in ledger.model.parameters()]
        scaler.scale(ledger.model(gradients)).backward()
        scaler.step(optimizer)
        scaler.update()
        steps = [old - new.detach() for old, new in zip(before, ledger.model.parameters(), strict=True)]
        due = 0.0 if is_spike else 1.0
        # What is owed is a gradient less a mean, of gradients that are all one; then in units of twice the scale.
        assert all((each - due).abs().max() <= 1.0 for each in steps), (
            f"step {step}: {[each.abs().max() for each in steps]}"
        )
    assert scaler.get_scale() == 1.0
