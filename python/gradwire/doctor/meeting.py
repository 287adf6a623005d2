"""Where the ranks of a check meet: each publishes a few values under its rank, and reads those of the others.

`file:///folder` needs a folder that all see and nothing else. Everything else is a torch Store, by torch's own rendezvous:
`env://` (what torchrun sets) or `tcp://host:port`.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

from gradwire.errors import ConfigError, MissingRankError, RendezvousError

_POLL_SECONDS = 0.02  # of a folder


class Meeting(Protocol):
    """A board of values that everybody can read."""

    def put(self, key: str, value: Any) -> None:
        """Publishes a value once. Raises RendezvousError where nobody takes it any more."""

    def get(self, key: str, timeout_s: float) -> Any:
        """Waits for a value. Raises RendezvousError when it does not come."""


@dataclass(frozen=True)
class Place:
    """A rank among the others, and how long it waits for them at each step."""

    meeting: Meeting
    rank: int
    world_size: int
    timeout_s: float


def everybody(place: Place, key: str, value: Any, more_s: float = 0.0) -> list[Any]:
    """Publishes this rank's value and waits for all ranks'; so everybody has come here when it returns.

    Args:
        place: this rank.
        key: of the values.
        value: this rank's.
        more_s: that others may need more than `place.timeout_s`, as they do something that takes so long.

    Raises:
        MissingRankError: ranks did not come; the message names the first.
    """
    place.meeting.put(f"{key}/{place.rank}", value)
    end = time.monotonic() + place.timeout_s + more_s
    values = []
    for other in range(place.world_size):
        try:
            values.append(place.meeting.get(f"{key}/{other}", max(0.1, end - time.monotonic())))
        except RendezvousError as error:
            raise MissingRankError(
                f"rank {other} has not come within {place.timeout_s + more_s:g} s ({key})", rank=other
            ) from error
    return values


class FolderMeeting:
    """Values as files of a folder, which should be empty at first."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def put(self, key: str, value: Any) -> None:
        """See `Meeting`."""
        path = self._folder / key.replace("/", "-")
        partial = path.with_suffix(".part")
        partial.write_text(json.dumps(value))
        partial.rename(path)

    def get(self, key: str, timeout_s: float) -> Any:
        """See `Meeting`."""
        path, end = self._folder / key.replace("/", "-"), time.monotonic() + timeout_s
        while not path.exists():
            if time.monotonic() > end:
                raise RendezvousError(f"{path} has not appeared within {timeout_s:g} s")
            time.sleep(_POLL_SECONDS)
        return json.loads(path.read_text())


class StoreMeeting:
    """Values in a torch Store."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def put(self, key: str, value: Any) -> None:
        """See `Meeting`."""
        try:
            self._store.set(f"gradwire/doctor/{key}", json.dumps(value))
        except RuntimeError as error:  # as below
            raise RendezvousError(f"{key}: {error}") from error

    def get(self, key: str, timeout_s: float) -> Any:
        """See `Meeting`."""
        name = f"gradwire/doctor/{key}"
        try:
            self._store.wait([name], timedelta(seconds=max(0.1, timeout_s)))
            return json.loads(self._store.get(name))
        except RuntimeError as error:  # DistStoreError and DistNetworkError are
            raise RendezvousError(f"{key}: {error}") from error


def open_meeting(address: str, rank: int, world_size: int, timeout_s: float) -> Meeting:
    """The meeting at `file:///folder`, `tcp://host:port` or `env://`.

    Raises:
        ConfigError: the address is none of these.
        RendezvousError: nobody answers there, or torch is missing.
    """
    kind, _, place = address.partition("://")
    if kind == "file" and place:
        return FolderMeeting(Path(place))
    if kind not in ("tcp", "env"):
        allowed = "file:///folder | tcp://host:port | env://"
        raise ConfigError(
            f"store = {address!r} is not allowed: {allowed}", field="store", value=address, allowed=allowed
        )
    try:
        from torch.distributed.rendezvous import rendezvous

        store, _, _ = next(iter(rendezvous(address, rank, world_size, timeout=timedelta(seconds=timeout_s))))
    except (ImportError, RuntimeError, ValueError) as error:
        raise RendezvousError(f"no Store at {address}: {error}") from error
    return StoreMeeting(store)
