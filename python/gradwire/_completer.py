"""One thread that completes futures.

It takes the GIL once for each batch of ended operations, so that a busy Python thread costs one hand-over and not one for
each bucket. Works that nobody asked a future of never wake it.

A callback that waits for the future of another call waits for that very thread. So none has it for ever: one that has run for
`PATIENCE_S` keeps its thread, and a new one goes on with the rest in order. What notices sleeps until then, or where no callback has
begun for as long until one does: it is woken once in that time, however many callbacks run.

Who watches operations takes no lock: a signal handler that interrupts it may wait for what this thread does.
"""

from __future__ import annotations

import itertools
import logging
import math
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

from gradwire import _native
from gradwire._outbox import LaterOp, Op
from gradwire._threads import start_thread
from gradwire.errors import EngineError

logger = logging.getLogger("gradwire")

# As long as a rank is waited for before a warning (`straggler_warning_s`), but whatever that is set to: until then training stands still.
PATIENCE_S = 3.0
# Who looks so much too late was stopped together with the callback, or neither could have the GIL.
LATE_S = 1.0
# Of the innermost frames of such a callback, as many show whose it is: torch's `wait` is the last one.
FRAMES_SHOWN = 4


class Completer:
    """Runs callbacks when operations of one engine have ended.

    Args:
        engine: its completions are drained until it stops.
        sync_futures: see `Config.sync_futures`.
        patience_s: how long a callback may hold up the others.
    """

    def __init__(self, engine: _native.Engine, *, sync_futures: bool, patience_s: float = PATIENCE_S) -> None:
        self.sync_futures = sync_futures
        self.last_error: Exception | None = None
        self._engine = engine
        self._patience_s = patience_s
        self._waiting: dict[int, list[_Countdown]] = {}
        # What has been watched since it was looked at last, with the number of the operation.
        self._new: deque[tuple[int, _Countdown]] = deque()
        # Of operations that have ended, in their order.
        self._ready: deque[_Countdown] = deque()
        # The one that goes on; `_threads` has those that it followed, and what watches it, too.
        self._thread: threading.Thread | None = None
        self._threads: list[threading.Thread] = []
        self._is_looking = False
        self._here = threading.local()
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        # When the latest callback began, and whether it runs still.
        self._began_s = -math.inf
        self._is_running = False
        # Whether the watching thread looks by itself, at the time that it knows.
        self._is_watched = False
        self._has_ended = False
        self._has_warned = False

    def start(self) -> None:
        """Starts the threads, unless they are there: `watch` needs them, when its call is under way.

        Raises:
            EngineError: no thread can be started.
        """
        if self._thread is not None and self._is_looking:
            return
        with self._lock:
            if self._thread is None:
                self._thread = self._start_thread(self._run, "gradwire-completer")
            if not self._is_looking:
                self._start_thread(self._look, "gradwire-look")
                self._is_looking = True

    def watch(self, ops: Sequence[Op], callback: Callable[[], object]) -> None:
        """Calls back when all operations have ended. They may be watched several times.

        On the completer's thread; where an operation could not be submitted, or the engine has stopped, on one of its own.
        """
        self.start()
        countdown = _Countdown(len(ops), callback)
        for op in ops:
            if isinstance(op, LaterOp):
                op.when_known(partial(self._watch, countdown))
            else:
                self._watch(countdown, op)

    def _watch(self, countdown: _Countdown, op: _native.Op | None) -> None:
        if op is None:
            # Found out on the outbox's thread, which a callback could wait for.
            _step_apart(countdown)
            return
        self._new.append((op.id, countdown))
        op.notify()
        if self._has_ended:
            self._call_late()

    def is_current_thread(self) -> bool:
        """Whether the caller is a callback, which must not wait for another callback."""
        return getattr(self._here, "is_completer", False)

    def join(self, timeout_s: float) -> None:
        """Waits for the threads, which end when the engine has stopped and every callback has run."""
        end_s = time.monotonic() + timeout_s
        while not self.is_current_thread() and (thread := self._latest_alive()) is not None:
            left_s = end_s - time.monotonic()
            if left_s <= 0:
                return
            thread.join(left_s)

    def _latest_alive(self) -> threading.Thread | None:
        with self._lock:
            return next((thread for thread in reversed(self._threads) if thread.is_alive()), None)

    def _start_thread(self, target: Callable[[], None], name: str) -> threading.Thread:
        thread = start_thread(target, name)
        self._threads = [*(other for other in self._threads if other.is_alive()), thread]
        return thread

    def _run(self) -> None:
        self._here.is_completer = True
        while self._call_back() or self._fetch():
            pass  # in a function of its own, whose variables hold no call's tensors while this thread waits for the next

    def _fetch(self) -> bool:
        """Waits for operations that have ended; false: another thread goes on, or nothing will ever come."""
        with self._lock:
            if not self._is_mine():
                return False
        batch = self._engine.next_completions()
        if batch is None:
            self._end()
            return False
        with self._lock:
            while self._new:
                number, countdown = self._new.popleft()
                self._waiting.setdefault(number, []).append(countdown)
            for op in batch:
                self._ready.extend(self._waiting.pop(op.id, ()))
        return True

    def _end(self) -> None:
        """Nobody looks at completions any more: what is watched has ended with the engine."""
        with self._lock:
            self._has_ended = True
            self._changed.notify()
        waiting, self._waiting = self._waiting, {}
        for countdown in itertools.chain(*waiting.values()):
            _step_apart(countdown)
        self._call_late()

    def _call_late(self) -> None:
        """The same of what has been watched since the last look, or is so now."""
        while self._new:
            try:
                _, countdown = self._new.popleft()
            except IndexError:  # another thread has just taken the last one
                return
            _step_apart(countdown)

    def _call_back(self) -> bool:
        """Runs the next callback; false: there is none, or another thread goes on."""
        with self._lock:
            if not self._is_mine() or not self._ready:
                return False
            countdown = self._ready.popleft()
            self._began_s, self._is_running = time.monotonic(), True
            if not self._is_watched:
                self._is_watched = True
                self._changed.notify()
        countdown.step()
        del countdown  # what it holds may end with it, in finalizers that wait for others as a callback may
        with self._lock:
            if self._is_mine():
                self._is_running = False
        return True

    def _is_mine(self) -> bool:
        return self._thread is threading.current_thread()

    def _look(self) -> None:
        while (stuck := self._next_stuck()) is not None:
            self._warn(stuck)

    def _next_stuck(self) -> threading.Thread | None:
        """The thread of a callback that runs for too long, when another one has followed it; None: nothing will ever come."""
        with self._lock:
            while not self._has_ended:
                pause_s = self._pause_s(time.monotonic())
                if pause_s == 0 and (stuck := self._followed()) is not None:
                    return stuck
                self._is_watched = pause_s is not None
                self._changed.wait(pause_s)
            return None

    def _followed(self) -> threading.Thread | None:
        """The thread of the callback that runs, when another one goes on; None: none can be started, and it is tried again later."""
        stuck = self._thread
        try:
            self._thread = self._start_thread(self._run, "gradwire-completer")
        except EngineError as error:
            logger.warning(
                "others wait for the callback of a future that has run for %g s: %s", self._patience_s, error
            )
            self._began_s = time.monotonic()
            return None
        self._is_running = False
        return stuck

    def _pause_s(self, now_s: float) -> float | None:
        """How long one need not look, as no callback can have run for too long until then; 0: one has; None: until one begins."""
        left_s = self._began_s + self._patience_s - now_s
        if left_s > 0:
            return left_s
        if not self._is_running:
            return None
        if left_s >= -LATE_S:
            return 0.0
        self._began_s = now_s
        return self._patience_s

    def _warn(self, stuck: threading.Thread) -> None:
        if self._has_warned:
            return
        self._has_warned = True
        frame = sys._current_frames().get(stuck.ident or 0)
        where = "".join(traceback.format_stack(frame, FRAMES_SHOWN)) if frame is not None else ""
        logger.warning(
            "the callback of a future has run for %g s, and others had to wait for it. They go on without it now; should it wait for "
            "the future of another call, it has held up training for as long, and will each time: with GRADWIRE_SYNC_FUTURES=1 "
            "callbacks run on the thread that asks for the future, in the order of the calls\n%s", self._patience_s, where,
        )  # fmt: skip


def _step_apart(countdown: _Countdown) -> None:
    try:
        threading.Thread(target=countdown.step, name="gradwire-failed", daemon=True).start()
    except RuntimeError:  # Python 3.12 starts none while the interpreter ends, which is when the runtime stops
        countdown.step()


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
