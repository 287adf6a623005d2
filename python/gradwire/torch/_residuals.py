"""Error feedback: what one step owes waits here for the next.

DDP rebuilds its buckets after the first iteration, so buckets have no identity that lasts; parameters do. Each bucket
has one flat buffer, and every parameter's slice moves with it when the buckets change. A slice has the shape of its parameter, with its
elements in the order in which DDP lays them out. That may be another one after a restart (channels last): what is saved has the shape
alone.

DDP throws away the mean of a parameter that no rank used in a step, and with it what the ranks were owed. Whether another
rank used it is known only when the step has ended. So everything that is owed is sent at once, and a copy is kept of what may
be thrown away: if it was, the copy is owed again, and what that step left behind is nothing. To hold it back until this rank
uses the parameter again instead would let it grow without bound while others do.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from gradwire.torch._unused import Unused

logger = logging.getLogger("gradwire")


# claim: auto/error-feedback
class Residuals:
    """Flat residual buffers, one for each bucket of the latest layout.

    Args:
        names: of the model's parameters; the keys of the saved state.
        unused: knows which of them no rank used; None: each has a gradient in every step, or in none.
    """

    def __init__(self, names: Iterable[tuple[str, torch.Tensor]], unused: Unused | None = None) -> None:
        self._unused = unused
        self._names: dict[int, str] = {}
        self._shapes: dict[str, torch.Size] = {}
        for name, parameter in names:
            self._names[id(parameter)] = name
            self._shapes[name] = parameter.shape
        self._buffers: dict[tuple[str, ...], torch.Tensor] = {}
        self._slices: dict[str, torch.Tensor] = {}
        self._loaded: dict[str, torch.Tensor] = {}
        # By the `id` of each parameter whose mean the latest step may have thrown away: what it was owed before; None: nothing.
        self._kept: dict[int, torch.Tensor | None] = {}

    def feed_back(self, bucket: Any) -> torch.Tensor:
        """Adds what is owed to a bucket's gradients. `settle` comes before the first bucket of a step.

        Args:
            bucket: of DDP; its gradients are changed in place.

        Returns:
            The residual of the bucket, with what was added still in it: shape, dtype and layout of `bucket.buffer()`. To be cleared
            when the gradients are sent, for what this step will owe; if they are not, it is added to the next ones.
        """
        key = tuple(self._names[id(parameter)] for parameter in bucket.parameters())
        known = self._buffers.get(key)
        flat = self._assembled(key, bucket) if known is None else known
        if self._unused is not None:
            self._keep(self._unused, bucket.parameters(), flat)
        add_owed(bucket.buffer(), flat)
        return flat

    def settle(self) -> None:
        """What DDP threw away of the latest step is owed again. When its backward pass has ended, before anything else is done here."""
        if self._unused is None or not self._kept:
            return
        kept, self._kept = self._kept, {}
        thrown_away = self._unused.latest()
        for parameter in kept.keys() & thrown_away:
            part, before = self._slices[self._names[parameter]], kept[parameter]
            part.zero_() if before is None else part.copy_(before)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """A copy of what each parameter is owed, in its shape."""
        self.settle()
        current = {name: part.clone(memory_format=torch.contiguous_format) for name, part in self._slices.items()}
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
        self._kept.clear()
        self._loaded = {name: part.clone() for name, part in state.items() if self._fits(name, part)}

    def rescale(self, factor: float) -> None:
        """Multiplies every residual, loaded ones too. What float16 cannot hold becomes the most that it can."""
        self.settle()
        # Slices and not buffers: those of a former layout whose new bucket has not come yet are in no buffer.
        for part in (*self._slices.values(), *self._loaded.values()):
            scale_owed(part, factor)

    def _fits(self, name: str, part: torch.Tensor) -> bool:
        shape = self._shapes.get(name)
        if shape is None:
            return False
        fits = part.shape in (shape, (shape.numel(),))
        if not fits:
            logger.warning("the residual of %s is %s, its gradient %s: not used", name, tuple(part.shape), tuple(shape))
        return fits

    def _keep(self, unused: Unused, parameters: Sequence[torch.Tensor], flat: torch.Tensor) -> None:
        unused.begin(parameters)
        ids = [id(parameter) for parameter in parameters if unused.may_be_thrown_away(parameter)]
        # Where nothing is owed nothing is copied. A device is not asked: it answers only when it has done all before, and the backward
        # pass, which is still giving it work, would wait for that.
        is_owed = bool(ids) and (flat.device.type != "cpu" or bool(flat.any()))
        for parameter in ids:
            self._kept[parameter] = self._slices[self._names[parameter]].clone() if is_owed else None

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
                copy_owed(part if saved.shape == part.shape else row, saved)
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
    were_finite = gradients.isfinite().logical_and_(owed.isfinite()) if gradients.dtype is torch.float16 else None
    gradients.add_(owed)
    _hold_finite(gradients, were_finite)


def scale_owed(owed: torch.Tensor, factor: float) -> None:
    """Multiplies in place; zero forgets what is not finite too. What is finite stays so, as in `add_owed`."""
    if factor == 0:
        owed.zero_()
        return
    were_finite = owed.isfinite() if owed.dtype is torch.float16 else None
    owed.mul_(factor)
    _hold_finite(owed, were_finite)


def copy_owed(owed: torch.Tensor, saved: torch.Tensor) -> None:
    """Copies `saved`, which may be of another dtype and on another device. What is finite stays so, as in `add_owed`."""
    owed.copy_(saved)
    if owed.dtype is torch.float16:
        _hold_finite(owed, saved.isfinite().to(owed.device))


def _hold_finite(values: torch.Tensor, were_finite: torch.Tensor | None) -> None:
    """The most that float16 can hold in place of an infinity that was none before. None: of a dtype that holds all such values."""
    if were_finite is not None:
        most = torch.finfo(torch.float16).max
        values.copy_(torch.where(were_finite, values.clamp(-most, most), values))
