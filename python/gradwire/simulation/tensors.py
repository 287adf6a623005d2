"""Reads how many elements each tensor of a model has, from a checkpoint or a list, in the order of the model."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any, NamedTuple

# Kept in state dicts, but no gradients are sent for them.
_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")
# Under these keys training scripts keep the state dict in a checkpoint of theirs.
_MODEL_KEYS = ("state_dict", "model_state_dict", "model", "module")


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
    tensors = readers.get(path.suffix, _from_torch)(path)
    kept = [Tensor(name, elems) for name, elems in tensors if elems > 0 and not name.endswith(_STATISTICS)]
    if not kept:
        raise ValueError(f"{path} holds no tensors with gradients")
    return kept


def _from_text(path: Path) -> list[tuple[str, int]]:
    try:
        lines = [line.split() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        return [(name, int(elems)) for name, elems in lines]
    except ValueError as error:
        raise ValueError(f"{path}: each line is a name and a number of elements") from error


def _from_json(path: Path) -> list[tuple[str, int]]:
    found = _object(path, path.read_bytes())
    return [(name, _elems(path, name, size)) for name, size in found.items()]


def _from_safetensors(path: Path) -> list[tuple[str, int]]:
    """Reads the header only: eight bytes with its length, then names with dtype and shape."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > path.stat().st_size:
            raise ValueError(f"{path} is no safetensors file")
        header = _object(path, file.read(length))
    header.pop("__metadata__", None)
    tensors = {name: entry if isinstance(entry, dict) else {} for name, entry in header.items()}
    return [
        (name, _elems(path, name, entry.get("shape")))
        for name, entry in tensors.items()
        if str(entry.get("dtype", "F")).startswith(("F", "BF"))
    ]


def _object(path: Path, text: bytes) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError as error:
        raise ValueError(f"{path} is no JSON: {error}") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path}: an object of names, each with a number of elements or a shape")
    return found


def _elems(path: Path, name: str, size: Any) -> int:
    """A number of elements, or the product of a shape."""
    sizes = size if isinstance(size, list) else [size]
    if not all(type(each) is int and each >= 0 for each in sizes):
        raise ValueError(f"{path}: {name!r} has {size!r}, where a number of elements or a shape belongs")
    return math.prod(sizes)


def _from_torch(path: Path) -> list[tuple[str, int]]:
    import torch

    try:
        found: Any = torch.load(path, map_location="cpu", weights_only=True)
    except (RuntimeError, EOFError, KeyError) as error:
        raise ValueError(f"{path} is no checkpoint of torch: {error}") from error
    except Exception as error:  # pickle's own error class, for what is no checkpoint or holds more than tensors
        raise ValueError(f"{path} cannot be loaded as tensors alone: {error}") from error
    key = next((key for key in _MODEL_KEYS if isinstance(found, dict) and isinstance(found.get(key), dict)), None)
    model = found[key] if key else found
    if not isinstance(model, dict):
        raise ValueError(f"{path} holds no state dict")
    is_gradient = lambda value: torch.is_tensor(value) and value.is_floating_point()  # noqa: E731
    return [(str(name), value.numel()) for name, value in model.items() if is_gradient(value)]
