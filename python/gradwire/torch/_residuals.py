"""Error feedback: what one step owes waits here for the next.

DDP rebuilds its buckets after the first iteration, so buckets have no identity that lasts; parameters do. Each bucket
has one flat buffer, and every parameter's slice moves with it when the buckets change. A slice has the shape of its parameter, with its
elements in the order in which DDP lays them out. That may be another one after a restart (channels last): what is saved has the shape
alone.

DDP throws away the mean of a parameter that no rank used in a step, and with it what the ranks were owed. Whether another
rank used it is known only when the step has ended. So everything that is owed is sent at once, and kept of buckets with such parameters: if
it was thrown away, it is owed again, and what that step left behind is nothing. To hold it back until this rank
uses the parameter again instead would let it grow without bound while others do. What the step leaves goes to other memory than what it was
fed, so that nothing is copied for that.

A step whose means are not all finite is most likely thrown away as a whole, by whoever scales or clips gradients: what it left is dropped.
What it was fed is not owed again: a loop that puts finite values in place of the others applies it, and would do so in every step.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch

from gradwire.torch._finite import Verdict
from gradwire.torch._unused import Unused

logger = logging.getLogger("gradwire")


class _Owed:
    """What the parameters of one bucket are owed.

    Attributes:
        now: flat, as the bucket.
        parts: of it, by parameter.
        may_be: not known to be zero.
    """

    def __init__(self, now: torch.Tensor, parts: dict[str, torch.Tensor]) -> None:
        self.now, self.parts = now, parts
        self.may_be = False
        # What the latest step was fed, where it may be owed again. None: memory that has not been needed yet.
        self._fed: torch.Tensor | None = None
        self._fed_parts: dict[str, torch.Tensor] = {}
        self._has_fed = False

    def begin(self, *, keeps: bool) -> torch.Tensor:
        """Memory of zeros for what a step leaves that has been fed. `keeps`: what it was fed may be owed again."""
        self._has_fed = keeps and self.may_be
        if self._has_fed:
            self._turn()
        self.may_be = True
        return self.now.zero_()

    def drop(self) -> None:
        """What the latest step left."""
        self.now.zero_()
        self.may_be = False

    def drop_unless(self, is_finite: torch.Tensor) -> None:
        """The same, if a device says so that nobody asks."""
        if self.may_be:
            self.now.masked_fill_(~is_finite, 0.0)

    def take_back_part(self, name: str) -> None:
        """What the latest step was fed of one parameter is owed, and nothing that it left."""
        if self._has_fed:
            self.parts[name].copy_(self._fed_parts[name])
            self.may_be = True
        else:
            self.parts[name].zero_()

    def rescale(self, factor: float) -> None:
        """Multiplies, in place."""
        scale_owed(self.now, factor)
        if self._fed is not None and self._has_fed:
            scale_owed(self._fed, factor)  # which may be taken back yet

    def _turn(self) -> None:
        if self._fed is None:
            fed = torch.empty_like(self.now)
            self._fed = fed
            self._fed_parts = {
                name: fed.as_strided(part.size(), part.stride(), part.storage_offset())
                for name, part in self.parts.items()
            }
        self.now, self._fed = self._fed, self.now
        self.parts, self._fed_parts = self._fed_parts, self.parts


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
        self._dtypes: dict[str, torch.dtype] = {}
        for name, parameter in names:
            self._names[id(parameter)] = name
            self._shapes[name] = parameter.shape
            self._dtypes[name] = parameter.dtype
        self._buffers: dict[tuple[str, ...], _Owed] = {}
        # The latest bucket of each parameter.
        self._holders: dict[str, _Owed] = {}
        self._loaded: dict[str, torch.Tensor] = {}
        # The buckets that the latest step has sent.
        self._step: list[_Owed] = []
        # The `id` of each parameter whose mean the latest step may have thrown away, and the names of those of which it has.
        self._doubtful: set[int] = set()
        self._thrown_away: set[str] = set()

    def begin_step(self) -> None:
        """Before the first bucket of a step, and when the backward pass before has ended."""
        self.settle()
        self._step.clear()
        self._thrown_away.clear()

    def feed_back(self, bucket: Any) -> torch.Tensor:
        """Adds what is owed to a bucket's gradients. `begin_step` comes before the first bucket of a step.

        Args:
            bucket: of DDP; its gradients are changed in place.

        Returns:
            What was added: shape, dtype and layout of `bucket.buffer()`. It is still owed, until `sent`.
        """
        key = self._key_of(bucket)
        owed = self._buffers.get(key)
        if owed is None:
            owed = self._assembled(key, bucket)
        if self._unused is not None:
            self._unused.begin(bucket.parameters())
            self._doubtful.update(id(p) for p in bucket.parameters() if self._unused.may_be_thrown_away(p))
        add_owed(bucket.buffer(), owed.now)
        return owed.now

    def sent(self, bucket: Any) -> tuple[torch.Tensor, Callable[[int], None]]:
        """A bucket that was fed is about to be sent.

        Returns:
            Zeros, like `bucket.buffer()`: to be given what this step leaves behind; and whom to tell, when it has ended well, how many
            of its elements did not count.
        """
        owed = self._buffers[self._key_of(bucket)]
        self._step.append(owed)
        keeps = any(id(parameter) in self._doubtful for parameter in bucket.parameters())

        def ended(uncounted: int) -> None:
            owed.may_be = uncounted > 0

        return owed.begin(keeps=keeps), ended

    def settle(self, verdict: Verdict | None = None) -> None:
        """The backward pass has ended, and nothing else has been done here since: of what was thrown away nothing is left.

        Args:
            verdict: on its results; None: finite, or told before.
        """
        if verdict is not None and verdict.known is False:
            self.forget_step()
        elif verdict is not None and verdict.known is None:
            for owed in self._step:
                owed.drop_unless(verdict.on(owed.now.device))
        if self._unused is None or not self._doubtful:
            return
        doubtful, self._doubtful = self._doubtful, set()
        for parameter in doubtful & self._unused.latest():
            name = self._names[parameter]
            if self._holders[name] in self._step:  # else it was not sent: it is still owed
                self._thrown_away.add(name)
        self._take_back()

    def forget_step(self) -> None:
        """What the latest step left is dropped. Twice is as good as once."""
        for owed in self._step:
            owed.drop()
        self._take_back()

    def _take_back(self) -> None:
        """What DDP threw away of what the latest step was fed."""
        for name in self._thrown_away:
            self._holders[name].take_back_part(name)

    def state_dict(self) -> dict[str, torch.Tensor]:
        """A copy in host memory of what each parameter is owed, in its shape."""
        self.settle()
        current = {name: owed.parts[name] for name, owed in self._holders.items()}
        return {name: on_host(part) for name, part in {**self._loaded, **current}.items()}

    def nothing_of(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        """As `state_dict` where nothing is owed: for those of these parameters that no bucket has had and nothing was loaded for."""
        known = self._holders.keys() | self._loaded.keys()
        new = [name for name in names if name in self._shapes and name not in known]
        return {name: torch.zeros(self._shapes[name], dtype=self._dtypes[name]) for name in new}

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Replaces every residual. Parameters that are not in `state` get zero, and so do those that have another shape.

        Those are told, as are names that the model has not: `torch.compile` and wrappers put a prefix before them. Flat ones, as earlier
        versions saved them, are taken to be in the order in which DDP lays out the gradient now.
        """
        unknown = [name for name in state if name not in self._shapes]
        if unknown:
            logger.warning("residuals of parameters that the model has not are not used: %s", ", ".join(unknown))
        self._buffers.clear()
        self._holders.clear()
        self._step.clear()
        self._doubtful.clear()
        self._thrown_away.clear()
        self._loaded = {name: part.clone() for name, part in state.items() if self._fits(name, part)}

    def rescale(self, factor: float) -> None:
        """Multiplies every residual, loaded ones too. What float16 cannot hold becomes the most that it can."""
        self.settle()
        # Holders and not buffers: those of a former layout whose parameters' new bucket has not come yet are among no buffers.
        for owed in set(self._holders.values()):
            owed.rescale(factor)
        for part in self._loaded.values():
            scale_owed(part, factor)

    def _fits(self, name: str, part: torch.Tensor) -> bool:
        shape = self._shapes.get(name)
        if shape is None:
            return False
        fits = part.shape in (shape, (shape.numel(),))
        if not fits:
            logger.warning("the residual of %s is %s, its gradient %s: not used", name, tuple(part.shape), tuple(shape))
        return fits

    def _key_of(self, bucket: Any) -> tuple[str, ...]:
        return tuple(self._names[id(parameter)] for parameter in bucket.parameters())

    def _assembled(self, key: tuple[str, ...], bucket: Any) -> _Owed:
        flat = torch.zeros_like(bucket.buffer())
        owed = _Owed(flat, {})
        start = bucket.buffer().storage_offset()
        for name, parameter, gradient in zip(key, bucket.parameters(), bucket.gradients(), strict=True):
            offset = gradient.storage_offset() - start
            row = flat[offset : offset + gradient.numel()]
            part = owed.parts[name] = laid_out_like(parameter, row.view(parameter.shape))
            former = self._holders.get(name)
            saved = self._loaded.pop(name, None) if former is None else former.parts[name]
            if saved is not None:
                copy_owed(part if saved.shape == part.shape else row, saved)
                owed.may_be |= former is None or former.may_be
            self._holders[name] = owed
        moved = set(key)
        self._buffers = {old: buffer for old, buffer in self._buffers.items() if moved.isdisjoint(old)}
        self._buffers[key] = owed
        return owed


def on_host(part: torch.Tensor) -> torch.Tensor:
    """A copy, row by row: to be saved, beside a device whose memory is full."""
    return part.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)


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
