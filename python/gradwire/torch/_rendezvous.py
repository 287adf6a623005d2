"""How ranks find each other: each publishes one record in the torch Store and reads all others.

No port or server but the Store that torch has anyway. A rank that cannot start publishes why, so that the others do not
wait for their timeout to learn it.

Keys, below the prefix that torch gives each group: `gradwire/rounds/<rank>` counts how often a rank has formed a group on
this Store (a destroyed group may be formed again under the same name); `gradwire/<round>/<rank>` holds its record;
`gradwire/<round>/joined` counts the ranks that reached all others; `gradwire/<round>/end` says how it ended for all.
"""

from __future__ import annotations

import json
import os
import socket
import time
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from gradwire import _native
from gradwire.config import Config, settings
from gradwire.errors import GradwireError, MissingRankError, RendezvousError, SettingsMismatchError, WorldSizeError
from gradwire.torch._runtime import Runtime, runtime

# Longest single wait on the Store: between two, a missing rank's neighbours are looked at and Ctrl-C is answered.
POLL_S = 1.0
# Stores count in whole milliseconds, and 0 means for ever.
POLL_MIN_S = 0.01


@dataclass(frozen=True)
class Place:
    """A rank in a group that is to be formed.

    Attributes:
        rank: of this process in the group.
        world_size: ranks in the group.
        name: of the group, unique in this process.
        timeout: of the group; longest wait for ranks to appear.
    """

    rank: int
    world_size: int
    name: str
    timeout: timedelta


def form_group(store: Any, place: Place) -> tuple[Runtime, _native.Group]:
    """Starts the engine if this is the process's first group, and connects to all other ranks.

    Args:
        store: the group's Store, already prefixed by torch.
        place: this rank. When all ranks have appeared, `connect_timeout_s` bounds the wait for their packets.

    Raises:
        MissingRankError: ranks that never appeared.
        WorldSizeError, SettingsMismatchError: a rank was started differently.
        UnreachableError: a rank answers no packet.
        RendezvousError: another rank could not start; the message has its reason.
        GradwireError: this rank could not start.
    """
    rank, timeout_s = place.rank, place.timeout.total_seconds()
    round_number = store.add(f"gradwire/rounds/{rank}", 1)
    board = _Board(store, f"gradwire/{round_number}", rank, place.world_size)
    try:
        owner = runtime()
        owner.check_process()
        pending = owner.engine.new_group(rank, place.world_size, place.name)
        board.publish({"record": pending.record(), "settings": _group_settings(owner.config)})
    except GradwireError as error:
        board.publish({"error": f"{type(error).__name__}: {error}"})
        raise
    entries = board.collect(timeout_s)
    connect_s = min(owner.config.connect_timeout_s, timeout_s)
    try:
        _compare_settings(entries, rank)
        group = pending.join([entries[other]["record"] for other in sorted(entries)], connect_s)
    except GradwireError as error:
        board.conclude(f"{type(error).__name__}: {error}")
        raise
    board.confirm(connect_s)
    return owner, group


class _Board:
    """The group's records in the Store."""

    def __init__(self, store: Any, prefix: str, rank: int, world_size: int) -> None:
        self._store = store
        self._prefix = prefix
        self._rank = rank
        self._world_size = world_size

    def publish(self, entry: dict[str, Any]) -> None:
        entry = {
            **entry,
            "rank": self._rank,
            "world_size": self._world_size,
            "host": socket.gethostname(),
            "pid": os.getpid(),
        }
        self._store.set(self._key(self._rank), json.dumps(entry))

    def collect(self, timeout_s: float) -> dict[int, dict[str, Any]]:
        """Every rank's entry. Each one is checked as it comes, so that trouble is reported before all have come."""
        end = time.monotonic() + timeout_s
        entries: dict[int, dict[str, Any]] = {}
        while missing := [r for r in range(self._world_size) if r not in entries]:
            here = [r for r in missing if self._store.check([self._key(r)])]
            for other in here:
                entries[other] = self._checked(other, json.loads(self._store.get(self._key(other))))
            if not here:
                self._wait_for(missing, end, timeout_s)
        return entries

    def confirm(self, timeout_s: float) -> None:
        """Waits until every rank has reached all others, so that no collective meets a group that is half formed."""
        if self._store.add(f"{self._prefix}/joined", 1) == self._world_size:
            self.conclude("")
        end = time.monotonic() + timeout_s
        key = f"{self._prefix}/end"
        while not self._store.check([key]):
            if time.monotonic() > end:
                raise RendezvousError(f"not every rank of {self._world_size} was connected within {timeout_s:g} s")
            self._pause_for(key, timeout_s)
        outcome = json.loads(self._store.get(key))
        if outcome["error"]:
            raise RendezvousError(f"rank {outcome['rank']} could not connect: {outcome['error']}", rank=outcome["rank"])

    def conclude(self, error: str) -> None:
        """Says how the group's formation ended; the first word counts."""
        self._store.compare_set(f"{self._prefix}/end", "", json.dumps({"rank": self._rank, "error": error}))

    def _wait_for(self, missing: list[int], end: float, timeout_s: float) -> None:
        left = end - time.monotonic()
        if left <= 0:
            raise MissingRankError(
                f"rank(s) {', '.join(map(str, missing))} of {self._world_size} did not appear within {timeout_s:g} s "
                f"(this is rank {self._rank} on {socket.gethostname()})",
                ranks=missing,
                waited_s=timeout_s,
            )
        self._pause_for(self._key(missing[0]), left)

    def _pause_for(self, key: str, longest_s: float) -> None:
        """Waits for a key, but not for long."""
        try:
            self._store.wait([key], timedelta(seconds=min(max(longest_s, POLL_MIN_S), POLL_S)))
        except RuntimeError as error:  # DistStoreError is one, and so is what other Stores raise when the time is over
            text = str(error).lower()
            if "timeout" not in text and "timed out" not in text:
                raise RendezvousError(f"the Store failed while waiting for {key}: {error}") from error

    def _checked(self, rank: int, entry: dict[str, Any]) -> dict[str, Any]:
        if entry["world_size"] != self._world_size:
            raise WorldSizeError(
                f"rank {rank} on {entry['host']} was started with world size {entry['world_size']}, "
                f"rank {self._rank} with {self._world_size}",
                rank=rank,
                theirs=entry["world_size"],
                ours=self._world_size,
            )
        if "error" in entry:
            raise RendezvousError(
                f"rank {rank} on {entry['host']} could not start: {entry['error']}", rank=rank, cause=entry["error"]
            )
        return entry

    def _key(self, rank: int) -> str:
        return f"{self._prefix}/{rank}"


def _group_settings(config: Config) -> dict[str, Any]:
    return {f.name: getattr(config, f.name) for f in settings() if f.metadata.get("everywhere")}


def _compare_settings(entries: dict[int, dict[str, Any]], rank: int) -> None:
    ours = entries[rank]["settings"]
    for other, entry in sorted(entries.items()):
        for field, value in ours.items():
            theirs = entry["settings"].get(field)
            if theirs != value:
                raise SettingsMismatchError(
                    f"rank {other} on {entry['host']} has {field} = {theirs}, rank {rank} has {value}: it must be equal on all ranks",
                    rank=other,
                    field=field,
                    theirs=theirs,
                    ours=value,
                )
