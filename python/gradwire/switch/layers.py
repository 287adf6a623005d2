"""Sizes of a model's layers, front to back, and how much of the traffic each class gets from them.

A layer is a module with parameters of its own, as for the transport's tags (`gradwire.torch._tags.LayerPriority`).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gradwire.simulation.tensors import read_checkpoint
from gradwire.switch.errors import SwitchError


def class_shares(layers: Sequence[int], classes: int) -> list[float]:
    """Share of the bytes in each class: layer i of L is in class floor(i * classes / L). Without layers: equal shares."""
    if not layers:
        return [1.0 / classes] * classes
    total = sum(layers)
    shares = [0.0] * classes
    for number, size in enumerate(layers):
        shares[number * classes // len(layers)] += size / total
    return shares


def read_layers(text: str) -> list[int]:
    """Layer sizes from a list (`9408,36864,..`), a JSON file (list, or name to size), or a torch checkpoint.

    Raises:
        SwitchError: there is no such file, or it does not hold sizes.
    """
    path = Path(text)
    if "," in text or text.strip().isdecimal():
        sizes = _numbers(text.split(","), text)
    elif not path.exists():
        raise SwitchError(f"--layers {text}: no such file; give sizes separated by commas, a JSON file or a checkpoint")
    elif path.suffix == ".json":
        sizes = _of_json(path)
    else:
        sizes = _of_checkpoint(path)
    if not sizes or min(sizes) < 0 or sum(sizes) == 0:
        raise SwitchError(f"--layers {text}: no layer with a size above 0 in it")
    return sizes


def _numbers(values: Sequence[Any], source: str) -> list[int]:
    try:
        return [int(value) for value in values]
    except (TypeError, ValueError, OverflowError):  # the last of 1e400, which JSON's floats read as infinite
        raise SwitchError(f"--layers {source}: sizes are whole numbers of bytes or parameters") from None


def _of_json(path: Path) -> list[int]:
    try:
        content = json.loads(path.read_text())
    except ValueError as error:
        raise SwitchError(f"{path} is not JSON: {error}") from None
    except RecursionError:
        raise SwitchError(f"{path} is nested too deeply") from None
    if isinstance(content, dict):
        content = list(content.values())
    if not isinstance(content, list):
        raise SwitchError(f"{path} holds neither a list of sizes nor an object of name to size")
    return _numbers(content, str(path))


def _of_checkpoint(path: Path) -> list[int]:
    """Bytes of each layer, in the checkpoint's order, which for `state_dict()` is that of the modules."""
    try:
        parameters = read_checkpoint(path)
    except ValueError as error:
        raise SwitchError(f"--layers {error}") from None
    layers: dict[str, int] = {}
    for name, tensor in parameters.items():
        layer = name.rpartition(".")[0]
        layers[layer] = layers.get(layer, 0) + tensor.numel() * tensor.element_size()
    return list(layers.values())
