"""What a training step may be delayed, shared out to its buckets."""

from __future__ import annotations


# claim: auto/step-delay
class DelayShares:
    """Gives each bucket of a step an equal part of what the step may be delayed.

    The parts of a step never add up to more than 1, whatever the number of its buckets turns out to be: DDP tells it with
    the last one, and changes it after the first step. Every rank has the same buckets in the same order, so all ranks
    come to the same parts, as the calls must agree.
    """

    def __init__(self) -> None:
        self._buckets = 0
        # Of the step so far. The index of a bucket says nothing: some may be left out, and a static graph begins with zeros.
        self._come = 0
        self._rest = 1.0

    def begin(self) -> None:
        """A new step."""
        self._come = 0
        self._rest = 1.0

    def next(self, *, is_last: bool) -> float:
        """The part of the step's next bucket, above 0 to 1; some of them may not come at all, the last one neither."""
        # One that is not expected to follow may: half is left for it.
        parts = max(self._buckets - self._come, 1 if is_last else 2)
        share = self._rest / parts
        self._rest -= share
        self._come += 1
        if is_last:
            self._buckets = self._come
        return share
