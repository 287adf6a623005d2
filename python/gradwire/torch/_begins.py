"""With which of DDP's buckets a training step begins. A hook sees buckets, and is not told.

The indices of buckets do not say so: in the first step of a static graph, whose buckets come when `backward` ends, all have index 0, and
with `skip_all_reduce_unused_params` any of them may be left out. Nor do forward passes: some are of an evaluation, some of `no_sync`, and
who calls `forward` by itself, or has it compiled, calls no hooks of the module.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor


class StepBegins:
    """A bucket begins a step if the step so far has had one of its parameters, or if DDP has ended that step.

    A step has each parameter once, and two steps without a parameter in common are possible only where DDP leaves out the buckets that
    nobody uses. There it counts in each step who has used what, behind the last bucket.

    Args:
        counts: see `_unused.counts_of`; None: every step has every bucket.
    """

    def __init__(self, counts: Tensor | None) -> None:
        self._counts = counts
        self._version: int | None = None
        # The `id` of each parameter that the step has had.
        self._come: set[int] = set()

    def begins_with(self, bucket: Any) -> bool:
        """Called once with each bucket, in the order in which they come."""
        parameters = {id(parameter) for parameter in bucket.parameters()}
        version = None if self._counts is None else self._counts._version
        begins = not self._come or version != self._version or not self._come.isdisjoint(parameters)
        if begins:
            self._come.clear()
        self._come |= parameters
        self._version = version
        return begins
