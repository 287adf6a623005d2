"""Between two steps: where a rank that was started again joins a group that runs, and gets what the others have (docs/membership.md).

All members cross the boundary together. Who waits to join has published a record in the Store under which the group was formed; the
first member looks there, all of them hear of it by an exact all-reduce, admit the record, and confirm so by another. Only then is the
newcomer answered. It becomes a member by an epoch of its own (`gradwire-membership`), and its first call is the barrier that ends the
crossing on all others. Without a newcomer a crossing is one look into the Store by one rank and one small all-reduce.

Keys below the prefix of the group's round (`_rendezvous.py`): `again` counts lives; `again/<rank>` has the record of the latest life of
a rank, `waiting` changes when one was written, `answer/<rank>` is what members say to it; `left/<rank>`: it has left in good order.
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
from gradwire._operation import Call, Operation
from gradwire._policy import algorithm_code
from gradwire._runtime import Runtime
from gradwire.errors import (
    GradwireError,
    GroupError,
    InvalidRequestError,
    MissingRankError,
    PeerLostError,
    RendezvousError,
)

if TYPE_CHECKING:
    from gradwire._rendezvous import Place

logger = logging.getLogger("gradwire")

# A newcomer and the members look at what the other has done so often.
POLL_S = 0.01
# A Store that does not answer would hold up every step.
REST_S = 30.0
# Parts of the state travel in pieces, so that what members keep for each other stays small.
PIECE_BYTES = 32 << 20


class Entrance:
    """The Store, as far as joining is concerned.

    Args:
        connect: the Store under which the group was formed, with the methods of torch's; called when it is needed.
        round_number: in which the group was formed.
        rank, world_size: of this process.
    """

    def __init__(self, connect: Callable[[], Any], round_number: int, rank: int, world_size: int) -> None:
        self._connect = connect
        self._prefix = f"gradwire/{round_number}"
        self._rank = rank
        self._world_size = world_size
        self._store: Any = None
        self._seen = ""
        self._tried: dict[int, int] = {}
        # A Store that does not answer is left alone until then.
        self._asks_at = 0.0

    def leave(self) -> None:
        """Says that this rank needs no successor. A Store that is gone does not matter."""
        if time.monotonic() < self._asks_at:
            return
        try:
            self._open().set(self._key("left", self._rank), "1")
        except (GradwireError, RuntimeError) as error:
            logger.debug("the Store does not learn that rank %d left: %s", self._rank, error)
        self.close()

    def close(self) -> None:
        """Ends the connection, where it is this object's."""
        store, self._store = self._store, None
        if hasattr(store, "close"):
            store.close()

    # For the members.

    def newcomer(self) -> int:
        """A life that waits, as one number; 0: nobody does. A Store that fails is left alone for a while."""
        if time.monotonic() < self._asks_at:
            return 0
        try:
            return self._look()
        except (GradwireError, RuntimeError, OSError) as error:
            self._asks_at = time.monotonic() + REST_S
            self.close()
            logger.warning("no rank can join this group now, the Store does not answer: %s", error)
            return 0

    def _look(self) -> int:
        store, waiting = self._open(), f"{self._prefix}/waiting"
        if not self._seen and not store.check([waiting]):
            return 0
        latest = _text(store.get(waiting))
        if latest == self._seen:
            return 0
        for rank in range(self._world_size):
            if store.check([self._key("again", rank)]):
                life = int(json.loads(_text(store.get(self._key("again", rank))))["life"])
                if life > self._tried.get(rank, 0):
                    return life * self._world_size + rank
        self._seen = latest
        return 0

    def record(self, rank: int, life: int) -> str:
        """What it has published.

        Raises:
            RendezvousError: there is a later life.
        """
        entry = json.loads(_text(self._open().get(self._key("again", rank))))
        if entry["life"] != life:
            raise RendezvousError(f"life {life} of rank {rank} waits no more", rank=rank)
        return str(entry["record"])

    def settle(self, rank: int, life: int) -> None:
        """It is not looked at again."""
        self._tried[rank] = life

    def answer(self, rank: int, life: int, **answer: str) -> None:
        """Tells it what it needs to know, or why it may not join."""
        try:
            self._open().set(self._key("answer", rank), json.dumps({"life": life, **answer}))
        except (GradwireError, RuntimeError, OSError) as error:
            logger.warning("rank %d, which wants to join, cannot be answered: %s", rank, error)

    # For the newcomer.

    def publish(self, new_record: Callable[[int], str]) -> int:
        """Waits to join with the record of a new life; which life that is."""
        store = self._open()
        life = int(store.add(f"{self._prefix}/again", 1))
        self.answer(self._rank, 0)
        store.set(self._key("again", self._rank), json.dumps({"life": life, "record": new_record(life)}))
        store.set(f"{self._prefix}/waiting", str(life))
        return life

    def answered(self, life: int, timeout_s: float) -> str:
        """What a member answers to it.

        Raises:
            MissingRankError: none did.
            RendezvousError: they refuse it.
        """
        end = time.monotonic() + timeout_s
        while time.monotonic() < end:
            answer = json.loads(_text(self._open().get(self._key("answer", self._rank))))
            if answer["life"] == life and "refused" in answer:
                text = f"the group runs and does not take rank {self._rank} in: {answer['refused']}"
                raise RendezvousError(text, rank=self._rank)
            if answer["life"] == life:
                return str(answer["running"])
            time.sleep(POLL_S)
        others = [rank for rank in range(self._world_size) if rank != self._rank]
        raise MissingRankError(
            f"the group of rank {self._rank} was formed before, and no member has let it join again within {timeout_s:g} s: "
            "a member does so where it calls sync(), and more than half of the members must live",
            ranks=others,
            waited_s=timeout_s,
        )

    def _open(self) -> Any:
        if self._store is None:
            self._store = self._connect()
        return self._store

    def _key(self, name: str, rank: int) -> str:
        return f"{self._prefix}/{name}/{rank}"


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
        entrance: where newcomers wait.
        place: of this process in the group; its timeout is that of a call.
        is_new: it has just joined itself.
    """

    def __init__(
        self,
        owner: Runtime,
        native: _native.Group,
        entrance: Entrance,
        place: Place,
        *,
        is_new: bool,
    ) -> None:
        self._owner = owner
        self._native = native
        self._entrance = entrance
        self._rank, self._world_size = place.rank, place.world_size
        self._timeout_s = place.timeout.total_seconds()
        self._is_new = is_new

    def leave(self) -> None:
        """Before a rank leaves in good order: another life of it is not expected then. Who is no member may come back."""
        epoch = self._native.stats()["epoch"]
        if epoch is not None and epoch["is_member"]:
            self._entrance.leave()
        self._entrance.close()

    def cross(self) -> Crossing:
        """Takes in at most one rank that waits. Nothing happens unless `on_peer_loss="continue"`.

        Raises:
            GroupError: the group has ended.
        """
        if self._owner.config.on_peer_loss != "continue":
            return Crossing()
        if self._is_new:
            self._is_new = False
            return self._crossed(self._rank, self._barrier())
        members = self._native.watch()["epoch"]["members"]
        waits = self._entrance.newcomer() if members[0] == self._rank else 0
        code, _ = self._reduce(waits, "max")
        if code == 0:
            return Crossing()
        life, rank = divmod(code, self._world_size)
        running, refusal = self._admit(rank, life)
        all_have, members = self._reduce(int(running is not None), "min")
        is_first = members[0] == self._rank
        if self._rank != 0 and not is_first:
            self._entrance.close()
        if not all_have:
            if is_first and refusal:
                self._entrance.answer(rank, life, refused=refusal)
            if refusal:
                self._entrance.settle(rank, life)
            return Crossing()
        if is_first:
            self._entrance.answer(rank, life, running=str(running))
        self._entrance.settle(rank, life)
        self._wait_for(rank, life)
        members = self._barrier()
        return self._crossed(rank, members) if self._has_joined(rank, life, members) else Crossing()

    def sync(self, arrays: Sequence[Array]) -> bool:
        """Crosses, and gives who has joined the arrays of the others; whether somebody has."""
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
            PeerLostError: no source is left.
            GroupError: the group has ended.
        """
        lost: GroupError | None = None
        for source in crossing.sources:
            try:
                return self._share_from(source, crossing, pack)
            except PeerLostError as error:  # on all alike
                logger.info("rank %d was lost while it told rank %s what it has", source, crossing.newcomer)
                lost = error
        raise lost or InvalidRequestError("nobody has joined")

    def _share_from(self, source: int, crossing: Crossing, pack: Callable[[], tuple[dict[str, Any], list[Any]]]) -> Any:
        head = np.zeros(0, np.uint8)
        arrays: list[Any] = []
        if self._rank == source:
            header, arrays = pack()
            text = json.dumps({"header": header, "bytes": [array.nbytes for array in arrays]})
            head = np.frombuffer(text.encode(), np.uint8).copy()
        length = np.array([head.size], np.int64)
        self._broadcast(length, source)
        if self._rank != source:
            head = np.empty(int(length[0]), np.uint8)
        self._broadcast(head, source)
        told = json.loads(head.tobytes())
        is_newcomer = self._rank == crossing.newcomer
        received = []
        for index, size in enumerate(told["bytes"]):
            array = arrays[index] if self._rank == source else np.empty(size, np.uint8)
            for start in range(0, size, PIECE_BYTES):
                self._broadcast(array[start : start + PIECE_BYTES], source)
            if is_newcomer:
                received.append(array)
        return (told["header"], received) if is_newcomer else None

    def _admit(self, rank: int, life: int) -> tuple[str | None, str | None]:
        """What the rank has to know; or why it may never join, if it may not."""
        try:
            return self._native.admit(self._entrance.record(rank, life)), None
        except RendezvousError as error:
            logger.warning("rank %d cannot join: %s", rank, error)
            return None, str(error)
        except (GradwireError, RuntimeError, OSError) as error:
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
        op = self._native.submit(call.request(self._timeout_s))
        return Operation(op, call.kind, call.result, call.after).report().members


def _packed(arrays: Sequence[Array]) -> tuple[dict[str, Any], list[Any]]:
    """Arrays, as `Boundary.share` sends them."""
    for array in arrays:
        _arrays.check(array)
    described = [{"dtype": str(array.dtype), "shape": list(array.shape)} for array in arrays]
    return {"arrays": described}, [np.frombuffer(array.tobytes(), np.uint8).copy() for array in arrays]


def _unpack(header: dict[str, Any], received: list[Any], arrays: Sequence[Array]) -> None:
    """Writes what was sent into `arrays`.

    Raises:
        InvalidRequestError: they are not alike.
    """
    ours = [{"dtype": str(array.dtype), "shape": list(array.shape)} for array in arrays]
    if header["arrays"] != ours:
        raise InvalidRequestError(f"sync: the others have {header['arrays']}, this rank {ours}")
    for array, data in zip(arrays, received, strict=True):
        array[...] = data.view(array.dtype).reshape(array.shape)


def _text(value: Any) -> str:
    """What a Store holds; torch's give bytes."""
    return value.decode() if isinstance(value, bytes) else str(value)
