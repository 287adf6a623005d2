"""The Store where ranks wait that join a group which runs: what they and the members write there, which `_boundary.py` is built on.

    the newcomer's Door                           the members' Watch
    publish(): again/<rank>, then waiting    ->   newcomer(), record()
    answered()                               <-   answer(): answer/<rank>

Keys below the prefix of the group's round (`_rendezvous.py`): `again` counts lives; `again/<rank>` has the record of the latest life of
a rank, `waiting` changes when one was written, `answer/<rank>` is what members say to it; `left/<rank>`: which life of it has left in good
order;
`over`: each rank has left or waited here, so that nobody is a member any more.
A Store that rank 0 serves anew has none of this: the members write it again, under another round (`_heritage.py`).
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

from gradwire import _heritage
from gradwire._calling import read
from gradwire._heritage import Heritage, Reopening
from gradwire.errors import GradwireError, MissingRankError, RendezvousError

logger = logging.getLogger("gradwire")

# A newcomer looks for its answer so often.
POLL_S = 0.01
# Whether all ranks wait here is looked at so often: that asks the Store for each of them.
LOOK_S = 1.0
# Who was let in and did not come keeps the members waiting for a peer timeout: before they let it in again it waits so long itself, and
# twice as long each time. So does who could not be told that it is refused.
VAIN_PAUSE_S, VAIN_PAUSE_MAX_S = 10.0, 120.0
# A Store that does not answer would hold up every step.
REST_S = 30.0
# A member that does not reach it while all others do: they wait for each attempt.
UNREAD_PAUSE_S = 1.0
# Members tell each other a life and its rank in one number of 64 bits.
LIVES_MAX = 1 << 40
# What a Store can do: fail, or have something there that no rank of gradwire's wrote: also a number that is not finite.
FAILURES = (GradwireError, RuntimeError, OSError, ValueError, TypeError, KeyError, ArithmeticError)


class NoMemberLeftError(Exception):
    """All ranks of the world wait to join a group, or have left it: it has no members, and who waits may form a new one."""


def is_over(store: Any, round_number: int) -> bool:
    """Whether its ranks have found that the group of a round has no members left."""
    return bool(store.check([f"gradwire/{round_number}/over"]))


def has_left(store: Any, round_number: int, rank: int) -> bool:
    """Whether a rank has left the group of a round in good order. A life before its latest one, which may not know of that, says nothing.

    Raises:
        RendezvousError: what lies there no rank wrote.
    """
    left, again = (f"gradwire/{round_number}/{name}/{rank}" for name in ("left", "again"))
    if not store.check([left]):
        return False
    life = read(store, left, life=int)["life"]
    return not store.check([again]) or life >= read(store, again, life=int)["life"]


class _Lives:
    """The Store, as far as the lives of ranks are concerned.

    Args:
        connect: the Store under which the group was formed, with the methods of torch's; called when it is needed.
        round_number: in which the group was formed.
        rank, world_size: of this process.
    """

    def __init__(self, connect: Callable[[], Any], round_number: int, rank: int, world_size: int) -> None:
        self._connect = connect
        self._round = round_number
        self._rank = rank
        self._world_size = world_size
        self._store: Any = None

    def close(self) -> None:
        """Ends the connection, where it is this object's."""
        store, self._store = self._store, None
        if hasattr(store, "close"):
            store.close()

    @property
    def _prefix(self) -> str:
        return f"gradwire/{self._round}"

    def _open(self) -> Any:
        if self._store is None:
            self._store = self._connect()
        return self._store

    def _answer_of(self, rank: int) -> dict[str, Any]:
        """What a member has said last to a rank that waits, in whatever life; to life 0: nothing yet."""
        answer: dict[str, Any] = json.loads(_text(self._open().get(self._key("answer", rank))))
        if not isinstance(answer["life"], int):
            raise TypeError(f"an answer to life {answer['life']!r}")
        return answer

    def _waiting_life(self, rank: int) -> int:
        """The latest life of a rank, if it has no answer yet; else 0."""
        store = self._open()
        if not store.check([self._key("again", rank)]):
            return 0
        life = int(json.loads(_text(store.get(self._key("again", rank))))["life"])
        if not 0 < life < LIVES_MAX:
            raise ValueError(f"rank {rank} cannot be in life {life}")
        return life if life > self._answer_of(rank)["life"] else 0

    def _key(self, name: str, rank: int) -> str:
        return f"{self._prefix}/{name}/{rank}"


class _Pause:
    """How long something is not tried again that failed: twice as long each time.

    Args:
        first_s, max_s: the first one, and the longest.
    """

    def __init__(self, first_s: float, max_s: float) -> None:
        self._pause_s = first_s / 2
        self._max_s = max_s
        self.until = 0.0

    def again(self) -> None:
        """It failed again."""
        self._pause_s = min(2 * self._pause_s, self._max_s)
        self.until = time.monotonic() + self._pause_s

    def is_over(self) -> bool:
        """Whether it may be tried again."""
        return time.monotonic() >= self.until


class Watch(_Lives):
    """A member's side: who waits, what it is told, and that this rank leaves. A Store that fails is left alone for a while.

    Args:
        connect, round_number, rank, world_size: as above.
        life: of this rank; 0: it has formed the group.
        heritage: what is written again where the Store is new; None: it lives as long as anybody who needs it.
        reopening: connects beside the steps, so that none waits and a Store that was gone is soon found again.
    """

    def __init__(
        self,
        connect: Callable[[], Any],
        round_number: int,
        rank: int,
        world_size: int,
        *,
        life: int = 0,
        heritage: Heritage | None = None,
        reopening: Reopening | None = None,
    ) -> None:
        super().__init__(connect, round_number, rank, world_size)
        self._own_life = life
        self._heritage = heritage
        self._reopening = reopening
        self._life = 0 if heritage is None else heritage.life
        self._is_new = False
        self._is_gone = False
        self._seen = ""
        self._tried: dict[int, int] = {}
        self._vain: dict[int, _Pause] = {}
        self._held_back: tuple[str, float] = ("", 0.0)
        self._asks_at = 0.0
        self._unread: _Pause | None = None

    def close(self) -> None:
        """Ends the connection, and the attempts to make one."""
        super().close()
        if self._reopening is not None:
            self._reopening.close()

    def note(self, life: int) -> None:
        """All members have heard of this life: on a new Store later ones are counted from there."""
        self._life = max(self._life, life)

    def waited(self, rank: int, *, has_joined: bool) -> None:
        """The members have waited for one that was let in."""
        if has_joined:
            self._vain.pop(rank, None)
        else:
            self._was_in_vain(rank)

    def _was_in_vain(self, rank: int) -> None:
        self._vain.setdefault(rank, _Pause(VAIN_PAUSE_S, VAIN_PAUSE_MAX_S)).again()

    def newcomer(self, members: Sequence[int] = ()) -> int:
        """A life that waits, as one number; 0: nobody does. `members`: who is in the group now."""
        if time.monotonic() < self._asks_at:
            return 0
        try:
            if not self._is_open():
                return 0
            code = self._look() if not self._is_new or self._write_again(members) else 0
        except FAILURES as error:
            self.close()
            if self._reopening is None:
                self._asks_at = time.monotonic() + REST_S
            if not self._is_gone or self._reopening is None:
                logger.warning("no rank can join this group now, the Store does not answer: %s", error)
            self._is_gone = True
            return 0
        self._is_gone = False
        return code

    def _is_open(self) -> bool:
        """Whether the Store can be asked: where nobody should wait for a connection, one may be under way."""
        if self._store is None and self._reopening is not None:
            store = self._reopening.take()
            if store is None:
                return False
            self._settle(store)
        self._open()
        return True

    def _open(self) -> Any:
        if self._store is None:
            self._settle(self._connect())
        return self._store

    def _settle(self, store: Any) -> None:
        """Finds the group's round in a Store that has just been connected to; rank 0 may serve it anew."""
        self._store = store
        if self._heritage is None:
            return
        self._is_new = not store.check([f"{self._prefix}/end"])
        running = _heritage.running_round(store) if self._is_new else 0
        if running:
            self._round, self._is_new, self._seen = running, False, ""

    def _write_again(self, members: Sequence[int]) -> bool:
        """Whether newcomers find the group now."""
        assert self._heritage is not None, "without it no Store is new"
        if _heritage.is_anothers(self._store, members):
            return False
        _heritage.write_again(self._store, self._round, self._heritage, self._life)
        logger.info("rank 0 serves the rendezvous again: rank %d wrote there what a rank needs to join", self._rank)
        self._settle(self._store)
        return not self._is_new

    def _look(self) -> int:
        store, waiting = self._open(), f"{self._prefix}/waiting"
        if not self._seen and not store.check([waiting]):
            return 0
        latest = _text(store.get(waiting))
        held_at, held_until = self._held_back
        if latest == self._seen or (latest == held_at and time.monotonic() < held_until):
            return 0
        held_back: list[int] = []
        for rank in range(self._world_size):
            life = self._waiting_life(rank)
            if life <= self._tried.get(rank, 0):
                continue
            if rank not in self._vain or self._vain[rank].is_over():
                return life * self._world_size + rank
            held_back.append(rank)
        if not held_back:
            self._seen = latest
            return 0
        until = min(self._vain[rank].until for rank in held_back)
        if latest != held_at:
            wait_s = until - time.monotonic()
            logger.info(
                "rank(s) %s, which did not come or could not be answered, are tried again in %.0f s", held_back, wait_s
            )
        self._held_back = (latest, until)
        return 0

    def record(self, rank: int, life: int) -> str | None:
        """What it has published; None: there is a later life, or this member cannot read it now.

        Then no connection is made here for a while: all members wait for each attempt.
        """
        if self._store is None and self._unread is not None and not self._unread.is_over():
            return None
        try:
            entry = json.loads(_text(self._open().get(self._key("again", rank))))
            latest, record = entry["life"], str(entry["record"])
        except FAILURES as error:
            self.close()
            if self._unread is None:
                logger.warning("rank %d cannot join now, rank %d cannot read its record: %s", rank, self._rank, error)
                self._unread = _Pause(UNREAD_PAUSE_S, REST_S)
            self._unread.again()
            return None
        self._unread = None
        if latest != life:
            logger.info("life %d of rank %d waits no more", life, rank)
            return None
        return record

    def answer(self, rank: int, life: int, **answer: str) -> None:
        """Tells it what it needs to know, or why it may not join. By this whoever is the first member later knows that it is settled.

        Where the Store fails, or has no room for it, it waits on, and is found again after a pause.
        """
        try:
            self._open().set(self._key("answer", rank), json.dumps({"life": life, **answer}))
        except FAILURES as error:
            logger.warning("rank %d, which wants to join, cannot be answered now: %s", rank, error)
            self.close()  # the answer to this may come when another one is expected
            if "refused" in answer:  # who is let in is waited for, in vain
                self._was_in_vain(rank)
        else:
            self._tried[rank] = life

    def leave(self) -> None:
        """Says that this rank needs no successor. A Store that is gone does not matter."""
        if time.monotonic() < self._asks_at or (self._is_gone and self._reopening is not None):
            return
        try:
            store = self._open()
            if not self._is_new:
                store.set(self._key("left", self._rank), json.dumps({"life": self._own_life}))
        except FAILURES as error:
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

    def _look_for_members(self) -> None:
        """Whether there can be any: a member waits for nothing here, and its life has been answered if it had to.

        Who has come to wait, and ended since, counts as waiting: it is no member either. Nor is who has left in good order.
        """
        store = self._open()
        if is_over(store, self._round) or all(map(self._is_no_member, range(self._world_size))):
            store.set(f"{self._prefix}/over", "1")
            raise NoMemberLeftError

    def _is_no_member(self, rank: int) -> bool:
        return has_left(self._open(), self._round, rank) or self._waiting_life(rank) > 0

    def answered(self, life: int, timeout_s: float, left_s: float) -> str:
        """What a member answers to it within `left_s`, what is left of `timeout_s`.

        Raises:
            NoMemberLeftError: there are no members; all ranks have come to wait here, or have left.
            MissingRankError: none did.
            RendezvousError: they refuse it.
        """
        end, looks_at = time.monotonic() + left_s, 0.0
        while time.monotonic() < end:
            try:
                if time.monotonic() >= looks_at:
                    self._look_for_members()
                    looks_at = time.monotonic() + LOOK_S
                answer = self._answer_of(self._rank)
            except (ValueError, TypeError, KeyError, RecursionError) as error:
                text = f"what lies at {self._key('answer', self._rank)} of the Store is no member's answer: {error}"
                raise RendezvousError(text, rank=self._rank) from error
            if answer["life"] == life and "refused" in answer:
                text = f"the group runs and does not take rank {self._rank} in: {answer['refused']}"
                raise RendezvousError(text, rank=self._rank)
            if answer["life"] == life:
                return str(answer.get("running"))
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
