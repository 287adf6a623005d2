"""Page-locked host memory for copies from and to a GPU, reused and bounded.

Locking pages costs as much as several copies, so buffers are kept. They are kept by powers of two: what a model sends is
the same in each step. What would exceed the bound gets ordinary memory instead: its copies block, and nobody waits for a
buffer, which could be for ever where the calls that hold them wait for this one.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gradwire.torch._streams import Streams

SIZE_LEAST = 4096


@dataclass(slots=True)
class Fence:
    """An event of one device, and whom to ask about it."""

    streams: Streams
    device: torch.device
    event: Any

    def passed(self) -> bool:
        """Whether what came before it has ended."""
        return self.streams.passed(self.event)

    def synchronize(self) -> None:
        """Blocks until it has."""
        self.streams.synchronize(self.event)

    def join(self) -> None:
        """What the caller gives its current stream from now on comes after it."""
        self.streams.wait(self.streams.current(self.device), self.event)


class Lease:
    """A buffer of the pool, until it is given back. Dropped without that, it leaves the pool's books."""

    def __init__(self, pool: PinnedPool, memory: Tensor) -> None:
        self.memory = memory
        self._pool: PinnedPool | None = pool

    def give_back(self, until: Sequence[Fence]) -> None:
        """The next one may have it once all of `until` have passed."""
        if (pool := self._pool) is not None:
            self._pool = None
            pool.keep(self.memory, until)

    def __del__(self) -> None:
        if self._pool is not None:
            self._pool.forget(self.memory.numel())


class PinnedPool:
    """All buffers of one kind of accelerator.

    A signal handler may interrupt who leases one, and lease another itself. Who gives one back takes no lock: it brings results that such
    a handler may wait for.

    Args:
        streams: where new ones come from.
        limit_bytes: the most that are page-locked at once, in use and kept.
    """

    def __init__(self, streams: Streams, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._streams = streams
        self._leased_and_idle_bytes = 0
        # Of that, what nobody gave back since it was counted last.
        self._forgotten: deque[int] = deque()
        self._idle: dict[int, deque[tuple[Tensor, Sequence[Fence]]]] = {}
        self._lock = threading.RLock()

    @property
    def held_bytes(self) -> int:
        """Page-locked, in use and kept."""
        with self._lock:
            while True:
                try:
                    size = self._forgotten.popleft()
                except IndexError:  # also where a signal handler has just taken the last one
                    return self._leased_and_idle_bytes
                self._leased_and_idle_bytes -= size

    def lease(self, nbytes: int) -> Lease | None:
        """At least so many bytes; None: not within the bound."""
        size = max(SIZE_LEAST, 1 << (nbytes - 1).bit_length())
        with self._lock:
            kept = self._take(size)
            if kept is not None:
                return Lease(self, kept)
            if self.held_bytes + size > self.limit_bytes and not self._make_room(size):
                return None
            self._leased_and_idle_bytes += size
        try:
            return Lease(self, self._streams.pinned(size))
        except RuntimeError:  # the system locks no more pages
            self.forget(size)
            return None

    def keep(self, memory: Tensor, until: Sequence[Fence]) -> None:
        """Called by the lease."""
        self._idle.setdefault(memory.numel(), deque()).append((memory, until))

    def forget(self, size: int) -> None:
        """Called by a lease that nobody gave back, perhaps while its thread is in here."""
        self._forgotten.append(size)

    def _take(self, size: int) -> Tensor | None:
        idle = self._idle.get(size, deque())
        for _ in range(len(idle)):
            try:
                memory, until = idle.popleft()  # before anything is asked: a signal handler may come in here too
            except IndexError:
                break
            has_passed = False
            try:
                has_passed = all(fence.passed() for fence in until)
            finally:
                if not has_passed:
                    idle.append((memory, until))
            if has_passed:
                return memory
        return None

    def _make_room(self, size: int) -> bool:
        for other in sorted(self._idle, reverse=True):
            while self.held_bytes + size > self.limit_bytes and self._take(other) is not None:
                self._leased_and_idle_bytes -= other
        if self.held_bytes + size > self.limit_bytes:
            return False
        self._streams.unpin()
        return True
