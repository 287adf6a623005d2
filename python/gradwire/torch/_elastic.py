"""State that a rank gets which joins a running job: `ElasticState`, the one line of a training loop that lets lost ranks come back.

The parts travel as plain JSON for their structure and bytes for their tensors, never pickled, so whoever can send to a rank cannot make
it run anything.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from gradwire.errors import InvalidRequestError
from gradwire.torch._tolerant import link_of

PLAIN = (bool, int, float, str, type(None))


class ElasticState:
    """What a training loop needs to go on: modules, optimizers, schedulers and plain values such as the number of the step.

        state = gradwire.torch.ElasticState(model=model, optimizer=optimizer, step=0)
        while state.step < steps:
            if state.sync():
                ddp = DistributedDataParallel(model, init_sync=False, broadcast_buffers=False)
                gradwire.torch.tolerate_loss(ddp)
            ...
            state.step += 1

    Args:
        group: None means the default group, which must be of the backend "gradwire".
        parts: by name. What has `state_dict` and `load_state_dict` is asked for its state; of DistributedDataParallel its module.
            Everything else is a value: tensors, numbers, texts, and lists, tuples and dictionaries of such; read and write it as
            an attribute.

    Raises:
        UnsupportedError: the group has another backend.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, /, **parts: Any) -> None:
        self._link = link_of(group)
        self._parts = {name: part for name, part in parts.items() if hasattr(part, "load_state_dict")}
        self._values = {name: part for name, part in parts.items() if name not in self._parts}
        self._began = False

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
        else:
            super().__setattr__(name, value)

    def sync(self) -> bool:
        """Lets at most one rank join that was lost and started again, and gives it everything here as the others have it.

        All ranks call it between two steps, with no call in flight; one that was started again before any other call of the group. It
        costs one small all-reduce, and a broadcast of the state when a rank joins; nothing with `on_peer_loss="raise"`.

        Returns:
            Whether wrappers that count calls must be made anew on every rank, DistributedDataParallel above all: when a rank has
            joined, and the first time.

        Raises:
            InvalidRequestError: a part is no plain value; the parts of the rank that joins are others.
            GroupError: the group has ended.
        """
        boundary, is_first = self._link.boundary, not self._began
        self._began = True
        if boundary is None:
            return is_first
        crossing = boundary.cross()
        if crossing.newcomer is None:
            return is_first
        told = boundary.share(crossing, self._pack)
        if told is not None:
            self._unpack(*told)
        return True

    def _pack(self) -> tuple[dict[str, Any], list[Any]]:
        tensors: list[torch.Tensor] = []
        parts = {name: _module_of(part).state_dict() for name, part in self._parts.items()}
        header = {"parts": _described(parts, tensors), "values": _described(self._values, tensors)}
        return header, [_bytes_of(tensor) for tensor in tensors]

    def _unpack(self, header: dict[str, Any], arrays: list[Any]) -> None:
        parts, values = _rebuilt(header["parts"], arrays), _rebuilt(header["values"], arrays)
        if set(parts) != set(self._parts) or set(values) != set(self._values):
            theirs, ours = sorted([*parts, *values]), sorted([*self._parts, *self._values])
            raise InvalidRequestError(f"the others have the parts {theirs}, this rank {ours}")
        for name, state in parts.items():
            _module_of(self._parts[name]).load_state_dict(state)
        for name, value in values.items():
            mine = self._values[name]
            self._values[name] = value.to(mine.device) if isinstance(mine, torch.Tensor) else value


def _module_of(part: Any) -> Any:
    return part.module if isinstance(part, torch.nn.parallel.DistributedDataParallel) else part


def _bytes_of(tensor: torch.Tensor) -> Any:
    flat = tensor.detach().to("cpu", copy=True).contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy() if flat.numel() else np.empty(0, np.uint8)


def _described(value: Any, tensors: list[torch.Tensor]) -> Any:
    """A tree of lists whose first entry says what follows: JSON keeps neither tuples nor keys that are numbers."""
    if isinstance(value, torch.Tensor):
        tensors.append(value)
        return ["tensor", len(tensors) - 1, str(value.dtype).removeprefix("torch."), list(value.shape)]
    if isinstance(value, PLAIN):
        return ["plain", value]
    if isinstance(value, Mapping):
        return ["dict", [[_described(key, tensors), _described(entry, tensors)] for key, entry in value.items()]]
    if isinstance(value, (list, tuple)):
        return [type(value).__name__, [_described(entry, tensors) for entry in value]]
    raise InvalidRequestError(f"the state holds a {type(value).__name__}, which is neither plain nor a tensor")


def _rebuilt(told: Any, arrays: list[Any]) -> Any:
    kind, content = told[0], told[1]
    if kind == "tensor":
        dtype = getattr(torch, told[2])
        data = torch.from_numpy(arrays[content])
        return (data.view(dtype) if data.numel() else torch.empty(0, dtype=dtype)).reshape(told[3])
    if kind == "dict":
        return {_rebuilt(key, arrays): _rebuilt(entry, arrays) for key, entry in content}
    if kind == "plain":
        return content
    entries = [_rebuilt(entry, arrays) for entry in content]
    return tuple(entries) if kind == "tuple" else entries
