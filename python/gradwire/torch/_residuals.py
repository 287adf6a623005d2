"""Error feedback: what did not count in one step waits here for the next.

DDP rebuilds its buckets after the first iteration, so buckets have no identity that lasts; parameters do. Each bucket
has one flat buffer, and every parameter's slice moves with it when the buckets change.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch


# claim: auto/error-feedback
class Residuals:
    """Flat residual buffers, one for each bucket of the latest layout.

    Args:
        names: of the model's parameters; the keys of the saved state.
    """

    def __init__(self, names: Iterable[tuple[str, torch.Tensor]]) -> None:
        self._names = {id(parameter): name for name, parameter in names}
        self._buffers: dict[tuple[str, ...], torch.Tensor] = {}
        self._slices: dict[str, torch.Tensor] = {}
        self._loaded: dict[str, torch.Tensor] = {}

    def buffer(self, bucket: Any) -> torch.Tensor:
        """The residual of a bucket: shape, dtype and layout of `bucket.buffer()`; zero where nothing was left behind."""
        key = tuple(self._names[id(parameter)] for parameter in bucket.parameters())
        known = self._buffers.get(key)
        return self._assembled(key, bucket) if known is None else known

    def state_dict(self) -> dict[str, torch.Tensor]:
        """A copy of each parameter's residual, flat, in the memory order of its gradient."""
        return {**self._loaded, **{name: part.clone() for name, part in self._slices.items()}}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Replaces every residual; parameters that are not in `state` get zero."""
        self._buffers.clear()
        self._slices.clear()
        self._loaded = {name: part.clone() for name, part in state.items()}

    def _assembled(self, key: tuple[str, ...], bucket: Any) -> torch.Tensor:
        flat = torch.zeros_like(bucket.buffer())
        start = bucket.buffer().storage_offset()
        for name, gradient in zip(key, bucket.gradients(), strict=True):
            offset = gradient.storage_offset() - start
            part = flat[offset : offset + gradient.numel()]
            saved = self._slices.get(name)
            if saved is None:
                saved = self._loaded.pop(name, None)
            if saved is not None:
                part.copy_(saved)
            self._slices[name] = part
        moved = set(key)
        self._buffers = {old: buffer for old, buffer in self._buffers.items() if moved.isdisjoint(old)}
        self._buffers[key] = flat
        return flat
