"""Error feedback of sharded models over sockets that lose packets: what one parameter is owed is its own.

FSDP reduces the parameters that have a gradient in a step, side by side. Heads that take turns, or are frozen later, make that
another set in each step, and sets may have the same size. For each parameter, with N ranks, over a run:

    sum over ranks and steps of its gradients  =  N * sum over steps of what was applied  +  sum over ranks of what is owed

added up in float64 here, so what is left is the rounding of each step's sum, mean and residual.
"""

from __future__ import annotations

import io
import logging
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import gradwire.torch
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from counted_once import assert_counted_once
from gradwire.torch import _sharded_residuals
from owed import owed_in
from rank import RANK, WORLD_SIZE
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

GLOO = dist.new_group(backend="gloo")
# Of two equal heads, one of another size, none a multiple of the ranks, and one that is sharded by its columns.
SHAPES = {"trunk": (40_003,), "a": (150_001,), "b": (150_001,), "small": (70_001,), "wide": (50, 300 * WORLD_SIZE)}
HEADS = ("a", "b")
# Everything that was sent once may be all that there will be: at 10 % loss a tenth does not count.
TOLERANT = {"loss_bound": 0.5, "preset": "auto"}


class Trunk(nn.Module):
    """Is a module of its own to FSDP."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(SHAPES["trunk"]))

    def forward(self, gradient: torch.Tensor) -> torch.Tensor:
        return (self.weight * gradient).sum()


class Heads(nn.Module):
    """A loss whose gradient with respect to each parameter is what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = Trunk()
        for name in ("a", "b", "small", "wide"):
            self.register_parameter(name, nn.Parameter(torch.zeros(SHAPES[name])))

    def forward(self, gradients: dict[str, torch.Tensor]) -> torch.Tensor:
        terms = [(getattr(self, name) * value).sum() for name, value in gradients.items() if name != "trunk"]
        if "trunk" in gradients:
            terms.append(self.trunk(gradients["trunk"]))
        return torch.stack(terms).sum()


class Renamed(Heads):
    """The same with a head of another name, and a smaller one."""

    def __init__(self) -> None:
        super().__init__()
        self.c = self.b
        del self.b
        self.small = nn.Parameter(torch.zeros(10))


def sharded(model: nn.Module | None = None, **options: Any) -> Any:
    mesh = DeviceMesh.from_group(dist.group.WORLD, "cpu", mesh_dim_names=("shard",))
    model = Heads() if model is None else model

    def placement(parameter: nn.Parameter) -> Shard | None:
        return Shard(1) if parameter.ndim == 2 else None

    fully_shard(model.trunk, mesh=mesh, **options)
    return fully_shard(model, mesh=mesh, shard_placement_fn=placement, **options)


def name_of(parameter: str) -> str:
    return "trunk.weight" if parameter == "trunk" else parameter


def step_of(model: Any, gradients: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What a step applies to each parameter that has a gradient then; the same on every rank."""
    model(gradients).backward()
    applied = {}
    for name in SHAPES:  # some ranks may have gradients of others
        parameter = model.get_parameter(name_of(name))
        if parameter.grad is not None:
            applied[name] = parameter.grad.full_tensor()
    for parameter in model.parameters():
        parameter.grad = None
    return applied


def whole_of(owed: torch.Tensor, name: str) -> torch.Tensor:
    """Rows of ranks as a tensor like the parameter."""
    if name == "wide":
        return torch.cat([row.view(SHAPES[name][0], -1) for row in owed], dim=1)
    return owed.flatten()[: SHAPES[name][0]]


class Ledger:
    """Trains and adds up, in float64: what every rank gave, what was applied, and at last what is owed."""

    def __init__(self, model: Any = None, **options: Any) -> None:
        self.model = sharded() if model is None else model
        self.state = gradwire.torch.tolerate_loss(self.model, **{**TOLERANT, **options})
        self.given = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()}
        self.applied = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in SHAPES.items()}
        self.lost = torch.zeros(())
        self.largest, self.steps = 0.0, 0

    def step(self, *names: str) -> None:
        generator = torch.Generator().manual_seed(1000 * self.steps + RANK)
        gradients = {name: torch.randn(SHAPES[name], generator=generator) for name in names}
        for name, gradient in gradients.items():
            self.given[name] += gradient
            self.largest = max(self.largest, gradient.abs().max().item())
        for name, mean in step_of(self.model, gradients).items():
            self.applied[name] += WORLD_SIZE * mean.double()
        self.steps += 1

    def goes_on_with(self, other: Ledger) -> None:
        """What another one has added up until now."""
        self.given, self.applied, self.largest, self.steps = other.given, other.applied, other.largest, other.steps
        self.lost = other.lost + other.state.total.elems_uncounted

    def check(self, names: Sequence[str]) -> None:
        owed = owed_in(self.state.state_dict())
        lost = self.lost + self.state.total.elems_uncounted
        for name in names:
            given, late = self.given[name].clone(), whole_of(owed[name_of(name)], name).double()
            dist.all_reduce(given, group=GLOO)
            dist.all_reduce(late, group=GLOO)
            sums = (given, self.applied[name], late)
            assert_counted_once(name, sums, torch.finfo(torch.float32).eps, self.steps * self.largest)
        dist.all_reduce(lost, group=GLOO)
        assert lost > 0, "nothing was lost: the test has shown nothing"


@contextmanager
def warnings() -> Iterator[list[str]]:
    """What gradwire warns of inside."""
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("gradwire").addHandler(handler)
    try:
        yield said
    finally:
        logging.getLogger("gradwire").removeHandler(handler)


# test of: auto/error-feedback
def check_what_a_head_is_owed_never_reaches_another_of_its_size() -> None:
    for algorithm in ("auto", "ring"):  # by a reduce-scatter, and by an all-reduce
        model = sharded()
        state = gradwire.torch.tolerate_loss(model, divide_by="world", algorithm=algorithm, **TOLERANT)
        step_of(model, {"a": torch.full(SHAPES["a"], 1000.0)})
        lost = torch.tensor(float(state.total.elems_uncounted))
        dist.all_reduce(lost, group=GLOO)
        assert lost > 0, "nothing was lost: the test has shown nothing"
        applied = step_of(model, {"b": torch.ones(SHAPES["b"])})["b"]
        # As a sum of c ones divided by all ranks: c / N. What a is owed are thousands.
        assert applied.max() <= 1, (algorithm, applied.unique())


def check_what_a_head_is_owed_waits_for_its_next_turn() -> None:
    for other in ("b", "small"):  # of the same size, of another
        model = sharded()
        gradwire.torch.tolerate_loss(model, divide_by="world", **TOLERANT)
        step_of(model, {"a": torch.ones(SHAPES["a"])})
        step_of(model, {other: torch.ones(SHAPES[other])})
        # As a sum of ones divided by all ranks: above 1 only where what was late has come.
        assert step_of(model, {"a": torch.ones(SHAPES["a"])})["a"].max() > 1, other


def check_every_gradient_counts_once_where_heads_take_turns() -> None:
    cases: list[dict[str, Any]] = [{"algorithm": "ring"}, {"divide_by": "world"}, {}]
    # By an all-reduce, of which no result may be missing: nobody else applies it.
    cases.append({"algorithm": "parameter_server", "preset": "mlt", "gather_loss_bound": 0.3})
    for options in cases:
        ledger = Ledger(**options)
        turns = (("a",), ("b",), ("a", "small"), ("wide", "b"), ("small",), ("a", "b", "small", "wide"))
        for turn in (*turns, *turns):
            ledger.step("trunk", *turn)
        ledger.check(tuple(SHAPES))


def check_what_a_parameter_is_owed_waits_while_it_is_frozen() -> None:
    ledger = Ledger()
    for frozen in (False, True, False):
        ledger.model.a.requires_grad_(not frozen)
        for _ in range(3):
            ledger.step("trunk", "b", *(() if frozen else ("a",)))
        if frozen:
            assert owed_in(ledger.state.state_dict())["a"].any()
    ledger.check(("trunk", "a", "b"))


def check_every_gradient_counts_once_where_unused_parameters_are_reduced_as_zeros() -> None:
    model = sharded()
    if not hasattr(model, "set_reduce_scatter_unused_params"):
        return  # torch before 2.15
    model.set_reduce_scatter_unused_params(True)
    ledger = Ledger(model)
    for step in range(6):
        ledger.step("trunk", HEADS[(step + RANK) % 2])  # of which each rank has another
    ledger.check(("trunk", *HEADS))


def check_what_was_owed_still_is_where_a_function_of_the_users_own_fails() -> None:
    def priority(bucket: gradwire.torch.ShardedBucket) -> int:
        if answer is None:
            raise ValueError(f"no class for {bucket.name!r}")
        return answer

    for wrong in (None, 99):
        model, answer = sharded(), 0  # torch's model goes no further once a backward pass has failed
        state = gradwire.torch.tolerate_loss(model, priority=priority, **TOLERANT)
        step_of(model, {"a": torch.ones(SHAPES["a"])})
        owed = owed_in(state.state_dict())["a"]
        assert owed.any(), "nothing was lost: the test has shown nothing"
        answer = wrong
        with pytest.raises(ValueError, match=r"no class|traffic_class"):
            model({"a": torch.ones(SHAPES["a"])}).backward()
        assert torch.equal(owed_in(state.state_dict())["a"], owed)


def check_a_step_that_was_skipped_can_be_forgotten() -> None:
    model = sharded()
    state = gradwire.torch.tolerate_loss(model, divide_by="world", **TOLERANT)
    ones = {name: torch.ones(SHAPES[name]) for name in ("trunk", "a")}
    for forgets in (False, True):
        spike = {name: 1e6 * gradient for name, gradient in ones.items()}
        if RANK == 0:
            spike["trunk"][0] = float("inf")  # in another module than what is looked at
        step_of(model, spike)
        if forgets:
            state.forget_step()
        applied = step_of(model, ones)["a"].max()
        # Divided by all ranks it is one at most; what a spike leaves behind is hundreds of thousands.
        assert applied <= 1.0 if forgets else applied > 1e5, applied
        state.forget_step()


def check_gradients_that_no_optimizer_gets_are_kept_apart() -> None:
    for is_frozen in (True, False):
        ledger = Ledger()
        for _ in range(4):
            ledger.step(*SHAPES)
            owed = ledger.state.state_dict()
            gradients = {name: torch.full(shape, -4.0 * (1 + RANK)) for name, shape in SHAPES.items()}
            gradients["a"].requires_grad_()  # of the model before this one
            ledger.model.requires_grad_(not is_frozen)
            step_of(ledger.model, gradients)
            ledger.model.requires_grad_(True)
            if not is_frozen:
                ledger.state.load_state_dict(owed)
        ledger.check(tuple(SHAPES))


def check_halves_are_fed_back_by_parameter_too() -> None:
    model = sharded(mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.bfloat16))
    gradwire.torch.tolerate_loss(model, divide_by="world", **TOLERANT)
    step_of(model, {"a": torch.full(SHAPES["a"], 1024.0)})
    assert step_of(model, {"b": torch.ones(SHAPES["b"])})["b"].max() <= 1
    assert step_of(model, {"a": torch.zeros(SHAPES["a"])})["a"].max() > 1


def check_training_goes_on_from_a_checkpoint_as_if_it_had_never_stopped() -> None:
    first, second = Ledger(), Ledger()
    for turn in (("a", "small"), ("b",), ("wide",), ("a",)):
        first.step("trunk", *turn)
    state, file = first.state.state_dict(), io.BytesIO()
    assert {name for name, owed in owed_in(state).items() if owed.any()} == {name_of(name) for name in SHAPES}
    torch.save(state, file)
    second.goes_on_with(first)
    second.state.load_state_dict(state)
    for owed in owed_in(state).values():
        owed.fill_(1e6)  # the caller's own again
    file.seek(0)
    saved, kept = owed_in(torch.load(file, weights_only=True)), owed_in(second.state.state_dict())
    assert all(torch.equal(kept[name], owed) for name, owed in saved.items())
    for turn in (("b", "small"), ("a",), ("a", "wide")):
        second.step("trunk", *turn)
    second.check(tuple(SHAPES))


def check_a_distributed_checkpoint_gives_each_rank_its_own_back() -> None:
    first, second = Ledger(), Ledger()
    for turn in (("a", "small"), ("b", "wide")):
        first.step("trunk", *turn)
    folder: list[Any] = [tempfile.mkdtemp() if RANK == 0 else None]
    dist.broadcast_object_list(folder, group=GLOO)
    checkpoint.save({"owed": first.state}, checkpoint_id=folder[0], process_group=GLOO)
    checkpoint.load({"owed": second.state}, checkpoint_id=folder[0], process_group=GLOO)  # before its first backward
    dist.barrier(GLOO)
    if RANK == 0:
        shutil.rmtree(folder[0])
    saved, kept = owed_in(first.state.state_dict()), owed_in(second.state.state_dict())
    assert saved.keys() == kept.keys()
    assert all(torch.equal(kept[name], owed) for name, owed in saved.items())
    assert any(owed.any() for owed in saved.values())


def check_what_was_saved_is_not_what_later_steps_owe() -> None:
    ledger = Ledger()
    ledger.step("trunk", "a")
    saved = owed_in(ledger.state.state_dict())
    before = {name: owed.clone() for name, owed in saved.items()}
    ledger.step("trunk", "a")
    assert any(owed.any() for owed in saved.values())
    assert all(torch.equal(saved[name], owed) for name, owed in before.items())


def check_a_state_that_does_not_fit_is_left_out_with_a_warning() -> None:
    first = Ledger()
    first.step("trunk", "a", "b", "small")
    state = first.state.state_dict()
    own = {"rank": RANK, "world_size": WORLD_SIZE, "residuals": owed_in(state)}  # as earlier versions saved it
    for wrong in ({"rank": RANK + 1}, {"world_size": WORLD_SIZE + 1}, {}):
        other = Ledger()
        with warnings() as said:
            other.state.load_state_dict({**own, **wrong})
            if not wrong:
                assert torch.equal(owed_in(other.state.state_dict())["a"], owed_in(state)["a"])
                other = Ledger()
                other.state.load_state_dict({f"rank {RANK + 1} of {WORLD_SIZE}": owed_in(state)})
        assert not any(owed.any() for owed in owed_in(other.state.state_dict()).values())
        assert any("are not used on rank" in text for text in said), said
    renamed = sharded(Renamed())
    loaded = gradwire.torch.tolerate_loss(renamed, **TOLERANT)
    with warnings() as said:
        loaded.load_state_dict(state)
    assert any("the model has not" in text and text.endswith(": b") for text in said), said
    kept = owed_in(loaded.state_dict())
    assert {name for name, owed in kept.items() if owed.any()} == {"trunk.weight", "a", "small"}
    assert torch.equal(kept["a"], owed_in(state)["a"])
    with warnings() as said:
        renamed({"a": torch.ones(SHAPES["a"]), "small": torch.ones(10)}).backward()
    assert any("residual of small" in text for text in said), said
    assert owed_in(loaded.state_dict())["small"].shape == (WORLD_SIZE, -(-10 // WORLD_SIZE))


def check_gradients_of_nobody_knows_which_parameters_are_reduced_exactly() -> None:
    ledger = Ledger()
    ledger.step("a", "b")
    before = owed_in(ledger.state.state_dict())
    known = _sharded_residuals.REDUCED
    _sharded_residuals.REDUCED = "called otherwise in another torch"
    try:
        with warnings() as said:
            for _ in range(3):
                applied = step_of(ledger.model, {"b": torch.full(SHAPES["b"], float(RANK))})["b"]
                assert torch.equal(applied, torch.full(SHAPES["b"], (WORLD_SIZE - 1) / 2))
    finally:
        _sharded_residuals.REDUCED = known
    assert len(said) == 1, said
    assert "does not say whose gradients" in said[0]
    after = owed_in(ledger.state.state_dict())
    assert all(torch.equal(after[name], owed) for name, owed in before.items())
    ledger.step("a", "b")
    ledger.check(HEADS)
