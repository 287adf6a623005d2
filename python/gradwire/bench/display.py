"""Progress of a benchmark with the time left: a bar on a terminal, a line now and then elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import ExitStack

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from gradwire.cli.suspending import suspends

_WIDTH_OF_A_FILE = 180  # columns; a terminal says its own
_LINE_EVERY_S = 10.0


class _Console(Console):
    """One that says so where nobody reads any more, as `head` does; rich would end the process with status 1."""

    def on_broken_pipe(self) -> None:
        """See `Console`."""
        try:
            super().on_broken_pipe()
        except SystemExit:
            raise BrokenPipeError from None


def make_console(width: int = _WIDTH_OF_A_FILE) -> Console:
    """Where results are printed: so many columns where it is no terminal."""
    return _Console(width=None if sys.stdout is not None and sys.stdout.isatty() else width)


class Display:
    """Of a run that may end early. A context manager.

    Args:
        console: where to.
        minutes: after which no new turn is begun.
    """

    def __init__(self, console: Console, minutes: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._console, self._budget_s, self._clock = console, 60 * minutes, clock
        columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())
        self._bar = Progress(*columns, TextColumn("{task.description}"), console=console)
        self._task = self._bar.add_task("", total=None)
        self._begun = self._said = clock()
        self._drawn = ExitStack()

    def __enter__(self) -> Display:
        self._begun = self._said = self._clock()
        if self._console.is_terminal:  # elsewhere it would print an empty line, which may be one too many for who reads
            self._drawn.enter_context(suspends(self._bar.live))
            self._drawn.enter_context(self._bar)
        return self

    def __exit__(self, *_: object) -> None:
        self._drawn.close()

    def say(self, text: str) -> None:
        """A line for what does not repeat itself."""
        self._console.print(f"{time.strftime('%H:%M:%S')} {text}", highlight=False, markup=False)

    def advance(self, done: int, total: int, text: str) -> None:
        """`done` of `total` equal parts are measured; `text` is about the latest."""
        now = self._clock()
        passed = now - self._begun
        if self._console.is_terminal:
            self._bar.update(self._task, completed=done, total=total, description=text)
        elif now - self._said > _LINE_EVERY_S or done == total:
            self._said = now
            self.say(
                f"{done} of {total}, {passed / 60:.1f} min of about {self.whole_s(done, total, passed) / 60:.1f}: {text}"
            )

    def whole_s(self, done: int, total: int, passed: float) -> float:
        """Seconds from the start to the end, if the rest goes on like this."""
        return max(passed, min(passed / done * total, self._budget_s))


def as_written(text: str | None) -> str:
    """A module's docstring as the help of its command: click would join the lines of examples and lists, which are indented."""
    paragraphs = (text or "").split("\n\n")
    return "\n\n".join(f"\b\n{each}" if each.startswith(" ") else each for each in paragraphs)
