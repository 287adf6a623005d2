"""The latest average of each bucket, for `gather_fill="previous"`: what did not arrive keeps its value (MLT section 4.2.1)."""

from __future__ import annotations

from typing import Any

import torch

from gradwire.torch._finite import Verdict


class LatestResults:
    """One tensor like each bucket of the latest layout. Called by the hook, for every bucket of every step."""

    def __init__(self) -> None:
        # By the parameters of the bucket, each of which has one entry. Not by its index: in a static graph's first step all have 0.
        self._results: dict[tuple[int, ...], torch.Tensor] = {}

    def of(self, bucket: Any) -> torch.Tensor:
        """The tensor that the result of `bucket` goes to, and which holds the one before: shape, dtype and device of its buffer.

        Zero before the first step and when the bucket holds other parameters than before: DDP rebuilds its buckets once. Zero where the one
        before was not finite: it would make loss scaling skip this step, too.
        """
        key = tuple(id(parameter) for parameter in bucket.parameters())
        known = self._results.get(key)
        if known is None:
            moved = set(key)
            self._results = {old: result for old, result in self._results.items() if moved.isdisjoint(old)}
            known = self._results[key] = torch.zeros_like(bucket.buffer())
        return known.nan_to_num_(0.0, 0.0, 0.0)

    def settle(self, verdict: Verdict | None) -> None:
        """Forgets every result where one of a step was not finite, which is thrown away as a whole. None: they were."""
        if verdict is None or verdict.known:
            return
        for result in self._results.values():
            if verdict.known is False:
                result.zero_()
            else:
                result.masked_fill_(~verdict.on(result.device), 0.0)

    def rescale(self, factor: float) -> None:
        """Multiplies every result; zero forgets what is not finite, too."""
        for result in self._results.values():
            result.zero_() if factor == 0 else result.mul_(factor)
