"""Calls whose memory is still being copied from a GPU: each is submitted when it is there, in the order of the calls.

Ranks match the calls of a group by their order, so a call that needs no copy waits behind those of its group that do. One
thread for the process, started by the first such call; programs without a GPU never have it.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable
from typing import Any

from gradwire import _native
from gradwire.errors import ShutDownError


class LaterOp:
    """An operation that will be submitted: `_native.Op`, as far as a Work needs it."""

    def __init__(self) -> None:
        self._op: _native.Op | None = None
        self._error: Exception | None = None
        self._known = threading.Event()
        self._lock = threading.Lock()
        self._callbacks: list[Callable[[_native.Op | None], None]] = []

    def resolve(self, op: _native.Op | None, error: Exception | None = None) -> None:
        """It was submitted as `op`, or could not be. Once."""
        with self._lock:
            self._op, self._error = op, error
            callbacks, self._callbacks = self._callbacks, []
            self._known.set()
        for callback in callbacks:
            callback(op)

    def when_known(self, callback: Callable[[_native.Op | None], None]) -> None:
        """Calls back with the operation, or None if it could not be submitted: now, or on the outbox's thread."""
        with self._lock:
            if not self._known.is_set():
                self._callbacks.append(callback)
                return
        callback(self._op)

    def wait(self, timeout_s: float | None = None) -> bool:
        """As that of `_native.Op`. What the GPU takes to come to the copy is not within the call's timeout."""
        end = None if timeout_s is None else time.monotonic() + timeout_s
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


Op = _native.Op | LaterOp


class Outbox:
    """The process's queue of such calls."""

    def __init__(self) -> None:
        self._calls: queue.SimpleQueue[_Waiting | None] = queue.SimpleQueue()
        self._waiting: Counter[Hashable] = Counter()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._stopped = False

    def is_waiting(self, group: Hashable) -> bool:
        """Whether a call of this group has not been submitted yet, behind which the next has to queue."""
        return self._thread is not None and self._waiting[group] > 0

    def put(self, group: Hashable, submit: Callable[[], _native.Op]) -> LaterOp:
        """Submits a call when those before it have been.

        Args:
            group: whose calls the next ones queue behind.
            submit: waits for the memory and submits. Called on the outbox's thread.
        """
        later = LaterOp()
        with self._lock:
            if self._stopped:
                later.resolve(None, _stopped())
                return later
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="gradwire-outbox", daemon=True)
                self._thread.start()
            self._waiting[group] += 1
            self._calls.put(_Waiting(group, submit, later))
        return later

    def stop(self, timeout_s: float) -> None:
        """Fails the calls that have not been submitted."""
        with self._lock:
            self._stopped = True
            self._calls.put(None)
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            op, error = None, None
            try:
                op = _refuse() if self._stopped else call.submit()
            except Exception as caught:  # noqa: BLE001  whoever waits for the operation gets it
                error = caught
            # Before anybody learns of it: their next call may go straight to the engine.
            with self._lock:
                self._waiting[call.group] -= 1
                if not self._waiting[call.group]:
                    del self._waiting[call.group]
            call.later.resolve(op, error)


class _Waiting:
    __slots__ = ("group", "later", "submit")

    def __init__(self, group: Hashable, submit: Callable[[], _native.Op], later: LaterOp) -> None:
        self.group, self.submit, self.later = group, submit, later


def _stopped() -> ShutDownError:
    return ShutDownError("the engine stopped before the tensors of this call had been copied from their device")


def _refuse() -> _native.Op:
    raise _stopped()
