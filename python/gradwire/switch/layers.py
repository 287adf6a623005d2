"""Sizes of a model's layers, front to back, the buckets that they are sent in, and how much of the traffic each class gets from them.

A layer is a module with parameters of its own, as for the transport's tags (`gradwire.torch._tags.LayerPriority`).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from gradwire.simulation.tensors import read_checkpoint
from gradwire.switch.errors import SwitchError

MEGABYTE = 1 << 20
DDP_BUCKET_MB = 25  # of DDP without `bucket_cap_mb`,
DDP_FIRST_BUCKET_MB = 1  # and of its first bucket then, so that sending begins early


def class_shares(layers: Sequence[int], classes: int, bucket_mb: float | None = None) -> list[float]:
    """Share of the bytes that a job sends in each class. Without layers: equal shares.

    Layer i of L has class floor(i * classes / L), and a whole bucket that of its front-most layer, as the transport's own rule is.

    Args:
        layers: bytes of the gradients of each, front to back.
        classes: how many there are.
        bucket_mb: as `buckets`.
    """
    if not layers:
        return [1.0 / classes] * classes
    total = sum(layers)
    shares = [0.0] * classes
    for front, size in buckets(layers, bucket_mb):
        shares[front * classes // len(layers)] += size / total
    return shares


def buckets(layers: Sequence[int], bucket_mb: float | None = None) -> list[tuple[int, int]]:
    """The buckets of DDP, in the order in which it sends them: number of the front-most layer in each, and bytes.

    DDP fills them with gradients as backward makes them, from the last layer to the first; a bucket is full once it holds its
    limit or more. Those that it has after the first step are meant, which has all gradients in one.

    Args:
        layers: bytes of the gradients of each, front to back; a layer is in one bucket as a whole.
        bucket_mb: limit of each, as DDP's `bucket_cap_mb` (of 1,048,576 bytes); None: as DDP without it; 0: a bucket for each layer,
            as FSDP has where each layer is sharded by itself.
    """
    first_mb, others_mb = (DDP_FIRST_BUCKET_MB, DDP_BUCKET_MB) if bucket_mb is None else (bucket_mb, bucket_mb)
    found: list[tuple[int, int]] = []
    held = 0
    for number in reversed(range(len(layers))):
        held += layers[number]
        if number == 0 or held >= int((others_mb if found else first_mb) * MEGABYTE):
            found.append((number, held))
            held = 0
    return found


def read_layers(text: str) -> list[int]:
    """Bytes of layers from a list (`9408,36864,..`), a JSON file (list, or name to size), or a torch checkpoint.

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
        raise SwitchError(f"--layers {source}: sizes are whole numbers of bytes") from None


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
