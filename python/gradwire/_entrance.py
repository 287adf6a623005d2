"""The Store where ranks wait that join a group which runs: what they and the members write there, which `_boundary.py` is built on.

    the newcomer's Door                           the members' Watch
    publish(): again/<rank>, then waiting    ->   newcomer(), record()
    answered()                               <-   answer(): answer/<rank>

Keys below the prefix of the group's round (`_rendezvous.py`): `again` counts lives; `again/<rank>` has the record of the latest life of
a rank, `waiting` changes when one was written, `answer/<rank>` is what members say to it; `left/<rank>`: it has left in good order.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from typing import Any

from gradwire.errors import GradwireError, MissingRankError, RendezvousError

logger = logging.getLogger("gradwire")

# A newcomer looks for its answer so often.
POLL_S = 0.01
# A Store that does not answer would hold up every step.
REST_S = 30.0


class _Lives:
    """The Store, as far as the lives of ranks are concerned.

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

    def close(self) -> None:
        """Ends the connection, where it is this object's."""
        store, self._store = self._store, None
        if hasattr(store, "close"):
            store.close()

    def _open(self) -> Any:
        if self._store is None:
            self._store = self._connect()
        return self._store

    def _answer_of(self, rank: int) -> dict[str, Any]:
        """What a member has said last to a rank that waits, in whatever life; to life 0: nothing yet."""
        answer: dict[str, Any] = json.loads(_text(self._open().get(self._key("answer", rank))))
        return answer

    def _key(self, name: str, rank: int) -> str:
        return f"{self._prefix}/{name}/{rank}"


class Watch(_Lives):
    """A member's side: who waits, what it is told, and that this rank leaves. A Store that fails is left alone for a while."""

    def __init__(self, connect: Callable[[], Any], round_number: int, rank: int, world_size: int) -> None:
        super().__init__(connect, round_number, rank, world_size)
        self._seen = ""
        self._tried: dict[int, int] = {}
        self._asks_at = 0.0

    def newcomer(self) -> int:
        """A life that waits, as one number; 0: nobody does."""
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
                if life > self._tried.get(rank, 0) and life > self._answer_of(rank)["life"]:
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

    def answer(self, rank: int, life: int, **answer: str) -> None:
        """Tells it what it needs to know, or why it may not join. By this whoever is the first member later knows that it is settled."""
        self._tried[rank] = life
        try:
            self._open().set(self._key("answer", rank), json.dumps({"life": life, **answer}))
        except (GradwireError, RuntimeError, OSError) as error:
            logger.warning("rank %d, which wants to join, cannot be answered: %s", rank, error)

    def leave(self) -> None:
        """Says that this rank needs no successor. A Store that is gone does not matter."""
        if time.monotonic() < self._asks_at:
            return
        try:
            self._open().set(self._key("left", self._rank), "1")
        except (GradwireError, RuntimeError, OSError) as error:
            logger.debug("the Store does not learn that rank %d left: %s", self._rank, error)
        self.close()


class Door(_Lives):
    """A newcomer's side: it waits, and is answered."""

    def publish(self, new_record: Callable[[int], str]) -> int:
        """Waits to join with the record of a new life; which life that is."""
        store = self._open()
        life = int(store.add(f"{self._prefix}/again", 1))
        answer = self._key("answer", self._rank)
        if not store.check([answer]):  # what an earlier life was answered tells members that it is settled
            store.set(answer, json.dumps({"life": 0}))
        store.set(self._key("again", self._rank), json.dumps({"life": life, "record": new_record(life)}))
        store.set(f"{self._prefix}/waiting", str(life))
        return life

    def answered(self, life: int, timeout_s: float, left_s: float) -> str:
        """What a member answers to it within `left_s`, what is left of `timeout_s`.

        Raises:
            MissingRankError: none did.
            RendezvousError: they refuse it.
        """
        end = time.monotonic() + left_s
        while time.monotonic() < end:
            answer = self._answer_of(self._rank)
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


def _text(value: Any) -> str:
    """What a Store holds; torch's give bytes."""
    return value.decode() if isinstance(value, bytes) else str(value)
