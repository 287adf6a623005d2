"""The DDP communication hook that opts gradients in to loss.

No `from __future__ import annotations` here: DDP compares the hook's annotations with types.
"""

import logging
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, cast, overload

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from gradwire.errors import ConfigError, GradwireError, InvalidRequestError, UnsupportedError
from gradwire.torch import _memory
from gradwire.torch._arguments import check_hook
from gradwire.torch._begins import StepBegins
from gradwire.torch._delay import DelayShares
from gradwire.torch._drift import DriftMeter, DriftReport, Optimizers
from gradwire.torch._early import EarlySteps, OptimizerOf
from gradwire.torch._early import check as check_early
from gradwire.torch._finite import FiniteResults
from gradwire.torch._latest import LatestResults
from gradwire.torch._residuals import Residuals
from gradwire.torch._saved import Member, own_of, saved
from gradwire.torch._scalars import ScalarWriter, StepScalars
from gradwire.torch._sharded import ShardedLossTolerance, is_sharded
from gradwire.torch._sparse import has_sparse_gradients, is_sparse
from gradwire.torch._steps import Delivered, StepMeter, StepRecord
from gradwire.torch._tags import LayerPriority, Priority, Tagged, split
from gradwire.torch._tolerant import adapter_of, all_reduce, link_of, schedule_of, timed_policy, warn_of_lost_results
from gradwire.torch._unused import Unused, counts_of
from gradwire.torch._work import GradwireWork
from gradwire.torch._wrapped import unwrapped

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule

logger = logging.getLogger("gradwire")

Hook = Callable[[Any, dist.GradBucket], torch.futures.Future[torch.Tensor]]
Compression = Callable[[Hook], Hook]
STEPS_KEPT = 1000
# Priority of bucket 0, the last layers. DDP numbers buckets in the order in which gradients become ready; the first layers
# come last and are needed first by the next forward, so each later bucket is one more urgent.
PRIORITY_FIRST_BUCKET = 192
PRIORITY_SPAN = 128


@overload
def tolerate_loss(
    model: DistributedDataParallel,
    *,
    loss_bound: float | None = ...,
    preset: str | None = ...,
    error_feedback: bool = ...,
    deadline: timedelta | None = ...,
    step_delay_max: timedelta | None = ...,
    gather_loss_bound: float | None = ...,
    gather_fill: str | None = ...,
    divide_by: str | None = ...,
    hadamard: str | None = ...,
    algorithm: str | None = ...,
    steps_kept: int = ...,
    priority: Priority | None = ...,
    drift_every: int = ...,
    compression: Compression | None = ...,
    tensorboard: ScalarWriter | None = ...,
) -> "LossTolerance": ...


@overload
def tolerate_loss(  # type: ignore[overload-cannot-match]  # where torch is not read both models are Any
    model: "FSDPModule",
    *,
    loss_bound: float | None = ...,
    preset: str | None = ...,
    error_feedback: bool = ...,
    deadline: timedelta | None = ...,
    step_delay_max: timedelta | None = ...,
    gather_loss_bound: float | None = ...,
    gather_fill: str | None = ...,
    divide_by: str | None = ...,
    hadamard: str | None = ...,
    algorithm: str | None = ...,
    steps_kept: int = ...,
    priority: Priority | None = ...,
) -> ShardedLossTolerance: ...


def tolerate_loss(
    model: "DistributedDataParallel | FSDPModule",
    *,
    loss_bound: float | None = None,
    preset: str | None = None,
    error_feedback: bool = True,
    deadline: timedelta | None = None,
    step_delay_max: timedelta | None = None,
    gather_loss_bound: float | None = None,
    gather_fill: str | None = None,
    divide_by: str | None = None,
    hadamard: str | None = None,
    algorithm: str | None = None,
    steps_kept: int = STEPS_KEPT,
    priority: Priority | None = None,
    drift_every: int = 0,
    compression: Compression | None = None,
    tensorboard: ScalarWriter | None = None,
) -> "LossTolerance | ShardedLossTolerance":
    """Lets the gradients of a model be averaged over what arrives in time. Everything else stays exact.

    Call it once, after wrapping the model and before the first backward, with the same arguments on every rank. A backward pass whose
    gradients no optimizer gets (a discriminator's in its generator's step) belongs in `model.no_sync()`, or the model frozen for it.

    Args:
        model: its process group has the backend gradwire, its parameters are float32, bfloat16 or float16; sparse gradients
            (`Embedding(sparse=True)`) are averaged exactly. Wrapped by DDP, or
            by `fully_shard` (FSDP2), and then perhaps by `torch.compile`: of a sharded one the reduce-scatter of gradients may lose
            (docs/torch.md), while
            the all-gather of parameters stays exact; `drift_every`, `compression` and `tensorboard` are for DDP
            alone, and `steps_kept` is of no use there.
        loss_bound: share of each transfer of the reduce stage that may be missing; with `reliable` 0 alone. None: the preset's.
        preset: `auto`, `mlt`, `dlcp`, `ltp`, `ultima` or `reliable`: its rules of what may be missing alone; rate control, code points
            and importance are the configuration's. None: the configuration's.
        deadline: after which a transfer is closed with what has arrived. None: the preset's; zero: never.
        step_delay_max: the most that waiting for retransmissions may delay a step. Its buckets share it in equal parts; with
            FSDP2 its modules do, and a module that is used several times in a step may wait as often. None: the preset's.
        gather_loss_bound: share of the averaged gradients that may be missing on their way back. Above 0 replicas drift apart
            until `resynchronize` mends them; see `drift_every`. None: the preset's, 0 for all but `mlt`, `dlcp` and `ultima`, which
            lose results as their papers do. Without effect with FSDP2.
        gather_fill: what an averaged gradient is that did not arrive here, or that no rank's gradients reached a server for: `zero`,
            `local` (this rank's own gradient) or `previous` (the latest average of the bucket, which costs one more copy of the
            gradients and sends them unrotated). None: the configuration's.
        divide_by: what the mean of an element divides by that some ranks' gradients are missing for: `contributions`, the
            ranks whose gradients arrived, or `world`, all ranks. None: the configuration's.
        hadamard: `on` or `off`: whether gradients are sent rotated, so that a lost packet takes a little of every gradient of its
            bucket and not all of a few; `auto`: from 5 % loss on, but not with `find_unused_parameters=True` and error feedback, with which
            `on` is a ConfigError, unless the graph is static (docs/error-feedback.md). None: the configuration's.
        algorithm: `auto`, `ring`, `transpose`, `halving_doubling`, `parameter_server`, `weighted_transpose` or `one_shot`. None: the
            configuration's.
        error_feedback: add to each gradient what is still owed of the step before: what did not count, less the mean that
            stood in for it. Then nothing is lost for good and nothing counts twice (docs/error-feedback.md). Costs one more
            copy of the gradients in memory, and with `find_unused_parameters=True` another one. With FSDP2 one copy of the **unsharded**
            gradients on every rank, however many there are, in the dtype that they are reduced in: 4 bytes for each parameter of the model
            in float32.
        steps_kept: how many records `steps` holds, 1 or more.
        priority: a function that is called with each bucket and returns its traffic class, 0 (the most urgent) to
            `classes` - 1, or the class and a mask of any length that says which parts of the bucket a switch should keep
            longest. Need not agree between ranks. For FSDP2 it is called with each module's gradients (a `ShardedBucket`). What it
            raises fails the step on every rank, on the others as a MismatchError. None: class by layer, the front layers first, and
            importance as the configuration says. Code points are written only with `dscp_classes`.
        drift_every: compare the parameters of all ranks every so many steps, and warn where they differ; 0: never. Of use
            where results may be lost; costs a read of the parameters and 16 bytes on the wire. Needs every rank: not with
            `on_peer_loss="continue"`.
        compression: `bf16_compress_wrapper` or `fp16_compress_wrapper` of torch's `default_hooks`: gradients are sent as halves,
            and those halves tolerate loss. Hooks that reduce by themselves (PowerSGD) take a `tolerant_group` instead.
        tensorboard: a `SummaryWriter`, or whatever has its `add_scalar`: gets what each step delivered (`gradwire/lost_share`,
            `gradwire/filled_share` and so on) when the next one begins. What it raises becomes a warning, once. Steps count from 0;
            a job that goes on from a checkpoint says from which one, `state.scalars.step = steps_made`, before its first backward.

    Returns:
        The hook's state: statistics of the steps, the residuals to save with a checkpoint, and the drift meter.

    Raises:
        UnsupportedError: not such a model, another backend, a parameter of another dtype, an argument that is for DDP alone, or sparse
            gradients or `drift_every` with `on_peer_loss="continue"`.
        ConfigError: a value is out of range or of another kind, or two of them, or one and the model, contradict each other.
        InvalidRequestError: the DDP model has a communication hook already, of an earlier call or of torch. It stays in force.
    """
    of_ddp = {"drift_every": drift_every, "compression": compression, "tensorboard": tensorboard}
    check_hook({"error_feedback": error_feedback, "steps_kept": steps_kept, "priority": priority, **of_ddp})
    model = unwrapped(model)
    arguments = {
        "loss_bound": loss_bound,
        "preset": preset,
        "deadline": deadline,
        "step_delay_max": step_delay_max,
        "gather_loss_bound": gather_loss_bound,
        "gather_fill": gather_fill,
        "divide_by": divide_by,
        "hadamard": hadamard,
        "algorithm": algorithm,
    }
    if is_sharded(model):
        if given := [name for name, value in of_ddp.items() if value]:
            raise UnsupportedError(
                f"{', '.join(given)}: for DistributedDataParallel alone, and this model was made by fully_shard. Leave it out "
                "(MixedPrecisionPolicy(reduce_dtype=torch.bfloat16) sends halves)"
            )
        return ShardedLossTolerance(
            cast("FSDPModule", model), arguments, error_feedback=error_feedback, priority=priority
        )
    assert isinstance(model, DistributedDataParallel)
    config = link_of(model.process_group).owner.config
    _check(model)
    if config.on_peer_loss == "continue":
        _check_going_on(model, drift_every)
    numbers = timed_policy(  # raises here rather than in the first backward
        config,
        preset,
        loss_bound=loss_bound,
        deadline=deadline,
        step_delay_max=step_delay_max,
        gather_loss_bound=gather_loss_bound,
        gather_fill=gather_fill,
        divide_by=divide_by,
        hadamard=hadamard,
    )
    schedule_of(config, algorithm, numbers)
    if error_feedback and may_be_unused(model):
        arguments["hadamard"] = _never_rotated(numbers["hadamard"])
    warn_of_lost_results(numbers)
    arguments["gather_fill"] = numbers["gather_fill"]
    state = LossTolerance(model, arguments, error_feedback, steps_kept, priority)
    state.drift = DriftMeter(model.module, state.group, drift_every)
    state.scalars = StepScalars(tensorboard)
    state.is_compressed = compression is not None
    hook = average_what_arrives if compression is None else compression(average_what_arrives)
    _register(model, state, hook)
    return state


def _register(model: DistributedDataParallel, state: "LossTolerance", hook: Hook) -> None:
    try:
        model.register_comm_hook(state, hook)
    except RuntimeError as error:
        if "only be called once" not in str(error):
            raise
        raise InvalidRequestError(
            "the model has a communication hook already, which torch never takes back (another tolerate_loss, or a hook of torch's): "
            "wrap the model again"
        ) from error


def _check(model: DistributedDataParallel) -> None:
    """Whether the hook can average the gradients of this model."""
    if getattr(model, "_delay_all_reduce_params", None):
        raise UnsupportedError(
            "delay_all_reduce_named_params: torch sums those gradients itself, without this hook, and does not wait until they are there"
        )
    if getattr(model, "_use_python_reducer", False):
        raise UnsupportedError(
            "torch._dynamo.config.optimize_ddp = 'python_reducer': DDP then has no buckets, and calls its hook with single gradients. "
            "Leave it at its default before the model is wrapped"
        )
    for name, parameter in model.module.named_parameters():
        if parameter.requires_grad and parameter.dtype not in _memory.TOLERANT_DTYPES:
            raise UnsupportedError(
                f"parameter {name} is {parameter.dtype}: gradients that tolerate loss are float32, bfloat16 or float16"
            )


def may_be_unused(model: DistributedDataParallel) -> bool:
    """Whether parameters may have no gradient in one step and one in another: in a static graph the unused ones stay unused."""
    return bool(model.find_unused_parameters and not model.static_graph)


def _trained(model: DistributedDataParallel) -> list[str]:
    """Names of the parameters that residuals can be owed to."""
    sparse = {id(p) for module in model.module.modules() if is_sparse(module) for p in module.parameters()}
    left_out = {name for name, p in model.module.named_parameters() if not p.requires_grad or id(p) in sparse}
    return [name for name, _ in model.module.named_parameters() if name not in left_out | model.parameters_to_ignore]


def _residuals_of(model: DistributedDataParallel) -> Residuals:
    return Residuals(model.module.named_parameters(), Unused(model) if may_be_unused(model) else None)


def _never_rotated(hadamard: str) -> str:
    """`hadamard` where DDP throws away the means of unused parameters.

    A rotated loss is an error of every element, those of unused parameters too, and what is owed makes up for it. Of these DDP applies no
    mean, so that what is owed would make up for nothing.
    """
    if hadamard == "on":
        raise ConfigError(
            "hadamard = on is not allowed with find_unused_parameters=True and error feedback: parameters that no rank used would be owed "
            "for losses of others. `off`, error_feedback=False, or static_graph=True if the same ones are used in every step",
            field="hadamard",
            value="on",
        )
    return "off"


def _check_going_on(model: DistributedDataParallel, drift_every: int) -> None:
    """Whether training could go on without ranks that are lost."""
    if drift_every:
        raise UnsupportedError(
            "drift_every with on_peer_loss = 'continue': what is compared is gathered from every rank, so that training could not go on "
            "without one that is lost"
        )
    if has_sparse_gradients(model.module):
        raise UnsupportedError(
            "Embedding(sparse=True) with on_peer_loss = 'continue': sparse gradients are gathered, which needs every rank, so that "
            "training could not go on without one that is lost"
        )


class LossTolerance(Delivered):
    """State of the hook on one rank.

    Attributes:
        steps: `StepRecord`s of the latest steps, oldest first.
        drift: compares the parameters of all ranks, on request and every `drift_every` steps.
        scalars: writes what each step delivered for TensorBoard.
    """

    def __init__(
        self,
        model: DistributedDataParallel,
        arguments: dict[str, Any],
        error_feedback: bool,
        steps_kept: int,
        priority: Priority | None = None,
    ) -> None:
        self.group = model.process_group
        self.is_compressed = False
        # DDP holds this state in C++, where the collector of Python sees no cycle: a model that it holds would never be freed.
        self._model = weakref.ref(model)
        self._early_steps: EarlySteps | None = None
        self.arguments = arguments
        self.residuals = _residuals_of(model) if error_feedback else None
        self.drift = DriftMeter(model.module, self.group)
        self._latest = LatestResults() if arguments["gather_fill"] == "previous" else None
        self._finite = FiniteResults()
        self._meter = StepMeter(steps_kept)
        self.scalars = StepScalars(None)
        self._delay = DelayShares()
        self._begins = StepBegins(counts_of(model) if may_be_unused(model) else None)
        self._by_layer = priority is None
        classes = link_of(self.group).owner.config.classes
        self.priority = (
            LayerPriority(model.module, classes)
            if priority is None
            else cast("Callable[[dist.GradBucket], Tagged]", priority)
        )

    def __reduce__(self) -> "tuple[type[OfACopy], tuple[()]]":
        """A copy of the model (`deepcopy`, `AveragedModel`, `torch.save`) gets no group and owes nothing: torch gives it no hook either."""
        return OfACopy, ()

    @property
    def steps(self) -> "list[StepRecord]":
        """Records of the latest steps; the last one is complete once `backward` has returned.

        With `step_in_forward` once the next forward pass or `finish` has.
        """
        return list(self._meter.steps)

    @property
    def total(self) -> StepRecord:
        """Sum over all steps."""
        return self._meter.total

    def state_dict(self) -> dict[str, Any]:
        """What to save with a checkpoint: this rank's residuals, under a key of its own; zeros before the first backward. In host memory.

        With `step_in_forward` it calls `finish`: what is owed is known when every bucket has ended.
        """
        self._finish()
        self._settle()
        residuals = {} if self.residuals is None else self.residuals.state_dict()
        model = self._model()
        if self.residuals is not None and model is not None:
            residuals = self.residuals.nothing_of(_trained(model)) | residuals
        return saved(Member.of(self.group), residuals)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes up what `state_dict` of the same rank returned.

        Another rank's state is ignored with a warning: the same residual added by several ranks would count several
        times, while starting from zero only loses what was late. So is what a parameter was owed that has another shape now.
        What was saved under another loss scale than the one to come needs `rescale`. With `step_in_forward` it calls `finish`.
        """
        self._finish()
        own = own_of(state, Member.of(self.group))
        if own is not None and self.residuals is not None:
            self.residuals.load_state_dict(own)

    def rescale(self, factor: float) -> None:
        """Multiplies what every parameter is owed: after `GradScaler.update()`, by the new scale over the old one.

        Gradients are scaled, and so is what they leave behind, also the averages that `gather_fill="previous"` keeps; without this it is in
        units of the old scale for one step, and those for as long as they fill in. A
        factor of zero forgets everything. With `step_in_forward` it calls `finish`.
        """
        self._finish()
        self._settle()
        if self.residuals is not None:
            self.residuals.rescale(factor)
        if self._latest is not None:
            self._latest.rescale(factor)

    def forget_step(self) -> None:
        """The latest step was skipped: what it left behind is forgotten. What it had been fed is gone with it.

        A step whose averaged gradients are not all finite is treated so by itself, when the next one begins or a checkpoint is taken: a
        `GradScaler` skips it. Call this after `backward` of a step that your loop leaves out for another reason (a norm above a limit,
        another model's gradients), on every rank, if it has exchanged gradients: else it would be the step before that is forgotten; and
        where results may be lost (`mlt`, `dlcp`, `ultima`) after each that a `ShardedGradScaler` skips, as a rank may not have the value
        that was not finite. Averages that `gather_fill="previous"` keeps are forgotten. Twice is as good as once.

        Not for passes whose gradients no optimizer is ever to get, between steps that are taken: those belong in `no_sync`.

        Raises:
            UnsupportedError: with `step_in_forward` no step can be left out.
        """
        if self._early is not None:
            raise UnsupportedError(
                "forget_step does not go with step_in_forward, which takes every step", what="step_in_forward"
            )
        self._settle()
        if self.residuals is not None:
            self.residuals.forget_step()
        if self._latest is not None:
            self._latest.rescale(0.0)

    def resynchronize(self, *, buffers: bool = False, optimizer: Optimizers = None) -> DriftReport:
        """Makes the parameters of all ranks equal again, bit by bit; see `DriftMeter.resynchronize`.

        With `step_in_forward` it calls `finish`, as `drift.check` and `drift.largest_difference` do.
        """
        return self.drift.resynchronize(buffers=buffers, optimizer=optimizer)

    def step_in_forward(self, optimizer_of: OptimizerOf, layers: Sequence[torch.nn.Module] | None = None) -> EarlySteps:
        """Moves each layer's optimizer step into the next forward pass, which no longer waits for the back layers' gradients.

        `backward` then returns when every bucket is on its way, and the script neither steps nor clears gradients: each layer
        waits for its own buckets, steps and computes. Results are the same bits; hyperparameters are those that the optimizers had
        when `backward` ended, so call schedulers after it. What needs all gradients before the
        first step (clipping by their common norm, a GradScaler) cannot be had with it, nor torch's `Join`. Gradients cannot be read
        between `backward` and the next forward pass. Call it once, before the first backward.

        Args:
            optimizer_of: makes the optimizer of a list of parameters: `lambda parameters: torch.optim.SGD(parameters, lr=0.1)`.
            layers: modules, in the order of the forward pass, whose parameters are stepped as a whole before each forward pass of the
                module; what is in none of them is stepped before the model's. None: the model's children, those of plain
                containers (Sequential, ModuleList, ModuleDict) one by one. The first use of a parameter in a forward pass has to be
                within a call of a module here that holds it: an earlier one reads the value of the step before.

        Returns:
            The optimizers, `finish`, which is to be called before parameters are read or written other than by a forward pass or
            the model's `state_dict`, and `remove`, which is to be called before the model is wrapped again.

        Raises:
            UnsupportedError: not with these options of DDP or of `tolerate_loss`.
            InvalidRequestError: the model steps so already, or is gone.
        """
        model = self._model()
        if model is None:
            raise InvalidRequestError("step_in_forward: the model that tolerate_loss was called with is gone")
        check_early(model, compressed=self.is_compressed, keeps_previous=self._latest is not None)
        self._early_steps = EarlySteps(model.module, optimizer_of, layers)
        self.drift.finish = self._early_steps.finish
        return self._early_steps

    @property
    def _early(self) -> EarlySteps | None:
        """Unless they have been removed."""
        return None if self._early_steps is None or self._early_steps.is_removed else self._early_steps

    def _finish(self) -> None:
        if self._early is not None:
            self._early.finish()

    def _refusal(self, bucket: dist.GradBucket) -> GradwireError | None:
        """Why a bucket cannot be exchanged whose layers are stepped in the next forward pass, if so."""
        model = self._model()
        if self._early is None or model is None:
            return None
        return self._early.refusal(bucket, joins=model._join_config.enable)

    def exchange(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Averages one bucket `[elems]` in place; a sparse one exactly."""
        gradient = bucket.buffer()
        refusal = self._refusal(bucket)
        if refusal is not None:
            return link_of(self.group).failed("all_reduce", refusal).future_of(gradient)
        if self._begins.begins_with(bucket):
            self._begin_step()
        delay_share = self._delay.next(is_last=bucket.is_last())
        if gradient.is_sparse:
            return self._average_exactly(gradient)
        if self.residuals is not None:
            self.residuals.feed_back(bucket)
        try:
            tags = self._tags_of(bucket)
        except Exception as error:  # noqa: BLE001  of the user's function: see the head of _group.py
            # What was added is still owed: this step's gradients are gone.
            return link_of(self.group).failed("all_reduce", error).future_of(gradient)
        tags["delay_share"] = delay_share
        output = None if self._latest is None else self._latest.of(bucket)
        residual, on_end = self._sent(bucket, gradient if output is None else output)
        tensors: dict[str, Any] = {"output": output, "residual": residual}
        work = all_reduce(gradient, group=self.group, async_op=True, **tensors, **tags, **self.arguments)
        if self._early is not None:
            return self._early.take(bucket, work, on_end)
        work.observer = on_end
        return work.future_of(gradient if output is None else output)

    def _sent(
        self, bucket: dist.GradBucket, result: torch.Tensor
    ) -> tuple[torch.Tensor | None, Callable[[GradwireWork], None]]:
        """Where what a bucket leaves behind is to be written, and what is to be done when it has ended well."""
        residual, told = (None, None) if self.residuals is None else self.residuals.sent(bucket)
        # Layers that step early have stepped by the time that all is known.
        is_of_use = self._early is None and (self.residuals is not None or self._latest is not None)
        look = self._finite.expect(result) if is_of_use else None
        # What ends last may still be known to its thread when the model is gone: it holds nothing else of it.
        meter = self._meter

        def on_end(work: GradwireWork) -> None:
            meter.add(work)
            if told is not None:
                told(work.totals().elems_uncounted)
            if look is not None:
                look()

        return residual, on_end

    def _settle(self) -> None:
        """The backward pass has ended. What it left is forgotten if its results are not all finite."""
        verdict = self._finite.verdict()
        if self.residuals is not None:
            self.residuals.settle(verdict)
        if self._latest is not None:
            self._latest.settle(verdict)

    def _tags_of(self, bucket: dist.GradBucket) -> dict[str, Any]:
        """What the network is told of a bucket, with what is owed in it: a mask is over what is sent."""
        traffic_class, important = split(self.priority(bucket), link_of(self.group).owner.config)
        # The order of buckets is finer than that of classes; a function of the user's decides both.
        priority = PRIORITY_FIRST_BUCKET - min(bucket.index(), PRIORITY_SPAN) if self._by_layer else None
        return {"traffic_class": traffic_class, "important": important, "priority": priority}

    def _begin_step(self) -> None:
        self._settle()
        if self.residuals is not None:
            self.residuals.begin_step()
        self.drift.before_step()
        self.scalars.before_step(self._meter)
        self._meter.begin(time.monotonic())
        self._delay.begin()

    def _average_exactly(self, gradient: torch.Tensor) -> torch.futures.Future[torch.Tensor]:
        """As DDP does it without a hook: its entries differ from rank to rank, so that there are no places where some may be missing.

        By the backend of the other buckets: for the model's device torch may know another one ("cpu:gloo,cuda:gradwire").
        """
        gradient.div_(dist.get_world_size(self.group))
        look = self._finite.expect(gradient)
        work = adapter_of(self.group).allreduce([gradient], dist.AllreduceOptions())

        def ended(future: torch.futures.Future[list[torch.Tensor]]) -> torch.Tensor:
            result = future.value()[0]
            look()
            return result

        future: torch.futures.Future[torch.Tensor] = work.get_future().then(ended)
        return future


class OfACopy:
    """What a copied model has in place of its original's `LossTolerance`: its gradients are averaged exactly until it gets its own."""

    def exchange(self, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:  # noqa: ARG002  the hook's signature
        """Refused: the hook was registered with the state of a copy.

        Raises:
            InvalidRequestError: always.
        """
        raise InvalidRequestError("this is a copy of a model that tolerates loss: call tolerate_loss for it, too")


def average_what_arrives(state: LossTolerance, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """The hook that `tolerate_loss` registers."""
    return state.exchange(bucket)
