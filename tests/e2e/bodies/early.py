"""Optimizer steps inside the next forward pass: the same bits, and front layers that wait for nobody else's gradients."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import gradwire.torch
import pytest
import torch
import torch.distributed as dist
from gradwire.errors import GradwireError, InvalidRequestError, UnsupportedError
from gradwire.torch import _early
from owed import owed_in
from rank import RANK
from torch import nn
from torch._dynamo.utils import counters
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import prune
from torch.optim.lr_scheduler import LinearLR
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

WIDTH, STEPS = 64, 5
Optimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
OPTIMIZERS: list[Optimizer] = [
    lambda parameters: torch.optim.SGD(parameters, lr=0.05, momentum=0.9),
    lambda parameters: torch.optim.AdamW(parameters, lr=0.01),
    lambda parameters: torch.optim.AdamW(parameters, lr=torch.tensor(0.01)),  # which schedulers write in place
]


class Multiplying(torch.optim.Optimizer):
    """Multiplies matrices, as Muon and Shampoo do."""

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 0.05})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        assert closure is None
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(group["lr"] * (parameter.grad @ torch.eye(WIDTH)))


class Tied(nn.Module):
    """Blocks in a plain container, a scale of the model's own, and a last layer with the weights of the first, used before it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(4)))
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.last = nn.Linear(WIDTH, WIDTH, bias=False)
        self.last.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.blocks(self.first(self.last(x * self.scale))))


class Sideways(nn.Module):
    """Uses the weights of a layer that it does not call."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(self.one(x), self.other.weight, self.other.bias)


class Borrowed(nn.Module):
    """Uses the weights of a layer before it calls it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        embedded = nn.functional.embedding(x.argmax(1), self.head.weight)
        return self.head(self.first(embedded))


class LaidOut(nn.Module):
    """A convolution of channels-last weights, a transposed weight, and one with gaps between its elements."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(2, 4, 3, padding=1).to(memory_format=torch.channels_last)
        self.turned = nn.Parameter(torch.randn(128, WIDTH).t())
        self.gaps = nn.Parameter(torch.randn(WIDTH, 6)[:, ::2])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        images = self.convolution(x.view(-1, 2, 4, WIDTH // 8)).flatten(1)
        return images @ self.turned.t() @ self.gaps


class Two(nn.Module):
    """Two layers, of which each call uses one."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return torch.tanh(self.get_submodule(name)(x))


class CalledTwice(nn.Module):
    """Layers in one module, which is called for each of them, and whose activations are computed again in `backward`."""

    def __init__(self, use_reentrant: bool) -> None:
        super().__init__()
        self.two, self.middle = Two(), nn.Linear(WIDTH, WIDTH)
        self.use_reentrant = use_reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        two = partial(checkpoint, self.two, use_reentrant=self.use_reentrant)
        return two(self.middle(two(x.requires_grad_(), "one")), "other")


class Embedding(nn.Module):
    """A layer with the weights of another one."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(nn.functional.linear(x, self.weight))


class TiedHead(nn.Module):
    """A first layer with the weights of the last, whose activations are computed again in `backward`."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, WIDTH)
        self.first, self.middle = Embedding(self.head.weight), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.middle(checkpoint(self.first, x, use_reentrant=False)))


class Selective(nn.Module):
    """Layers of which the matrix products are kept, and all else is computed again in `backward`."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh()) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        context = partial(create_selective_checkpoint_contexts, [torch.ops.aten.mm.default])
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False, context_fn=context)
        return x


def computed() -> nn.Module:
    """Layers whose weights are computed from their parameters by hooks before each forward pass."""
    layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))
    prune.random_unstructured(layers[0], "weight", amount=0.5)
    nn.utils.spectral_norm(layers[2])
    return layers


def partly_ignored() -> nn.Module:
    """A model of which a script averages some gradients by itself."""
    model = Tied()
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["blocks.0.0.weight"])
    return model


def parallel(model: Callable[[], nn.Module], **options: Any) -> DistributedDataParallel:
    torch.manual_seed(4)
    return DistributedDataParallel(model(), **{"gradient_as_bucket_view": True, "bucket_cap_mb": 0.01, **options})


def batch(step: int) -> torch.Tensor:
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(10 * step + RANK))


def backward(model: DistributedDataParallel, step: int) -> None:
    if step == 2:  # gradients of two batches
        with model.no_sync():
            model(batch(90)).square().mean().backward()
    model(batch(step)).square().mean().backward()


def check_parameters_are_those_of_steps_after_backward() -> None:
    for optimizer_of in OPTIMIZERS:
        late = parallel(Tied)
        gradwire.torch.tolerate_loss(late, preset="reliable")
        optimizer = optimizer_of(list(late.parameters()))
        scheduler = LinearLR(optimizer)
        early = parallel(Tied)
        state = gradwire.torch.tolerate_loss(early, preset="reliable")
        steps = state.step_in_forward(optimizer_of)
        assert len(steps.optimizers) == 6, "the first layer, four blocks, the scale; the last has what the first owns"
        schedulers = [LinearLR(each) for each in steps.optimizers]
        for step in range(STEPS):
            backward(late, step)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            backward(early, step)
            with warnings.catch_warnings(action="error"):  # of a scheduler that thinks that it comes before the step
                for each in schedulers:
                    each.step()
            if step == 3:
                with torch.no_grad():
                    assert torch.equal(early.eval()(batch(0)), late.eval()(batch(0)))
        expected, found = late.state_dict(), early.state_dict()
        assert all(torch.equal(expected[name], found[name]) for name in expected)
        rates = [group["lr"] for each in (optimizer, *steps.optimizers) for group in each.param_groups]
        assert all(rate == rates[0] for rate in rates)
        assert state.total.buckets >= 2 * STEPS
        assert [record.buckets > 0 for record in state.steps] == [True] * STEPS


def check_parameters_that_are_not_row_major_are_stepped_with_their_own_gradients() -> None:
    for options in ({}, {"gradient_as_bucket_view": False}):
        assert_early_steps_are_those_after_backward(LaidOut, **options)


def check_weights_that_hooks_compute_are_computed_from_the_parameters_of_the_step() -> None:
    assert_early_steps_are_those_after_backward(computed)


def check_layers_that_are_computed_again_in_backward_wait_with_their_steps_for_the_next_forward_pass() -> None:
    for model in (partial(CalledTwice, use_reentrant=False), partial(CalledTwice, use_reentrant=True), TiedHead):
        assert_early_steps_are_those_after_backward(model)


def check_what_an_optimizer_multiplies_is_not_kept_for_the_layer_that_is_computed_again() -> None:
    assert_early_steps_are_those_after_backward(Selective, optimizer_of=Multiplying)


def assert_early_steps_are_those_after_backward(
    model: Callable[[], nn.Module], optimizer_of: Optimizer = OPTIMIZERS[1], **options: Any
) -> None:
    """The parameters, and their memory layout; `options` of DDP, for the model that steps after `backward`."""
    late, early = parallel(model, **options), parallel(model)
    optimizer = optimizer_of(list(late.parameters()))
    gradwire.torch.tolerate_loss(late, preset="reliable")
    steps = gradwire.torch.tolerate_loss(early, preset="reliable").step_in_forward(optimizer_of)
    for step in range(STEPS):
        backward(late, step)
        optimizer.step()
        optimizer.zero_grad()
        backward(early, step)
    steps.finish()
    for (name, expected), found in zip(late.named_parameters(), early.parameters(), strict=True):
        assert torch.equal(expected, found), f"{name}: {options}"
        assert expected.stride() == found.stride()


def check_the_front_layers_compute_before_the_back_layers_gradients_are_waited_for() -> None:
    model = parallel(lambda: nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(4))))
    steps = gradwire.torch.tolerate_loss(model, preset="reliable").step_in_forward(OPTIMIZERS[0])
    for step in range(3):
        backward(model, 10 + step)
    log: list[str] = []
    for number, layer in enumerate(model.module):
        layer.register_forward_hook(lambda *_, number=number: log.append(f"computed {number}"))
    numbers = {id(p): number for number, layer in enumerate(model.module) for p in layer.parameters()}
    real = _early._Arrival.wait
    waited: dict[int, int] = {}
    for each, (_, arrival) in steps._owed.items():
        waited[id(arrival)] = min(numbers[each], waited.get(id(arrival), len(numbers)))

    def wait(arrival: _early._Arrival) -> None:
        line = f"waited for the bucket of {waited[id(arrival)]}"
        if line not in log:
            log.append(line)
        real(arrival)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_early._Arrival, "wait", wait)
        model(batch(0))
    assert log == [line for n in range(4) for line in (f"waited for the bucket of {n}", f"computed {n}")]


def check_what_is_owed_is_read_and_changed_when_the_buckets_in_flight_have_ended() -> None:
    model = parallel(Tied)
    state = gradwire.torch.tolerate_loss(model, preset="mlt", loss_bound=0.3, gather_loss_bound=0.0)
    steps = state.step_in_forward(OPTIMIZERS[0])
    backward(model, 0)
    backward(model, 1)  # DDP has rebuilt its buckets, together with the other rank
    saved = before_the_others_gradients(model, 3, state.state_dict)
    steps.finish()
    assert are_equal(owed_in(saved), owed_in(state.state_dict()))
    assert any(part.any() for part in owed_in(saved).values()), "nothing was lost, this run says nothing"
    before_the_others_gradients(model, 4, lambda: state.rescale(0.0))
    assert not any(part.any() for part in owed_in(state.state_dict()).values())

    def load() -> dict[str, torch.Tensor]:
        state.load_state_dict(saved)
        return {name: parameter.detach().clone() for name, parameter in model.module.named_parameters()}

    stepped = before_the_others_gradients(model, 5, load)
    assert are_equal(owed_in(saved), owed_in(state.state_dict()))
    steps.finish()
    assert are_equal(stepped, dict(model.module.named_parameters())), (
        "the step of what was in flight comes before what is loaded"
    )


def before_the_others_gradients(model: DistributedDataParallel, step: int, call: Callable[[], Any]) -> Any:
    """Calls after a backward pass whose buckets are in flight: rank 1 begins its own when rank 0 waits for them, or is through."""
    store, key = dist.distributed_c10d._get_default_store(), f"backward {step} of rank 1"
    if RANK == 1:
        store.wait([key])
        backward(model, step)
        return call()
    backward(model, step)
    real = _early._Arrival.wait

    def wait(arrival: _early._Arrival) -> None:
        store.set(key, "")
        real(arrival)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_early._Arrival, "wait", wait)
        result = call()
    store.set(key, "")
    return result


def are_equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def check_steps_are_taken_in_the_modes_of_a_script_that_steps_after_backward() -> None:
    modes: list[Callable[[], Any]] = [torch.inference_mode, lambda: torch.autocast("cpu", torch.bfloat16)]
    for mode, optimizer_of in ((mode, each) for mode in modes for each in (*OPTIMIZERS, Multiplying)):
        late, early = parallel(Tied), parallel(Tied)
        gradwire.torch.tolerate_loss(late, preset="reliable")
        optimizer = optimizer_of(list(late.parameters()))
        gradwire.torch.tolerate_loss(early, preset="reliable").step_in_forward(optimizer_of)
        for step in range(3):
            backward(late, step)
            optimizer.step()
            optimizer.zero_grad()
            backward(early, step)
            if step == 0:
                with torch.no_grad(), mode():
                    assert torch.equal(early(batch(step)), late(batch(step)))
        expected, found = late.state_dict(), early.state_dict()
        assert all(torch.equal(expected[name], found[name]) for name in expected)


def one_step_behind() -> tuple[tuple[Any, Any], tuple[Any, Any]]:
    """A model that was stepped after its backward pass, with its optimizer, and one that is owed that step, with its steps."""
    late, early = parallel(Tied), parallel(Tied)
    gradwire.torch.tolerate_loss(late, preset="reliable")
    optimizer = OPTIMIZERS[0](list(late.parameters()))
    steps = gradwire.torch.tolerate_loss(early, preset="reliable").step_in_forward(OPTIMIZERS[0])
    backward(late, 0)
    optimizer.step()
    backward(early, 0)
    return (late, optimizer), (early, steps)


def check_a_step_that_fails_is_taken_by_the_next_forward_pass() -> None:
    (late, _), (early, steps) = one_step_behind()

    def fail(*_: Any) -> None:
        raise ZeroDivisionError

    handle = steps.optimizers[2].register_step_pre_hook(fail)
    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            early(batch(1))
    handle.remove()
    steps.finish()
    expected, found = late.state_dict(), early.state_dict()
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def check_a_step_that_was_interrupted_behind_its_update_is_not_taken_again() -> None:
    for interrupt in ("hook", "zero_grad"):
        (late, optimizer), (early, steps) = one_step_behind()
        stepped = steps.optimizers[2]

        def fail(*_: Any, **__: Any) -> None:
            raise KeyboardInterrupt

        if interrupt == "hook":
            handle = stepped.register_step_post_hook(fail)
            with pytest.raises(KeyboardInterrupt):
                early(batch(1))
            handle.remove()
        else:
            clear, stepped.zero_grad = stepped.zero_grad, fail  # type: ignore[method-assign]
            with pytest.raises(KeyboardInterrupt):
                early(batch(1))
            stepped.zero_grad = clear  # type: ignore[method-assign]
            clear(set_to_none=True)
        expected, found = late.state_dict(), early.state_dict()
        assert all(torch.equal(expected[name], found[name]) for name in expected), interrupt
        optimizer.zero_grad()
        backward(late, 2)
        optimizer.step()
        backward(early, 2)
        expected, found = late.state_dict(), early.state_dict()
        assert all(torch.equal(expected[name], found[name]) for name in expected), interrupt


def check_a_layer_whose_bucket_failed_is_not_taken_for_stepped() -> None:
    (late, optimizer), (early, steps) = one_step_behind()
    failing = steps._owed[id(early.module.blocks[1][0].weight)][1]
    real = failing.wait

    def fail() -> None:
        raise GradwireError("peer lost")

    failing.wait = fail  # type: ignore[method-assign]
    for read in (lambda: early(batch(1)), steps.finish, early.state_dict):
        with pytest.raises(GradwireError, match="peer lost"):
            read()
    failing.wait = real  # type: ignore[method-assign]
    steps.finish()
    expected, found = late.state_dict(), {name: value.clone() for name, value in early.state_dict().items()}
    assert all(torch.equal(expected[name], found[name]) for name in expected)
    backward(early, 1)
    steps.forget()
    assert all(torch.equal(found[name], value) for name, value in early.state_dict().items())
    optimizer.zero_grad()
    backward(late, 3)
    optimizer.step()
    backward(early, 3)
    expected, found = late.state_dict(), early.state_dict()
    assert all(torch.equal(expected[name], found[name]) for name in expected), "the forgotten gradients are in the next"


def check_a_layer_that_was_used_without_its_step_is_an_error() -> None:
    model = parallel(Sideways)
    gradwire.torch.tolerate_loss(model).step_in_forward(OPTIMIZERS[0])
    backward(model, 0)
    with pytest.raises(InvalidRequestError, match=r"other\.bias, other\.weight"):
        model(batch(1))
    model = parallel(Sideways)
    state = gradwire.torch.tolerate_loss(model)
    state.step_in_forward(OPTIMIZERS[0], layers=[model.module])
    for step in (0, 1):
        model(batch(step)).square().mean().backward()


def check_a_layer_whose_weights_are_used_before_it_is_called_needs_its_parent() -> None:
    late, early = parallel(Borrowed), parallel(Borrowed)
    gradwire.torch.tolerate_loss(late, preset="reliable")
    optimizer = OPTIMIZERS[0](list(late.parameters()))
    state = gradwire.torch.tolerate_loss(early, preset="reliable")
    state.step_in_forward(OPTIMIZERS[0], layers=[early.module])
    for step in range(STEPS):
        late(batch(step)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        early(batch(step)).square().mean().backward()
    expected, found = late.state_dict(), early.state_dict()
    assert all(torch.equal(expected[name], found[name]) for name in expected)


def check_what_does_not_go_with_it_is_refused() -> None:
    def refused(model: DistributedDataParallel, match: str, **tolerance: Any) -> None:
        state = gradwire.torch.tolerate_loss(model, **tolerance)
        with pytest.raises(UnsupportedError, match=match):
            state.step_in_forward(OPTIMIZERS[0])

    for options in ({"gradient_as_bucket_view": False}, {"find_unused_parameters": True}):
        refused(parallel(Tied, **options), next(iter(options)))
    refused(parallel(lambda: nn.EmbeddingBag(4, 2, sparse=True)), "sparse")
    refused(parallel(partly_ignored), "parameters that DDP ignores")
    for more in ({"compression": default_hooks.bf16_compress_wrapper}, {"preset": "mlt", "gather_fill": "previous"}):
        refused(parallel(Tied), "does not go with", **more)


def check_parameters_that_were_frozen_after_the_model_was_wrapped_are_named() -> None:
    model = parallel(Tied, static_graph=True)
    model.module.blocks[1].requires_grad_(False)
    steps = gradwire.torch.tolerate_loss(model).step_in_forward(OPTIMIZERS[0])
    with pytest.raises(RuntimeError, match=r"no layer steps blocks\.1\.0\.bias, blocks\.1\.0\.weight.*freeze"):
        backward(model, 0)
    assert isinstance(gradwire.torch.last_error(), UnsupportedError)
    steps.forget()


def check_an_optimizer_that_cannot_be_made_leaves_no_hook_on_the_model() -> None:
    model = parallel(Tied)
    made: list[torch.optim.Optimizer] = []

    def fails_later(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        if len(made) == 2:
            raise ZeroDivisionError
        made.append(OPTIMIZERS[0](parameters))
        return made[-1]

    with pytest.raises(ZeroDivisionError):
        gradwire.torch.tolerate_loss(model).step_in_forward(fails_later)
    assert len(made) == 2
    assert not any(module._forward_pre_hooks for module in model.module.modules())


def check_a_rank_that_joins_before_the_others_is_refused_on_all() -> None:
    model = parallel(Tied)
    gradwire.torch.tolerate_loss(model).step_in_forward(OPTIMIZERS[0])

    def train() -> None:
        with Join([model]):
            for step in (3, 4, 5, 6)[: 2 + 2 * RANK]:
                backward(model, step)

    with pytest.raises(RuntimeError, match=r"step_in_forward does not go with Join.*enable=False"):
        train()
    assert isinstance(gradwire.torch.last_error(), UnsupportedError)


def check_a_model_that_was_in_a_join_is_taken_out_of_it_as_the_error_says() -> None:
    model = parallel(Tied)
    state = gradwire.torch.tolerate_loss(model)
    with Join([model]):
        for step in (3, 4)[: 1 + RANK]:
            backward(model, step)
    model.zero_grad()
    with Join([model], enable=False):
        pass
    steps = state.step_in_forward(OPTIMIZERS[0])
    for step in (0, 1):
        backward(model, step)
    steps.finish()


def check_gradients_that_nobody_has_used_are_not_replaced_by_those_of_another_backward_pass() -> None:
    model = parallel(Tied)
    steps = gradwire.torch.tolerate_loss(model).step_in_forward(OPTIMIZERS[0])
    losses = [model(batch(step)).square().mean() for step in (0, 1)]
    losses[0].backward()
    model.reducer.prepare_for_backward([])  # what DDP does in a forward pass, here without the modules'
    with pytest.raises(RuntimeError, match=r"first\.weight.* have not been used.*finish"):
        losses[1].backward()
    assert isinstance(gradwire.torch.last_error(), InvalidRequestError)
    steps.forget()


def check_a_compiled_model_traces_nothing_of_the_steps() -> None:
    torch._dynamo.reset()
    counters.clear()
    model = DistributedDataParallel(Tied(), gradient_as_bucket_view=True)
    steps = gradwire.torch.tolerate_loss(model, preset="reliable").step_in_forward(OPTIMIZERS[0])
    compiled = torch.compile(model, backend="eager")
    for _ in range(3):
        compiled(torch.ones(2, WIDTH)).square().mean().backward()
    steps.finish()
    breaks = [*counters["graph_break"], *counters["unimplemented"]]
    assert any("gradwire steps the optimizer" in text for text in breaks), breaks
    assert not any("_native" in text or "method `wait`" in text for text in breaks), breaks


def check_gradients_that_may_be_lost_leave_replicas_equal() -> None:
    model = parallel(Tied)
    steps = gradwire.torch.tolerate_loss(model, loss_bound=0.1).step_in_forward(OPTIMIZERS[1])
    for step in range(STEPS):
        backward(model, step)
    steps.finish()
    for parameter in model.parameters():
        mine = parameter.detach().clone()
        dist.broadcast(mine, 0)
        assert torch.equal(mine, parameter)
