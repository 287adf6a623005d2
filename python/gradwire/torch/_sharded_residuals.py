"""Error feedback of sharded models: what one step owes waits here for the next, by parameter.

FSDP reduces the parameters of a module that have a gradient in this step, as one flat tensor. Which they are may change from step to step
(task heads that take turns, layers that are frozen later), and two sets may have the same size. So what is owed is kept by
parameter: for each rank a row, of which each parameter has the same columns.

    row of rank 0 [ weight, its part for rank 0 | bias, likewise | .. ]
    row of rank 1 [ weight, its part for rank 1 | ..

A set that is reduced has one flat buffer, which the engine writes to; what parameters are owed that are in none waits beside them.

FSDP does not tell a reduce-scatter of one's own whose gradients it gets. Its caller knows: they are the argument `fsdp_params` of torch's
`foreach_reduce`, in the order of the flat tensor (2.9 to 2.15), which is read there. The other way, to note for each module before its
backward which parameters have gradients, would repeat torch's own choice, which differs from release to release. Where no caller says
it, as in a future torch, nothing is fed back and nothing may be lost.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import Any

import torch

from gradwire.torch._residuals import add_owed, copy_owed, on_host, scale_owed
from gradwire.torch._streams import streams_of

logger = logging.getLogger("gradwire")

# Whose gradients are reduced, in the function of torch's that calls the reduce-scatter.
REDUCED = "fsdp_params"
# How far above it may be: a reduce-scatter of the user's may call ours.
CALLERS = 8

Columns = Sequence[tuple[str, int]]
"""Name of each parameter, and elements of its part in a row."""


# claim: auto/error-feedback
class ShardedResiduals:
    """What is owed to each parameter of a sharded model, on one rank.

    Args:
        model: whose modules name the parameters; the keys of the saved state.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._modules = {module: name for name, module in model.named_modules()}
        self._flats: dict[tuple[str, ...], torch.Tensor] = {}
        self._parts: dict[str, torch.Tensor] = {}
        self._waiting: dict[str, torch.Tensor] = {}
        self._has_warned = False

    def feed_back(self, gradients: torch.Tensor, world_size: int) -> torch.Tensor | None:
        """Adds what is owed to gradients. Called by a reduce-scatter that FSDP calls.

        Args:
            gradients: `[world_size * elems]`, changed in place.
            world_size: of the group that they are reduced in.

        Returns:
            Their residual, with what was added still in it: shape and dtype of `gradients`. To be cleared when they are sent, for what
            this step will owe; if they are not, it is added to the next ones. None: nobody knows whose they are.
        """
        columns = self._columns(gradients, world_size)
        if columns is None:
            self._warn()
            return None
        flat = self._flats.get(tuple(name for name, _ in columns))
        if flat is None or flat.dtype != gradients.dtype or flat.device != gradients.device:
            flat = self._laid_out(columns, gradients, world_size)
        add_owed(gradients, flat.nan_to_num_(0.0, 0.0, 0.0))  # what is not finite would never leave again
        return flat

    def state_dict(self) -> dict[str, torch.Tensor]:
        """A copy in host memory of what each parameter is owed, `[world_size, elems]`: for each rank's part a row, padded as FSDP does."""
        return {name: on_host(part) for name, part in {**self._nothing(), **self._waiting, **self._parts}.items()}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Replaces every residual by a copy; parameters that are not in `state` get zero. Names that the model has not are left out."""
        known = self._names()
        unknown = [name for name in state if name not in known]
        if unknown:
            logger.warning("residuals of parameters that the model has not are not used: %s", ", ".join(unknown))
        self._flats.clear()
        self._parts.clear()
        self._waiting = {name: _copy_of(part) for name, part in state.items() if name in known}

    def rescale(self, factor: float) -> None:
        """Multiplies every residual. What float16 cannot hold becomes the most that it can."""
        for owed in (*self._flats.values(), *self._waiting.values()):
            scale_owed(owed, factor)

    def _nothing(self) -> dict[str, torch.Tensor]:
        """Zeros of those parameters of which no gradients have come yet. As far as torch says of which size they are."""
        found = {}
        for group in (group for module in self._modules for group in groups_of(module)):
            try:
                for parameter in group.fsdp_params:
                    name, elems = self._name_of(parameter), parameter.padded_sharded_param_size.numel()
                    if name in self._parts or name in self._waiting or not parameter.sharded_param.requires_grad:
                        continue
                    policy = parameter.mp_policy
                    dtype = policy.reduce_dtype or policy.param_dtype or parameter.sharded_param.dtype
                    found[name] = torch.zeros(group.mesh_info.shard_mesh_size, elems, dtype=dtype)
            except (AttributeError, KeyError):  # another torch
                continue
        return found

    def _names(self) -> set[str]:
        return {_full(module, name) for owner, module in self._modules.items() for name in owner._parameters}

    def _columns(self, gradients: torch.Tensor, world_size: int) -> Columns | None:
        found = _reduced_by(sys._getframe(2))
        if found is None:
            return None
        try:
            columns = [(self._name_of(parameter), parameter.padded_sharded_param_size.numel()) for parameter in found]
        except (AttributeError, KeyError):  # another torch; a module that came into the model later
            return None
        return columns if world_size * sum(elems for _, elems in columns) == gradients.numel() else None

    def _name_of(self, parameter: Any) -> str:
        info = parameter._module_info
        return _full(self._modules[info.module], info.param_name)

    def _laid_out(self, columns: Columns, gradients: torch.Tensor, world_size: int) -> torch.Tensor:
        """A buffer for these parameters, with what they are owed. What else was in their former ones waits."""
        left = self._leave({name for name, _ in columns})
        flat = torch.zeros_like(gradients)
        rows, start = flat.view(world_size, -1), 0
        for name, elems in columns:
            self._parts[name] = rows[:, start : start + elems]
            start += elems
            if (owed := self._waiting.pop(name, None)) is not None:
                _take_up(name, owed, self._parts[name])
        self._flats[tuple(name for name, _ in columns)] = flat
        # A copy, so that the memory of the former buffer is free.
        self._waiting |= {name: _copy_of(self._waiting[name]) for name in left if name in self._waiting}
        return flat

    def _leave(self, moved: set[str]) -> list[str]:
        """Gives up the buffers that hold any of these parameters: all that is in them waits. Returns whose."""
        keys = [key for key in self._flats if not moved.isdisjoint(key)]
        left = [name for key in keys for name in key]
        for key in keys:
            del self._flats[key]
        for name in left:
            self._waiting[name] = self._parts.pop(name)
        return left

    def _warn(self) -> None:
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                "torch %s does not say whose gradients it reduces: gradients of this model are reduced exactly, without error feedback",
                torch.__version__,
            )


def groups_of(module: torch.nn.Module) -> list[Any]:
    """FSDP's groups of parameters that are this module's, to be reduced together."""
    ask = getattr(module, "_get_fsdp_state", None)
    if ask is None:
        return []
    state = ask()
    # Since torch 2.15 parameters of one module may be on meshes of their own.
    groups = getattr(state, "_fsdp_param_groups", None)
    groups = [state._fsdp_param_group] if groups is None else groups
    return [group for group in groups if group is not None]


def _full(module: str, parameter: str) -> str:
    return f"{module}.{parameter}" if module else parameter


def _copy_of(part: torch.Tensor) -> torch.Tensor:
    return part.detach().clone(memory_format=torch.contiguous_format)


def _take_up(name: str, owed: torch.Tensor, part: torch.Tensor) -> None:
    if owed.shape != part.shape:
        logger.warning(
            "the residual of %s is %s, its gradients %s: not used", name, tuple(owed.shape), tuple(part.shape)
        )
        return
    copy_owed(part, owed)
    if (streams := streams_of(owed)) is not None:
        streams.hold(
            owed, streams.current(owed.device)
        )  # made on another stream than FSDP's, which may have it back now


def _reduced_by(caller: FrameType | None) -> Sequence[Any] | None:
    """FSDP's parameters whose gradients are reduced by whoever called; None: it does not say."""
    for _ in range(CALLERS):
        if caller is None:
            return None
        if REDUCED in caller.f_code.co_varnames:
            found: Sequence[Any] | None = caller.f_locals.get(REDUCED)
            return found
        caller = caller.f_back
    return None
