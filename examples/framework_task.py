"""The small task that the examples `with_lightning.py`, `with_accelerate.py` and `with_ray.py` share."""

from __future__ import annotations

import argparse
import hashlib
import json
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset


def network() -> nn.Module:
    """A small regression model, with the same weights in every process."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 1))


def samples(count: int = 512) -> TensorDataset:
    """Inputs `[count, 32]` and targets `[count, 1]`, the same in every process."""
    inputs = torch.randn(count, 32, generator=torch.Generator().manual_seed(2))
    return TensorDataset(inputs, inputs.sum(1, keepdim=True).sin())


def result(model: nn.Module, loss: torch.Tensor, backend: str, tolerance: Any) -> str:
    """One line: what carried the gradients, how many steps might lose some, and what came of it.

    Equal digests are equal parameters, bit by bit. `tolerance` is what `tolerate_loss` returned, or None.
    """
    tolerant_steps = 0 if tolerance is None else len(tolerance.steps)
    digest = hashlib.sha256()
    for parameter in model.parameters():
        digest.update(parameter.detach().contiguous().view(torch.uint8).numpy())
    said = {"backend": backend, "tolerant_steps": tolerant_steps, "loss": round(loss.item(), 6)}
    return json.dumps({**said, "parameters": digest.hexdigest()})


def arguments(description: str | None) -> argparse.Namespace:
    """The options of all three examples."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backend", choices=("gradwire", "gloo"), default="gradwire")
    parser.add_argument("--exact", action="store_true", help="gradwire without tolerate_loss")
    parser.add_argument("--epochs", type=int, default=2)
    chosen = parser.parse_args()
    chosen.tolerant = chosen.backend == "gradwire" and not chosen.exact
    return chosen
