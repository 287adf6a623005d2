"""Ctrl-Z of a command that has more to do than to stop: the terminal is left to the shell as it was."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # what does not draw needs none of it
    from rich.live import Live


@contextmanager
def suspends(live: Live) -> Iterator[None]:
    """Around a drawing: Ctrl-Z takes it away before it stops this process, and `fg` draws it again. For the main thread."""
    console, was_drawn, rows = live.console, False, 0

    def take_away() -> None:
        nonlocal was_drawn, rows
        was_drawn = live.is_started
        rows = 0 if console.is_alt_screen else len(console.render_lines(live.renderable))
        live.stop()

    def draw() -> None:
        if was_drawn:
            for _ in range(rows - 1):  # it begins as many above as it had, where the shell has written meanwhile
                console.line()
            live.start(refresh=True)

    with around_stops(take_away, draw):
        yield


@contextmanager
def around_stops(before: Callable[[], object], afterwards: Callable[[], object]) -> Iterator[None]:
    """Within it, Ctrl-Z calls `before` and then stops this process, and `afterwards` is called when it goes on. For the main thread."""
    if signal.getsignal(signal.SIGTSTP) is signal.SIG_IGN:  # who has started it does not want it to stop
        yield
        return
    is_asked = False

    def ask(*_: object) -> None:
        nonlocal is_asked
        is_asked = True

    def suspend(number: int, interrupted: FrameType | None) -> None:
        if _draws(interrupted):  # what takes the drawing away writes to the same file, which nobody may twice at a time
            again = threading.Timer(AGAIN_S, os.kill, (os.getpid(), number))
            again.daemon = True
            again.start()
            return
        ask()
        while is_asked:  # also while it was just going on
            signal.signal(number, ask)
            before()
            stop(number)
            afterwards()
        signal.signal(number, suspend)

    def stop(number: int) -> None:
        nonlocal is_asked
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)  # it stands here until it is to go on
        signal.signal(number, ask)
        is_asked = False

    previous = signal.signal(signal.SIGTSTP, suspend)
    try:
        with _heard_at_once(signal.SIGTSTP):
            yield
    finally:
        signal.signal(signal.SIGTSTP, previous)


@contextmanager
def _heard_at_once(number: int) -> Iterator[None]:
    """Within it, this signal is handled at once, also where the main thread waits in the kernel and was not woken by it.

    Python runs handlers in the main thread, between two of its steps. A signal that comes when this thread has made the last step but
    does not wait yet, or one that the kernel gives to another thread, is else handled when the wait ends.
    """
    asked, tells = os.pipe()
    os.set_blocking(tells, False)
    ended, main = threading.Event(), threading.get_ident()

    def wake() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())  # none is for this thread
        while _END not in (told := os.read(asked, _LONGEST)):
            for _ in range(_WAKES if number in told else 0):
                signal.pthread_kill(main, _WAKING)
                if ended.wait(AGAIN_S):
                    break

    thread = threading.Thread(target=wake, daemon=True)
    waking = signal.signal(_WAKING, lambda *_: None)  # who waits looks for what there is to handle, and waits on
    before = signal.set_wakeup_fd(tells, warn_on_full_buffer=False)
    try:
        with suppress(RuntimeError):  # the system has no thread left: then it is handled when the wait ends
            thread.start()
        yield
    finally:
        signal.set_wakeup_fd(before)
        ended.set()
        if thread.ident is not None:
            os.set_blocking(tells, True)
            os.write(tells, bytes([_END]))
            thread.join()
        signal.signal(_WAKING, waking)
        os.close(asked)
        os.close(tells)


def _draws(frame: FrameType | None) -> bool:
    """Whether rich is at work there."""
    while frame is not None and not frame.f_globals.get("__name__", "").startswith("rich."):
        frame = frame.f_back
    return frame is not None


AGAIN_S = 0.01  # a screen is drawn in less
_WAKING = signal.SIGURG  # which nothing here uses, and which does nothing to a process without a handler
_WAKES = 100  # a second: on a busy machine the main thread may come late to where it waits
_END = 0  # no signal has this number
_LONGEST = 1 << 10  # of what is told, in bytes
