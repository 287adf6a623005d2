"""What the members of a group keep of the board where it was formed, and write again when rank 0, lost and started again, serves a new one.

Without it nobody could join: a board is in the memory of rank 0's process (`_meeting.py`). Only communicators need this; torch's Store
is torch's.

Below the prefix of a round that no rank can count to (`ANEW` and more) lie the records by which the group was formed, its `end` and the
number of the latest life; the counters of all ranks are moved there, and last `gradwire/running` names the round. Who came before, and
waits for the others to form a group of its own, finds it (`_rendezvous.py`). Two members may write at once: the first `running` counts.
"""

from __future__ import annotations

import contextlib
import json
import logging
import queue
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from gradwire._threads import start_thread
from gradwire.errors import GradwireError

logger = logging.getLogger("gradwire")

RUNNING = "gradwire/running"
# Ranks that were started again count their rounds on a new board from 1: what they write there meets nothing of the group's.
ANEW = 1 << 32
# A lost rank 0 is looked for so often, by a thread that nobody waits for.
PAUSE_S = 0.5


@dataclass(frozen=True)
class Heritage:
    """What a newcomer needs to know of a group.

    Attributes:
        entries: of all ranks, by which the group was formed, in order.
        life: of this rank, if it has joined while the group ran; no other one was later then.
    """

    entries: tuple[str, ...]
    life: int = 0


def heritage(entries: dict[int, dict[str, Any]], life: int = 0) -> Heritage:
    """Of a group whose ranks had written `entries`."""
    return Heritage(tuple(json.dumps(entries[rank]) for rank in sorted(entries)), life)


def running_round(store: Any) -> int:
    """The round of the group that ran when the Store was new; 0: none did."""
    return int(store.get(RUNNING)) if store.check([RUNNING]) else 0


def is_anothers(store: Any, members: Sequence[int]) -> bool:
    """Whether who lives in the group has come to the Store anew: then another job meets there, or it is not known yet who is lost."""
    keys = [f"gradwire/rounds/{rank}" for rank in members]
    # What a member wrote that could not finish is no reason.
    return any(store.check([key]) and int(store.get(key)) < ANEW for key in keys)


def write_again(store: Any, round_number: int, left: Heritage, life: int) -> None:
    """Writes what a newcomer needs into a Store that is empty, unless another member has; `life`: the latest one of any rank."""
    number = round_number + ANEW
    prefix = f"gradwire/{number}"
    for rank, entry in enumerate(left.entries):
        store.set(f"{prefix}/{rank}", entry)
    store.set(f"{prefix}/again", str(life))
    store.set(f"{prefix}/end", json.dumps({"rank": 0, "error": ""}))
    for rank in range(len(left.entries)):
        store.set(f"gradwire/rounds/{rank}", str(number))
    store.compare_set(RUNNING, "", str(number))


class Reopening:
    """A Store that is connected to by a thread, again and again until it answers, so that no step waits for a host that is gone.

    There is no lock: a signal handler or a finalizer may close it, whatever it interrupts.

    Args:
        connect: returns the Store, or raises.
    """

    def __init__(self, connect: Callable[[], Any]) -> None:
        self._connect = connect
        self._attempts: _Attempts | None = None

    def take(self) -> Any:
        """The Store, if it has answered; else None, and it is tried.

        Raises:
            EngineError: no thread can be started now.
        """
        attempts = self._attempts
        if attempts is None:
            attempts = self._attempts = _Attempts(self._connect)
            try:
                start_thread(attempts.run, "gradwire-reopen")
            except BaseException:  # interrupted: it may have begun
                self.close()
                raise
        store = attempts.take()
        if store is not None:
            self._attempts = None
        return store

    def close(self) -> None:
        """Ends the attempts."""
        attempts, self._attempts = self._attempts, None
        if attempts is not None:
            attempts.close()


class _Attempts:
    """What the thread does. It knows nobody who waits for it: who is lost meanwhile ends with its last reference."""

    def __init__(self, connect: Callable[[], Any]) -> None:
        self._connect = connect
        self._found: deque[Any] = deque()
        self._is_over = False
        self._wakes: queue.SimpleQueue[None] = queue.SimpleQueue()

    def take(self) -> Any:
        """The Store, once; None: there is none."""
        try:
            return self._found.popleft()
        except IndexError:
            return None

    def close(self) -> None:
        """Nobody takes it any more."""
        self._is_over = True
        self._wakes.put(None)
        if (store := self.take()) is not None:
            store.close()

    def run(self) -> None:
        """Connects, until it has a Store or is over."""
        while not self._is_over:
            with contextlib.suppress(GradwireError, OSError):
                self._found.append(self._connect())
                break
            with contextlib.suppress(queue.Empty):
                self._wakes.get(timeout=PAUSE_S)
        if self._is_over:  # else who says so from here on closes it
            self.close()
