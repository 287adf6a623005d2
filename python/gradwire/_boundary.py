"""Between two steps: where a rank that was started again joins a group that runs, and gets what the others have (docs/membership.md).

All members cross the boundary together. Who waits to join has published a record in the Store under which the group was formed; the
first member looks there, all of them hear of it by an exact all-reduce, admit the record, and confirm so by another. Only then is the
newcomer answered. It becomes a member by an epoch of its own (`gradwire-membership`), and its first call is the barrier that ends the
crossing on all others. Without a newcomer a crossing is one look into the Store by one rank and one small all-reduce.
What they write in the Store is `_entrance.py`'s.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from gradwire import _arrays, _native
from gradwire._arrays import Array
from gradwire._entrance import FAILURES, Watch
from gradwire._operation import Call, Operation
from gradwire._policy import algorithm_code
from gradwire._runtime import Runtime
from gradwire._uncrossed import uncrossed
from gradwire.errors import EngineError, GroupError, InvalidRequestError, PeerLostError, RendezvousError

if TYPE_CHECKING:
    from gradwire._rendezvous import Place

logger = logging.getLogger("gradwire")

# The members look so often whether a newcomer has come.
POLL_S = 0.01
# Parts of the state travel in pieces, so that what members keep for each other stays small.
PIECE_BYTES = 32 << 20
# What a source says comes over the network: it makes nobody reserve more than any state has. The header names each tensor and number
# in some ten to hundred bytes, so this is of ten million of them; and no host has so much memory.
HEADER_BYTES_MAX = 1 << 30
STATE_BYTES_MAX = 1 << 44


@dataclass(frozen=True)
class Crossing:
    """How a boundary was crossed.

    Attributes:
        newcomer: rank that has joined; None: nobody has.
        sources: members that have what it needs, in order.
    """

    newcomer: int | None = None
    sources: tuple[int, ...] = ()


class Boundary:
    """One rank's part in it. All ranks call the same methods in the same order, as for collectives.

    Args:
        owner: the process's engine.
        native: the connected group.
        watch: over those who wait.
        place: of this process in the group.
        is_new: it has just joined itself.

    Attributes:
        name: of the group.
        timeout: of a call; the place's to begin with.
    """

    def __init__(
        self,
        owner: Runtime,
        native: _native.Group,
        watch: Watch,
        place: Place,
        *,
        is_new: bool,
    ) -> None:
        self._owner = owner
        self._native = native
        self._watch = watch
        self._rank, self._world_size = place.rank, place.world_size
        self.name = place.name
        self.timeout = place.timeout
        self._is_new = is_new
        if is_new:
            uncrossed.add(self)

    @property
    def is_open(self) -> bool:
        """Whether ranks may join again."""
        return self._owner.config.on_peer_loss == "continue"

    def leave(self) -> None:
        """Before a rank leaves in good order: another life of it is not expected then. Who is no member may come back."""
        try:
            epoch = self._native.stats()["epoch"]
        except EngineError:  # the group was aborted, which is no good order
            epoch = None
        if epoch is not None and epoch["is_member"]:
            self._watch.leave()
        uncrossed.discard(self)
        self._watch.close()

    def is_awaited(self) -> bool:
        """Whether the members wait for the first call of this rank."""
        try:
            epoch = self._native.stats()["epoch"]
        except EngineError:  # it was aborted
            return False
        return self._is_new and (epoch is None or epoch["is_member"])

    def cross(self) -> Crossing:
        """Takes in at most one rank that waits. Nothing happens unless `on_peer_loss="continue"`.

        Raises:
            GroupError: the group has ended.
        """
        if not self.is_open:
            return Crossing()
        if self._is_new:
            self._is_new = False
            uncrossed.discard(self)
            return self._crossed(self._rank, self._barrier())
        members = self._native.watch()["epoch"]["members"]
        waits = self._watch.newcomer(members) if members[0] == self._rank else 0
        code, _ = self._reduce(waits, "max")
        if code == 0:
            return Crossing()
        life, rank = divmod(code, self._world_size)
        self._watch.note(life)
        running, refusal = self._admit(rank, life)
        all_have, members = self._reduce(int(running is not None), "min")
        is_first = members[0] == self._rank
        if not is_first:
            self._watch.close()
        if not all_have:
            if is_first and refusal:
                self._watch.answer(rank, life, refused=refusal)
            return Crossing()
        if is_first:
            self._watch.answer(rank, life, running=str(running))
        self._wait_for(rank, life)
        members = self._barrier()
        has_joined = self._has_joined(rank, life, members)
        self._watch.waited(rank, has_joined=has_joined)
        if not has_joined and is_first:
            logger.warning(
                "rank %d was let in, and nothing of it has come within %g s: see whether the UDP ports between its host and the "
                "members' are open (gradwire doctor)", rank, self._owner.config.peer_timeout_s
            )  # fmt: skip
        return self._crossed(rank, members) if has_joined else Crossing()

    def sync(self, arrays: Sequence[Array]) -> bool:
        """Crosses, and gives who has joined the arrays of the others; whether somebody has.

        Raises:
            UnsupportedError, InvalidRequestError: an array cannot be sent, or not be written. On every rank and at every call: only who
                joins writes, and would find out by itself, each time that it is started.
        """
        for array in arrays:
            _arrays.check_writable(array)
        crossing = self.cross()
        if crossing.newcomer is None:
            return False
        told = self.share(crossing, lambda: _packed(arrays))
        if told is not None:
            _unpack(*told, arrays)
        return True

    def share(
        self, crossing: Crossing, pack: Callable[[], tuple[dict[str, Any], list[Any]]]
    ) -> tuple[Any, list[Any]] | None:
        """Sends the newcomer what the first source has; all who have crossed call it.

        Args:
            crossing: that a newcomer came with.
            pack: a header of plain JSON, and arrays of bytes; called on one source.

        Returns:
            Header and arrays on the newcomer, else None.

        Raises:
            InvalidRequestError: on all who have crossed: the source could not pack. The group goes on.
            PeerLostError: no source is left.
            GroupError: the group has ended.
        """
        lost: GroupError | None = None
        for source in crossing.sources:
            try:
                return self._share_from(source, crossing.newcomer, pack)
            except PeerLostError as error:  # on all alike
                logger.info("rank %d was lost while it told rank %s what it has", source, crossing.newcomer)
                lost = error
        raise lost or InvalidRequestError("nobody has joined")

    def meet(self, has_state: bool, pack: Callable[[], tuple[dict[str, Any], list[Any]]]) -> Any:
        """First of all calls of a group that was made of some of another one and of others: what the first member has that has a state.

        Returns:
            Header and arrays on all members but that one, or None where nobody has a state.

        Raises:
            InvalidRequestError: on all: it could not pack. The group goes on.
            GroupError: that member was lost, or the group has ended.
        """
        source, _ = self._reduce(self._rank if has_state else self._world_size, "min")
        if source == self._world_size:
            return None
        return self._share_from(source, None, pack)

    def _share_from(
        self, source: int, newcomer: int | None, pack: Callable[[], tuple[dict[str, Any], list[Any]]]
    ) -> Any:
        """Header and arrays on the newcomer; with None on all but the source."""
        head = np.zeros(0, np.uint8)
        arrays: list[Any] = []
        failure: Exception | None = None
        if self._rank == source:
            try:
                header, arrays = pack()
                text = json.dumps({"header": header, "bytes": [array.nbytes for array in arrays]})
            except Exception as error:  # noqa: BLE001 - the program's; the others would wait, and fail alike as the next source
                failure, text = error, json.dumps({"error": f"{type(error).__name__}: {error}"})
            head = np.frombuffer(text.encode(), np.uint8).copy()
        length = np.array([head.size], np.int64)
        self._broadcast(length, source)
        if not 0 <= int(length[0]) <= HEADER_BYTES_MAX:  # on all alike, the source too
            problem = f"rank {source} says what it has in {length[0]} bytes, and at most {HEADER_BYTES_MAX} are taken"
            raise InvalidRequestError(problem)
        if self._rank != source:
            head = np.empty(int(length[0]), np.uint8)
        self._broadcast(head, source)
        told, sizes = _read(head.tobytes(), source)
        if "error" in told:
            whom = "the others" if newcomer is None else f"rank {newcomer}"
            problem = f"rank {source} cannot tell {whom} what it has: {told['error']}"
            raise InvalidRequestError(problem) from failure
        is_newcomer = self._rank != source and newcomer in (None, self._rank)
        received = []
        spare = np.empty(
            0 if is_newcomer or self._rank == source else PIECE_BYTES, np.uint8
        )  # who needs nothing of it keeps nothing
        for index, size in enumerate(sizes):
            if self._rank == source:
                array = arrays[index]
            elif is_newcomer:
                array = _room(size, source)
                received.append(array)
            for start in range(0, size, PIECE_BYTES):
                piece = spare[: size - start] if spare.size else array[start : start + PIECE_BYTES]
                self._broadcast(piece, source)
        return (told["header"], received) if is_newcomer else None

    def _admit(self, rank: int, life: int) -> tuple[str | None, str | None]:
        """What the rank has to know; or why it may never join, if it may not."""
        record = self._watch.record(rank, life)
        if record is None:  # nothing is wrong with the rank
            return None, None
        try:
            return self._native.admit(record), None
        except RendezvousError as error:
            logger.warning("rank %d cannot join: %s", rank, error)
            return None, str(error)
        except FAILURES as error:
            logger.info("rank %d cannot join now: %s", rank, error)
            return None, None

    def _crossed(self, newcomer: int, members: Sequence[int]) -> Crossing:
        logger.info("rank %d has joined again; members are %s", newcomer, list(members))
        return Crossing(newcomer, tuple(rank for rank in members if rank != newcomer))

    def _wait_for(self, rank: int, life: int) -> None:
        end = time.monotonic() + self._owner.config.peer_timeout_s
        while not self._has_joined(rank, life, [rank]) and time.monotonic() < end:
            time.sleep(POLL_S)

    def _has_joined(self, rank: int, life: int, members: Sequence[int]) -> bool:
        joined = self._native.watch()["epoch"]["joined"]
        return rank in members and any((one["rank"], one["incarnation"]) == (rank, life) for one in joined)

    def _reduce(self, value: int, op: str) -> tuple[int, Sequence[int]]:
        array = np.array([value], np.int64)
        call = Call("all_reduce", array, array)
        call.options = _arrays.reduce_options(array, op)
        call.options["algorithm"] = algorithm_code(self._owner.config)
        call.load()
        members = self._make(call)
        return int(array[0]), members

    def _barrier(self) -> Sequence[int]:
        return self._make(Call("barrier", None, None))

    def _broadcast(self, array: Any, root: int) -> None:
        call = Call("broadcast", array, array, peer=root).copy()
        call.load()
        self._make(call)

    def _make(self, call: Call) -> Sequence[int]:
        """The members that took part."""
        op = self._native.submit(call.request(self.timeout.total_seconds()))
        return Operation(op, call.kind, call.result, call.after).report().members


def _read(content: bytes, source: int) -> tuple[dict[str, Any], list[int]]:
    """What a source says: its header or an error, and the bytes of each array behind it.

    Raises:
        InvalidRequestError: that is none of these.
    """
    try:
        told = json.loads(content)
    except (ValueError, RecursionError):
        told = None
    if isinstance(told, dict) and ("error" in told or "header" in told):
        sizes: Any = [] if "error" in told else told.get("bytes")
        if _are_sizes(sizes):
            return told, sizes
    raise InvalidRequestError(f"what rank {source} says that it has is no state: {content[:60]!r}")


def _are_sizes(sizes: Any) -> bool:
    are_counts = isinstance(sizes, list) and all(type(size) is int and size >= 0 for size in sizes)
    return are_counts and sum(sizes) <= STATE_BYTES_MAX


def _room(size: int, source: int) -> Any:
    try:
        return np.empty(size, np.uint8)
    except MemoryError as error:
        raise InvalidRequestError(f"no memory for the {size} bytes that rank {source} says it has") from error


def _packed(arrays: Sequence[Array]) -> tuple[dict[str, Any], list[Any]]:
    """Arrays, as `Boundary.share` sends them."""
    described = [{"dtype": str(array.dtype), "shape": list(array.shape)} for array in arrays]
    return {"arrays": described}, [np.frombuffer(array.tobytes(), np.uint8).copy() for array in arrays]


def _unpack(header: dict[str, Any], received: list[Any], arrays: Sequence[Array]) -> None:
    """Writes what was sent into `arrays`.

    Raises:
        InvalidRequestError: they are not alike.
    """
    ours = [{"dtype": str(array.dtype), "shape": list(array.shape)} for array in arrays]
    theirs = header.get("arrays") if isinstance(header, dict) else None
    if theirs != ours or [data.nbytes for data in received] != [array.nbytes for array in arrays]:
        raise InvalidRequestError(f"sync: the others have {theirs}, this rank {ours}")
    for array, data in zip(arrays, received, strict=True):
        array[...] = data.view(array.dtype).reshape(array.shape)
