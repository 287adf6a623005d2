"""The model that `tolerate_loss` is for, where a program or a framework has wrapped it once more."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from gradwire.errors import UnsupportedError
from gradwire.torch._sharded import is_sharded

# Whose `replicate` changes the class of a model, which then holds a DDP model of itself from its first forward pass on.
_COMPOSABLE = "torch.distributed._composable.replicate"


def unwrapped(model: Any) -> Any:
    """The DDP or sharded model that was given, or that `torch.compile` was given.

    Raises:
        UnsupportedError: it is neither. The message names the one that it holds, if any.
    """
    found = model
    while not _is_one(found) and isinstance(original := getattr(found, "_orig_mod", None), nn.Module):
        found = original
    if _is_one(found):
        return found
    raise UnsupportedError(
        f"tolerate_loss needs a DistributedDataParallel or fully_shard model, got {type(found).__name__}{_advice(found)}"
    )


def _is_one(model: Any) -> bool:
    return isinstance(model, DistributedDataParallel) or is_sharded(model)


def _advice(model: Any) -> str:
    if not isinstance(model, nn.Module):
        return ""
    for name, module in model.named_modules():
        if _is_one(module):
            return f": pass its {name}, which is one"
        if type(module).__name__ == "FullyShardedDataParallel":
            return " (FSDP1), whose gradients are always exact: fully_shard makes a model that can lose"
        if any(each.__module__ == _COMPOSABLE for each in type(module).__mro__):
            return f" (replicate() of {_COMPOSABLE}), whose gradients are always exact: DistributedDataParallel makes a model that can lose"
    return ": wrap it first"
