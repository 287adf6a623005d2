"""How ranks find each other: each publishes one record in a Store and reads all others.

The Store is torch's, which is there anyway, or without torch that of `_meeting.py`. A rank that cannot start publishes
why, so that the others do not wait for their timeout to learn it.

A default group with dedicated parameter servers meets below `gradwire-served` of the Store that lies under all prefixes,
because the server processes know no prefix of torch's; they are numbered behind the workers, and called by worker 0 too.

Keys, below the prefix that torch gives each group: on torch's Store rank 0 counts rounds (a destroyed group may be formed again under the
same name) and calls the others into them (`_calling.py`); on a board without torch `gradwire/rounds/<rank>` counts how often a rank has
formed a group there. `gradwire/<round>/<rank>` holds a rank's record, that of rank 0 also what the
job is called; `gradwire/<round>/read` counts the ranks that have read all of them, `gradwire/<round>/read/<rank>` is
there for each that has, `gradwire/<round>/reading/<rank>` says how far one is that takes long,
and `gradwire/<round>/read/all` is there once all have; `gradwire/<round>/told` and `told/all` say the same of ranks that know why there
will be no group; `gradwire/<round>/joined` counts the ranks that reached all others;
`gradwire/<round>/end` says how it ended for all. Of a group that was formed on torch's Store the ranks remove what only they needed for
that (`_board.py`), so that a launcher's Store does not hold the records of each. A rank that is started again while a group with
`on_peer_loss="continue"` runs joins it (`_boundary.py`) instead of forming another one; where rank 0 was, on a board that it serves anew,
the members say which group that is (`_heritage.py`).
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any, NamedTuple

from gradwire import _heritage, _native
from gradwire._board import Board, CalledAgain, RunsAlready, compare_settings
from gradwire._bounded import ANSWER_S, NO_GROUP, BoundedStore, give_time, root_of
from gradwire._calling import (
    POLL_MIN_S,
    POLL_S,
    TELLING_S,
    Caller,
    be_called,
    checked,
    latest_round,
    read,
    said_by_rank,
    said_by_server,
    server_is_called,
    tells_of_a_failed_store,
)
from gradwire._entrance import Door, NoMemberLeftError, has_left, is_over
from gradwire._heritage import Heritage
from gradwire._part_of_store import PartOfStore
from gradwire._runtime import Runtime, configuration, group_settings, runtime
from gradwire._uncrossed import check_that_all_are_crossed
from gradwire.errors import (
    GradwireError,
    MissingRankError,
    NotMemberError,
    RendezvousError,
    SecretMismatchError,
    SettingsMismatchError,
)

logger = logging.getLogger("gradwire")

# Who begins anew, in a round with others, has so long at least: with less it would give up while they could still form a group.
AGAIN_MIN = timedelta(seconds=30)
# Below this dedicated servers and their workers meet.
SERVED = "gradwire-served"


@dataclass(frozen=True)
class Place:
    """A rank in a group that is to be formed.

    Attributes:
        rank: of this process in the group.
        world_size: ranks in the group.
        name: of the group, the same on all ranks. Empty: as rank 0 calls it, on a board of one start (`_meeting.py`).
        timeout: of the group; longest wait for ranks to appear.
        is_default: the group of all ranks, which dedicated servers serve.
        global_ranks: of the members, in order; empty for all ranks.
        begun: by `time.monotonic`, when that wait began; None: it begins with the call.
    """

    rank: int
    world_size: int
    name: str
    timeout: timedelta
    is_default: bool = False
    global_ranks: tuple[int, ...] = ()
    begun: float | None = None

    def waits_since(self) -> float:
        """By `time.monotonic`, when the wait for ranks began."""
        return time.monotonic() if self.begun is None else self.begun


@dataclass(frozen=True)
class Served:
    """A group with dedicated parameter servers behind its workers.

    Attributes:
        rank: of this process: of a worker in the group, of server j `workers + j`.
        workers: ranks of the group.
        servers: so many.
        memory_bytes: that the sums in flight on this process may take, if it is a server.
    """

    rank: int
    workers: int
    servers: int
    memory_bytes: int = 0

    @property
    def ranks(self) -> int:
        """Workers and servers."""
        return self.workers + self.servers


class Formed(NamedTuple):
    """A connected group.

    Attributes:
        owner: the process's engine.
        native: the group.
        round_number: in which it was formed.
        is_new: this rank has joined it while it ran.
        heritage: what ranks that join it later need to know.
    """

    owner: Runtime
    native: _native.Group
    round_number: int = 0
    is_new: bool = False
    heritage: Heritage | None = None


@tells_of_a_failed_store
def form_group(store: Any, place: Place) -> Formed:
    """Starts the engine if this is the process's first group, and connects to all other ranks.

    If they have formed the group with an earlier life of this rank, and go on without lost ranks, it joins them.

    Args:
        store: the group's Store, already prefixed by torch.
        place: this rank. When all ranks have read all records, `connect_timeout_s` bounds the wait for their packets.

    Raises:
        MissingRankError: ranks that never appeared, or have not read all records.
        WorldSizeError, SettingsMismatchError: a rank was started differently.
        SecretMismatchError: a rank has another job secret.
        UnreachableError: a rank answers no packet.
        RendezvousError: another rank could not start; the message has its reason. Or the Store has failed.
            Or it does not answer; fields: store.
        GradwireError: this rank could not start.
    """
    end, servers = place.waits_since() + place.timeout.total_seconds(), _dedicated_servers(place)
    shortest = min(place.timeout, AGAIN_MIN)
    with _bounded(root_of(store) if servers else store, place.timeout.total_seconds()) as below:
        while True:
            try:
                if not servers:
                    return _form_or_join(below, place)
                served = Served(place.rank, place.world_size, servers)
                return Formed(*_form_served_group(_served_part(below), served, place.timeout.total_seconds()))
            except NoMemberLeftError:
                logger.info(
                    "rank %d: the group that ran has no members left, and who comes forms another one", place.rank
                )
            except CalledAgain:
                logger.info("rank %d: rank 0 has begun another round and calls this rank anew", place.rank)
            place = replace(place, timeout=max(timedelta(seconds=end - time.monotonic()), shortest), begun=None)
            give_time(below, time.monotonic() + place.timeout.total_seconds())


@contextlib.contextmanager
def _bounded(store: Any, timeout_s: float) -> Iterator[Any]:
    """The Store, of which no request outlasts the time of who asks, also where its host stands still.

    A board without torch (`_meeting.py`) has bounds of its own.
    """
    if getattr(store, "is_of_one_start", False):
        yield store
        return
    with contextlib.closing(
        BoundedStore(store, ANSWER_S, until=time.monotonic() + timeout_s, meanwhile=NO_GROUP)
    ) as bounded:
        yield bounded


def _form_or_join(store: Any, place: Place) -> Formed:
    """The same without dedicated servers. Raises NoMemberLeftError where who has not come to join has left."""
    rank, timeout_s = place.rank, place.timeout.total_seconds()
    started, is_of_one_start = place.waits_since(), getattr(store, "is_of_one_start", False)
    latest = int(store.add(f"gradwire/rounds/{rank}", 1)) if is_of_one_start else latest_round(store) + 1
    continues = _continues()
    running = _running_round(store, rank, place.world_size, latest) if continues else 0
    if running:
        return _join_running(store, place, running)
    if is_of_one_start:
        round_number, caller = latest, None
    else:
        round_number, caller = _round_together(store, rank, place.world_size, timeout_s)
    board = Board(store, f"gradwire/{round_number}", rank, place.world_size, round_number if continues else 0)
    board.caller, board.started = caller, started
    if caller is None and not is_of_one_start:
        board.called, board.said = round_number, said_by_rank(rank)
    try:
        name = place.name or _name_of_rank_0(board, timeout_s)
        formed = _form(
            board, lambda owner: owner.engine.new_group(rank, place.world_size, name), {"name": name}, timeout_s
        )
    except RunsAlready as found:
        return _join_running(store, place, found.round_number)
    heritage = _heritage.heritage(formed[2]) if continues else None
    return Formed(*formed[:2], round_number, heritage=heritage)


def _name_of_rank_0(board: Board, timeout_s: float) -> str:
    """Processes count what they have formed, and one that was started again has formed less than those that were not."""
    try:
        runtime().check_process()  # what is wrong here has a name of its own
        return board.name(timeout_s)
    except GradwireError as error:
        with _telling():
            board.publish_failure(_told(error))
        raise


def _round_together(
    store: Any, rank: int, world_size: int, timeout_s: float, *, servers: int = 0
) -> tuple[int, Caller | None]:
    """The round of all ranks that were started with this one, and with rank 0 who calls the others into it.

    Raises:
        MissingRankError, RendezvousError: rank 0 is not there, or could not start.
        GradwireError: this rank cannot; the others are told, if rank 0 calls it soon.
    """
    if rank == 0:
        caller = Caller(store, world_size, servers)
        return caller.round_number, caller
    try:
        runtime().check_process()
    except GradwireError as error:
        text = _told(error)
        with _telling():
            number = be_called(store, rank, world_size, min(timeout_s, TELLING_S), text)
            Board(store, f"gradwire/{number}", rank, world_size).publish({"error": text})
        raise
    return be_called(store, rank, world_size, timeout_s), None


def _telling() -> contextlib.suppress:
    """For what is said to others before an error is raised: a Store that fails meanwhile is not what the caller should see."""
    return contextlib.suppress(GradwireError, RuntimeError)


def _told(error: GradwireError) -> str:
    return f"{type(error).__name__}: {error}"


def _missing(error: GradwireError) -> tuple[list[int], float | None]:
    """Ranks that did not come, if that is it, and how long was waited for them."""
    return (error.ranks, error.waited_s) if isinstance(error, MissingRankError) else ([], None)


def _form_served_group(below: PartOfStore, served: Served, timeout_s: float) -> tuple[Runtime, _native.Group]:
    """The same for a worker of a group with dedicated parameter servers, which all call `join_served_group`."""
    started = time.monotonic()
    round_number, caller = _round_together(below, served.rank, served.ranks, timeout_s, servers=served.servers)
    board = Board(below, f"gradwire/{round_number}", served.rank, served.ranks)
    board.workers, board.caller, board.started = served.workers, caller, started
    if caller is None:
        board.called, board.said = round_number, said_by_rank(served.rank)
    return _form_served(board, served, timeout_s)


def join_served_group(store: Any, served: Served, timeout_s: float, round_number: int) -> tuple[Runtime, _native.Group]:
    """The same for a server.

    Args:
        store: as the workers have it.
        served: this process.
        timeout_s: longest wait for workers and servers to appear.
        round_number: into which worker 0 has called it (`first_worker`).
    """
    with _bounded(root_of(store), timeout_s) as below:
        board = Board(_served_part(below), f"gradwire/{round_number}", served.rank, served.ranks)
        board.workers, board.called, board.is_servers = served.workers, round_number, True
        board.said = said_by_server(served.rank - served.workers)
        return _form_served(board, served, timeout_s)


def _form_served(board: Board, served: Served, timeout_s: float) -> tuple[Runtime, _native.Group]:
    asked = (served.servers, served.memory_bytes)

    def prepare(owner: Runtime) -> _native.PendingGroup:
        return owner.engine.new_served_group(served.rank, served.workers, asked, SERVED)

    return _form(board, prepare, {"workers": served.workers}, timeout_s)[:2]


def first_worker(store: Any, index: int, timeout_s: float) -> tuple[int, dict[str, Any]]:
    """What worker 0 has published, and the round into which it called server `index`, which takes its settings from there.

    Raises:
        MissingRankError: it did not appear in time.
        SettingsMismatchError: it has another version of gradwire, which the workers learn too.
        RendezvousError: it could not start, or the Store does not answer.
    """
    started = time.monotonic()
    with _bounded(root_of(store), timeout_s) as root:
        below = _served_part(root)
        number = server_is_called(below, index, timeout_s)
        board = Board(below, f"gradwire/{number}", 0, 0)
        board.started = started
        try:
            entry = board.first(timeout_s)
        except SettingsMismatchError as error:
            _decline(below, number, index, error)
            raise
    if "error" in entry:
        raise RendezvousError(f"worker 0 on {entry['host']} could not start: {entry['error']}", rank=0)
    return number, entry


def _decline(store: Any, number: int, index: int, error: GradwireError) -> None:
    """The workers called a server that will not come and has published nothing yet: without a word they would wait for their timeout."""
    with _telling():
        rank = read(store, f"gradwire/{number}/0", workers=int)["workers"] + index
        Board(store, f"gradwire/{number}", rank, rank + 1).publish_failure(_told(error))


def _served_part(root: Any) -> PartOfStore:
    """Where dedicated servers and their workers meet: below no prefix of torch's, which the servers do not know."""
    return PartOfStore(root, f"{SERVED}/")


def _dedicated_servers(place: Place) -> int:
    """Servers of a group; 0 also where the configuration is wrong, which is reported when the engine starts."""
    try:
        servers = configuration().dedicated_servers()
    except GradwireError:
        return 0
    if servers and not place.is_default:
        logger.info("group %s: parameter servers are its own ranks; dedicated ones serve the default group", place.name)
        return 0
    return servers


def _continues() -> bool:
    """Whether lost ranks may come back; not where the configuration is wrong, which is reported when the engine starts."""
    try:
        return configuration().on_peer_loss == "continue"
    except GradwireError:
        return False


def _running_round(store: Any, rank: int, world_size: int, round_number: int) -> int:
    """The round whose group an earlier life of this rank was in and did not leave in good order; 0: there is none.

    Nor is there where lost ranks may not come back: the records of such a group are not kept.
    """
    for earlier in range(round_number - 1, 0, -1):
        if is_over(store, earlier):
            return 0
        key = f"gradwire/{earlier}/end"
        if store.check([key]) and not read(store, key, error=str)["error"]:
            is_kept = store.check([f"gradwire/{earlier}/{other}" for other in range(world_size)])
            return earlier if is_kept and not has_left(store, earlier, rank) else 0
    return 0


def _join_running(store: Any, place: Place, round_number: int) -> Formed:
    check_that_all_are_crossed(place.name)
    rank, timeout_s = place.rank, place.timeout.total_seconds()
    end = time.monotonic() + timeout_s
    store.set(f"gradwire/rounds/{rank}", str(round_number))
    owner = runtime()
    owner.check_process()
    board = Board(store, f"gradwire/{round_number}", rank, place.world_size)
    entries = board.collect(timeout_s)
    compare_settings({**entries, rank: {**entries[rank], "settings": group_settings(owner.config)}}, rank)
    formed = [entries[other]["record"] for other in sorted(entries)]
    door = Door(lambda: store, round_number, rank, place.world_size)
    name = checked(entries[rank], f"gradwire/{round_number}/{rank}", name=str)["name"]
    while True:
        pending = owner.engine.new_group(rank, place.world_size, name)

        def new_record(life: int, pending: _native.PendingGroup = pending) -> str:
            pending.live_again(life)
            return pending.record()

        life = door.publish(new_record)
        logger.info("rank %d waits to join the group again, as life %d", rank, life)
        running = door.answered(life, timeout_s, max(end - time.monotonic(), 0.0))
        try:
            group = pending.join_running(formed, running, max(end - time.monotonic(), POLL_MIN_S))
        except NotMemberError as error:
            # The members had waited for it in vain, or have lost somebody in the middle of it.
            if time.monotonic() > end:
                raise
            logger.info("rank %d tries to join once more: %s", rank, error)
            continue
        owner.observer.add(group, entries[0].get("job"))
        return Formed(owner, group, round_number, is_new=True, heritage=_heritage.heritage(entries, life))


def _form(
    board: Board, prepare: Callable[[Runtime], _native.PendingGroup], more: dict[str, Any], timeout_s: float
) -> tuple[Runtime, _native.Group, dict[int, dict[str, Any]]]:
    rank = board.rank
    try:
        owner = runtime()
        owner.check_process()
        pending = prepare(owner)
        if rank == 0:
            more = {**more, "job": owner.observer.job_at(board.address)}
        board.publish({"record": pending.record(), "settings": group_settings(owner.config), **more})
    except GradwireError as error:
        with _telling():
            board.publish_failure(_told(error))
        raise
    connect_s = min(owner.config.connect_timeout_s, timeout_s)
    with _noting(board):
        entries = board.collect(timeout_s)
    with _seeing_out(board), _concluding(board):
        compare_settings(entries, rank, board.workers)
    with _noting(board), _concluding(board):
        board.wait_for_readers(timeout_s, connect_s)
    with _seeing_out(board), _concluding(board):
        group = pending.join([entries[other]["record"] for other in sorted(entries)], connect_s)
    with _seeing_out(board):
        board.confirm(connect_s)
    stats = group.stats()
    owner.say_how_it_travels(stats["name"], stats["security"])
    owner.observer.add(group, entries[0].get("job"))
    return owner, group, entries


@contextlib.contextmanager
def _noting(board: Board) -> Iterator[None]:
    """While ranks are waited for: where that was in vain, rank 0 leaves word to those it has called."""
    try:
        yield
    except GradwireError as error:
        if board.caller is not None:
            with _telling():
                board.caller.note(_told(error), *_missing(error))
                board.caller.stay()
        raise


@contextlib.contextmanager
def _concluding(board: Board) -> Iterator[None]:
    """While this rank does what all have to do: where it cannot, the group is not formed."""
    try:
        yield
    except GradwireError as error:
        with _telling():
            board.conclude(_told(error))
        raise


@contextlib.contextmanager
def _seeing_out(board: Board) -> Iterator[None]:
    """While all have what they need to find out by themselves: the Store, which may end with rank 0, does not end before they have."""
    try:
        yield
    except GradwireError as error:
        # What all ranks find in the same records they find soon. Else one may have died, which is not waited for so long.
        is_found_by_all = isinstance(error, (SettingsMismatchError, SecretMismatchError))
        with _telling():
            board.see_out(TELLING_S if is_found_by_all else POLL_S)
        raise
