"""`monitored_barrier`: a barrier whose error names the ranks that did not come.

Rank 0 hears from every other rank by name and then tells them all to go on. Messages are in the words that users of gloo
know from their logs.

Where a group goes on without lost ranks (`on_peer_loss="continue"`) it is a plain barrier among those who are left: of messages rank 0
would learn at once that a rank is gone, and the others would wait for its word.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch

from gradwire.errors import AbortedError, DeadlineError, GradwireError, PeerLeftError, PeerLostError
from gradwire.torch._work import GradwireWork

# Tags of these messages: the last of the tag space, one for each of the latest barriers, so that a rank that comes too late
# to one is not taken for early at the next.
TAG_FIRST = 0xFFFF_0000
TAG_COUNT = 0x1_0000

# (peer, tag, timeout) -> work, of a message of one byte
Exchange = Callable[[int, int, timedelta], GradwireWork]
# timeout -> the members that took part in a barrier
Meeting = Callable[[timedelta], Sequence[int]]
# Of a wait that took too long: this rank's own, or another one's that came first and told of it.
TOO_LATE = (DeadlineError, AbortedError)
GONE = (PeerLostError, PeerLeftError)


class MonitoredBarrier:
    """One call on one rank.

    Args:
        rank, world_size: of the group.
        number: of this barrier in the group, equal on all ranks.
        timeout: of everything together.
        wait_all: whether the error names all missing ranks, not the first alone.

    Attributes:
        end_s: when the timeout has passed, by the monotonic clock.
    """

    def __init__(self, rank: int, world_size: int, number: int, timeout: timedelta, *, wait_all: bool) -> None:
        self._rank, self._world_size = rank, world_size
        self._tag = TAG_FIRST + number % TAG_COUNT
        self._timeout = timeout
        self._start_s = time.monotonic()
        self.end_s = self._start_s + timeout.total_seconds()
        self._wait_all = wait_all

    def run(self, send: Exchange, receive: Exchange) -> None:
        """Blocks until all ranks have come.

        Raises:
            DeadlineError: some did not come in time. Fields: during, waited_s.
            GradwireError: the group failed for another reason, such as a rank that was lost.
        """
        if self._rank == 0:
            self._gather(receive)
            for work in [send(other, self._tag, self._left()) for other in range(1, self._world_size)]:
                work.wait()
            return
        try:
            send(0, self._tag, self._left())
            receive(0, self._tag, self._left()).wait()
        except GradwireError as error:
            text = (
                f"Rank {self._rank} successfully reached monitoredBarrier, but received errors while waiting for send/recv "
                f"from rank 0: {error}"
            )
            raise self._told(text, error) from error

    def meet(self, barrier: Meeting) -> None:
        """The same where the group goes on without lost ranks: all who are left get the same.

        Raises:
            PeerLostError: a rank is lost; all who are left have come, and the group goes on.
            DeadlineError: some did not come in time. Fields: during, waited_s.
            GradwireError: the group failed for another reason.
        """
        self._check_time()
        try:
            members = barrier(self._left())
        except GradwireError as error:
            text = f"[Rank {self._rank}]: not all ranks passed monitoredBarrier in {self._waited_ms()} ms: {error}"
            raise self._told(text, error) from error
        gone = [rank for rank in range(self._world_size) if rank not in members]
        if gone:
            detail = f"the group goes on without it: members are {', '.join(map(str, members))}"
            during = "monitored_barrier"
            lost = PeerLostError(
                detail, rank=gone[0], host="", silent_s=0.0, during=during, detail=detail, reported_by=None
            )
            raise PeerLostError(self._failure(gone, lost), **lost.fields)

    def _check_time(self) -> None:
        if self._timeout <= timedelta(0):
            raise self.too_late(f"Rank {self._rank} timed out in monitoredBarrier after {self._waited_ms()} ms")

    def _gather(self, receive: Exchange) -> None:
        self._check_time()
        works = {other: receive(other, self._tag, self._left()) for other in range(1, self._world_size)}
        missing, cause = [], None
        for other, work in works.items():
            try:
                work.wait()
            except TOO_LATE as error:
                if not _says_late(error):
                    raise
                missing.append(other)
                cause = cause or error
                if not self._wait_all:
                    break
            except GONE as error:
                # It ended the waits for all the others, about which nothing is known then.
                gone = [] if error.rank is None else [error.rank]
                raise self._told(self._failure(gone, error), error) from error
        if cause is not None:
            raise self._told(self._failure(missing, cause), cause) from cause

    def _failure(self, missing: list[int], cause: GradwireError) -> str:
        ranks = f"Rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))}" if missing else "A rank"
        return f"[Rank {self._rank}]: {ranks} failed to pass monitoredBarrier in {self._waited_ms()} ms: {cause}"

    def _told(self, text: str, cause: GradwireError) -> GradwireError:
        """`cause` in these words: of its own class, unless it says no more than that a wait was too long."""
        return self.too_late(text) if _says_late(cause) else type(cause)(text, **cause.fields)

    def too_late(self, text: str) -> DeadlineError:
        """The timeout has passed."""
        return DeadlineError(text, during="monitored_barrier", waited_s=self._waited_s())

    def _waited_s(self) -> float:
        return time.monotonic() - self._start_s

    def _waited_ms(self) -> int:
        return round(self._waited_s() * 1000)

    def _left(self) -> timedelta:
        return timedelta(seconds=max(0.001, self.end_s - time.monotonic()))


def _says_late(error: GradwireError) -> bool:
    """Whether all that happened is that a wait took too long, here or on another rank, which aborted the group for it."""
    return isinstance(error, DeadlineError) or "timed out" in str(error.fields.get("cause", ""))


def signal() -> torch.Tensor:
    """What is sent: one byte."""
    return torch.zeros(1, dtype=torch.uint8, device="cpu")
