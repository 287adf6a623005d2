"""How the ranks that form a group on torch's Store know that they were started together.

That Store outlives processes: torchrun keeps one for all its attempts, and what an attempt wrote that came to nothing stays there. So each
process draws a number of its own and says that it is here; rank 0 begins a round that nobody has begun before, and calls each process into
it by that number. Who has ended hears no call, and a round's keys are those of processes that do.

    rounds/all         rounds that rank 0 has begun
    here/<rank>        the latest process of a rank that came: its number, and why it cannot start, if so; until its group is formed
    here/server-<i>    of a dedicated parameter server, which does not know its rank before it is called
    called/<it>        the round into which it was called
    gave_up            the latest round that its rank 0 gave up, why, and for which ranks it had waited in vain

Below `gradwire/` and the prefix that torch gives each group. A `_meeting.py` board is of one start, and needs none of this.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import logging
import secrets
import socket
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any, TypeVar

from gradwire.errors import GradwireError, MissingRankError, RendezvousError, WorldSizeError

logger = logging.getLogger("gradwire")

# Longest single wait on the Store: between two, a missing rank's neighbours are looked at and Ctrl-C is answered.
POLL_S = 1.0
# Stores count in whole milliseconds, and 0 means for ever.
POLL_MIN_S = 0.01
# Torch's Stores are looked at after the first of these, then after twice as long, and so on up to the second.
LOOK_MIN_S, LOOK_S = 0.001, 0.25
# Who cannot start stays so long to tell the others of its start.
TELLING_S = 5.0
# What may be of an earlier start is believed by rank 0, and told by others, when nothing else has come for so long: ranks of one start come
# further apart than seconds.
AGAIN_S = 120.0
# First pause for who was called, and may have ended long ago; each is twice as long as the one before.
PAUSE_S = 0.05

_Function = TypeVar("_Function", bound=Callable[..., Any])

_ROUNDS = "gradwire/rounds/all"
_GAVE_UP = "gradwire/gave_up"
# What no rank writes: a Store that is to put it in place of itself says what it has, or this if it has nothing.
_NOTHING = "nothing"


def tells_of_a_failed_store(function: _Function) -> _Function:
    """What a Store raises that has ended, or cannot be reached, becomes an error of ours."""

    @functools.wraps(function)
    def told(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except GradwireError:
            raise
        except RuntimeError as error:  # DistNetworkError and DistStoreError are
            raise _store_failed(error) from error

    return told  # type: ignore[return-value]


def _store_failed(error: RuntimeError) -> RendezvousError:
    return RendezvousError(
        f"the Store failed while the ranks waited for each other: {error}. It ends with the process that holds it, rank 0 or "
        "the launcher: see there why that ended",
        over=True,
    )


class Caller:
    """Rank 0, which begins a round and calls the others into it.

    Args:
        store: of the group.
        world_size: of this process, dedicated servers included.
        servers: so many of these are dedicated servers, the last ones.
    """

    def __init__(self, store: Any, world_size: int, servers: int = 0) -> None:
        self._store = store
        self._world_size = world_size
        self._workers = world_size - servers
        self.round_number = int(store.add(_ROUNDS, 1))
        self._called: dict[str, str] = {}
        self._failed_since: dict[str, float] = {}
        self._pause_s = PAUSE_S

    def call(self, ranks: Iterable[int]) -> None:
        """Calls those of these ranks that have come.

        Raises:
            RendezvousError: one of them cannot start, and no other process has taken its place.
        """
        for rank in ranks:
            if (one := self._call(self._name(rank))) is not None:
                self._look_at(rank, one)
        # Who was started with a larger world size, or as a server too many, has to hear of this one's.
        for beyond in (map(str, itertools.count(self._workers)), map(self._name, itertools.count(self._world_size))):
            while self._call(next(beyond)) is not None:
                pass

    def _name(self, rank: int) -> str:
        """Of a worker its rank, of a dedicated server what `server_is_called` says."""
        return str(rank) if rank < self._workers else _server(rank - self._workers)

    def _call(self, name: str) -> dict[str, Any] | None:
        """Calls one that has come, and returns what it says; None: it has not."""
        one = _read_if_there(self._store, _here(name), number=str, host=str, error=str)
        if one is not None and one["number"] != self._called.get(name):
            self._store.set(_called(one["number"]), str(self.round_number))
            self._called[name] = one["number"]
            self._pause_s = PAUSE_S
        return one

    def wait_for(self, rank: int, record: str, longest_s: float) -> None:
        """Waits for what comes next of a rank, itself or its record, but not for long: who was called may have ended."""
        if (name := self._name(rank)) not in self._called:
            return pause(self._store, _here(name), longest_s)
        pause(self._store, record, min(longest_s, self._pause_s))
        self._pause_s = min(2 * self._pause_s, POLL_S)
        return None

    def note(self, error: str, missing: Iterable[int] = (), waited_s: float | None = None) -> None:
        """Leaves word that this round has come to nothing, for who is in it and for who comes later.

        Args:
            error: why.
            missing: the ranks that did not come, if that is why.
            waited_s: for them.
        """
        note = {"round": self.round_number, "host": socket.gethostname(), "error": error}
        self._store.set(_GAVE_UP, json.dumps({**note, "missing": list(missing), "waited_s": waited_s}))

    def stay(self) -> None:
        """For as long as those who were called may sleep, so that they read the note: the Store may end with this process.

        Who comes meanwhile, or came just before the note, is called to it too: nobody else would tell it.
        """
        end = time.monotonic() + POLL_S
        while True:
            for name in map(self._name, range(1, self._world_size)):
                with contextlib.suppress(GradwireError):  # what this one wrote may be why all end
                    self._call(name)
            if not self._called:
                return
            pause(self._store, f"{_GAVE_UP}/never", PAUSE_S)
            if time.monotonic() >= end:
                return

    def give_up(self, ranks: Iterable[int], error: str) -> None:
        """This process cannot start: leaves word, and stays for a moment to call who comes, so that they read why."""
        self.note(error)
        ranks, end = list(ranks), time.monotonic() + TELLING_S
        self.call(ranks)
        names, may_have_ended = list(map(self._name, ranks)), dict(self._called)
        while time.monotonic() < end and any(self._called.get(name) == may_have_ended.get(name) for name in names):
            pause(self._store, f"{_GAVE_UP}/never", PAUSE_S)
            self.call(ranks)
        if time.monotonic() < end:  # those who were called a moment ago have yet to read it
            self.stay()

    def _look_at(self, rank: int, one: dict[str, Any]) -> None:
        if not one["error"]:
            return
        since = self._failed_since.setdefault(one["number"], time.monotonic())
        if time.monotonic() - since > AGAIN_S:
            raise _could_not_start(rank, one)


@tells_of_a_failed_store
def be_called(store: Any, rank: int, world_size: int, timeout_s: float, error: str = "") -> int:
    """Another rank than 0: says that it is here and waits for its round.

    Args:
        store: of the group.
        rank: of this process.
        world_size: of its group, as it was started.
        timeout_s: longest wait.
        error: why it cannot start, if so.

    Raises:
        MissingRankError: rank 0 did not call it.
        WorldSizeError: a group was formed without it.
        RendezvousError: rank 0 could not start, and no other process has taken its place.
    """
    is_told = False

    def look(latest: int, is_new: bool, waited_s: float) -> None:
        # A round from before this process came may be of an earlier start, and the rank 0 of this one only slow.
        nonlocal is_told
        if is_new or waited_s >= timeout_s:
            _look_at_the_latest(store, latest, rank, world_size)
        elif waited_s > AGAIN_S and not is_told:
            is_told = True
            try:
                _look_at_the_latest(store, latest, rank, world_size)
            except GradwireError as word:
                logger.warning("rank %d waits for rank 0, which may have ended: %s", rank, word)

    return _be_called(store, str(rank), f"rank {rank}", timeout_s, look=look, error=error)


@tells_of_a_failed_store
def server_is_called(store: Any, index: int, timeout_s: float) -> int:
    """The same for a dedicated parameter server, whose rank depends on how many workers call it.

    Raises:
        MissingRankError: rank 0 did not call it, or gave a round up that began while this process waited.
        RendezvousError: rank 0 could not start.
    """

    def look(latest: int, is_new: bool, _waited_s: float) -> None:
        # Servers may be started long before their workers: what an earlier start left is not theirs.
        if is_new:
            look_for_a_note(store, latest, None)

    return _be_called(store, _server(index), f"server {index}", timeout_s, look=look)


def _be_called(
    store: Any, name: str, title: str, timeout_s: float, *, look: Callable[[int, bool, float], None], error: str = ""
) -> int:
    """Says that it is here and waits for its round; `look` hears of the latest round, whether it is new, and the seconds so far."""
    number, known = secrets.token_hex(16), latest_round(store)
    store.set(_here(name), json.dumps({"number": number, "host": socket.gethostname(), "error": error}))
    started, key = time.monotonic(), _called(number)
    while not store.check([key]):
        waited_s = time.monotonic() - started
        latest = latest_round(store)
        look(latest, latest > known, waited_s)
        if waited_s >= timeout_s:
            raise MissingRankError(
                f"rank(s) 0 did not appear within {timeout_s:g} s (this is {title} on {socket.gethostname()})",
                ranks=[0],
                waited_s=timeout_s,
            )
        pause(store, key, timeout_s - waited_s)
    try:
        return int(store.get(key))
    except ValueError as wrong:
        raise no_entry(key) from wrong
    finally:
        # Nobody else reads it, and a Store that outlives many groups would hold it for ever. Not every Store can.
        with contextlib.suppress(Exception):
            store.delete_key(key)


def latest_round(store: Any) -> int:
    """The latest that a rank 0 has begun; 0: none."""
    return int(store.add(_ROUNDS, 0))


def pause(store: Any, key: str, longest_s: float) -> None:
    """Waits for a key, but not for long.

    Raises:
        RendezvousError: the Store failed.
    """
    longest_s = min(max(longest_s, POLL_MIN_S), POLL_S)
    try:
        if getattr(store, "is_of_one_start", False):
            store.wait([key], timedelta(seconds=longest_s))
        else:
            _look_for(store, key, longest_s)
    except GradwireError:  # of our own Store, and already what its caller should see
        raise
    except RuntimeError as error:  # DistStoreError is one, and so is what other Stores raise when the time is over
        text = str(error).lower()
        if "timeout" not in text and "timed out" not in text:
            raise _store_failed(error) from error


def _look_for(store: Any, key: str, longest_s: float) -> None:
    """By itself a Store's `wait` would do, but torch's prints two lines of warnings each time that it waits in vain."""
    end, look_s = time.monotonic() + longest_s, LOOK_MIN_S
    while not store.check([key]) and (left_s := end - time.monotonic()) > 0:
        time.sleep(min(left_s, look_s))
        look_s = min(2 * look_s, LOOK_S)


def read(store: Any, key: str, **fields: type) -> dict[str, Any]:
    """What a rank has written under `key`, with these fields.

    Raises:
        RendezvousError: it is something else.
    """
    return _parsed(store.get(key), key, **fields)


def _read_if_there(store: Any, key: str, **fields: type) -> dict[str, Any] | None:
    """The same of a key that its writer may take back at any moment; None: it is not there.

    In one request: a Store that is asked for a key which has gone since it was looked for waits for it, and torch's breaks the connection
    where it goes in the middle.
    """
    found = store.compare_set(key, _NOTHING, _NOTHING)
    if not isinstance(found, (str, bytes)):  # a Store of the user's, which says nothing
        return read(store, key, **fields) if store.check([key]) else None
    if not found and not store.check([key]):
        return None
    return None if found in (_NOTHING, _NOTHING.encode()) else _parsed(found, key, **fields)


def _parsed(text: str | bytes, key: str, **fields: type) -> dict[str, Any]:
    try:
        entry = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise no_entry(key) from error
    return checked(entry, key, **fields)


def checked(entry: Any, key: str, **fields: type) -> dict[str, Any]:
    """An entry, if it has these fields."""
    if not isinstance(entry, dict) or not all(type(entry.get(name)) is kind for name, kind in fields.items()):
        raise no_entry(key)
    return entry


def no_entry(key: str) -> RendezvousError:
    """For what no rank wrote."""
    return RendezvousError(
        f"what lies at {key} of the Store was not written by this version of gradwire: does another program use the Store?"
    )


def look_for_a_note(store: Any, round_number: int, rank: int | None) -> None:
    """Whether rank 0 has given this round up.

    Args:
        store: of the group.
        round_number: of interest.
        rank: of this process; None: a server, which does not know it yet.

    Raises:
        MissingRankError: it has, because ranks did not come; so that all who waited for them get the same error.
        RendezvousError: it has, for another reason, or because this rank was too late.
    """
    if not store.check([_GAVE_UP]):
        return
    note = read(store, _GAVE_UP, round=int, host=str, error=str, missing=list)
    if note["round"] != round_number:
        return
    text, cause = f"rank 0 on {note['host']} gave up: {note['error']}", note["error"]
    if note["missing"] and rank not in note["missing"]:
        raise MissingRankError(text, ranks=note["missing"], waited_s=note.get("waited_s"), cause=cause)
    raise RendezvousError(text, rank=0, cause=cause)


def _look_at_the_latest(store: Any, latest: int, rank: int, world_size: int) -> None:
    """Whether its rank 0 will not call this one: it has given up, or knows of fewer ranks."""
    look_for_a_note(store, latest, rank)
    key = f"gradwire/{latest}/0"
    if store.check([key]):
        first = read(store, key, host=str, world_size=int)
        if first["world_size"] <= rank:
            raise other_world_size((0, first), (rank, world_size))


def other_world_size(their: tuple[int, dict[str, Any]], our: tuple[int, int]) -> WorldSizeError:
    """For a rank and its entry, and this rank and its world size."""
    (other, entry), (rank, world_size) = their, our
    theirs = entry["world_size"]
    text = f"rank {other} on {entry['host']} was started with world size {theirs}, rank {rank} with {world_size}: start all ranks with one"
    return WorldSizeError(text, rank=other, theirs=theirs, ours=world_size)


def _could_not_start(rank: int, one: dict[str, Any]) -> RendezvousError:
    text = f"rank {rank} on {one['host']} could not start: {one['error']}"
    return RendezvousError(text, rank=rank, cause=one["error"])


def said_by_rank(rank: int) -> str:
    """The key under which another rank than 0 says that it is here: rank 0 alone looks there, until the group is formed."""
    return _here(str(rank))


def said_by_server(index: int) -> str:
    """The same of a dedicated server."""
    return _here(_server(index))


def _server(index: int) -> str:
    return f"server-{index}"


def _here(name: str) -> str:
    return f"gradwire/here/{name}"


def _called(number: str) -> str:
    return f"gradwire/called/{number}"
