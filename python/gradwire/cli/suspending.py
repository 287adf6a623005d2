"""Ctrl-Z of a command that has more to do than to stop: the terminal is left to the shell as it was."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
        yield
    finally:
        signal.signal(signal.SIGTSTP, previous)


def _draws(frame: FrameType | None) -> bool:
    """Whether rich is at work there."""
    while frame is not None and not frame.f_globals.get("__name__", "").startswith("rich."):
        frame = frame.f_back
    return frame is not None


AGAIN_S = 0.01  # a screen is drawn in less
