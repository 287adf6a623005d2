"""The latest average of each bucket, for `gather_fill="previous"`: what did not arrive keeps its value (MLT section 4.2.1)."""

from __future__ import annotations

from typing import Any

import torch

from gradwire.torch._finite import Verdict


class LatestResults:
    """One tensor like each bucket of the latest layout. Called by the hook, for every bucket of every step."""

    def __init__(self) -> None:
        self._results: dict[int, tuple[tuple[int, ...], torch.Tensor]] = {}

    def of(self, bucket: Any) -> torch.Tensor:
        """The tensor that the result of `bucket` goes to, and which holds the one before: shape, dtype and device of its buffer.

        Zero before the first step and when the bucket holds other parameters than before: DDP rebuilds its buckets once. Zero where the one
        before was not finite: it would make loss scaling skip this step, too.
        """
        index, parameters = bucket.index(), tuple(id(parameter) for parameter in bucket.parameters())
        known = self._results.get(index)
        if known is None or known[0] != parameters:
            known = self._results[index] = (parameters, torch.zeros_like(bucket.buffer()))
        if bucket.is_last():
            self._results = {at: held for at, held in self._results.items() if at <= index}
        return known[1].nan_to_num_(0.0, 0.0, 0.0)

    def settle(self, verdict: Verdict | None) -> None:
        """Forgets every result where one of a step was not finite, which is thrown away as a whole. None: they were."""
        if verdict is None or verdict.known:
            return
        for _, result in self._results.values():
            if verdict.known is False:
                result.zero_()
            else:
                result.masked_fill_(~verdict.on(result.device), 0.0)

    def rescale(self, factor: float) -> None:
        """Multiplies every result; zero forgets what is not finite, too."""
        for _, result in self._results.values():
            result.zero_() if factor == 0 else result.mul_(factor)
