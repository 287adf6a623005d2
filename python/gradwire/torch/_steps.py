"""What each training step's gradient exchange delivered and how long it took."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections import deque
from dataclasses import dataclass, replace

from gradwire.report import DeliveryTotals
from gradwire.torch._work import GradwireWork


@dataclass(frozen=True)
class StepRecord:
    """Gradient exchange of one or more steps on this rank.

    Attributes:
        buckets: all-reduces that have ended.
        bytes_expected: bytes of the other ranks' gradients that this rank averages its shards from; where other processes are the
            servers, bytes of its own that they average. Each transfer counts once: in a ring, where it carries a sum of several
            ranks' gradients, what is missing is of more gradients than this says (two for one on average among four ranks).
        bytes_received: those of them that came in time.
        bytes_sent, bytes_retransmitted: payload bytes sent, and sent again.
        elems_uncounted: elements of this rank's gradients that did not count somewhere.
        ended_by_time: ranks whose contribution to a bucket (on a GPU: to each piece of it) a deadline or another time limit closed, and
            not what had arrived; summed.
        comm_s: from the start of the step's first all-reduce to the end of its last, seconds.
        elems_filled: elements of the averaged gradients that did not arrive here and were filled in, where results may be lost on their way
            back (`gather_loss_bound`).
        elems: elements of the averaged gradients; of rotated buckets those that were sent, as for `elems_filled`.
    """

    buckets: int = 0
    bytes_expected: int = 0
    bytes_received: int = 0
    bytes_sent: int = 0
    bytes_retransmitted: int = 0
    elems_uncounted: int = 0
    ended_by_time: int = 0
    comm_s: float = 0.0
    elems_filled: int = 0
    elems: int = 0

    @property
    def lost_share(self) -> float:
        """Share of the gradient bytes that did not come in time, 0 to 1.

        What is lost of the averages on their way back is not in it, but in `filled_share`.
        """
        return 1.0 - self.bytes_received / self.bytes_expected if self.bytes_expected else 0.0

    @property
    def filled_share(self) -> float:
        """Share of the averaged gradients that did not arrive here and were filled in, 0 to 1."""
        return self.elems_filled / self.elems if self.elems else 0.0

    def plus(self, totals: DeliveryTotals, elem_bytes: int) -> StepRecord:
        """This record with one more all-reduce; `comm_s` is left to the caller."""
        return replace(
            self,
            buckets=self.buckets + 1,
            bytes_expected=self.bytes_expected + totals.elems_expected * elem_bytes,
            bytes_received=self.bytes_received + totals.elems_received * elem_bytes,
            bytes_sent=self.bytes_sent + totals.bytes_sent,
            bytes_retransmitted=self.bytes_retransmitted + totals.bytes_retransmitted,
            elems_uncounted=self.elems_uncounted + totals.elems_uncounted,
            elems_filled=self.elems_filled + totals.elems_filled,
            elems=self.elems + totals.elems,
            ended_by_time=self.ended_by_time + totals.ended_by_time,
        )


class Delivered(ABC):
    """What the states of loss tolerance say about all steps so far."""

    @property
    @abstractmethod
    def total(self) -> StepRecord:
        """Sum over all steps."""

    @property
    def bytes_expected(self) -> int:
        """Bytes of the other ranks' gradients that this rank should have averaged, or servers of its own, over all steps."""
        return self.total.bytes_expected

    @property
    def bytes_missing(self) -> int:
        """Those of them that did not come in time."""
        return self.total.bytes_expected - self.total.bytes_received


class StepMeter:
    """Collects what was delivered of a step's buckets, in whatever order they end.

    Attributes:
        steps: the latest records; the last one is complete when every bucket that began has been added.
        total: sum over all steps.
    """

    def __init__(self, kept: int) -> None:
        self.steps: deque[StepRecord] = deque(maxlen=kept)
        self.total = StepRecord()
        self._lock = threading.Lock()
        self._started_s = 0.0

    def begin(self, started_s: float) -> None:
        """A new step: its first bucket was submitted at this time of the monotonic clock."""
        with self._lock:
            self._started_s = started_s
            self.steps.append(StepRecord())

    def add(self, work: GradwireWork) -> None:
        """A bucket of the current step ended well."""
        totals = work.totals()
        elem_bytes = work.result()[0].element_size()
        with self._lock:
            record = self.steps[-1].plus(totals, elem_bytes)
            comm_s = max(record.comm_s, work.submitted_s + totals.elapsed_s - self._started_s)
            grown = comm_s - record.comm_s
            self.steps[-1] = replace(record, comm_s=comm_s)
            self.total = replace(self.total.plus(totals, elem_bytes), comm_s=self.total.comm_s + grown)
