"""How the ranks of a communicator form parts of it (`Communicator.split`), on the board where they met for the whole.

What decides who is in which part, and under which keys it meets, is what all ranks have gathered from each other and the name of the
whole's group: a rank that joined again has counted other splits than those who stayed. Keys, below those of `_rendezvous.py`:
`<name of the whole>/<split>/<color>/`; they are forgotten as soon as the parts are there.
"""

from __future__ import annotations

import operator
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import numpy as np

from gradwire import _joining
from gradwire._meeting import MeetingServer
from gradwire._rendezvous import Formed, Place
from gradwire.errors import GradwireError, InvalidRequestError, RendezvousError

if TYPE_CHECKING:
    from gradwire.communicator import Communicator

# Of a rank that is in no part.
NO_COLOR = -1


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
        return Place(members.index(rank), len(members), f"{self._prefix()}{color}", self._timeout)

    def form(self, whole: Communicator, place: Place | None) -> Formed | None:
        """Forms the parts of `whole` while rank 0 listens; a rank without a place only waits until the others have met.

        Raises:
            PortInUseError, AddressError: rank 0 cannot listen again; a RendezvousError on the others.
            GroupError: a rank is lost.
            UnreachableError, RendezvousError: a part could not be formed.
        """
        server, failure = self._listen_again(whole)
        try:
            listens = np.array([failure is None])
            whole.broadcast(listens)
            if failure is not None:
                raise failure
            if not listens[0]:
                raise RendezvousError("rank 0 cannot listen again for split: its own error says why", rank=0)
            try:
                if place is None:
                    return None
                return _joining.meet_below(f"{place.name}/", self._address, whole.rank, place)
            finally:
                whole.barrier()  # whatever became of this rank's part, the others still need the server
        finally:
            if server is not None and _joining.stays(self._address):
                server.forget(self._prefix())
            elif server is not None:
                server.end(None, 0.0)

    def _listen_again(self, whole: Communicator) -> tuple[MeetingServer | None, GradwireError | None]:
        if whole.rank:
            return None, None
        try:
            return _joining.listen(self._address, whole.world_size), None
        except GradwireError as error:
            return None, error

    def _prefix(self) -> str:
        return f"{self._name}/{self._splits}/"
