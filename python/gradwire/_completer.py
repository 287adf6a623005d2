"""One thread that completes futures.

It takes the GIL once for each batch of ended operations, so that a busy Python thread costs one hand-over and not one for
each bucket. Works that nobody asked a future of never wake it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from functools import partial

from gradwire import _native
from gradwire._outbox import LaterOp, Op

logger = logging.getLogger("gradwire")


class Completer:
    """Runs callbacks when operations of one engine have ended.

    Args:
        engine: its completions are drained until it stops.
        sync_futures: see `Config.sync_futures`.
    """

    def __init__(self, engine: _native.Engine, *, sync_futures: bool) -> None:
        self.sync_futures = sync_futures
        self.last_error: Exception | None = None
        self._engine = engine
        self._waiting: dict[int, list[_Countdown]] = {}
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def watch(self, ops: Sequence[Op], callback: Callable[[], object]) -> None:
        """Calls back when all operations have ended. They may be watched several times.

        On the completer's thread; where an operation could not be submitted, on one of its own.
        """
        self._start()
        countdown = _Countdown(len(ops), callback)
        for op in ops:
            if isinstance(op, LaterOp):
                op.when_known(partial(self._watch, countdown))
            else:
                self._watch(countdown, op)

    def _watch(self, countdown: _Countdown, op: _native.Op | None) -> None:
        if op is None:
            # Found out on the outbox's thread, which a callback could wait for.
            threading.Thread(target=countdown.step, name="gradwire-failed", daemon=True).start()
            return
        with self._lock:
            self._waiting.setdefault(op.id, []).append(countdown)
        op.notify()

    def is_current_thread(self) -> bool:
        """Whether the caller is a callback, which must not wait for another callback."""
        return self._thread is not None and self._thread.ident == threading.get_ident()

    def join(self, timeout_s: float) -> None:
        """Waits for the thread, which ends when the engine has stopped and every callback has run."""
        if self._thread is not None and not self.is_current_thread():
            self._thread.join(timeout_s)

    def _start(self) -> None:
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="gradwire-completer", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        while self._call_back():
            pass  # in a function of its own, whose variables hold no call's tensors while this thread waits for the next

    def _call_back(self) -> bool:
        batch = self._engine.next_completions()
        for op in batch or ():
            with self._lock:
                countdowns = self._waiting.pop(op.id, ())
            for countdown in countdowns:
                countdown.step()
        return batch is not None


class _Countdown:
    """Calls back after so many steps."""

    def __init__(self, count: int, callback: Callable[[], object]) -> None:
        self._count = count
        self._callback = callback
        self._lock = threading.Lock()

    def step(self) -> None:
        with self._lock:
            self._count -= 1
            is_last = self._count == 0
        if is_last:
            try:
                self._callback()
            except Exception:  # a future completed twice is a bug, but must not take the other futures with it
                logger.exception("completing a future failed")
