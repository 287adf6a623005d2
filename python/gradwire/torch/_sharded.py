"""Loss tolerance for `fully_shard` (FSDP2): a reduce-scatter of gradients over what arrives in time.

FSDP hands each module's gradients to a reduce-scatter that may be exchanged for another; the all-gather of parameters is
left alone and stays exact. The one here is the engine's, tolerant: contributions are lost, and nothing is sent back. What a rank
owes the next step takes no mean of another rank's shard (docs/error-feedback.md, "Without the results") and is kept by parameter
(`_sharded_residuals.py`). Rotated gradients (`hadamard="on"`) and schedules of an all-reduce that are asked for by name go through a
tolerant all-reduce of which a rank keeps its shard, at twice the bytes. Where there is a replicate dimension (HSDP), the all-reduce
between replicas is torch's, and exact.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist

from gradwire._policy import ALGORITHM_CODES, algorithm_code, results_may_be_lost
from gradwire._runtime import configuration
from gradwire.config import check as checked
from gradwire.errors import ConfigError, UnsupportedError
from gradwire.report import DeliveryTotals
from gradwire.torch import _memory
from gradwire.torch._saved import Member, own_of, saved
from gradwire.torch._sharded_residuals import ShardedResiduals, groups_of
from gradwire.torch._steps import Delivered, StepRecord
from gradwire.torch._tags import LayerPriority, Priority, ShardedBucket, Tagged, split
from gradwire.torch._tolerant import all_reduce, link_of, reduce_scatter, schedule_of, timed_policy

logger = logging.getLogger("gradwire")

# Arguments that a reduce-scatter has no use for.
OF_ALL_REDUCES = ("algorithm", "hadamard", "gather_loss_bound", "gather_fill")
AUTO, TRANSPOSE = ALGORITHM_CODES["auto"], ALGORITHM_CODES["transpose"]

if TYPE_CHECKING:  # a second to import, for programs that may never shard
    from torch.distributed.fsdp import FSDPModule


class ShardedLossTolerance(Delivered):
    """What `tolerate_loss` returns for a sharded model."""

    def __init__(
        self, model: FSDPModule, arguments: dict[str, Any], *, error_feedback: bool, priority: Priority | None = None
    ) -> None:
        # Presets that lose results mean what workers pull: here that are the parameters, whose all-gather is exact. Results that an
        # all-reduce sends back are means of shards, each of which one rank alone applies.
        if arguments["gather_loss_bound"] is not None:
            checked("gather_loss_bound", arguments["gather_loss_bound"])
        arguments = arguments | {"gather_loss_bound": 0.0}
        check(model, arguments)
        self._total = StepRecord()
        self.residuals = ShardedResiduals(cast("torch.nn.Module", model)) if error_feedback else None
        modules = list(_sharded(model))
        # Each reduces once in a step.
        arguments = arguments | {"delay_share": 1 / len(modules)}
        tagged = _tagging(model, [name for name, _ in modules], priority)
        for name, module in modules:
            module.set_custom_reduce_scatter(ReduceScatter(self, arguments, self.residuals, tagged[name]))

    @property
    def total(self) -> StepRecord:
        """Sum over all reduce-scatters so far."""
        return self._total

    def count(self, totals: DeliveryTotals, elem_bytes: int) -> None:
        """One more reduce-scatter has ended."""
        self._total = self._total.plus(totals, elem_bytes)

    def state_dict(self) -> dict[str, Any]:
        """What to save with a checkpoint: this rank's residuals, under a key of its own. In host memory; zeros at first."""
        residuals = {} if self.residuals is None else self.residuals.state_dict()
        return saved(Member.of(), residuals)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes up what `state_dict` of the same rank returned, from memory of any device.

        Another rank's state, or that of another number of ranks, is ignored with a warning: it would count twice, or at other places.
        """
        own = own_of(state, Member.of())
        if own is not None and self.residuals is not None:
            self.residuals.load_state_dict(own)

    def rescale(self, factor: float) -> None:
        """Multiplies what every parameter is owed: after the scaler's `update()`, by the new scale over the old one.

        Gradients are scaled, and so is what they leave behind; without this it is in units of the old scale for one step. A factor of
        zero forgets everything.
        """
        if self.residuals is not None:
            self.residuals.rescale(factor)

    def forget_step(self) -> None:
        """The latest step was skipped, by a scaler or by the loop: what it left behind is forgotten.

        To be called on every rank, after a `backward` that has exchanged gradients. A rank sees the average of its own shard alone, so that
        it does not know by itself of a value elsewhere that was not finite (with DDP it does). Without this call what such a step left,
        however large, is added to the next one. All that is owed is forgotten: what had been fed into the step is gone too, as is what
        parameters are owed that had no part in it; to keep those would take the memory of all gradients once more. Not for passes whose
        gradients no optimizer is ever to get, between steps that are taken: freeze the model for those.
        """
        if self.residuals is not None:
            self.residuals.rescale(0.0)


class ReduceScatter:
    """The reduce-scatter of one module's gradients, in the form that FSDP calls (its `ReduceScatter`).

    Args:
        owner: is told what was delivered.
        arguments: of `gradwire.torch.all_reduce`. What only that can do is reduced by it.
        residuals: where what did not count waits for the next gradients of its parameters; None: it is lost.
        tags_of: traffic class of the module's gradients, and what of them is important.
    """

    def __init__(
        self,
        owner: ShardedLossTolerance,
        arguments: dict[str, Any],
        residuals: ShardedResiduals | None,
        tags_of: Callable[[torch.Tensor], Tagged],
    ) -> None:
        self._owner = owner
        self._tags_of = tags_of
        self._arguments = arguments
        self._scatters = scatters(arguments)
        self._residuals = residuals

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Memory for input and output."""
        return torch.empty(tuple(size), dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """`input_tensor` `[world_size * elems]` may be overwritten; `output_tensor` `[elems]` becomes this rank's shard.

        Raises:
            UnsupportedError: the group has another backend, or the gradients are of a dtype that tolerates no loss.
            GradwireError: the reduction failed.
            Exception: what a `priority` function raised.
        """
        del async_op  # FSDP waits for it in any case
        residual = None
        if self._residuals is not None:
            residual = self._residuals.feed_back(input_tensor, dist.get_world_size(group))
            if residual is None:  # what would be lost has no place to wait at
                dist.reduce_scatter_tensor(output_tensor, input_tensor, op, group)
                return
        try:
            traffic_class, important = split(self._tags_of(input_tensor), configuration())
        except Exception as error:  # noqa: BLE001  of the user's function: the other ranks learn of it, see `GroupLink.failed`
            link_of(group).failed("reduce_scatter", error).wait()
            return  # the wait has raised it; what was owed still is
        if residual is not None:
            residual.zero_()
        given: dict[str, Any] = {"group": group, "residual": residual}
        given |= {"traffic_class": traffic_class, "important": important}
        if self._scatters:
            asked = {name: value for name, value in self._arguments.items() if name not in OF_ALL_REDUCES}
            work = reduce_scatter(output_tensor, input_tensor, op, **given, **asked)
        else:
            work = all_reduce(input_tensor, op, **given, **self._arguments)
            output_tensor.copy_(input_tensor.view(dist.get_world_size(group), -1)[dist.get_rank(group)])
        self._owner.count(work.totals(), input_tensor.element_size())


def scatters(arguments: dict[str, Any]) -> bool:
    """Whether a reduce-scatter can do what is asked for; else it takes an all-reduce."""
    config = configuration()
    asked = {name: value for name, value in arguments.items() if name not in ("algorithm", "delay_share")}
    is_rotated = timed_policy(config, **asked)["hadamard"] == "on"
    return not is_rotated and algorithm_code(config, arguments["algorithm"]) in (AUTO, TRANSPOSE)


def check(model: FSDPModule, arguments: dict[str, Any]) -> None:
    """Finds here what would else be found in the first backward.

    Raises:
        ConfigError: a value is out of range, or the environment has results lost that an all-reduce would send back.
        UnsupportedError: a parameter of a dtype that tolerates no loss, or nothing is sharded; another backend reduces the gradients, or
            those of one module are reduced over several meshes.
    """
    config = configuration()
    asked = {name: value for name, value in arguments.items() if name != "algorithm"}
    numbers = timed_policy(config, **asked)
    if numbers["gather_fill"] == "previous":
        raise ConfigError("gather_fill = previous is not kept for sharded models: zero or local", field="gather_fill")
    if results_may_be_lost(numbers) and not scatters(arguments):
        bound = numbers["gather_loss_bound"]
        raise ConfigError(
            f"gather_loss_bound = {bound:g} (environment) is not allowed for a sharded model that is reduced by an all-reduce (hadamard "
            "= on, or an algorithm other than transpose): a lost result would be a mean that no other rank applies",
            field="gather_loss_bound",
            value=bound,
        )
    schedule_of(config, arguments["algorithm"], numbers)
    assert isinstance(model, torch.nn.Module)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and parameter.dtype not in _memory.TOLERANT_DTYPES:
            raise UnsupportedError(
                f"parameter {name} is {parameter.dtype}: gradients that tolerate loss are float32, bfloat16 or float16"
            )
    if is_only_replicated(model):
        raise UnsupportedError(
            "no parameter is sharded over more than one rank (torch's replicate(), or a shard dimension of size 1): gradients are summed "
            "by an all-reduce of torch's alone, which tolerates no loss. Wrap the model in DistributedDataParallel, or shard it"
        )
    for name, module in _sharded(model):
        _check_meshes(name, module)


def _check_meshes(name: str, module: FSDPModule) -> None:
    reduced = groups_of(cast("torch.nn.Module", module))
    if len(reduced) > 1:
        raise UnsupportedError(
            f"the parameters of module {name!r} are on several meshes (shard_placement_fn): torch takes no reduce-scatter for it. "
            "Shard those of each mesh as a module of their own"
        )
    for mesh in (each.mesh_info for each in reduced):
        group = getattr(mesh, "shard_process_group", None)
        if group is not None and mesh.shard_mesh_size > 1:
            link_of(group)


def is_only_replicated(model: torch.nn.Module) -> bool:
    """Whether several ranks have all of the model each, so that nothing of it is reduced by a reduce-scatter."""
    from torch.distributed.tensor import DTensor

    meshes = [(p.device_mesh, p.placements) for p in model.parameters() if isinstance(p, DTensor)]
    is_sharded_over = any(
        size > 1 and not placement.is_replicate()
        for mesh, placements in meshes
        for size, placement in zip(mesh.shape, placements, strict=True)
    )
    return not is_sharded_over and any(mesh.size() > 1 for mesh, _ in meshes)


def _tagging(
    model: FSDPModule, sharded: list[str], priority: Priority | None
) -> dict[str, Callable[[torch.Tensor], Tagged]]:
    """For the name of each sharded module what tags its gradients: the user's function, or the class of its front-most layer.

    A module reduces the parameters that are in no sharded module within it.
    """
    assert isinstance(model, torch.nn.Module)
    own: dict[str, dict[str, torch.nn.Parameter]] = {name: {} for name in sharded}
    for parameter, value in model.named_parameters():
        around = [name for name in sharded if not name or parameter.startswith(f"{name}.")]
        if around:
            own[max(around, key=len)][parameter] = value
    rule = LayerPriority(model, configuration().classes)
    if priority is None:
        return {name: _always(rule.of_parameters(parameters)) for name, parameters in own.items()}
    front = {name: min(rule.layers_of(parameters)) for name, parameters in own.items() if parameters}
    order = sorted(front, key=lambda name: front[name], reverse=True)
    return {
        name: _asking(cast("Callable[[ShardedBucket], Tagged]", priority), name, order, list(own[name].values()))
        for name in sharded
    }


def _always(traffic_class: int) -> Callable[[torch.Tensor], Tagged]:
    return lambda _gradients: traffic_class


def _asking(
    priority: Callable[[ShardedBucket], Tagged], name: str, order: list[str], parameters: list[torch.nn.Parameter]
) -> Callable[[torch.Tensor], Tagged]:
    index = order.index(name) if name in order else 0  # a module without parameters of its own reduces nothing
    return lambda gradients: priority(ShardedBucket(name, index, index == len(order) - 1, parameters, gradients))


def is_sharded(module: object) -> bool:
    """Whether `fully_shard` was applied to it."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and isinstance(module, fsdp.FSDPModule)


def _sharded(model: FSDPModule) -> Iterator[tuple[str, FSDPModule]]:
    assert isinstance(model, torch.nn.Module)
    for name, module in model.named_modules():
        if is_sharded(module):
            yield name, module
