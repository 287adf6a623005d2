"""How a check ends: no rank does before rank 0 has shown the report, as launchers end all ranks once one ends with an error.

   rank 0                                another rank
   verdict: what all end with    ->      waits for it
                                 <-      seen/R
   shows the report
   told, once all have seen      ->      waits for it, for a while
                                 <-      done/R, and ends
   removes what was said, and ends

A rank that fails by itself says so under the key that others wait for next, so that rank 0 shows what there is before that rank ends.
Rank 0 may end early, or die: every wait has an end, and a rank that has the verdict ends with it in any case.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from gradwire._in_time import in_time
from gradwire.doctor.meeting import Place, say_given_up
from gradwire.errors import MissingRankError, RendezvousError

# More than rank 0 takes to read and judge what some hundred ranks have measured, and to print it: some seconds each.
_JUDGING_S, _SHOWING_S = 60.0, 60.0
_PART_S = 10.0
_LEAVING_S = 2.0  # launchers leave 30 s or less


class Terminated(BaseException):
    """SIGTERM to rank 0, which nothing on the way may take for an error of its own."""

    def __init__(self) -> None:
        super().__init__("rank 0 was ended by SIGTERM, as launchers do once a rank has died")


def conclude(place: Place, show: Callable[[], None], *, is_suffering: bool) -> None:
    """Rank 0's end, after which it may go: it may hold the Store, so it goes last. Raises what `show` does.

    Args:
        place: rank 0's.
        show: shows the report, and returns when it is out.
        is_suffering: whether training would.
    """
    _say(place, "verdict", is_suffering)
    have_seen = False
    try:
        show()
        have_seen = _have_all_said(place, "seen")
    finally:
        _say(place, "told")
    if have_seen and _have_all_said(place, "done"):
        place.meeting.clear()


def leave(place: Place, error: Terminated, show: Callable[[], None]) -> None:
    """The end of a rank 0 that is terminated: it shows what there is, and has little time.

    Args:
        place: rank 0's.
        error: with which it is about to end.
        show: as of `conclude`.
    """
    show()

    def let_go() -> None:
        _say(place, "verdict", str(error))
        _say(place, "told")

    with suppress(TimeoutError):  # a Store takes nothing while the wait that was cut short goes on in it
        in_time(let_go, _LEAVING_S)


def give_up(place: Place, error: Exception, show: Callable[[], None], *, due: Sequence[str], more_s: float) -> None:
    """The end of a rank of a check that did not end: rank 0 shows what there is, and others wait for that.

    Args:
        place: of this rank.
        error: why, with which this rank is about to end.
        show: rank 0's.
        due: the keys of what others wait for next from this rank.
        more_s: beyond the timeout of the place, in seconds, that rank 0 may wait before it gives up too.
    """
    if place.rank != 0:
        with suppress(RendezvousError, OSError):
            for key in due:
                say_given_up(place, key, str(error))
    if place.rank == 0:
        _say(place, "verdict", str(error))
        try:
            show()
        finally:
            _say(place, "told")
    elif not (isinstance(error, MissingRankError) and 0 in error.ranks):
        # Rank 0 may not have heard of it: then it gives up once its own wait ends.
        _wait_until_told(place, place.timeout_s + more_s + _SHOWING_S)


def verdict(place: Place) -> bool:
    """Whether training would suffer, as rank 0 says; when it returns rank 0 has shown the report, or has had long to do so.

    Raises:
        MissingRankError: rank 0 says nothing.
        RendezvousError: the check did not end; the message is rank 0's.
    """
    waited_s = place.timeout_s + _JUDGING_S
    try:
        said = place.meeting.get("verdict", waited_s)
    except RendezvousError as error:
        text = f"rank 0 has not said within {waited_s:g} s what was found{place.meeting.doubt}"
        raise MissingRankError(text, ranks=[0], waited_s=waited_s) from error
    if isinstance(said, str):
        raise RendezvousError(said)
    _say(place, f"seen/{place.rank}")
    _wait_until_told(place, _SHOWING_S)
    _say(place, f"done/{place.rank}")
    return bool(said)


def _wait_until_told(place: Place, longest_s: float) -> None:
    with suppress(RendezvousError, OSError):  # rank 0 has gone
        place.meeting.get("told", longest_s)


def _have_all_said(place: Place, key: str) -> bool:
    with suppress(RendezvousError, OSError):  # whoever does not say so has gone without it
        for other in range(1, place.world_size):
            place.meeting.get(f"{key}/{other}", _PART_S)
        return True
    return False


def _say(place: Place, key: str, value: Any = True) -> None:
    """Where nobody takes it any more nobody waits for it either."""
    with suppress(RendezvousError, OSError):
        place.meeting.put(key, value)
