"""Models that are wrapped again: what wrapped them before is gone, whatever it tolerated and however its backward pass ended."""

from __future__ import annotations

import copy
import gc
import io
import weakref
from collections.abc import Callable
from typing import Any

import gradwire.torch
import pytest
import torch
import torch.distributed as dist
from gradwire.errors import InvalidRequestError
from rank import RANK
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

GLOO = dist.new_group(backend="gloo")
WIDTH = 64


class Failing(torch.autograd.Function):
    """Passes everything on, and fails in the backward pass where it is told to."""

    fails = False

    @staticmethod
    def forward(_context: Any, inputs: torch.Tensor) -> torch.Tensor:
        return inputs.clone()

    @staticmethod
    def backward(_context: Any, gradient: torch.Tensor) -> torch.Tensor:
        if Failing.fails:
            raise MemoryError("none is left")
        return gradient


class Net(nn.Module):
    """Fails between its layers: the gradients of the last one are on their way then."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.last(Failing.apply(self.first(inputs)))


def parallel(model: nn.Module, group: Any = None) -> DistributedDataParallel:
    return DistributedDataParallel(model, process_group=group, bucket_cap_mb=0.01, gradient_as_bucket_view=True)


def backward(model: nn.Module, step: int) -> None:
    inputs = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(10 * step + RANK))
    model(inputs).square().mean().backward()


def sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05)


def check_a_wrapper_whose_gradients_tolerated_loss_is_freed() -> None:
    def in_forward(state: Any) -> None:
        state.step_in_forward(sgd)

    then: list[Callable[[Any], None]] = [lambda _state: None, in_forward]
    for prepare in then:
        wrapped = parallel(Net())
        state = gradwire.torch.tolerate_loss(wrapped, preset="mlt", gather_fill="zero", drift_every=1)
        prepare(state)
        for step in range(2):  # DDP lays its buckets out anew between the two
            backward(wrapped, step)
        gone = [weakref.ref(wrapped), weakref.ref(state)]
        wrapped.state_dict()  # nothing is in flight any more
        del wrapped, state
        gc.collect()
        assert [each() for each in gone] == [None, None]


def check_a_wrapper_whose_gradients_tolerate_loss_is_copied_averaged_and_saved() -> None:
    wrapped = parallel(Net())
    gradwire.torch.tolerate_loss(wrapped, preset="reliable")
    backward(wrapped, 0)
    saved = io.BytesIO()
    torch.save(wrapped, saved)
    saved.seek(0)
    copies = [copy.deepcopy(wrapped), AveragedModel(wrapped).module, torch.load(saved, weights_only=False)]
    gradwire.torch.tolerate_loss(copies[0], preset="reliable")
    for each in (wrapped, *copies):
        each.zero_grad()
        backward(each, 1)
        for ours, reference in zip(each.parameters(), wrapped.parameters(), strict=True):
            assert torch.equal(ours.grad, reference.grad)


def check_a_wrapper_that_has_a_hook_keeps_it_and_another_one_gets_its_own() -> None:
    net = Net()
    model = parallel(net)
    state = gradwire.torch.tolerate_loss(model, preset="reliable")
    with pytest.raises(InvalidRequestError, match="wrap the model again"):
        gradwire.torch.tolerate_loss(model)
    backward(model, 0)
    assert len(state.steps) == 1
    other = parallel(net)
    other._register_builtin_comm_hook(dist.BuiltinCommHookType.FP16_COMPRESS)
    with pytest.raises(InvalidRequestError, match="wrap the model again"):
        gradwire.torch.tolerate_loss(other)
    again = gradwire.torch.tolerate_loss(third := parallel(net), preset="reliable")
    backward(third, 1)
    assert len(again.steps) == 1


def check_steps_in_the_forward_pass_are_removed_before_a_model_is_wrapped_again() -> None:
    late, model = Net(), Net()
    for wrapped_for in range(3):  # at last without
        ddps = [parallel(late), parallel(model)]
        states = [gradwire.torch.tolerate_loss(ddp, preset="reliable") for ddp in ddps]
        steps = states[1].step_in_forward(sgd)
        with pytest.raises(InvalidRequestError, match=r"already.*remove"):
            states[1].step_in_forward(sgd)
        if wrapped_for == 2:
            steps.remove()
        for step in range(3):
            for ddp in ddps:
                backward(ddp, 10 * wrapped_for + step)
            for each in (late, model)[: 1 + steps.is_removed]:
                sgd(list(each.parameters())).step()
                each.zero_grad()
        steps.remove()
        assert all(torch.equal(*pair) for pair in zip(late.parameters(), model.parameters(), strict=True))
        hooks = (
            each for m in model.modules() for each in (m._forward_pre_hooks, m._forward_hooks, m._state_dict_pre_hooks)
        )
        assert not any(hooks)


def check_a_model_is_wrapped_again_after_an_error_in_its_backward_pass() -> None:
    def wrapped(model: nn.Module, group: Any) -> DistributedDataParallel:
        ddp = parallel(model, group)
        if group is not GLOO:
            gradwire.torch.tolerate_loss(ddp, preset="reliable")
        return ddp

    def gradients(group: Any) -> list[torch.Tensor]:
        model = Net()
        ddp = wrapped(model, group)
        Failing.fails = True
        with pytest.raises(MemoryError):
            backward(ddp, 0)
        Failing.fails = False
        del ddp
        gc.collect()
        model.zero_grad()
        ddp = wrapped(model, group)
        for step in (1, 2):
            backward(ddp, step)
        return [p.grad.clone() for p in model.parameters()]

    for ours, reference in zip(gradients(dist.group.WORLD), gradients(GLOO), strict=True):
        torch.testing.assert_close(ours, reference, rtol=1e-5, atol=1e-7)
