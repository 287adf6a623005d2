"""What is kept of a measurement that ends before its last turn, and how that is said: in the numbers, in a line, as exit status."""

from __future__ import annotations

import signal
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from gradwire.lab import LabError, sandbox
from gradwire.lab.crew import WorkerFailed

# Exit statuses. Click exits with the latter for a wrong option, too.
MISSED, NOT_RUN = 1, 2
GONE = "; the workers and the network are gone"
_Found = TypeVar("_Found")


class WrongResult(WorkerFailed):
    """What workers found is wrong, which no failure of theirs explains: the worst that a benchmark can find, and no reason to skip it."""


@dataclass(frozen=True)
class Ended:
    """Why there is less than was asked for.

    Attributes:
        by: `SIGINT`, `SIGTERM`, `SIGHUP`, `--minutes`, or the first line of the error; None: there is as much.
        status: exit status; None: as the results are judged.
        lines: for people.
    """

    by: str | None = None
    status: int | None = None
    lines: tuple[str, ...] = ()


def whole_turns(turns: Iterable[list[_Found]]) -> tuple[list[_Found], BaseException | None]:
    """What the whole turns have measured, and what ended them early; with no whole turn that is raised as ever."""
    found: list[_Found] = []
    try:
        for each in turns:
            found = each
    except (KeyboardInterrupt, SystemExit, WorkerFailed, LabError, OSError) as end:
        if not found:
            raise
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # what is kept takes a few seconds to write
        return found, end
    return found, None


def ended(end: BaseException | None, kept: str, *, is_whole: bool) -> Ended:
    """How an end is said.

    Args:
        end: what `whole_turns` caught.
        kept: how much there is, for people.
        is_whole: whether that is as much as was asked for.
    """
    if isinstance(end, KeyboardInterrupt):
        return Ended("SIGINT", sandbox.EXIT_INTERRUPTED, (f"interrupted: {kept} are kept{GONE}",))
    if isinstance(end, SystemExit):
        if end.code == sandbox.EXIT_HUNG_UP:
            return Ended("SIGHUP", sandbox.EXIT_HUNG_UP, (f"the terminal has gone: {kept} are kept{GONE}",))
        return Ended("SIGTERM", sandbox.EXIT_TERMINATED, (f"terminated: {kept} are kept{GONE}",))
    if end is not None:
        first = str(end).partition("\n")[0]
        return Ended(first, status_of(end), (f"error: {end}", f"ended early: {kept} are kept{GONE}"))
    return Ended() if is_whole else Ended("--minutes", None, (f"ended early by --minutes: {kept}",))


def status_of(error: BaseException) -> int:
    """Exit status of a run that an error ended."""
    return MISSED if isinstance(error, WrongResult) else NOT_RUN


def with_unmeasured(ended: Ended, names: Sequence[str]) -> Ended:
    """The same where some were never measured, as the minutes were over before their presets had warmed up, or the run ended before."""
    if not names:
        return ended
    cut = "--minutes were over before its preset had ended its warm-up"
    why = cut if ended.by in (None, "--minutes") else f"the run ended before, or {cut}"
    lines = [f"not measured: {name}: {why}" for name in names]
    return replace(ended, lines=(*ended.lines, *lines))
