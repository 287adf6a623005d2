"""Where the ranks of a check meet: each publishes a few values under its rank, and reads those of the others.

`file:///folder` needs a folder that all see and nothing else. Everything else is a torch Store, by torch's own rendezvous:
`env://` (what torchrun sets) or `tcp://host:port`.

A folder outlives its runs, so ranks make sure that they are of one run before they believe what they read:

   rank-2      the token of the process that is rank 2, until it has met the others; nobody else can be rank 2 meanwhile
   met-TOKEN   the tokens of all ranks as that process has read them
   RUN-...     values, after all processes have read the same tokens; their digest is RUN

A process that has ended says nothing about tokens drawn after its end, so what it has left is never taken for a rank.
"""

from __future__ import annotations

import hashlib
import json
import secrets
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

from gradwire._in_time import in_time
from gradwire.errors import ConfigError, MissingRankError, RendezvousError

_POLL_SECONDS = 0.02  # of a folder
_TOKEN_DIGITS = 16  # as good as never drawn twice
# A Store has so much more time to be opened than is waited for it, so that it does not end just when the process does; and who waits
# for a value has so much more than the Store, so that this says what did not come.
_LONGER_S = 60.0
_GIVEN_UP = "given up"  # no value of any rank has a field of this name


class Meeting(Protocol):
    """A board of values that everybody can read.

    Attributes:
        doubt: why a rank that is there may not come all the same, as the end of a sentence; or empty.
    """

    doubt: str

    def put(self, key: str, value: Any) -> None:
        """Publishes a value once. Raises RendezvousError where nobody takes it any more."""

    def get(self, key: str, timeout_s: float) -> Any:
        """Waits for a value. Raises RendezvousError when it does not come."""

    def clear(self) -> None:
        """Removes what was said, once all have read it and nobody waits."""


@dataclass(frozen=True)
class Place:
    """A rank among the others, and how long it waits for them at each step."""

    meeting: Meeting
    rank: int
    world_size: int
    timeout_s: float


def say(place: Place, key: str, value: Any) -> None:
    """Publishes this rank's value, for who reads it (`said_by_all`). Raises RendezvousError where nobody takes it any more."""
    place.meeting.put(f"{key}/{place.rank}", value)


def say_given_up(place: Place, key: str, why: str) -> None:
    """Publishes, in place of the value that others wait for, that there will be none, so that they need not. Errors as of `say`."""
    say(place, key, {_GIVEN_UP: why})


def said_by_all(place: Place, key: str, more_s: float = 0.0, *, first: int = 0) -> list[Any]:
    """Waits for all ranks' values, and returns them in order; so all have come as far as that when it returns.

    Args:
        place: this rank.
        key: of the values.
        more_s: that others may need more than `place.timeout_s`, in seconds, as they do something that takes so long.
        first: the rank that is waited for first; then those behind it, and those before it.

    Raises:
        MissingRankError: ranks did not come, or one gave up; the message names the first.
    """
    waited_s = place.timeout_s + more_s
    end = time.monotonic() + waited_s
    values: list[Any] = [None] * place.world_size
    for other in ((first + step) % place.world_size for step in range(place.world_size)):
        try:
            values[other] = place.meeting.get(f"{key}/{other}", max(0.1, end - time.monotonic()))
        except RendezvousError as error:
            text = f"rank {other} has not come within {waited_s:g} s ({key}){place.meeting.doubt}"
            raise MissingRankError(text, ranks=[other], waited_s=waited_s) from error
        if isinstance(values[other], dict) and _GIVEN_UP in values[other]:
            text = f"rank {other} gave up ({key}): {values[other][_GIVEN_UP]}"
            raise MissingRankError(text, ranks=[other], waited_s=waited_s)
    return values


class FolderMeeting:
    """Values as files of a folder, of one run among others."""

    doubt = ""

    def __init__(self, folder: Path, run: str, tokens: list[str] | None = None) -> None:
        self._folder, self._run = folder, run
        self._told = [_met(folder, token) for token in tokens or []]
        folder.mkdir(parents=True, exist_ok=True)

    @classmethod
    def enter(cls, folder: Path, rank: int, world_size: int, timeout_s: float) -> FolderMeeting:
        """Waits until all ranks of a run are here.

        Args:
            folder: that all see; other runs may have left something there.
            rank: of this process.
            world_size: ranks in all.
            timeout_s: how long to wait at each of two steps, for the processes and for their word.

        Raises:
            ConfigError: there is a process of this rank, or one that was killed.
            MissingRankError: ranks did not come; the message names the first.
            RendezvousError: somebody has emptied the folder meanwhile.
        """
        folder.mkdir(parents=True, exist_ok=True)
        token = secrets.token_hex(_TOKEN_DIGITS // 2)
        with _claimed(folder, rank, token) as is_mine:
            waiting = _Waiting(folder, is_mine, timeout_s)
            tokens = waiting.for_tokens(world_size)
            _publish(_met(folder, token), tokens)
            waiting = _Waiting(folder, is_mine, timeout_s)
            for other in range(world_size):
                waiting.for_word(other, tokens)
        return cls(folder, hashlib.sha256("".join(tokens).encode()).hexdigest()[:_TOKEN_DIGITS], tokens)

    def put(self, key: str, value: Any) -> None:
        """See `Meeting`."""
        _publish(self._path(key), value)

    def get(self, key: str, timeout_s: float) -> Any:
        """See `Meeting`."""
        path, end = self._path(key), time.monotonic() + timeout_s
        while not path.exists():
            if time.monotonic() > end:
                raise RendezvousError(f"{path} has not appeared within {timeout_s:g} s")
            time.sleep(_POLL_SECONDS)
        return json.loads(path.read_text())

    def clear(self) -> None:
        """See `Meeting`. What a run leaves that has not come so far is not in the way of others."""
        for path in (*self._folder.glob(f"{self._run}-*"), *self._told):
            with suppress(OSError):  # other users' files need not be ours to remove
                path.unlink()

    def _path(self, key: str) -> Path:
        return self._folder / f"{self._run}-{key.replace('/', '-')}"


@dataclass
class _Waiting:
    """One step of meeting in a folder: what others have left there, while this process is its rank."""

    folder: Path
    is_mine: Callable[[], bool]
    timeout_s: float

    def __post_init__(self) -> None:
        self.end = time.monotonic() + self.timeout_s

    def for_tokens(self, world_size: int) -> list[str]:
        """Those of the processes that are all ranks at once: one may end while others wait, and another come in its place."""
        before: list[str] = []
        tokens = [self._for_token(rank) for rank in range(world_size)]
        while tokens != before:
            before, tokens = tokens, [self._for_token(rank) for rank in range(world_size)]
        return tokens

    def for_word(self, rank: int, tokens: list[str]) -> None:
        """That the process of this rank has read the same tokens; one that was killed never has."""
        path = _met(self.folder, tokens[rank])
        why = f": another run may have left {_claim(self.folder, rank)}; empty the folder, or name another"
        self._until(lambda: _read(path) == tokens, rank, why)

    def _for_token(self, rank: int) -> str:
        """A process that has only begun to say its token has not come."""
        token = self._until(lambda: _token(_claim(self.folder, rank)), rank, "")
        assert isinstance(token, str)
        return token

    def _until(self, found: Callable[[], object], rank: int, why: str) -> object:
        while not (value := found()):
            if not self.is_mine():
                raise RendezvousError(f"somebody has emptied {self.folder}: start all ranks again")
            if time.monotonic() > self.end:
                text = f"rank {rank} has not come within {self.timeout_s:g} s ({self.folder}){why}"
                raise MissingRankError(text, ranks=[rank], waited_s=self.timeout_s)
            time.sleep(_POLL_SECONDS)
        return value


@contextmanager
def _claimed(folder: Path, rank: int, token: str) -> Iterator[Callable[[], bool]]:
    """While this process is the one of its rank that others may meet; says whether it still is. Raises ConfigError where there is one.

    Where they do not meet, nothing of it stays.
    """
    path = _claim(folder, rank)
    try:
        _take(path, rank, token)
        yield lambda: _token(path) == token
    except BaseException:
        _met(folder, token).unlink(missing_ok=True)
        raise
    finally:
        if _token(path) == token:
            path.unlink(missing_ok=True)


def _take(path: Path, rank: int, token: str) -> None:
    """Raises ConfigError where somebody has it."""
    try:
        with path.open("x") as claim:
            claim.write(token)
    except FileExistsError as error:
        allowed = "an empty folder"
        text = (
            f"{path} is there already: a run that was killed has left it, or another process is rank {rank}. "
            "If none is, empty the folder or name another one, for all ranks"
        )
        raise ConfigError(text, field="store", value=f"file://{path.parent}", allowed=allowed) from error


def _claim(folder: Path, rank: int) -> Path:
    return folder / f"rank-{rank}"


def _met(folder: Path, token: str) -> Path:
    return folder / f"met-{token}"


def _token(path: Path) -> str:
    """That of a process; empty where there is none, or not all of it yet."""
    with suppress(FileNotFoundError):
        text = path.read_text()
        return text if len(text) == _TOKEN_DIGITS else ""
    return ""


def _read(path: Path) -> object:
    with suppress(FileNotFoundError):
        return json.loads(path.read_text())
    return None


def _publish(path: Path, value: Any) -> None:
    """Nobody reads a part of it."""
    partial = path.with_suffix(".part")
    partial.write_text(json.dumps(value))
    partial.rename(path)


class StoreMeeting:
    """Values in a torch Store."""

    doubt = (
        ". If it was started, large packets of the Store's TCP may be lost on the way: try a smaller MTU of the interfaces (ip link), "
        "net.ipv4.tcp_mtu_probing=1, or a folder (--store file:///...)"
    )

    def __init__(self, store: Any) -> None:
        self._store = store

    def put(self, key: str, value: Any) -> None:
        """See `Meeting`."""
        content = json.dumps(value)
        try:
            in_time(lambda: self._store.set(f"gradwire/doctor/{key}", content), _LONGER_S)
        except TimeoutError:
            raise RendezvousError(f"{key}: the Store takes nothing: is its host cut off?") from None
        except RuntimeError as error:  # as below
            raise RendezvousError(f"{key}: {error}") from error

    def get(self, key: str, timeout_s: float) -> Any:
        """See `Meeting`."""
        name = f"gradwire/doctor/{key}"
        try:
            # Longer than the Store waits, so that it says what it waited for.
            return json.loads(in_time(lambda: self._waited_for(name, timeout_s), timeout_s + _LONGER_S))
        except TimeoutError:
            raise RendezvousError(f"{key}: the Store does not answer: is its host cut off?") from None
        except RuntimeError as error:  # DistStoreError and DistNetworkError are
            raise RendezvousError(f"{key}: {error}") from error

    def clear(self) -> None:
        """See `Meeting`. A Store ends with its job."""

    def _waited_for(self, name: str, timeout_s: float) -> bytes:
        self._store.wait([name], timedelta(seconds=max(0.1, timeout_s)))
        found: bytes = self._store.get(name)
        return found


def open_meeting(address: str, rank: int, world_size: int, timeout_s: float) -> Meeting:
    """The meeting at `file:///folder`, `tcp://host:port` or `env://`.

    Raises:
        ConfigError: the address is none of these or names no place, or the folder has a process of this rank.
        RendezvousError: nobody answers there, or torch is missing; in a folder the others have not come.
    """
    kind, _, place = address.partition("://")
    if kind == "file" and place:
        return FolderMeeting.enter(Path(place), rank, world_size, timeout_s)
    if kind not in ("tcp", "env"):
        allowed = "file:///folder | tcp://host:port | env://"
        raise ConfigError(
            f"store = {address!r} is not allowed: {allowed}", field="store", value=address, allowed=allowed
        )
    try:
        from torch.distributed.rendezvous import rendezvous

        longest = timedelta(seconds=timeout_s + _LONGER_S)
        store, _, _ = in_time(lambda: next(iter(rendezvous(address, rank, world_size, timeout=longest))), timeout_s)
        store.set_timeout(timedelta(seconds=timeout_s))
    except TimeoutError:
        text = f"no Store answers at {address} within {timeout_s:g} s, or not all ranks have come to it"
        raise RendezvousError(text) from None
    except ModuleNotFoundError as error:
        remedy = "pip install 'gradwire[torch]', or meet in a folder that all see (--store file:///...)"
        raise RendezvousError(f"no Store at {address}: {error.name} is not installed: {remedy}") from error
    except ValueError as error:  # of the address, or of what env:// reads
        raise ConfigError(f"store = {address!r} names no place: {error}", field="store", value=address) from error
    except (ImportError, RuntimeError) as error:
        raise RendezvousError(f"no Store at {address}: {error}") from error
    return StoreMeeting(store)
