"""How the ranks of a communicator form parts of it (`Communicator.split`), on the board where they met for the whole.

What decides who is in which part, and under which keys it meets, is what all ranks have gathered from each other and the name of the
whole's group: a rank that joined again has counted other splits than those who stayed. Keys, below those of `_rendezvous.py`:
`<name of the whole>/<split>/<color>/`; they are forgotten as soon as the parts are there.
"""

from __future__ import annotations

import contextlib
import operator
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from gradwire import _joining
from gradwire._meeting import MeetingServer, MeetingStore
from gradwire._rendezvous import Formed, Place
from gradwire.errors import GradwireError, InvalidRequestError, RendezvousError

if TYPE_CHECKING:
    from gradwire.communicator import Communicator

T = TypeVar("T")

# Of a rank that is in no part.
NO_COLOR = -1
# What a rank tells all others of its error: a line or two.
TOLD_BYTES = 256


class Parts:
    """One rank's side of the splits of a communicator.

    Args:
        address: where rank 0 listens.
        name: of its group, the same on all ranks.
        timeout: longest wait for the ranks to appear.
    """

    def __init__(self, address: tuple[str, int], name: str, timeout: timedelta) -> None:
        self._address = address
        self._name = name
        self._timeout = timeout
        self._splits = 0

    def asked(self, color: int | None, key: int) -> np.ndarray[Any, Any]:
        """What the others need to know: `[3] i64`, color, key and the number of splits that this rank has seen.

        Raises:
            InvalidRequestError: color or key are none.
        """
        try:
            whole = NO_COLOR if color is None else operator.index(color)
            asked = np.array([whole, operator.index(key), self._splits], np.int64)
        except (OverflowError, TypeError, ValueError) as error:
            raise InvalidRequestError(f"color = {color!r}, key = {key!r}: whole numbers of 64 bits") from error
        if color is not None and asked[0] < 0:
            raise InvalidRequestError(f"color = {color} is not allowed: 0 or more, or None")
        return asked

    def place(self, rank: int, asked: np.ndarray[Any, Any]) -> Place | None:
        """That of `rank` in the next part, from what all have asked for, `[world_size, 3] i64`; None: in none."""
        self._splits = int(asked[:, 2].max()) + 1
        color = int(asked[rank, 0])
        members = [other for other, (theirs, _, _) in enumerate(asked) if theirs == color]
        members.sort(key=lambda other: int(asked[other, 1]))
        if color == NO_COLOR:
            return None
        # Half of the time that the whole has: the calls of it in which others wait for the outcome outlast the meeting.
        return Place(members.index(rank), len(members), f"{self._prefix()}{color}", self._timeout / 2)

    def form(self, whole: Communicator, place: Place | None) -> Formed | None:
        """Forms the parts of `whole` while rank 0 listens; a rank without a place only waits until the others have met.

        Raises:
            PortInUseError, AddressError, EngineError: rank 0 cannot listen again, or this rank cannot come there; a RendezvousError on the
                others. The whole goes on.
            GroupError: a rank is lost.
            UnreachableError, RendezvousError: a part could not be formed.
        """
        server, failure = _tried(lambda: self._listen_again(whole))
        try:
            _agree(whole, failure)
            store, failure = _tried(
                lambda: None if place is None else _joining.come_back(self._address, whole.rank, place)
            )
            with contextlib.closing(store) if store is not None else contextlib.nullcontext():
                _agree(whole, failure)
                return self._meet(whole, store, place)
        finally:
            if server is not None and _joining.stays(self._address):
                server.forget(self._prefix())
            elif server is not None:
                server.end(None, 0.0)

    def _meet(self, whole: Communicator, store: MeetingStore | None, place: Place | None) -> Formed | None:
        """Whatever becomes of this rank's part, the others still need the server: all have met when the barrier ends."""
        try:
            formed = None if store is None or place is None else _joining.meet_below(f"{place.name}/", store, place)
        except BaseException as failure:
            with contextlib.suppress(GradwireError):  # what is wrong with the whole, its next call says
                whole.barrier(async_op=not isinstance(failure, Exception))  # who is interrupted waits for nobody
            raise
        whole.barrier()
        return formed

    def _listen_again(self, whole: Communicator) -> MeetingServer | None:
        return None if whole.rank else _joining.listen(self._address, whole.world_size, self._timeout / 2)

    def _prefix(self) -> str:
        return f"{self._name}/{self._splits}/"


def _tried(make: Callable[[], T]) -> tuple[T | None, BaseException | None]:
    """What it makes, or why it cannot, for the others to be told first."""
    try:
        return make(), None
    except BaseException as failure:  # noqa: BLE001  raised by `_agree`, an interrupt too
        return None, failure


def _agree(whole: Communicator, failure: BaseException | None) -> None:
    """Goes on where all ranks can.

    Raises:
        BaseException: `failure`, why this rank cannot.
        RendezvousError: another rank cannot. Fields: rank, cause.
        GroupError: a rank is lost.
    """
    told = np.zeros(TOLD_BYTES, np.uint8)
    if failure is not None:
        text = f"{type(failure).__name__}: {failure}".encode(errors="replace")[:TOLD_BYTES]
        told[: len(text)] = np.frombuffer(text, np.uint8)
    try:
        rows = whole.all_gather(told).result
    except GradwireError as error:
        if failure is None:
            raise
        raise failure from error
    if failure is not None:
        raise failure
    assert rows is not None, "every rank gets the result of an all-gather"
    for rank, row in enumerate(rows):
        if row[0]:
            cause = row.tobytes().rstrip(b"\0").decode(errors="replace")
            raise RendezvousError(f"rank {rank} cannot meet the others for split: {cause}", rank=rank, cause=cause)
