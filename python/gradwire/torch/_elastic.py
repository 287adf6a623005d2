"""State that a rank gets which joins a running job: `ElasticState`, the one line of a training loop that lets lost ranks come back.

The parts travel as `_described.py` says, never pickled.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from gradwire.errors import InvalidRequestError
from gradwire.torch._described import described, rebuilt
from gradwire.torch._group import GroupLink
from gradwire.torch._tolerant import link_of


class ElasticState:
    """What a training loop needs to go on: modules, optimizers, schedulers and plain values such as the number of the step.

        state, tolerance = gradwire.torch.ElasticState(model=model, optimizer=optimizer, step=0), None
        while state.step < steps:
            if state.sync():
                owed = None if tolerance is None else tolerance.state_dict()
                ddp = DistributedDataParallel(model, init_sync=False, broadcast_buffers=False)
                tolerance = gradwire.torch.tolerate_loss(ddp)
                if owed is not None:  # what this rank owes to the next step
                    tolerance.load_state_dict(owed)
                    owed = None  # it is as large as all gradients
            ...
            state.step += 1

    Args:
        group: None means the default group, which must be of the backend "gradwire".
        parts: by name. What has `state_dict` and `load_state_dict` is asked for its state; of DistributedDataParallel its module.
            Everything else is a value; read and write it as an attribute. Values and states are dense tensors, numbers, texts, None, and
            `list`, `tuple`, `torch.Size`, `dict`, `OrderedDict` (with a module's `_metadata`) and `Counter` of such, and stay so.

    Raises:
        UnsupportedError: the group has another backend.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, /, **parts: Any) -> None:
        link_of(group)
        self._group = group
        self._parts = {name: part for name, part in parts.items() if hasattr(part, "load_state_dict")}
        self._values = {name: part for name, part in parts.items() if name not in self._parts}
        self._synced: GroupLink | None = None

    def __getattr__(self, name: str) -> Any:
        parts = {**self.__dict__.get("_parts", {}), **self.__dict__.get("_values", {})}
        if name not in parts:
            raise AttributeError(f"the state has no part {name!r}")
        return parts[name]

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self.__dict__.get("_values", {}):
            self._values[name] = value
        elif name in self.__dict__.get("_parts", {}):
            self._parts[name] = value
        elif name.startswith("_"):
            super().__setattr__(name, value)
        else:
            # As an attribute it would look like a part, and never reach a rank that joins.
            raise AttributeError(f"the state has no part {name!r}: name it in ElasticState(...)")

    def sync(self) -> bool:
        """Lets at most one rank join that was lost and started again, and gives it everything here as the others have it.

        All ranks call it between two steps, with no call in flight; one that was started again before any other call of the group. It
        costs one small all-reduce, and a broadcast of the state when a rank joins; nothing with `on_peer_loss="raise"`. After torch's
        `_reconfigure` it is the first call of all members, with any policy: they get what the first of those has that were in the group
        before.

        Returns:
            Whether wrappers that count calls must be made anew on every rank, DistributedDataParallel above all: when a rank has
            joined, when the group was formed anew, and the first time.

        Raises:
            InvalidRequestError: on all ranks: a part holds something else, which the first call finds on each, or cannot tell its state
                when a rank has joined, where the group goes on. On the rank that joins: its parts are others.
            UnsupportedError: the group has another backend now.
            GroupError: the group has ended.
        """
        link = link_of(self._group)
        boundary, is_first = link.boundary, self._synced is not link
        if boundary is not None:
            boundary.timeout = link.timeout  # the group's `set_timeout` changes it
        if is_first and boundary is not None and (boundary.is_open or link.is_reconfigured):
            self._describe()
        if is_first and boundary is not None and link.is_reconfigured:
            told = boundary.meet(self._synced is not None, self._pack)
            if told is not None:
                self._unpack(*told)
        self._synced = link
        if boundary is None:
            return is_first
        crossing = boundary.cross()
        if crossing.newcomer is None:
            return is_first
        told = boundary.share(crossing, self._pack)
        if told is not None:
            self._unpack(*told)
        return True

    def _describe(self) -> tuple[dict[str, Any], list[torch.Tensor]]:
        tensors: list[torch.Tensor] = []
        parts = {name: _module_of(part).state_dict() for name, part in self._parts.items()}
        named = {"parts": parts, "values": self._values}
        header = {
            kind: {name: described(value, tensors, name) for name, value in values.items()}
            for kind, values in named.items()
        }
        return header, tensors

    def _pack(self) -> tuple[dict[str, Any], list[Any]]:
        header, tensors = self._describe()
        header["monitored_barriers"] = link_of(self._group).monitored_barriers
        return header, [_bytes_of(tensor) for tensor in tensors]

    def _unpack(self, header: dict[str, Any], arrays: list[Any]) -> None:
        parts, values = (
            {name: rebuilt(told, arrays) for name, told in _named(header, kind).items()} for kind in ("parts", "values")
        )
        barriers = header.get("monitored_barriers")
        if type(barriers) is not int or barriers < 0:
            raise InvalidRequestError(f"another rank counts {barriers!r} calls of monitored_barrier")
        if set(parts) != set(self._parts) or set(values) != set(self._values):
            theirs, ours = sorted([*parts, *values]), sorted([*self._parts, *self._values])
            raise InvalidRequestError(f"the others have the parts {theirs}, this rank {ours}")
        for name, state in parts.items():
            _module_of(self._parts[name]).load_state_dict(state)
        for name, value in values.items():
            mine = self._values[name]
            are_tensors = isinstance(mine, torch.Tensor) and isinstance(value, torch.Tensor)
            self._values[name] = value.to(mine.device) if are_tensors else value
        link_of(self._group).monitored_barriers = barriers


def _named(header: Any, kind: str) -> dict[str, Any]:
    named = header.get(kind) if isinstance(header, dict) else None
    if not isinstance(named, dict):
        raise InvalidRequestError(f"what another rank says of its state has no {kind}")
    return named


def _module_of(part: Any) -> Any:
    return part.module if isinstance(part, torch.nn.parallel.DistributedDataParallel) else part


def _bytes_of(tensor: torch.Tensor) -> Any:
    flat = tensor.detach().to("cpu", copy=True).contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy() if flat.numel() else np.empty(0, np.uint8)
