"""Calls whose memory is still being copied from a GPU: each is submitted when it is there, in the order of the calls.

Ranks match the calls of a group by their order, so a call that needs no copy waits behind those of its group that do. One
thread for the process, started by the first such call; programs without a GPU never have it. It waits for devices, one of which
may never come to the copy: a second thread, that sleeps until a call has waited for its whole timeout, ends the group then.

There is no lock: a signal handler or a finalizer that interrupts a thread in here may make such calls itself, and wait for them, but on the
thread that submits them.
"""

from __future__ import annotations

import contextlib
import math
import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

from gradwire import _native
from gradwire._in_time import HEARS_S
from gradwire._threads import start_thread
from gradwire.errors import ForkedError, ShutDownError

# The names of the two threads.
SUBMITS, WATCHES = "gradwire-outbox", "gradwire-overdue"


class LaterOp:
    """An operation that will be submitted: `_native.Op`, as far as a Work needs it."""

    def __init__(self) -> None:
        # In a forked child there is no thread that could submit it.
        self._pid = os.getpid()
        self._op: _native.Op | None = None
        self._error: Exception | None = None
        self._is_known = False
        self._callbacks: deque[Callable[[_native.Op | None], None]] = deque()

    def resolve(self, op: _native.Op | None, error: Exception | None = None) -> None:
        """It was submitted as `op`, or could not be. Once."""
        self._op, self._error = op, error
        self._is_known = True
        self._call_back()

    def when_known(self, callback: Callable[[_native.Op | None], None]) -> None:
        """Calls back with the operation, or None if it could not be submitted: now, or on the outbox's thread."""
        self._check_process()
        self._callbacks.append(callback)
        if self._is_known:
            self._call_back()

    def wait(self, timeout_s: float | None = None) -> bool:
        """As that of `_native.Op`."""
        end = None if timeout_s is None else time.monotonic() + timeout_s
        if not self._is_known and not self._becomes_known(timeout_s):
            return False
        if self._op is None:
            return True
        return self._op.wait(None if end is None else max(0.0, end - time.monotonic()))

    def is_done(self) -> bool:
        """The same."""
        return self._is_known and (self._op is None or self._op.is_done())

    def error(self) -> Exception | None:
        """The same; why it could not be submitted, too."""
        return self._error if self._op is None else self._op.error()

    def choice(self) -> str | None:
        """The same."""
        return None if self._op is None else self._op.choice()

    def report(self) -> dict[str, Any] | None:
        """The same."""
        return None if self._op is None else self._op.report()

    def totals(self) -> dict[str, Any] | None:
        """The same."""
        return None if self._op is None else self._op.totals()

    def _becomes_known(self, timeout_s: float | None) -> bool:
        came: queue.SimpleQueue[_native.Op | None] = queue.SimpleQueue()
        self.when_known(came.put)
        end = math.inf if timeout_s is None else time.monotonic() + timeout_s
        # In turns, as `comes`: else Ctrl-C might be heard at the end alone.
        while not self._is_known and (left_s := end - time.monotonic()) > 0:
            with contextlib.suppress(queue.Empty):
                came.get(timeout=min(left_s, HEARS_S))
        with contextlib.suppress(ValueError):  # it has been called
            self._callbacks.remove(came.put)
        return self._is_known

    def _call_back(self) -> None:
        while self._callbacks:
            try:
                callback = self._callbacks.popleft()
            except IndexError:  # another thread has just taken the last one
                return
            callback(self._op)

    def _check_process(self) -> None:
        """As `_native.Op` does."""
        child = os.getpid()
        if child != self._pid:
            text = f"this call belongs to process {self._pid} and cannot be waited for in its forked child {child}"
            raise ForkedError(text, owner_pid=self._pid, child_pid=child)


Op = _native.Op | LaterOp


class Outbox:
    """The process's queue of such calls."""

    def __init__(self) -> None:
        # In their order. Who takes a call off submits it or fails it.
        self._waiting: deque[_Waiting] = deque()
        # The one that has been taken off to be submitted.
        self._under_way: _Waiting | None = None
        self._threads: dict[str, threading.Thread] = {}
        # What wakes the two threads: a call has come, and one that is overdue sooner than those before.
        self._come: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._sooner: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._stopped = False
        # When the watching thread looks next; None: when it is told to.
        self._next_look: float | None = None

    def is_waiting(self, group: Hashable) -> bool:
        """Whether a call of this group has not been submitted yet, behind which the next has to queue."""
        if not self._waiting and self._under_way is None:
            return False
        calls = (*self._waiting.copy(), self._under_way)  # in the order in which a call is in them
        return any(call is not None and call.group == group for call in calls)

    def put(
        self,
        group: Hashable,
        arrive: Callable[[], None],
        submit: Callable[[Exception | None], _native.Op],
        *,
        timeout_s: float,
        overdue: Callable[[], Exception],
    ) -> LaterOp:
        """Submits a call when those before it have been.

        Args:
            group: whose calls the next ones queue behind.
            arrive: waits for the memory. Called on the outbox's thread, like `submit`.
            submit: submits, or raises what `arrive` did. Must not block. Never called for what was dropped meanwhile.
            timeout_s: the longest that the call may wait here.
            overdue: ends the group after that, and says why. Must not block. What else waits of the group fails with it.

        Raises:
            EngineError: no thread can be started. Then nothing waits here, and the call was not taken.
        """
        later = LaterOp()
        if self._stopped:
            later.resolve(None, _stopped())
            return later
        self._start()
        call = _Waiting(group, arrive, submit, later, time.monotonic() + timeout_s, overdue)
        self._waiting.append(call)
        self._come.put(None)
        next_look = self._next_look
        if next_look is None or call.end < next_look:
            self._sooner.put(None)
        if self._stopped:  # meanwhile, by another thread
            self._fail(call, _stopped())
        return later

    def drop(self, group: Hashable, error: Exception) -> None:
        """Fails the calls of a group that have not been submitted, also where their device never comes to the copy."""
        for call in self._waiting.copy():
            if call.group == group:
                self._fail(call, error)

    def stop(self, timeout_s: float) -> None:
        """Fails the calls that have not been submitted."""
        self._stopped = True
        self._come.put(None)
        self._sooner.put(None)
        for call in self._waiting.copy():
            self._fail(call, _stopped())
        thread = self._threads.get(SUBMITS)
        if thread is not None and thread is not threading.current_thread():
            thread.join(timeout_s)

    def _start(self) -> None:
        # Each by itself: where one was refused, the next call tries it again.
        for name, run in ((WATCHES, self._watch), (SUBMITS, self._run)):
            if name not in self._threads:
                self._threads.setdefault(name, start_thread(run, name))

    def _is_the_one(self) -> bool:
        """Whether this thread is the one of its name. Callers may have started two at once."""
        own = threading.current_thread()
        return self._threads.setdefault(own.name, own) is own

    def _run(self) -> None:
        is_the_one = self._is_the_one()
        while is_the_one and self._submit_next():
            pass  # in a function of its own, whose variables hold no call's tensors while this thread waits for the next

    def _watch(self) -> None:
        is_the_one = self._is_the_one()
        while is_the_one and not self._stopped:
            with contextlib.suppress(queue.Empty):
                self._sooner.get(timeout=self._pause_s())

    def _pause_s(self) -> float | None:
        """Ends the groups of calls that are overdue; how long none of the others will be. None: there are none."""
        self._next_look = None  # who comes from here on says so
        while (first := min(self._waiting.copy(), key=lambda call: call.end, default=None)) is not None:
            left_s = first.end - time.monotonic()
            if left_s > 0:
                self._next_look = first.end
                return min(left_s, threading.TIMEOUT_MAX)
            if first not in self._waiting:  # it has just been submitted, or dropped
                continue
            # The group ends while the call is still in its place: one that comes now finds the end and no gap.
            self.drop(first.group, first.overdue())
        return None

    def _submit_next(self) -> bool:
        """False: the outbox has stopped."""
        with contextlib.suppress(queue.Empty):
            self._come.get(block=not self._waiting)
        try:
            call = self._waiting[0]
        except IndexError:  # it was submitted when another one came, or has been dropped
            return not self._stopped
        failed = None
        try:
            call.arrive()
        except Exception as caught:  # noqa: BLE001  whoever waits for the operation gets it
            failed = caught
        self._submit(call, failed)
        return True

    def _submit(self, call: _Waiting, failed: Exception | None) -> None:
        op, error = None, None
        self._under_way = call
        is_taken = self._take(call)
        if is_taken:
            try:
                op = call.submit(failed)
            except Exception as caught:  # noqa: BLE001  the same
                error = caught
        # Before anybody learns of it: their next call may go straight to the engine.
        self._under_way = None
        if is_taken:
            call.later.resolve(op, error)

    def _fail(self, call: _Waiting, error: Exception) -> None:
        if self._take(call):
            call.later.resolve(None, error)

    def _take(self, call: _Waiting) -> bool:
        try:
            self._waiting.remove(call)
        except ValueError:  # another thread has
            return False
        return True


@dataclass(eq=False, slots=True)
class _Waiting:
    group: Hashable
    arrive: Callable[[], None]
    submit: Callable[[Exception | None], _native.Op]
    later: LaterOp
    end: float
    overdue: Callable[[], Exception]


def _stopped() -> ShutDownError:
    return ShutDownError("the engine stopped before the tensors of this call had been copied from their device")
