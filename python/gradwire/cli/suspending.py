"""Ctrl-Z while something is drawn on a terminal: the shell gets it back as it was."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from rich.live import Live


@contextmanager
def suspends(live: Live) -> Iterator[None]:
    """Around a drawing: Ctrl-Z takes it away before it stops this process, and `fg` draws it again. For the main thread."""

    def suspend(number: int, _: FrameType | None) -> None:
        is_drawn = live.is_started
        live.stop()
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)  # it stands here until it is to go on
        signal.signal(number, suspend)
        if is_drawn:
            live.start(refresh=True)

    before = signal.signal(signal.SIGTSTP, suspend)
    try:
        yield
    finally:
        signal.signal(signal.SIGTSTP, before)
