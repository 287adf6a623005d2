"""Calls whose memory is still being copied from a GPU: each is submitted when it is there, in the order of the calls.

Ranks match the calls of a group by their order, so a call that needs no copy waits behind those of its group that do. One
thread for the process, started by the first such call; programs without a GPU never have it. It waits for devices, one of which
may never come to the copy: a second thread, that sleeps until a call has waited for its whole timeout, ends the group then.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

from gradwire import _native
from gradwire._threads import start_thread
from gradwire.errors import ForkedError, ShutDownError


class LaterOp:
    """An operation that will be submitted: `_native.Op`, as far as a Work needs it."""

    def __init__(self) -> None:
        # In a forked child there is no thread that could submit it.
        self._pid = os.getpid()
        self._op: _native.Op | None = None
        self._error: Exception | None = None
        self._known = threading.Event()
        # No lock: a signal handler that interrupts who asks may wait for the outbox's thread.
        self._callbacks: deque[Callable[[_native.Op | None], None]] = deque()

    def resolve(self, op: _native.Op | None, error: Exception | None = None) -> None:
        """It was submitted as `op`, or could not be. Once."""
        self._op, self._error = op, error
        self._known.set()
        self._call_back()

    def when_known(self, callback: Callable[[_native.Op | None], None]) -> None:
        """Calls back with the operation, or None if it could not be submitted: now, or on the outbox's thread."""
        self._check_process()
        self._callbacks.append(callback)
        if self._known.is_set():
            self._call_back()

    def wait(self, timeout_s: float | None = None) -> bool:
        """As that of `_native.Op`."""
        end = None if timeout_s is None else time.monotonic() + timeout_s
        if not self._known.is_set():
            self._check_process()
            if not self._known.wait(timeout_s):
                return False
        if self._op is None:
            return True
        return self._op.wait(None if end is None else max(0.0, end - time.monotonic()))

    def is_done(self) -> bool:
        """The same."""
        return self._known.is_set() and (self._op is None or self._op.is_done())

    def error(self) -> Exception | None:
        """The same; why it could not be submitted, too."""
        return self._error if self._op is None else self._op.error()

    def choice(self) -> str | None:
        """The same."""
        return None if self._op is None else self._op.choice()

    def report(self) -> dict[str, Any] | None:
        """The same."""
        return None if self._op is None else self._op.report()

    def _call_back(self) -> None:
        while self._callbacks:
            try:
                callback = self._callbacks.popleft()
            except IndexError:  # another thread has just taken the last one
                return
            callback(self._op)

    def _check_process(self) -> None:
        """As `_native.Op` does, before any lock: the fork may have copied a held one."""
        child = os.getpid()
        if child != self._pid:
            text = f"this call belongs to process {self._pid} and cannot be waited for in its forked child {child}"
            raise ForkedError(text, owner_pid=self._pid, child_pid=child)


Op = _native.Op | LaterOp


class Outbox:
    """The process's queue of such calls."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[_Waiting | None] = queue.SimpleQueue()
        self._waiting: dict[Hashable, list[_Waiting]] = {}
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._thread: threading.Thread | None = None
        self._watcher: threading.Thread | None = None
        self._stopped = False
        # When the watching thread looks next; None: when it is told to.
        self._next_look: float | None = None

    def is_waiting(self, group: Hashable) -> bool:
        """Whether a call of this group has not been submitted yet, behind which the next has to queue."""
        return group in self._waiting

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
        with self._lock:
            if self._stopped:
                later.resolve(None, _stopped())
                return later
            self._start()
            call = _Waiting(group, arrive, submit, later, time.monotonic() + timeout_s, overdue)
            self._waiting.setdefault(group, []).append(call)
            if self._next_look is None or call.end < self._next_look:
                self._changed.notify()
            self._calls.put(call)
        return later

    def drop(self, group: Hashable, error: Exception) -> None:
        """Fails the calls of a group that have not been submitted, also where their device never comes to the copy."""
        with self._lock:
            dropped = self._waiting.pop(group, [])
        for call in dropped:
            call.later.resolve(None, error)

    def stop(self, timeout_s: float) -> None:
        """Fails the calls that have not been submitted."""
        with self._lock:
            self._stopped = True
            self._calls.put(None)
            self._changed.notify()
            groups = list(self._waiting)
        for group in groups:
            self.drop(group, _stopped())
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)

    def _start(self) -> None:
        # Each by itself: where one was refused, the next call tries it again.
        if self._watcher is None:
            self._watcher = start_thread(self._watch, "gradwire-overdue")
        if self._thread is None:
            self._thread = start_thread(self._run, "gradwire-outbox")

    def _run(self) -> None:
        while self._submit_next():
            pass  # in a function of its own, whose variables hold no call's tensors while this thread waits for the next

    def _watch(self) -> None:
        while (failed := self._next_overdue()) is not None:
            calls, error = failed
            for call in calls:
                call.later.resolve(None, error)
            del failed, calls

    def _next_overdue(self) -> tuple[list[_Waiting], Exception] | None:
        """The calls of a group that has just been ended, and why; None: the outbox has stopped."""
        with self._lock:
            while not self._stopped:
                now = time.monotonic()
                ends = [(call.end, call) for calls in self._waiting.values() for call in calls]
                first = min(ends, key=lambda pair: pair[0], default=None)
                if first is not None and first[0] <= now:
                    # The group ends while the call is still in its place: one that comes now finds the end and no gap.
                    error = first[1].overdue()
                    return self._waiting.pop(first[1].group), error
                self._next_look = None if first is None else first[0]
                del ends, first
                self._changed.wait(None if self._next_look is None else self._next_look - now)
            return None

    def _submit_next(self) -> bool:
        call = self._calls.get()
        if call is None:
            return False
        failed = None
        if call not in self._waiting.get(call.group, ()):
            return True
        try:
            call.arrive()
        except Exception as caught:  # noqa: BLE001  whoever waits for the operation gets it
            failed = caught
        self._submit(call, failed)
        return True

    def _submit(self, call: _Waiting, failed: Exception | None) -> None:
        op, error = None, None
        with self._lock:
            calls = self._waiting.get(call.group, [])
            if call not in calls:
                return
            try:
                op = call.submit(failed)
            except Exception as caught:  # noqa: BLE001  the same
                error = caught
            # Before anybody learns of it: their next call may go straight to the engine.
            calls.remove(call)
            if not calls:
                del self._waiting[call.group]
        call.later.resolve(op, error)


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
