"""Error feedback: what one step owes waits here for the next.

DDP rebuilds its buckets after the first iteration, so buckets have no identity that lasts; parameters do. Each bucket
has one flat buffer, and every parameter's slice moves with it when the buckets change. A slice has the shape of its parameter, with its
elements in the order in which DDP lays them out. That may be another one after a restart (channels last): what is saved has the shape
alone.

DDP throws away the mean of a parameter that no rank used in a step. What such a parameter is owed would be lost with it,
so it waits until this rank has used the parameter again: its use here is a use somewhere.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

import torch

logger = logging.getLogger("gradwire")


# claim: auto/error-feedback
class Residuals:
    """Flat residual buffers, one for each bucket of the latest layout.

    Args:
        names: of the model's parameters; the keys of the saved state.
    """

    def __init__(self, names: Iterable[tuple[str, torch.Tensor]]) -> None:
        self._names: dict[int, str] = {}
        self._shapes: dict[str, torch.Size] = {}
        for name, parameter in names:
            self._names[id(parameter)] = name
            self._shapes[name] = parameter.shape
        self._buffers: dict[tuple[str, ...], torch.Tensor] = {}
        self._slices: dict[str, torch.Tensor] = {}
        self._loaded: dict[str, torch.Tensor] = {}
        self._held: dict[str, torch.Tensor] = {}

    def feed_back(self, bucket: Any, *, may_be_unused: bool) -> torch.Tensor:
        """Adds what is owed to a bucket's gradients.

        Args:
            bucket: of DDP; its gradients are changed in place.
            may_be_unused: parameters may have no gradient in a step. What they are owed waits then.

        Returns:
            The residual of the bucket, with what was added still in it: shape, dtype and layout of `bucket.buffer()`. To be cleared
            when the gradients are sent, for what this step will owe; if they are not, it is added to the next ones.
        """
        key = tuple(self._names[id(parameter)] for parameter in bucket.parameters())
        known = self._buffers.get(key)
        flat = self._assembled(key, bucket) if known is None else known
        for name in [name for name in key if name in self._held]:
            self._slices[name].add_(self._held.pop(name))
        if may_be_unused:
            self._hold_unused(key, bucket.gradients())
        add_owed(bucket.buffer(), flat)
        return flat

    def state_dict(self) -> dict[str, torch.Tensor]:
        """A copy of what each parameter is owed, in its shape."""
        current = {name: part.clone(memory_format=torch.contiguous_format) for name, part in self._slices.items()}
        for name, part in self._held.items():
            current[name].add_(part)
        return {**self._loaded, **current}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Replaces every residual. Parameters that are not in `state` get zero, and so do those that have another shape.

        Those are told, as are names that the model has not: `torch.compile` and wrappers put a prefix before them. Flat ones, as earlier
        versions saved them, are taken to be in the order in which DDP lays out the gradient now.
        """
        unknown = [name for name in state if name not in self._shapes]
        if unknown:
            logger.warning("residuals of parameters that the model has not are not used: %s", ", ".join(unknown))
        self._buffers.clear()
        self._slices.clear()
        self._held.clear()
        self._loaded = {name: part.clone() for name, part in state.items() if self._fits(name, part)}

    def rescale(self, factor: float) -> None:
        """Multiplies every residual, held and loaded ones too."""
        # Slices and not buffers: those of a former layout whose new bucket has not come yet are in no buffer.
        for part in (*self._slices.values(), *self._held.values(), *self._loaded.values()):
            part.zero_() if factor == 0 else part.mul_(factor)

    def _fits(self, name: str, part: torch.Tensor) -> bool:
        shape = self._shapes.get(name)
        if shape is None:
            return False
        fits = part.shape in (shape, (shape.numel(),))
        if not fits:
            logger.warning("the residual of %s is %s, its gradient %s: not used", name, tuple(part.shape), tuple(shape))
        return fits

    def _hold_unused(self, key: tuple[str, ...], gradients: Iterable[torch.Tensor]) -> None:
        for name, gradient in zip(key, gradients, strict=True):
            part = self._slices[name]
            if part.any() and not gradient.any():
                self._held[name] = part.clone()
                part.zero_()

    def _assembled(self, key: tuple[str, ...], bucket: Any) -> torch.Tensor:
        flat = torch.zeros_like(bucket.buffer())
        start = bucket.buffer().storage_offset()
        for name, parameter, gradient in zip(key, bucket.parameters(), bucket.gradients(), strict=True):
            offset = gradient.storage_offset() - start
            row = flat[offset : offset + gradient.numel()]
            part = laid_out_like(parameter, row.view(parameter.shape))
            saved = self._slices.get(name)
            if saved is None:
                saved = self._loaded.pop(name, None)
            if saved is not None:
                (part if saved.shape == part.shape else row).copy_(saved)
            self._slices[name] = part
        moved = set(key)
        self._buffers = {old: buffer for old, buffer in self._buffers.items() if moved.isdisjoint(old)}
        self._buffers[key] = flat
        return flat


def laid_out_like(parameter: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """The gradient as DDP puts its elements into a bucket: in the parameter's own order where that is dense, else row by row.

    `GradBucket.gradients` takes every one for row by row.
    """
    is_dense = torch.empty_like(parameter, device="meta").stride() == parameter.stride()
    return (
        gradient.as_strided(parameter.size(), parameter.stride(), gradient.storage_offset()) if is_dense else gradient
    )


def add_owed(gradients: torch.Tensor, owed: torch.Tensor) -> None:
    """Adds in place. Where both are finite the sum is: the most that float16 can hold, beyond it.

    An infinity would say that a gradient overflowed, and none did. Other dtypes hold any sum of gradients.
    """
    if gradients.dtype is not torch.float16:
        gradients.add_(owed)
        return
    most = torch.finfo(torch.float16).max
    are_finite = gradients.isfinite().logical_and_(owed.isfinite())
    gradients.add_(owed)
    torch.where(are_finite, gradients.clamp(-most, most), gradients, out=gradients)
