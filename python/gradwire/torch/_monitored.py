"""`monitored_barrier`: a barrier whose error names the ranks that did not come.

Rank 0 hears from every other rank by name and then tells them all to go on. Messages are in the words that users of gloo
know from their logs.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta

import torch

from gradwire.errors import DeadlineError, GradwireError
from gradwire.torch._work import GradwireWork

# Tags of these messages: the last of the tag space, one for each of the latest barriers, so that a rank that comes too late
# to one is not taken for early at the next.
TAG_FIRST = 0xFFFF_0000
TAG_COUNT = 0x1_0000

# (peer, tag, timeout) -> work, of a message of one byte
Exchange = Callable[[int, int, timedelta], GradwireWork]


class MonitoredBarrier:
    """One call on one rank.

    Args:
        rank, world_size: of the group.
        number: of this barrier in the group, equal on all ranks.
        timeout: of everything together.
        wait_all: whether the error names all missing ranks, not the first alone.
    """

    def __init__(self, rank: int, world_size: int, number: int, timeout: timedelta, *, wait_all: bool) -> None:
        self._rank, self._world_size = rank, world_size
        self._tag = TAG_FIRST + number % TAG_COUNT
        self._timeout = timeout
        self._end_s = time.monotonic() + timeout.total_seconds()
        self._wait_all = wait_all

    def run(self, send: Exchange, receive: Exchange) -> None:
        """Blocks until all ranks have come.

        Raises:
            DeadlineError: some did not come in time. Fields: during, waited_s.
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
            raise self._error(
                f"Rank {self._rank} successfully reached monitoredBarrier, but received errors while waiting for send/recv "
                f"from rank 0: {error}"
            ) from error

    def _gather(self, receive: Exchange) -> None:
        if self._timeout <= timedelta(0):
            raise self._error(f"Rank 0 timed out in monitoredBarrier after {self._timeout_ms()} ms")
        works = {other: receive(other, self._tag, self._left()) for other in range(1, self._world_size)}
        missing = []
        for other, work in works.items():
            try:
                work.wait()
            except GradwireError as error:
                missing.append(other)
                if not self._wait_all:
                    raise self._error(self._failure(missing)) from error
        if missing:
            raise self._error(self._failure(missing))

    def _failure(self, missing: list[int]) -> str:
        ranks = f"Rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))}"
        return f"[Rank 0]: {ranks} failed to pass monitoredBarrier in {self._timeout_ms()} ms"

    def _error(self, message: str) -> DeadlineError:
        return DeadlineError(message, during="monitored_barrier", waited_s=self._timeout.total_seconds())

    def _left(self) -> timedelta:
        return timedelta(seconds=max(0.001, self._end_s - time.monotonic()))

    def _timeout_ms(self) -> int:
        return int(self._timeout.total_seconds() * 1000)


def signal() -> torch.Tensor:
    """What is sent: one byte."""
    return torch.zeros(1, dtype=torch.uint8, device="cpu")
