"""What the ranks of a group that is to be formed write for each other, and read: one record of each, and how it ended for all."""

from __future__ import annotations

import bisect
import contextlib
import json
import logging
import os
import socket
import time
from collections.abc import Iterable, Sequence
from typing import Any

from gradwire import _heritage, _native
from gradwire._bounded import address_of, give_time, root_of
from gradwire._calling import (
    Caller,
    checked,
    latest_round,
    look_for_a_note,
    no_entry,
    other_world_size,
    pause,
    read,
    tells_of_a_failed_store,
)
from gradwire._named import first_named
from gradwire.errors import MissingRankError, RendezvousError, SettingsMismatchError

logger = logging.getLogger("gradwire")

# Of a group; the engine refuses more.
RANKS_MAX = 16_384
# Where many have not come, so many of them are looked at for each wait of at most a second: all of a small group, of 512 ranks each
# within half a minute. That is for trouble while others are missing: once all are there, all are read.
LOOKS = 16

# What must be the same on all ranks before anything else is compared: other releases and builds have other settings and other records.
VERSIONS = {"gradwire": _native.VERSION, "protocol": _native.PROTOCOL_VERSION}

# So often a rank that reads for long says how far it is. One that has got no further for so long has ended, or hangs.
TELLS_EVERY_S = 1.0
STUCK_S = 30.0


class RunsAlready(Exception):
    """The members of a group that runs have said so, while this rank waited to form another one."""

    def __init__(self, round_number: int) -> None:
        super().__init__(f"the group of round {round_number} runs")
        self.round_number = round_number


class CalledAgain(Exception):
    """Rank 0 has begun another round, so the one that called this rank has ended: it calls anew."""


class Board:
    """The group's records in the Store.

    Args:
        store, prefix: where they lie.
        rank, world_size: of this process.
        continues: number of the round, if lost ranks may come back to its group; else 0.
    """

    def __init__(self, store: Any, prefix: str, rank: int, world_size: int, continues: int = 0) -> None:
        self._continues = continues
        self._store = store
        self._prefix = prefix
        self.rank = rank
        self._world_size = world_size
        # Of rank 0 on a Store where processes of earlier starts have written.
        self.caller: Caller | None = None
        # Of the others there: the round into which it called this one.
        self.called = 0
        # And the key under which it said that it is here.
        self.said = ""
        # Dedicated servers outlive the workers that called them: nobody ends them with an attempt that came to nothing.
        self.is_servers = False
        # Of all ranks: those behind them are dedicated servers, which have a number of their own in what people read.
        self.workers = max(world_size, 1)
        # By `time.monotonic`, when its wait for ranks began; None: with each call here.
        self.started: float | None = None
        self._next_look = 0
        self._tells_at: float | None = None
        self._has_told = False

    @property
    def address(self) -> str:
        """`host:port` of the Store, or the path of its file; empty: it has neither."""
        return address_of(root_of(self._store))

    def publish(self, entry: dict[str, Any]) -> None:
        entry = {
            **entry,
            "rank": self.rank,
            "world_size": self._world_size,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            **VERSIONS,
        }
        self._store.set(self._key(self.rank), json.dumps(entry))

    def publish_failure(self, error: str) -> None:
        """This rank cannot start, and says why."""
        self.publish({"error": error})
        if self.caller is not None:
            self.caller.give_up(range(1, self._world_size), error)

    @tells_of_a_failed_store
    def collect(self, timeout_s: float) -> dict[int, dict[str, Any]]:
        """Every rank's entry. Each one is checked as it comes, so that trouble is reported before all have come."""
        end = (self.started or time.monotonic()) + timeout_s
        entries: dict[int, dict[str, Any]] = {}
        here: list[int] = []
        while missing := [r for r in range(self._world_size) if r not in entries]:
            if self.caller is not None and not here:
                self.caller.call(r for r in missing if r != self.rank)
            is_last = time.monotonic() >= end
            here = self._here(missing, self._world_size if is_last else LOOKS)
            for other in here:
                entries[other] = self._checked(other, self._entry_of(other))
                self._tell_progress(len(entries))
            if not here:
                self._look_for_a_group()
                self._look_for_a_note()
                if is_last:
                    raise self._did_not_appear(missing, timeout_s)
                self._wait_for(missing[0], end)
        # Rank 0 may have given up just before the last one came.
        self._look_for_a_note()
        return entries

    def _here(self, missing: list[int], looks: int) -> list[int]:
        """Those that have come of ranks that were missing: all, in one request, or of so many that are looked at one by one, in turn.

        If every rank looked at every other whenever one had come, a Store would be asked more than N^2 times while N ranks start.
        """
        if self._are_here(missing):
            return missing
        if len(missing) == 1:
            return []
        turn = bisect.bisect_left(missing, self._next_look)
        # The first one is what was waited for.
        looked = list(dict.fromkeys([missing[0], *missing[turn:], *missing[:turn]]))[:looks]
        self._next_look = looked[-1] + 1
        return [rank for rank in looked if self._are_here([rank])]

    def _are_here(self, ranks: Sequence[int]) -> bool:
        return bool(self._store.check([self._key(rank) for rank in ranks]))

    def _look_for_a_note(self) -> None:
        if self.called:
            look_for_a_note(self._store, self.called, self.rank)
        if not self.called or latest_round(self._store) <= self.called:
            return
        if not self.is_servers:
            raise CalledAgain
        text = "worker 0 has begun another round, so the workers of this one have ended: start this server again"
        raise RendezvousError(text, rank=0)

    def _look_for_a_group(self) -> None:
        """Of which this rank was a member, on a board that was empty when it came."""
        running = _heritage.running_round(self._store) if self._continues else 0
        if running > self._continues:
            raise RunsAlready(running)

    def first(self, timeout_s: float) -> dict[str, Any]:
        """The entry of worker 0, of which the version alone has been compared.

        Raises:
            MissingRankError: it did not appear.
            SettingsMismatchError: it has another version.
        """
        entry = self._first(timeout_s)
        if "error" not in entry and not 0 < checked(entry, self._key(0), workers=int)["workers"] <= RANKS_MAX:
            raise no_entry(self._key(0))
        return entry

    @tells_of_a_failed_store
    def name(self, timeout_s: float) -> str:
        """What rank 0 calls the group.

        Raises:
            MissingRankError: it did not appear.
            SettingsMismatchError, WorldSizeError: it has another version, or was started differently.
            RendezvousError: it could not start.
        """
        return str(checked(self._checked(0, self._first(timeout_s)), self._key(0), name=str)["name"])

    def _first(self, timeout_s: float) -> dict[str, Any]:
        end = (self.started or time.monotonic()) + timeout_s
        while not self._are_here([0]):
            self._look_for_a_group()
            if time.monotonic() >= end:
                raise self._did_not_appear([0], timeout_s)
            self._wait_for(0, end)
        return self._entry_of(0)

    @tells_of_a_failed_store
    def wait_for_readers(self, timeout_s: float, connect_s: float) -> None:
        """Waits until every rank has collected the entries: from then on each has `connect_s` for the packets of the others.

        Entries of many ranks are large, and one rank may be next to the Store and another one behind a slow link. So the wait is as long
        as that for ranks to appear, and one in which they can connect where that is nearly over; but not for a rank that reads nothing
        more, as it has ended after it had published its own.

        Args:
            timeout_s: of the group.
            connect_s: as above; a warning says then who is waited for.

        Raises:
            MissingRankError: ranks that have not read all entries.
            RendezvousError: a rank that has could not connect, or rank 0 gave up.
        """
        started = time.monotonic()
        end = max((self.started or started) + timeout_s, started + connect_s)
        give_time(self._store, end)
        self._store.set(self._read_key(self.rank), "1")
        if self._store.add(f"{self._prefix}/read", 1) == self._world_size:
            self._store.set(self._read_key("all"), "1")
        looks_at, before = started + connect_s, dict[int, Any]()
        while not self._all_have_read():
            self._look_for_a_note()
            now = time.monotonic()
            if now >= min(looks_at, end):
                reading = {rank: self._progress_of(rank) for rank in self._still_reading(range(self._world_size))}
                stuck = [rank for rank, progress in reading.items() if before.get(rank) == progress]
                if not reading:
                    return
                if stuck or now >= end:
                    raise self._did_not_read(stuck or list(reading), now - started)
                names = self._named(reading)
                logger.warning("rank %d waits for %s, which have not read all records yet", self.rank, names)
                looks_at, before = now + max(connect_s, STUCK_S), reading
            pause(self._store, self._read_key("all"), min(looks_at, end) - now)

    def _all_have_read(self) -> bool:
        """Whether all ranks have: from then on each finds out by itself, also where another one could not connect since."""
        all_read = [self._read_key("all")]
        try:
            return self._store.check(all_read) or self._is_formed()
        except RendezvousError:
            if self._store.check(all_read):
                return True
            raise

    def _still_reading(self, ranks: Sequence[int]) -> list[int]:
        """Of these, those that have not read all entries: by halves, so that a few of many take a few requests."""
        if self._store.check([self._read_key(rank) for rank in ranks]):
            return []
        if len(ranks) == 1:
            return list(ranks)
        half = len(ranks) // 2
        return self._still_reading(ranks[:half]) + self._still_reading(ranks[half:])

    def _tell_progress(self, records: int) -> None:
        """Every second or so while this rank reads: who waits for it sees that it is alive."""
        now = time.monotonic()
        if self._tells_at is None or now >= self._tells_at:
            if self._tells_at is not None:
                self._store.set(self._progress_key(self.rank), str(records))
                self._has_told = True
            self._tells_at = now + TELLS_EVERY_S

    def _progress_of(self, rank: int) -> Any:
        key = self._progress_key(rank)
        return self._store.get(key) if self._store.check([key]) else ""

    def confirm(self, timeout_s: float) -> None:
        """Waits until every rank has reached all others, so that no collective meets a group that is half formed.

        Rank 0 may have heard so and gone before this rank did, where packets are lost, and the Store with it. This rank has reached all
        others by now: if the group was not formed, its next call names who is missing.
        """
        try:
            self._confirm(timeout_s)
        except RendezvousError as error:
            if not error.fields.get("over"):
                raise
            logger.warning("rank %d goes on, connected to all others: %s", self.rank, error)

    @tells_of_a_failed_store
    def _confirm(self, timeout_s: float) -> None:
        end = time.monotonic() + timeout_s
        give_time(self._store, end)
        if self._store.add(f"{self._prefix}/joined", 1) == self._world_size:
            self.conclude("")
        while not self._is_formed():
            if time.monotonic() > end:
                raise RendezvousError(f"not every rank of {self._world_size} was connected within {timeout_s:g} s")
            pause(self._store, self._end_key, timeout_s)
        self._forget()

    def _forget(self) -> None:
        """Removes what this rank wrote for the others to read: all have, and a Store that outlives many groups would hold it for ever.

        Nobody looks for any of it once all ranks are connected: they have read all records before, and rank 0 calls nobody any more.
        Rank 0's record stays: who comes late, of another world size, learns that there (`_calling.py`). So does all where lost ranks may
        come back, who read what the group was formed by, and on a board of one start (`_meeting.py`), which has its own ways.
        """
        if self._continues or getattr(self._store, "is_of_one_start", False):
            return
        keys = [self._read_key(self.rank)]
        keys += [self._key(self.rank)] if self.rank != 0 else []
        keys += [self._progress_key(self.rank)] if self._has_told else []
        keys += [self.said] if self.said else []
        # Not every Store can, as one of the user's own, and the group is there.
        with contextlib.suppress(Exception):
            for key in keys:
                self._store.delete_key(key)

    def _is_formed(self) -> bool:
        """Whether all ranks have said so. Raises RendezvousError where one has said why it could not connect."""
        if not self._store.check([self._end_key]):
            return False
        outcome = read(self._store, self._end_key, rank=int, error=str)
        if outcome["error"]:
            text = f"{named(outcome['rank'], self.workers)} could not connect: {outcome['error']}"
            raise RendezvousError(text, rank=outcome["rank"])
        return True

    def conclude(self, error: str) -> None:
        """Says how the group's formation ended; the first word counts."""
        self._store.compare_set(self._end_key, "", json.dumps({"rank": self.rank, "error": error}))

    def see_out(self, longest_s: float) -> None:
        """Of a group that cannot be formed: this rank knows why, and looks here no more.

        Rank 0 waits until the others have come so far, as the Store may end with its process, but no longer than this.
        """
        end, all_told = time.monotonic() + longest_s, f"{self._prefix}/told/all"
        give_time(self._store, end)
        if self._store.add(f"{self._prefix}/told", 1) == self._world_size:
            self._store.set(all_told, "1")
        while self.rank == 0 and not self._store.check([all_told]) and (left_s := end - time.monotonic()) > 0:
            pause(self._store, all_told, left_s)

    def _wait_for(self, rank: int, end: float) -> None:
        key, left = self._key(rank), end - time.monotonic()
        if self.caller is None or rank == self.rank:
            pause(self._store, key, left)
        else:
            self.caller.wait_for(rank, key, left)

    def _did_not_read(self, reading: list[int], waited_s: float) -> MissingRankError:
        return MissingRankError(
            f"{self._named(reading)} of {self._all()} appeared, and did not read the records of all others "
            f"within {waited_s:.0f} s: they have ended since, or their way to the Store is slow ({self._this()})",
            ranks=reading,
            waited_s=waited_s,
        )

    def _did_not_appear(self, missing: list[int], timeout_s: float) -> MissingRankError:
        servers = [rank - self.workers for rank in missing if rank >= self.workers]
        start = (
            f". Start what is missing: gradwire serve --index {servers[0]}, with the workers' Store" if servers else ""
        )
        return MissingRankError(
            f"{self._named(missing)} of {self._all()} did not appear within {timeout_s:g} s ({self._this()}){start}",
            ranks=missing,
            waited_s=timeout_s,
        )

    def _named(self, ranks: Iterable[int]) -> str:
        """Of dedicated servers their own numbers: nobody has started a rank with theirs."""
        workers, servers = list[int](), list[int]()
        for rank in ranks:
            (workers if rank < self.workers else servers).append(rank)
        said = [f"rank(s) {first_named(workers)}"] if workers else []
        said += [f"parameter server(s) {first_named(rank - self.workers for rank in servers)}"] if servers else []
        return " and ".join(said)

    def _all(self) -> str:
        servers = self._world_size - self.workers
        return f"{self.workers} worker(s) and {servers} server(s)" if servers > 0 else f"{self._world_size}"

    def _this(self) -> str:
        return f"this is {named(self.rank, self.workers)} on {socket.gethostname()}"

    def _checked(self, rank: int, entry: dict[str, Any]) -> dict[str, Any]:
        if entry["world_size"] != self._world_size:
            raise other_world_size((rank, entry), (self.rank, self._world_size))
        if "error" in entry:
            raise RendezvousError(
                f"{named(rank, self.workers)} on {entry['host']} could not start: {entry['error']}",
                rank=rank,
                cause=entry["error"],
            )
        return entry

    def _entry_of(self, rank: int) -> dict[str, Any]:
        key = self._key(rank)
        entry = read(self._store, key, host=str, world_size=int)
        self._compare_versions(rank, entry)
        return entry if "error" in entry else checked(entry, key, record=str, settings=dict)

    def _compare_versions(self, rank: int, entry: dict[str, Any]) -> None:
        for name, ours in VERSIONS.items():
            theirs = entry.get(name, "(not said)")
            if theirs != ours:
                raise SettingsMismatchError(
                    f"{named(rank, self.workers)} on {entry['host']} has {name} version {theirs}, this process on "
                    f"{socket.gethostname()} has {ours}: install the same version of gradwire on all hosts, built of the same "
                    "sources, and start again what runs with another one",
                    rank=rank,
                    field=f"{name} version",
                    theirs=theirs,
                    ours=ours,
                )

    @property
    def _end_key(self) -> str:
        return f"{self._prefix}/end"

    def _read_key(self, who: int | str) -> str:
        return f"{self._prefix}/read/{who}"

    def _progress_key(self, rank: int) -> str:
        return f"{self._prefix}/reading/{rank}"

    def _key(self, rank: int) -> str:
        return f"{self._prefix}/{rank}"


def named(rank: int, workers: int) -> str:
    """What a rank is called, if those behind the workers are dedicated servers."""
    return f"rank {rank}" if rank < workers else f"parameter server {rank - workers}"


def compare_settings(entries: dict[int, dict[str, Any]], rank: int, workers: int | None = None) -> None:
    """Raises SettingsMismatchError where another rank has others than this one; `workers`: as for `named`, None: all are."""
    ours, workers = entries[rank]["settings"], len(entries) if workers is None else workers
    for other, entry in sorted(entries.items()):
        for field, value in ours.items():
            theirs = entry["settings"].get(field)
            if theirs != value:
                raise SettingsMismatchError(
                    f"{named(other, workers)} on {entry['host']} has {field} = {theirs}, {named(rank, workers)} has {value}: it must be "
                    f"equal on all ranks (GRADWIRE_{field.upper()}, or Config)",
                    rank=other,
                    field=field,
                    theirs=theirs,
                    ours=value,
                )
