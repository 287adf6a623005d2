"""What DDP can be told, with gradients that may be lost but are not: as with gloo. Two ranks."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import gradwire.torch
import pytest
import torch
import torch.distributed as dist
from gradwire.errors import ConfigError, GradwireError, InvalidRequestError, UnsupportedError
from rank import RANK, WORLD_SIZE
from torch import nn
from torch.distributed._composable.replicate import replicate
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

GLOO = dist.new_group(backend="gloo")
BUCKET_MB = 0.1  # several buckets


class Net(nn.Module):
    """Of four layers one is used when asked for, and one never."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.sometimes = nn.Linear(20, 300), nn.Linear(300, 300)
        self.never, self.last = nn.Linear(4, 4), nn.Linear(300, 4)

    def forward(self, x: torch.Tensor, use_all: bool = True) -> torch.Tensor:
        hidden = torch.relu(self.first(x))
        return self.last(torch.relu(self.sometimes(hidden)) if use_all else hidden)


def used() -> nn.Module:
    """All of its parameters are used."""
    net = Net()
    del net.never
    return net


def batch(step: int) -> torch.Tensor:
    return torch.randn(16, 20, generator=torch.Generator().manual_seed(1000 * step + RANK))


def loss_of(model: Any, step: int, *more: Any) -> torch.Tensor:
    return model(batch(step), *more).square().mean()


Train = Callable[[DistributedDataParallel, Any], None]


def as_with_gloo(train: Train, net: Callable[[], nn.Module] = used, **options: Any) -> None:
    """`train(model, state)` leaves the parameters that gloo leaves; `state` is None with gloo."""
    ended = []
    for group in (dist.group.WORLD, GLOO):
        model = DistributedDataParallel(net(), process_group=group, **{"bucket_cap_mb": BUCKET_MB, **options})
        state = None if group is GLOO else gradwire.torch.tolerate_loss(model, preset="reliable")
        train(model, state)
        assert state is None or (state.bytes_missing == 0 < state.bytes_expected)
        ended.append([parameter.detach().clone() for parameter in model.parameters()])
    for ours, reference in zip(*ended, strict=True):
        torch.testing.assert_close(ours, reference, rtol=1e-5, atol=1e-7)


def plain(model: DistributedDataParallel, _state: Any, use_all: Callable[[int], bool] = lambda _step: True) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step in range(4):
        optimizer.zero_grad()
        loss_of(model, step, use_all(step)).backward()
        optimizer.step()


def check_bucket_views_and_static_graphs() -> None:
    for options in (
        {"gradient_as_bucket_view": True},
        {"static_graph": True},
        {"static_graph": True, "gradient_as_bucket_view": True},
    ):
        as_with_gloo(plain, **options)
    as_with_gloo(plain, Net, static_graph=True)


class Mixed(nn.Module):
    """The gradient of each parameter is what it is given: one of halves, one not."""

    def __init__(self, elems: int) -> None:
        super().__init__()
        self.full = nn.Parameter(torch.zeros(elems))
        self.halves = nn.Parameter(torch.zeros(elems, dtype=torch.bfloat16))

    def forward(self, gradient: torch.Tensor) -> torch.Tensor:
        return (self.full * gradient).sum() + (self.halves * gradient.bfloat16()).sum().float()


def check_a_static_graph_of_several_dtypes_keeps_its_averages_apart() -> None:
    elems = 500_000  # so many that the first bucket is in flight when the second one comes
    for _ in range(3):
        model = DistributedDataParallel(Mixed(elems), static_graph=True)
        state = gradwire.torch.tolerate_loss(model, preset="auto", gather_fill="previous")
        for step in range(1, 4):
            model.zero_grad()
            model(torch.full((elems,), float(step))).backward()
            for parameter in model.parameters():
                assert torch.equal(parameter.grad, torch.full_like(parameter, step)), f"step {step}"
        assert [record.buckets for record in state.steps] == [2] * 3


def check_parameters_that_are_not_used() -> None:
    def train(model: DistributedDataParallel, state: Any) -> None:
        plain(model, state, lambda step: (step + RANK) % 2 == 0)

    for view in (False, True):
        as_with_gloo(train, Net, find_unused_parameters=True, gradient_as_bucket_view=view)


class Headless(nn.Module):
    """The last layer, alone in DDP's first bucket, is not used."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.first, self.last, self.head = nn.Linear(20, 300), nn.Linear(300, 300), nn.Linear(300, 100)

    def forward(self, x: torch.Tensor, _use_all: bool) -> torch.Tensor:
        return self.last(torch.relu(self.first(x)))


def check_buckets_that_are_skipped() -> None:
    if "skip_all_reduce_unused_params" not in inspect.signature(DistributedDataParallel).parameters:
        return

    def train(model: DistributedDataParallel, state: Any) -> None:
        plain(model, state)
        if state is not None:
            assert len(state.steps) == 4
            assert [record.buckets for record in state.steps] == [2] * 4, "without that of the head"

    as_with_gloo(train, Headless, find_unused_parameters=True, skip_all_reduce_unused_params=True)


def check_gradients_accumulate_without_communication() -> None:
    def train(model: DistributedDataParallel, state: Any) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for step in range(3):
            optimizer.zero_grad()
            with model.no_sync():
                loss_of(model, step).backward()
                loss_of(model, step + 10).backward()
            loss_of(model, step + 20).backward()
            optimizer.step()
        assert state is None or len(state.steps) == 3

    for view in (False, True):
        as_with_gloo(train, gradient_as_bucket_view=view)


def check_uneven_inputs_with_a_sharded_optimizer() -> None:
    def train(model: DistributedDataParallel, state: Any) -> None:
        optimizer = ZeroRedundancyOptimizer(
            model.parameters(), optimizer_class=torch.optim.Adam, lr=0.01, process_group=model.process_group
        )
        with Join([model, optimizer]):
            for step in range(2 + RANK):
                optimizer.zero_grad()
                loss_of(model, step).backward()
                optimizer.step()
        assert state is None or len(state.steps) == WORLD_SIZE + 1, "also where this rank had joined"

    as_with_gloo(train)


def check_passes_of_other_kinds_begin_no_step() -> None:
    def train(model: DistributedDataParallel, state: Any) -> None:
        for step in range(3):
            with torch.no_grad():
                loss_of(model, step)
            losses = [loss_of(model, step), loss_of(model, step + 10)]
            sum(losses).backward(retain_graph=True)
            losses[0].backward()  # which DDP exchanges nothing of
            model.zero_grad()
            if state is not None:
                assert len(state.steps) == step + 1
                state.state_dict()

    for options in ({}, {"static_graph": True}, {"find_unused_parameters": True}):
        as_with_gloo(train, **options)


def check_autocast_and_a_scaler_that_skips_a_step() -> None:
    def trained_in(dtype: torch.dtype) -> Train:
        def train(model: DistributedDataParallel, state: Any) -> None:
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
            scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
            scales = [64.0]
            for step in range(5):
                optimizer.zero_grad()
                with torch.autocast("cpu", dtype=dtype):
                    loss = model(batch(step)).float().square().mean()
                # Of one rank alone; the mean tells the other.
                scaler.scale(loss * float("inf") if step == 2 and RANK == 0 else loss).backward()
                scaler.step(optimizer)
                scaler.update()
                scales.append(scaler.get_scale())
                if state is not None:
                    state.rescale(scales[-1] / scales[-2])
            assert scales == [64.0, 64.0, 128.0, 64.0, 64.0, 128.0]

        return train

    for dtype in (torch.bfloat16, torch.float16):
        as_with_gloo(trained_in(dtype))


def check_activations_that_are_computed_again() -> None:
    def train(model: DistributedDataParallel, state: Any) -> None:
        for step in range(2):
            model.zero_grad()
            checkpoint(model, batch(step), use_reentrant=False).square().mean().backward()
        assert state is None or len(state.steps) == 2

    as_with_gloo(train, static_graph=True)


def check_a_compiled_model() -> None:
    def train(model: DistributedDataParallel, state: Any) -> None:
        compiled = torch.compile(model, backend="aot_eager")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for step in range(3):
            optimizer.zero_grad()
            loss_of(compiled, step).backward()
            optimizer.step()
        assert state is None or len(state.steps) == 3

    as_with_gloo(train, bucket_cap_mb=25)  # torch's own splitting wants larger buckets


def check_what_torch_compile_made_of_a_model_is_taken() -> None:
    model = torch.compile(
        DistributedDataParallel(used(), bucket_cap_mb=25), backend="aot_eager"
    )  # as Accelerate's `prepare`
    state = gradwire.torch.tolerate_loss(model, preset="reliable")
    loss_of(model, 0).backward()
    assert state.steps[-1].buckets > 0


def check_a_wrapper_is_refused_with_the_name_of_the_model_that_it_holds() -> None:
    class Wrapper(nn.Module):
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.held = model

    for wrapped, advice in ((Wrapper(DistributedDataParallel(used())), "pass its held"), (used(), "wrap it first")):
        with pytest.raises(UnsupportedError, match=f"got {type(wrapped).__name__}: {advice}"):
            gradwire.torch.tolerate_loss(wrapped)
    sharded_once = FullyShardedDataParallel(used(), process_group=GLOO, device_id=torch.device("cpu"))
    with pytest.raises(UnsupportedError, match="FSDP1"):
        gradwire.torch.tolerate_loss(sharded_once)
    for replicated in (replicate(used()), Wrapper(replicate(used()))):
        with pytest.raises(UnsupportedError, match=r"replicate\(\) of .*always exact: DistributedDataParallel"):
            gradwire.torch.tolerate_loss(replicated)


def check_a_rank_outside_of_a_group_is_told_so() -> None:
    group = gradwire.torch.tolerant_group([0])
    tensor, shard = torch.ones(WORLD_SIZE), torch.empty(1)
    calls = (
        lambda: gradwire.torch.all_reduce(tensor, group=group),
        lambda: gradwire.torch.reduce_scatter(shard, tensor, group=group),
        lambda: gradwire.torch.stats(group),
        lambda: gradwire.torch.members(group),
    )
    for call in calls if RANK != 0 else ():
        with pytest.raises(UnsupportedError, match="this rank is not in the group"):
            call()


WRONG_OF_THE_HOOK = [
    ("priority", 3), ("compression", "bf16"), ("tensorboard", "runs"), ("error_feedback", "no"), ("error_feedback", 1),
    ("steps_kept", "a"), ("steps_kept", 1.5), ("steps_kept", 0), ("drift_every", "a"), ("drift_every", True), ("drift_every", -1),
    ("loss_bound", "a"), ("deadline", 1.0), ("algorithm", 3), ("preset", []),
]  # fmt: skip


def check_a_wrong_argument_of_the_hook_is_refused_with_its_name() -> None:
    model = DistributedDataParallel(used())
    for name, value in WRONG_OF_THE_HOOK:
        with pytest.raises(ConfigError, match=f"^{name} = .* is not allowed: ") as caught:
            gradwire.torch.tolerate_loss(model, **{name: value})
        assert caught.value.field == name
    gradwire.torch.tolerate_loss(model, preset="reliable")  # nothing has been registered
    plain(model, None)


WRONG_OF_A_CALL: list[tuple[str, Any, type[GradwireError]]] = [
    ("op", "mean", UnsupportedError), ("op", "1", UnsupportedError), ("delay_share", "a", ConfigError),
    ("important", "a", InvalidRequestError), ("contributions", "no", ConfigError), ("traffic_class", "a", ConfigError),
    ("residual", [1.0], InvalidRequestError), ("loss_bound", "a", ConfigError), ("deadline", 3, ConfigError),
]  # fmt: skip
WRONG_OF_AN_ALL_REDUCE = [
    ("priority", "a", ConfigError),
    ("priority", 1.5, ConfigError),
    ("priority", 256, ConfigError),
]


def check_a_wrong_argument_of_a_tolerant_reduction_is_refused_with_its_name() -> None:
    tensor, part = torch.ones(4 * WORLD_SIZE), torch.empty(4)
    for name, value, kind in WRONG_OF_A_CALL + WRONG_OF_AN_ALL_REDUCE:
        with pytest.raises(kind, match=f"^{name} "):
            gradwire.torch.all_reduce(tensor, **{name: value})
    for name, value, kind in WRONG_OF_A_CALL:
        with pytest.raises(kind, match=f"^{name} "):
            gradwire.torch.reduce_scatter(part, tensor, **{name: value})
    assert gradwire.torch.all_reduce(tensor, "SUM", async_op=True).exception() is not None
    gradwire.torch.all_reduce(tensor, dist.ReduceOp.SUM, preset="reliable")
    assert tensor.eq(WORLD_SIZE).all(), "the group goes on"


def check_a_model_on_a_mesh() -> None:
    mesh = init_device_mesh("cpu", (WORLD_SIZE,))
    model = DistributedDataParallel(used(), device_mesh=mesh)
    state = gradwire.torch.tolerate_loss(model, preset="reliable")
    loss_of(model, 0).backward()
    assert state.bytes_expected > 0
    reference = DistributedDataParallel(used(), process_group=GLOO)
    loss_of(reference, 0).backward()
    for ours, theirs in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-5, atol=1e-7)
