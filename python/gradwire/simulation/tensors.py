"""Reads how many elements each tensor of a model has, from a checkpoint or a list, in the order of the model.

A state dict also holds what no gradients are sent for, and a checkpoint much besides the state dict: both are told by their
names, and masks by their shape. `gradwire switch --layers` reads checkpoints here too.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from gradwire._extras import require

# Kept in state dicts, but no gradients are sent for them: statistics of normalisations, rotary frequencies and masks.
_BUFFERS = (
    *("running_mean", "running_var", "num_batches_tracked"),
    *("inv_freq", "masked_bias", "attn_mask", "causal_mask"),
)
# Under these keys training scripts keep the state dict in a checkpoint of theirs.
_MODEL_KEYS = ("state_dict", "model_state_dict", "model_state", "model", "module", "net", "network")
_KEY_DEPTH = 2  # such keys within each other, as in {"model": {"state_dict": ..}}
_EXTRA_STATE = "_extra_state"  # what a module of torch adds to its state dict, of any type
_NAMED_COUNT = 8  # keys that an error names


class Tensor(NamedTuple):
    """One parameter: its name, and its elements."""

    name: str
    elems: int


def read_tensors(path: Path) -> list[Tensor]:
    """Tensors of a model that have gradients.

    Args:
        path: `.safetensors`; `.json` (name to number of elements or shape); `.txt` (a line for each: name, then elements);
            anything else: a checkpoint of `torch.save`, of which only tensors are loaded (`weights_only`).

    Raises:
        OSError: it cannot be read.
        ValueError: it holds no tensors, or is not what its name says.
        ImportError: a checkpoint of torch, without torch.
    """
    readers = {".safetensors": _from_safetensors, ".json": _from_json, ".txt": _from_text}
    shapes = readers.get(path.suffix, _from_torch)(path)
    kept = [Tensor(name, math.prod(shape)) for name, shape in shapes if _has_gradient(name, shape)]
    if not kept:
        raise ValueError(f"{path} holds no tensors with gradients")
    return kept


def read_checkpoint(path: Path) -> dict[str, Any]:
    """The parameters in a checkpoint of `torch.save`, by name, in the order of the model.

    They are without values, on torch's device `meta`. One that several modules share has its first name alone, as in
    `named_parameters`.

    Args:
        path: a state dict, or an object that holds one under a key such as `model`; only tensors are loaded (`weights_only`).

    Raises:
        OSError: it cannot be read.
        ValueError: it is no checkpoint, or no parameters of a model are recognised in it.
        ImportError: torch is missing.
    """
    require("torch", "torch", f"{path}, a checkpoint of torch,")
    import torch

    try:
        content: Any = torch.load(path, map_location="meta", weights_only=True)
    except OSError:
        raise
    except Exception as error:  # torch raises whatever its unpickler meets
        reason = next(iter(str(error).splitlines()), type(error).__name__)
        raise ValueError(f"{path} is not a torch checkpoint, or not of tensors alone: {reason}") from error
    parameters = _parameters(content)
    if not parameters:
        raise ValueError(
            f"{path} holds no parameters of a model, neither by itself nor under {', '.join(_MODEL_KEYS)}; it holds "
            f"{_contents(content)}. Save the model's state_dict() in a file of its own"
        )
    return parameters


def _parameters(content: Any, depth: int = _KEY_DEPTH) -> dict[str, Any]:
    """Of the content, if it is a state dict, or of the first one under a model's key in it; empty: there is none."""
    if not isinstance(content, dict):
        return {}
    if all(map(_is_of_state_dict, content, content.values())):
        return _distinct(content)
    inside = (_parameters(content[key], depth - 1) for key in _MODEL_KEYS if depth > 0 and key in content)
    return next(filter(None, inside), {})


def _is_of_state_dict(name: Any, value: Any) -> bool:
    import torch

    return isinstance(name, str) and (torch.is_tensor(value) or name.endswith(_EXTRA_STATE))


def _distinct(state: dict[str, Any]) -> dict[str, Any]:
    """Those with gradients, each piece of memory once."""
    import torch

    found: dict[Any, tuple[str, Any]] = {}
    for name, value in state.items():
        if torch.is_tensor(value) and value.is_floating_point() and _has_gradient(name, value.shape):
            place = (value.untyped_storage()._cdata, value.storage_offset(), tuple(value.shape))
            found.setdefault(place, (name, value))
    return dict(found.values())


def _contents(content: Any) -> str:
    """What an object holds: names and types, a few of them."""
    if not isinstance(content, dict):
        return f"a {type(content).__name__}"
    named = [f"{name} ({type(value).__name__})" for name, value in content.items()]
    more = [f"{len(named) - _NAMED_COUNT} more"] if len(named) > _NAMED_COUNT else []
    return ", ".join(named[:_NAMED_COUNT] + more) or "nothing"


def _has_gradient(name: str, shape: Sequence[int]) -> bool:
    """Whether it is a parameter, as far as that can be told: buffers are saved like parameters.

    A `bias` of `[1, 1, n, n]` is the causal mask of GPT-2 and of its descendants.
    """
    is_mask = name.rpartition(".")[2] == "bias" and len(shape) == 4 and shape[0] == shape[1] == 1 < shape[2] == shape[3]
    return math.prod(shape) > 0 and not is_mask and not name.endswith(_BUFFERS)


def _from_text(path: Path) -> list[tuple[str, list[int]]]:
    try:
        lines = [line.split() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        return [(name, [int(elems)]) for name, elems in lines]
    except ValueError as error:
        raise ValueError(f"{path}: each line is a name and a number of elements") from error


def _from_json(path: Path) -> list[tuple[str, list[int]]]:
    found = _object(path, path.read_bytes())
    return [(name, _shape(path, name, size)) for name, size in found.items()]


def _from_safetensors(path: Path) -> list[tuple[str, list[int]]]:
    """Reads the header only: eight bytes with its length, then names with dtype and shape."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > path.stat().st_size:
            raise ValueError(f"{path} is no safetensors file")
        header = _object(path, file.read(length))
    header.pop("__metadata__", None)
    tensors = {name: entry if isinstance(entry, dict) else {} for name, entry in header.items()}
    return [
        (name, _shape(path, name, entry.get("shape")))
        for name, entry in tensors.items()
        if str(entry.get("dtype", "F")).startswith(("F", "BF"))
    ]


def _object(path: Path, text: bytes) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{path} is no JSON: {error}") from error
    except RecursionError:
        raise ValueError(f"{path} is nested too deeply") from None
    if not isinstance(found, dict):
        raise ValueError(f"{path}: an object of names, each with a number of elements or a shape")
    return found


def _shape(path: Path, name: str, size: Any) -> list[int]:
    """A shape, or that of a number of elements."""
    sizes = size if isinstance(size, list) else [size]
    if not all(type(each) is int and each >= 0 for each in sizes):
        raise ValueError(f"{path}: {name!r} has {size!r}, where a number of elements or a shape belongs")
    return sizes


def _from_torch(path: Path) -> list[tuple[str, Sequence[int]]]:
    return [(name, tuple(value.shape)) for name, value in read_checkpoint(path).items()]
