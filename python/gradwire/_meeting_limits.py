"""What strangers at the port of a rendezvous cannot exceed: bytes held for them, places, and lines of the log.

And how many connections the system allows to the process that listens there.
"""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from gradwire.errors import EngineError

logger = logging.getLogger("gradwire")

# Of the log in a window of so many seconds: who has one rank too many reads why, who is scanned all night keeps the disk.
LINES_MAX = 8
WINDOW_S = 60.0
COUNT_DIGITS_MAX = 18
# File descriptors that rank 0 opens while its board is there: those of its engine, its files, what the training loads.
OWN_DESCRIPTORS = 64


class NoRequestError(Exception):
    """What a client sent is not what this server takes."""


def is_count(value: str) -> bool:
    """Whether it is a number that was counted up to."""
    return value.isascii() and value.isdecimal() and len(value) <= COUNT_DIGITS_MAX


class Room:
    """The bytes that a board may hold: values, requests that are not complete, answers that are not read yet.

    Args:
        bytes_max: of all together.
    """

    def __init__(self, bytes_max: int) -> None:
        self.bytes_max = bytes_max
        self.held = 0

    def take(self, count: int) -> None:
        """Holds so many more, or gives back.

        Raises:
            NoRequestError: there is no room for them.
        """
        if count > 0 and self.held + count > self.bytes_max:
            raise NoRequestError(f"more than {self.bytes_max} bytes in all")
        self.held += count
        assert self.held >= 0, self.held

    @contextlib.contextmanager
    def of(self, count: int) -> Iterator[None]:
        """Holds them for a while."""
        self.take(count)
        try:
            yield
        finally:
            self.take(-count)


@dataclass(eq=False)
class Visitor:
    """A connection.

    Attributes:
        leave: ends it at once.
        heard_s: when it last asked for something.
        peer: where it came from.
        has_said: it has said who it is.
        rank: who it is; None: it only looks, or has not said.
        is_known: it has shown that it knows the job secret.
    """

    leave: Callable[[], Any]
    heard_s: float
    peer: str = ""
    has_said: bool = False
    rank: int | None = None
    is_known: bool = False


class Places:
    """Who is connected. Whoever is none of the job's ranks goes when the place is needed, so that no crowd that stays keeps a rank out.

    One that comes and goes thousands of times a second may take the place of a rank that is about to say who it is. It tries again.

    Args:
        world_size: ranks of the job.
        places: connections at the same time.
    """

    def __init__(self, world_size: int, places: int) -> None:
        assert places > world_size, "one place is left for who comes"
        self._world_size = world_size
        self._places = places
        self._here: list[Visitor] = []

    def enter(self, visitor: Visitor) -> None:
        """Makes room for it: who has been silent longest goes; strangers before those who know the secret, first those who say nothing."""
        if len(self._here) >= self._places:
            others = [other for other in self._here if other.rank is None or other.rank >= self._world_size]
            silent = min(others, key=lambda other: (other.is_known, other.has_said, other.heard_s))
            self._here.remove(silent)
            silent.leave()
        self._here.append(visitor)

    def left(self, visitor: Visitor) -> None:
        """It has gone."""
        if visitor in self._here:
            self._here.remove(visitor)


class Complaints:
    """The log's lines about refused connections, of which there may be many.

    Args:
        now: seconds; for tests.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._begun = now()
        self._lines = 0
        self._untold = 0

    def add(self, peer: str, reason: object) -> None:
        """Says it, or counts it for the next line."""
        now = self._now()
        if now - self._begun >= WINDOW_S:
            self._begun, self._lines = now, 0
        if self._lines >= LINES_MAX:
            self._untold += 1
            return
        more = f" ({self._untold} more were refused since the last such line)" if self._untold else ""
        self._lines, self._untold = self._lines + 1, 0
        logger.warning("rendezvous: refused what came from %s: %s%s", peer, reason, more)


def make_room_for_descriptors(clients: int) -> None:
    """Raises the soft limit of file descriptors, where it is too low for so many clients, as far as the hard one allows.

    Systems set it to 1024 for programs that call `select`, and leave the hard one far above. It is not lowered again: what was opened
    meanwhile may have a larger number.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _descriptors_in_use() + clients + OWN_DESCRIPTORS
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft == resource.RLIM_INFINITY or soft >= most:
        return
    with contextlib.suppress(OSError, ValueError):  # then there is what there was
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
        logger.info("rank 0 may open %d files now, for the connections of the other ranks; before: %d", most, soft)


def check_descriptors(needed: int, world_size: int) -> None:
    """Whether so many more can be opened.

    Raises:
        EngineError: the limit does not allow it. Fields: what, needed, in_use, limit.
    """
    limit, in_use = resource.getrlimit(resource.RLIMIT_NOFILE)[0], _descriptors_in_use()
    if limit == resource.RLIM_INFINITY or in_use + needed <= limit:
        return
    raise EngineError(
        f"rank 0 needs a connection to each of {world_size} ranks: {needed} file descriptors beside the {in_use} that are in use, and the "
        f"hard limit is {limit}. Raise it on its host (ulimit -Hn, LimitNOFILE=, docker --ulimit nofile)",
        what="file descriptors",
        needed=needed,
        in_use=in_use,
        limit=limit,
    )


def _descriptors_in_use() -> int:
    """Of this process; 0 where the system does not say."""
    try:
        return len(os.listdir("/proc/self/fd")) - 1  # that of the look itself
    except OSError:
        return 0
