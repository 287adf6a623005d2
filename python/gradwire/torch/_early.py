"""Steps of the optimizer inside the next forward pass: each layer waits for its own gradients and for nobody else's.

DDP ends `backward` when every bucket has ended, so a script that steps after `backward` begins its next forward pass with
the slowest bucket, though the front layers' are the first that arrive. Here the hook tells DDP that a bucket has ended as soon as
it is on its way, and what waits for it is the forward pass of the layers whose gradients it holds: wait, step the layer's optimizer,
compute, while the back layers' buckets are still being sent. Every parameter is used with the value that it has in a script that
steps after `backward`, bit for bit, for optimizers that treat parameters one by one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.hooks import RemovableHandle

from gradwire.errors import GradwireError, InvalidRequestError, UnsupportedError
from gradwire.torch import _memory
from gradwire.torch._hyperparameters import Hyperparameters
from gradwire.torch._residuals import laid_out_like
from gradwire.torch._sparse import has_sparse_gradients
from gradwire.torch._work import GradwireWork

# parameters of one layer -> its optimizer
OptimizerOf = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
# What torch says that this thread computes no gradients for.
_NO_BACKWARD = -1


@dataclass(eq=False)
class _Layer:
    """Parameters that are stepped together, before the forward pass of the module that they belong to."""

    parameters: list[nn.Parameter]
    optimizer: torch.optim.Optimizer

    def __post_init__(self) -> None:
        self._hyperparameters = Hyperparameters(self.optimizer)
        self._on_update: Callable[[], None] | None = None
        # Before the hooks of others, which may raise.
        self.hook = self.optimizer.register_step_post_hook(lambda *_: self._tell_of_update())
        self.optimizer._optimizer_step_post_hooks.move_to_end(self.hook.id, last=False)  # type: ignore[attr-defined]

    def gradients_are_on_their_way(self) -> None:
        """Here a script that steps after `backward` would do so, which is also what schedulers make sure of before they change anything."""
        self._hyperparameters = Hyperparameters(self.optimizer)
        self.optimizer._opt_called = True  # type: ignore[attr-defined]

    def step(self, on_update: Callable[[], None]) -> None:
        """With the hyperparameters and in the modes of a script that steps after `backward`, whatever those of the forward pass are.

        Args:
            on_update: called as soon as the parameters have their new values: whatever fails from then on, they have been stepped.
        """
        with ExitStack() as modes:
            modes.enter_context(torch.inference_mode(False))  # which also turns gradients on, as they are there
            for device in {p.device.type for p in self.parameters}:
                modes.enter_context(torch.autocast(device, enabled=False))
            modes.enter_context(self._hyperparameters.applied())
            self._on_update = on_update
            try:
                self.optimizer.step()
                self._tell_of_update()  # where a class calls no hooks
            finally:
                is_updated, self._on_update = self._on_update is None, None
                if is_updated:
                    self.optimizer.zero_grad(set_to_none=True)

    def _tell_of_update(self) -> None:
        if self._on_update is not None:  # else somebody else steps
            on_update, self._on_update = self._on_update, None
            on_update()


class _Arrival:
    """A bucket on its way."""

    def __init__(self, work: GradwireWork, on_end: Callable[[GradwireWork], None]) -> None:
        self._work = work
        work.stand_apart()
        self._on_end: Callable[[GradwireWork], None] | None = on_end

    def wait(self) -> None:
        self._work.wait_apart()  # the buckets of the layers behind it were called before it, and stay in flight
        if self._on_end is not None:
            self._on_end(self._work)
            self._on_end = None


class EarlySteps:
    """What `LossTolerance.step_in_forward` returns.

    Args:
        model: what DDP has wrapped.
        optimizer_of: makes the optimizer of one layer.
        layers: see `step_in_forward`.

    Raises:
        InvalidRequestError: the model has such steps already.

    Attributes:
        is_removed: `remove` was called.
    """

    def __init__(self, model: nn.Module, optimizer_of: OptimizerOf, layers: Sequence[nn.Module] | None) -> None:
        if _has_steps(model):
            raise InvalidRequestError(
                "the layers of this model step in its forward pass already: call remove() of what the step_in_forward before returned, "
                "before the model is wrapped again or copied"
            )
        self.is_removed = False
        self._handles: list[RemovableHandle] = []
        self._names = {id(p): name for name, p in model.named_parameters()}
        # Of a parameter whose gradient is on its way: where it will be, and the bucket.
        self._owed: dict[int, tuple[Tensor, _Arrival]] = {}
        self._layers: list[_Layer] = []
        self._optimizer_of = optimizer_of
        self._owners: dict[int, _Layer] = {}
        try:
            for module in layers_of(model) if layers is None else layers:
                self._watch(module, list(module.parameters()))
            self._watch(model, [p for p in model.parameters() if id(p) not in self._owners])
            self._handles.append(model.register_forward_hook(self._hook(self._check_that_nothing_is_owed)))
            self._handles.append(model.register_state_dict_pre_hook(lambda *_: self.finish()))
        except BaseException:  # of `optimizer_of`, for one: the model stays as it was
            self._unhook()
            raise

    @property
    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Those of the layers, front to back: for schedulers, and to be saved with a checkpoint after `finish`."""
        return [layer.optimizer for layer in self._layers]

    def finish(self) -> None:
        """Waits for every gradient and steps every layer. Before parameters are read or written other than by a forward pass.

        Raises:
            GradwireError: a collective failed. The layers that it was for have not been stepped; this, the next forward pass and
                `state_dict` raise it again, until `forget`. A step that an optimizer failed in is tried again by the next of these, unless
                it had written the parameters, as where a hook behind the step failed.
        """
        self._step(self._layers)

    def remove(self) -> None:
        """Undoes `step_in_forward`, on all ranks between the same two steps: from then on the script steps after `backward`.

        Before the model is wrapped again. It calls `finish`; after an error `forget` comes first.

        Raises:
            GradwireError: of `finish`. Nothing is undone.
        """
        self.finish()
        self._unhook()
        self.is_removed = True

    def forget(self) -> None:
        """Forgets the gradients that have not been used, after an error: the parameters of their layers stay as they are.

        Other ranks may have stepped some of these layers: make the parameters equal before training goes on. Calls that are still in
        flight are waited for: the next backward pass writes the memory that they use.
        """
        for arrival in {id(arrival): arrival for _, arrival in self._owed.values()}.values():
            with suppress(Exception):
                arrival.wait()
        for parameter in (p for layer in self._layers for p in layer.parameters if id(p) in self._owed):
            parameter.grad = None  # DDP has put the gradient there, and the next one would be added to it
        self._owed.clear()

    def refusal(self, bucket: Any, *, joins: bool) -> GradwireError | None:
        """Why the gradients of a bucket cannot be taken, if so. What is delivered to all ranks instead of letting them differ.

        Args:
            bucket: that a backward pass has ended with, or that stands for one in torch's `Join`.
            joins: the model is in a `Join`, or has been in one.
        """
        if joins:
            text = (
                "step_in_forward does not go with Join: a rank that has joined has no forward pass that could step. Torch leaves a model "
                "in it after the end of one; `with Join([model], enable=False): pass` takes it out"
            )
            return UnsupportedError(text, what="Join")
        if again := [self._names[id(p)] for p in bucket.parameters() if id(p) in self._owed]:
            return InvalidRequestError(
                f"a second backward pass, while the gradients of {', '.join(sorted(again))} of the one before have not been used: no "
                "forward pass has called their modules since; call finish() between the two"
            )
        if unknown := [self._names[id(p)] for p in bucket.parameters() if id(p) not in self._owners]:
            text = (
                f"step_in_forward: no layer steps {', '.join(sorted(unknown))}, which needed no gradient when it was called, though DDP "
                "exchanges one: freeze parameters before the model is wrapped by DistributedDataParallel"
            )
            return UnsupportedError(text, what="frozen parameters")
        return None

    def take(
        self, bucket: Any, work: GradwireWork, on_end: Callable[[GradwireWork], None]
    ) -> torch.futures.Future[Tensor]:
        """Called by the hook: the bucket's gradients are on their way. DDP is told that they are there."""
        arrival = _Arrival(work, on_end)
        for parameter, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
            self._owed[id(parameter)] = (laid_out_like(parameter, gradient), arrival)
        for layer in {self._owners[id(parameter)] for parameter in bucket.parameters()}:
            layer.gradients_are_on_their_way()
        done: torch.futures.Future[Tensor] = torch.futures.Future(devices=_memory.devices_of([bucket.buffer()]))
        done.set_result(bucket.buffer())
        return done

    def _watch(self, module: nn.Module, parameters: list[nn.Parameter]) -> None:
        """Steps these parameters before each forward pass of `module`, and with them whoever owns some of them already."""
        parameters = [p for p in parameters if p.requires_grad]
        own = [p for p in parameters if id(p) not in self._owners]
        if own:
            layer = _Layer(own, self._optimizer_of(own))
            self._layers.append(layer)
            self._handles.append(layer.hook)
            self._owners.update((id(p), layer) for p in own)
        needed = list(dict.fromkeys(self._owners[id(p)] for p in parameters))
        # Before all others: some compute from the parameters what the forward pass uses (pruning, weight and spectral norm).
        step = self._hook(lambda _module, _inputs: self._step(needed))
        self._handles.append(module.register_forward_pre_hook(step, prepend=True))

    def _hook(self, hook: Callable[..., None]) -> Callable[..., None]:
        """For a module's calls in a forward pass.

        Behind a break in the graph: `torch.compile` would trace it into the forward pass, and give the model up. Nothing is done where an
        activation checkpoint computes the layer again within `backward`: that is to see the parameters of the forward pass, and DDP has yet
        to put the gradients of buckets that are on their way into `.grad`, where the next ones would be added to them.
        """

        def in_forward(*given: Any) -> None:
            if torch._C._current_graph_task_id() != _NO_BACKWARD:
                return
            # A selective checkpoint would keep the optimizer's matrix products as the layer's, and count on them when it computes it again.
            with _disable_current_modes():
                hook(*given)

        untraced: Any = torch.compiler.disable(
            in_forward, reason="gradwire steps the optimizer of a layer before its forward pass"
        )
        untraced.early_steps = self
        return cast("Callable[..., None]", untraced)

    def _unhook(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _step(self, layers: Sequence[_Layer]) -> None:
        for layer in layers:
            owed = {p: self._owed[id(p)] for p in layer.parameters if id(p) in self._owed}
            for _, arrival in owed.values():
                arrival.wait()  # if it failed everything here stays owed: no later call may take the layer for stepped
            if not owed:
                continue
            for parameter, (gradient, _) in owed.items():
                parameter.grad = gradient
            layer.step(partial(self._settle, list(owed)))

    def _settle(self, parameters: Sequence[nn.Parameter]) -> None:
        for parameter in parameters:
            del self._owed[id(parameter)]

    def _check_that_nothing_is_owed(self, _module: nn.Module, _inputs: Any, _output: Any) -> None:
        if self._owed:
            names = ", ".join(sorted(self._names[each] for each in self._owed))
            raise InvalidRequestError(
                f"the forward pass ended without the modules of {names}, whose values are those of the step before: pass "
                "step_in_forward(layers=...) the modules whose forward pass uses them, or a parent of these"
            )


def _has_steps(model: nn.Module) -> bool:
    return any(isinstance(getattr(hook, "early_steps", None), EarlySteps) for hook in model._forward_hooks.values())


def layers_of(model: nn.Module) -> Iterator[nn.Module]:
    """The children of a model, and in place of a plain container its children: its forward pass is theirs, one by one."""
    for child in model.children():
        if isinstance(child, nn.ModuleList | nn.ModuleDict) or type(child).forward is nn.Sequential.forward:
            yield from layers_of(child)
        else:
            yield child


def check(model: DistributedDataParallel, *, compressed: bool, keeps_previous: bool) -> None:
    """Whether layers of this model can be stepped early.

    Raises:
        UnsupportedError: they cannot. Fields: what.
    """
    reasons = {
        "gradient_as_bucket_view=False: DDP copies gradients when backward ends, before they are there": (
            not model.gradient_as_bucket_view
        ),
        "find_unused_parameters=True: which layers a forward pass uses has to be known": model.find_unused_parameters,
        "compression: gradients are halves until their bucket has ended": compressed,
        "gather_fill = previous: averages are not where DDP has gradients": keeps_previous,
        "Embedding(sparse=True): DDP takes sparse gradients when backward ends": has_sparse_gradients(model.module),
        "parameters that DDP ignores: no bucket has their gradients, and nothing else would step them": any(
            p.requires_grad and name in model.parameters_to_ignore for name, p in model.module.named_parameters()
        ),
    }
    for reason, is_so in reasons.items():
        if is_so:
            raise UnsupportedError(f"step_in_forward does not go with {reason}", what=reason.partition(":")[0])
