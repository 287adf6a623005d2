"""What the calls of a group still owe to their callers' tensors, in the order of the calls.

A result that goes through a buffer (lists, tensors with gaps, a GPU's) is copied into the caller's tensors by whoever first sees the end
of the call (`_ending.py`). Programs may wait for a later call instead, or for a barrier, and drop the Work of this one: so who waits for a
call of the group first waits for those before it and brings their results, on its own thread, one after the other. Of two calls that
write the same memory the later one therefore has the last word. Who makes a call first brings what has ended, so that no old result
comes while the engine reads or writes the new call's tensors. What the engine writes itself needs nobody; a barrier waits for it too,
as gloo's does, since bare signals may come before the data of earlier calls.

A call whose result somebody is sure to bring stands apart from that order: one whose future has been asked for, which brings it, and a
bucket that a layer steps with. Only barriers wait for these, too.

Messages between two ranks stand apart from that order, as their ranks do: waiting for one waits for nothing else, and nothing waits for it.

There is no lock here. A call leaves the list when it has been settled and not before, which `Ending` does once: so of threads that come
here at once each finds it settled or waits until it is, and a signal handler that interrupts a delivery goes on without it.
"""

from __future__ import annotations

import itertools
import logging
import math
import os
from collections import deque
from collections.abc import Sequence
from typing import TypeVar

import torch

from gradwire._outbox import Op
from gradwire.errors import GroupError
from gradwire.torch._ending import Bare, Ending
from gradwire.torch._pinned import Fence
from gradwire.torch._streams import BACK

logger = logging.getLogger("gradwire")

ALL = math.inf
"""The turn of who comes after every call."""
# So many are looked at together for those that have ended. They hold no tensors.
BARE_MOST = 8
# Of a group that fails everything fails: the first ones say why.
FAILED_MOST = 8

_Call = TypeVar("_Call")


class Deliveries:
    """Of one group.

    Args:
        owner_pid: the process whose calls these are.
    """

    def __init__(self, owner_pid: int) -> None:
        self._owner_pid = owner_pid
        self._turns = itertools.count(1)
        # Calls that may never be waited for: whose results are to be brought, and whose come by themselves.
        self._owed: deque[Ending] = deque()
        self._bare: deque[Bare] = deque()
        # By turn, those whose results somebody is sure to bring: only barriers wait for them.
        self._kept: dict[int, Ending] = {}
        # Of the calls that have failed, the first ones that neither their callers nor a barrier have been told of.
        self._failed: deque[Bare] = deque()
        # Behind the calls that were made until a caller was told that the group has failed: they failed with it.
        self._known_until = 0
        self._note = self.note
        # What has to pass on devices before results may be read, by the turn of their call.
        self._arriving: dict[tuple[int, int], Fence] = {}

    def admit(self, ending: Ending, *, is_waited_for: bool, is_barrier: bool = False) -> bool:
        """Gives a call its turn. Returns whether who waits for it has to ask here: not so in programs whose calls need no buffer.

        Args:
            ending: of the call, which is under way.
            is_waited_for: by its caller, at once; others may never be.
            is_barrier: it waits for calls that deliver by themselves, too.
        """
        ending.turn, ending.on_failed = self.take_turn(), self._note
        self._forget_what_has_arrived()
        if is_waited_for:
            return bool(self._owed or self._arriving or (is_barrier and (self._bare or self._kept or self._failed)))
        if ending.delivers:
            ending.belongs_to(self._owner_pid)
            self._owed.append(ending)
            return True
        # A program that never waits keeps hardly more than what is in flight.
        if len(self._bare) >= BARE_MOST:
            self._first_bare(ALL)
        self._bare.append(_bare_of(ending, ending.ops))
        return bool(self._owed or self._arriving or is_barrier)

    def was_not_made(self, ending: Ending, *, is_waited_for: bool) -> None:
        """A call that failed before anything of it was under way."""
        ending.turn, ending.on_failed = self.take_turn(), self._note
        if not is_waited_for:
            self.note(ending)

    def note(self, ending: Ending) -> None:
        """It has failed, or its caller is told of that: where nobody ever asks what it ended with, a barrier tells of it."""
        if ending.bare is None:
            self._keep_if_failed(_bare_of(ending, ()))
        if ending.is_told and isinstance(ending.failure, GroupError):
            self._known_until = self.take_turn()

    def take_turn(self) -> int:
        """Behind all calls that have been made, and before those to come."""
        return next(self._turns)

    def bring(self) -> None:
        """Brings the results of calls that have ended: before a new one is made, whose tensors they may be."""
        if self._owed and os.getpid() == self._owner_pid:
            self.first_in_flight(ALL)

    def first_in_flight(self, turn: float, *, is_barrier: bool = False) -> InFlight | None:
        """Brings the results of calls that have ended; the first one before `turn` that has not, whose result comes before all later ones'.

        Args:
            turn: of the call that waits.
            is_barrier: it waits for calls that deliver by themselves, too.

        Raises:
            ForkedError: the calls are of the process that this one was forked from.
        """
        while (first := _head(self._owed)) is not None and first.turn < turn:
            if first.is_in_hand():
                break  # this thread was interrupted while it delivers it, and goes on with those behind it afterwards
            if not first.has_come():
                return first
            self._settle(first)
        return self._first_apart(turn) if is_barrier else None

    def keep(self, ending: Ending) -> None:
        """Somebody is sure to bring the results of this call as soon as they are there: other calls do not."""
        if ending in self._owed:
            self._kept[ending.turn] = ending
            _remove(self._owed, ending)
            if ending.is_settled:  # meanwhile, on another thread
                self._kept.pop(ending.turn, None)

    def wait(self, turn: float, end: float | None, *, is_barrier: bool = False) -> bool:
        """Whether all calls before `turn` have ended by then, and their results are in the callers' tensors or on their way.

        Raises:
            ForkedError: as `first_in_flight`.
        """
        while (first := self.first_in_flight(turn, is_barrier=is_barrier)) is not None:
            if not first.wait_until(end):
                return False
        return True

    def let_go(self, ending: Ending) -> None:
        """Called by who has settled a call, or tried to: if its results are on their way the list need not hold it."""
        if not ending.is_settled:
            return
        for at, fence in enumerate(ending.fences):
            self._arriving[ending.turn, at] = fence
        self._kept.pop(ending.turn, None)
        _remove(self._owed, ending)

    def arriving(self, turn: float) -> list[Fence]:
        """What has to pass before the results of calls before `turn` may be read, of those that have been brought."""
        if not self._arriving or os.getpid() != self._owner_pid:
            return []
        self._forget_what_has_arrived()
        return [fence for (of, _), fence in self._arriving.copy().items() if of < turn]

    def join(self, turn: float) -> None:
        """What the caller gives its current streams from now on comes after these."""
        for fence in one_for_each_device(self.arriving(turn)):
            fence.join()

    def _forget_what_has_arrived(self) -> None:
        for key, fence in self._arriving.copy().items() if self._arriving else ():
            if not _has_passed(fence):
                break
            self._arriving.pop(key, None)

    def _first_apart(self, turn: float) -> InFlight | None:
        """For a barrier: of the calls before it that no other call waits for, the first that has not ended."""
        for kept in self._kept.copy().values():
            if kept.turn < turn and not kept.is_in_hand():
                if not kept.has_come():
                    return kept
                self._settle(kept)
        if (bare := self._first_bare(turn)) is not None:
            return bare
        self._tell_of_failures(turn)
        return None

    def _first_bare(self, turn: float) -> Bare | None:
        while (bare := _head(self._bare)) is not None and bare.turn < turn:
            if not bare.has_come():
                return bare
            _remove(self._bare, bare)
            self._keep_if_failed(bare)
        return None

    def _settle(self, ending: Ending) -> None:
        ending.settle()
        self.let_go(ending)

    def _keep_if_failed(self, ended: Bare) -> None:
        if ended.has_failed():
            self._failed.append(ended)
            self._forget_who_was_told()
            if len(self._failed) > FAILED_MOST:
                _remove(self._failed, ended)

    def _forget_who_was_told(self) -> None:
        for bare in self._failed.copy():
            if bare.is_told or (bare.is_of_group and bare.turn < self._known_until):
                _remove(self._failed, bare)

    def _tell_of_failures(self, turn: float) -> None:
        self._forget_who_was_told()
        failed = [bare for bare in self._failed.copy() if bare.turn < turn]
        for bare in failed:
            _remove(self._failed, bare)
        first = next(iter(failed), None)
        if first is not None:
            logger.warning(
                "a call of this group has failed, and nobody has waited for it yet: its tensors do not have the result. %s",
                first.failure,
            )  # fmt: skip


InFlight = Ending | Bare


def one_for_each_device(fences: Sequence[Fence]) -> list[Fence]:
    """What passes behind all of these, for who waits: of hundreds of pieces each would take calls of the driver.

    All results come over the stream `BACK` of their device, or it waits for them (`_ending.py`).
    """
    of: dict[torch.device, list[Fence]] = {}
    for fence in fences:
        of.setdefault(fence.device, []).append(fence)
    return [same[0] if len(same) == 1 else _behind_all_on_the_device_of(same[0]) for same in of.values()]


def _behind_all_on_the_device_of(fence: Fence) -> Fence:
    streams, device = fence.streams, fence.device
    return Fence(streams, device, streams.record(streams.side(device, BACK)))


def _has_passed(fence: Fence) -> bool:
    try:
        return fence.passed()
    except RuntimeError:  # the device has failed, which is told to who asks it for something
        return True


def _bare_of(ending: Ending, ops: Sequence[Op]) -> Bare:
    bare = ending.bare = Bare(ending.turn, ops, ending.failure)
    if ending.is_told:  # perhaps meanwhile, by another thread
        bare.is_told = True
    return bare


def _head(calls: deque[_Call]) -> _Call | None:
    try:
        return calls[0] if calls else None
    except IndexError:  # another thread has just taken the last one
        return None


def _remove(calls: deque[_Call], call: _Call) -> None:
    if calls:
        try:  # noqa: SIM105  for each call that goes through here, and three times as fast
            calls.remove(call)
        except ValueError:  # it was never there, or another thread has removed it
            pass
