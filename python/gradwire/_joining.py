"""How the ranks of a communicator come together: who this process is, where the ranks meet, and that they do.

Used by `communicator.py` alone, which makes the calls once the group is there.
"""

from __future__ import annotations

import contextlib
import gc
import operator
import os
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any
from weakref import WeakValueDictionary

from gradwire._calling import POLL_MIN_S
from gradwire._entrance import Watch
from gradwire._heritage import Heritage, Reopening
from gradwire._meeting import ANSWER_MIN_S, LINGER_S, MeetingServer, MeetingStore, parse_address
from gradwire._meeting_sockets import CONNECT_PAUSE_S
from gradwire._part_of_store import PartOfStore
from gradwire._rendezvous import Formed, Place, form_group
from gradwire._runtime import configuration, configure, current
from gradwire.config import Config
from gradwire.errors import ConfigError, GradwireError, MissingRankError, RendezvousError, SecretMismatchError
from gradwire.secret import job_secret

# A board that does not answer, or shows this rank out before it has said who it is, is come to again for so long: rank 0 may be busy.
COMING_S = 60.0


def take(address: tuple[str, int], holder: object) -> None:
    """The address is a communicator's, `holder`, until it leaves or nobody has it any more.

    Raises:
        ConfigError: it is another communicator's, which is open. Rounds at an address follow each other: whoever comes there while one runs
            is taken for a later life of its rank.
    """
    if configuration().on_peer_loss == "continue" and _is_held(address):
        raise _taken(address)
    _held[address] = holder


def _is_held(address: tuple[str, int]) -> bool:
    if address in _held:
        gc.collect()  # one that nobody can reach may be there until then
    return address in _held


def leave(address: tuple[str, int], holder: object) -> None:
    """The communicator there is closed, or was not formed, and another one may follow."""
    if _held.get(address) is holder:
        _held.pop(address, None)


def meet(address: tuple[str, int], rank: int, world_size: int, timeout: timedelta) -> tuple[Place, Formed]:
    """Forms the group of all ranks, or joins it; rank 0 listens meanwhile, and where lost ranks may join again as long as it lives.

    Returns:
        The group, and this rank's place in it; its name is the group's, the same on all ranks.
    """
    # No two groups of a job are called alike: where they meet is one process's at a time, and that one counts.
    name = "" if rank else f"communicator {address[0]}:{address[1]} {_counted.communicators}"
    place = Place(rank, world_size, name, timeout)
    formed = _meet(address, place)
    name = str(formed.native.stats()["name"])
    # So that this process calls no other group so, where it is rank 0.
    _counted.communicators = max(_counted.communicators, int(name.rpartition(" ")[2])) + 1
    return replace(place, name=name), formed


def _meet(address: tuple[str, int], place: Place) -> Formed:
    server = None
    if place.rank == 0:
        # Its own name may have no address for a while: that is of the same wait as the one for the others.
        place = replace(place, begun=time.monotonic())
        server = listen(address, place.world_size, place.timeout)
    failure: BaseException | None = None
    try:
        formed = _form(address, place)
        _forget_earlier(address, place.world_size, formed.round_number)
        return formed
    except MissingRankError as error:
        failure = error if server is None else _explained(error, server.why_missing(error.ranks))
        if failure is not error:
            raise failure from error
        raise
    except BaseException as error:
        failure = error
        raise
    finally:
        if server is not None and (failure is not None or not stays(address)):
            server.end(failure, LINGER_S if failure is None or isinstance(failure, Exception) else 0.0)
            _boards.pop(address, None)
            _formed.pop(address, None)


def _forget_earlier(address: tuple[str, int], world_size: int, round_number: int) -> None:
    """Makes room on a board of this process that stays: whoever has come to a round has left the ones before.

    What lies there of a round tells who is started again which group runs; that is the latest one.
    """
    if address not in _boards:
        return
    earlier, ranks = _formed.get(address, (round_number, world_size))
    if ranks > world_size:
        return  # some of its ranks may still be together
    for number in range(earlier, round_number):
        _boards[address].forget(f"gradwire/{number}/")
    _formed[address] = round_number, world_size


def _form(address: tuple[str, int], place: Place) -> Formed:
    """Forms the group on the board at an address.

    A meeting cannot end without this rank: one that does was that of the communicator before, which this rank has closed before others
    had left the board.
    """
    end = place.waits_since() + place.timeout.total_seconds()
    while True:
        try:
            left_s = max(end - time.monotonic(), ANSWER_MIN_S)
            with contextlib.closing(_come_to(address, place.rank, left_s)) as store:
                return form_group(store, place)
        except RendezvousError as error:
            left_s = end - time.monotonic()
            if not error.fields.get("ended") or left_s < POLL_MIN_S:
                raise
        place = replace(place, timeout=timedelta(seconds=left_s), begun=None)


def _come_to(address: tuple[str, int], rank: int | None, timeout_s: float) -> MeetingStore:
    """The board at an address.

    One that ends while a rank comes was that of the communicator before, and goes soon. One that does not answer may be busy with others.
    """
    started = time.monotonic()
    end, left_s = started + min(timeout_s, COMING_S), timeout_s
    while True:
        try:
            return MeetingStore(*address, rank, left_s, _secret(), mtu=configuration().mtu)
        except SecretMismatchError:
            job_secret(configuration())  # a secret that cannot be used has a reason of its own
            raise
        except RendezvousError as error:
            left_s = started + timeout_s - time.monotonic()
            is_over = time.monotonic() > end or left_s < POLL_MIN_S
            if rank is None or not error.fields.get("over") or is_over:
                raise
        time.sleep(CONNECT_PAUSE_S)


def _secret() -> bytes | None:
    """The job secret; None also where it cannot be used: the engine says why, and the others are told (`_rendezvous.py`)."""
    if (owner := current()) is not None:
        return owner.secret
    try:
        return job_secret(configuration())
    except GradwireError:
        return None


def _explained(error: MissingRankError, reasons: Sequence[str]) -> MissingRankError:
    """With what the board knows of the ranks that are missing."""
    return MissingRankError("; ".join([str(error), *reasons]), **error.fields) if reasons else error


def listen(address: tuple[str, int], world_size: int, timeout: timedelta) -> MeetingServer:
    """The board of this process at an address, within `timeout`. One that stays is used by all of its communicators."""
    server = _boards.get(address) or MeetingServer(
        *address, world_size, _secret(), mtu=configuration().mtu, timeout_s=timeout.total_seconds()
    )
    if configuration().on_peer_loss == "continue":
        _boards[address] = server
    return server


def stays(address: tuple[str, int]) -> bool:
    """Whether this process goes on listening there."""
    return address in _boards


def watch(address: tuple[str, int], round_number: int, place: Place, heritage: Heritage | None) -> Watch:
    """Over those who join a group that runs, also on a board that rank 0 serves anew."""

    def connect() -> MeetingStore:
        # Without a rank: it may stay open while this rank meets the others for `split`.
        return _come_to(address, None, ANSWER_S)

    reopening = Reopening(connect)
    life = 0 if heritage is None else heritage.life
    return Watch(connect, round_number, place.rank, place.world_size, life=life, heritage=heritage, reopening=reopening)


def come_back(address: tuple[str, int], rank: int, place: Place) -> MeetingStore:
    """The board that rank 0 of a whole serves again, for a part in which this is the place of `rank` of the whole."""
    return _come_to(address, rank, place.timeout.total_seconds())


def meet_below(prefix: str, store: MeetingStore, place: Place) -> Formed:
    """Forms a part, whose `place` this is, while rank 0 of the whole listens."""
    return form_group(PartOfStore(store, prefix), place)


def address(rendezvous: str | None, config: Config | None = None) -> tuple[str, int]:
    """Host and port of the argument, or of the configuration: the one that is to be the process's, if there is one."""
    if rendezvous is None:
        is_given = isinstance(config, Config) and current() is None
        rendezvous = (Config.from_env(config) if is_given else configuration()).rendezvous
    address = rendezvous
    if address is None:
        raise ConfigError(
            "where do the ranks meet? Pass rendezvous='host:port' or set GRADWIRE_RENDEZVOUS, an address of rank 0's host",
            field="rendezvous",
        )
    return parse_address(address)


class _Counted:
    """What this process has formed, or more where others had; rank 0's count is in the group's name."""

    communicators = 0


_counted = _Counted()
# Where communicators of this process are open. One that is lost without `close` leaves its group with its last reference, and its address.
_held: WeakValueDictionary[tuple[str, int], object] = WeakValueDictionary()
# Boards that stay, the latest round that was formed on each and its world size, and how long a member that looks there waits for
# one that is gone.
_boards: dict[tuple[str, int], MeetingServer] = {}
_formed: dict[tuple[str, int], tuple[int, int]] = {}
# In a forked child: its parent's boards. Nothing of them is dropped: their event loops would take themselves for forgotten, and complain.
_inherited: list[MeetingServer] = []
ANSWER_S = 1.0


def _forget_in_child() -> None:
    """A forked child has no communicators, and serves no board: the threads are its parent's, and so are the sockets."""
    _inherited.extend(_boards.values())
    _boards.clear()
    _formed.clear()
    _held.clear()


os.register_at_fork(after_in_child=_forget_in_child)


def apply(config: Config) -> None:
    """The configuration of the process; a second communicator may repeat it.

    Raises:
        ConfigError: the engine runs already with another one, or this is no `Config`.
    """
    owner = current()
    if owner is None or not isinstance(config, Config):
        configure(config)
    elif owner.config != Config.from_env(config):
        raise ConfigError(
            "config comes too late: the engine has started with the first group of the process, and with other settings. Pass it to the "
            "first one",
            field="config",
        )


def _taken(address: tuple[str, int]) -> ConfigError:
    text = f"{address[0]}:{address[1]}"
    return ConfigError(
        f"rendezvous = {text!r} is the address of a communicator that is open: with on_peer_loss = 'continue' lost ranks come back "
        "to it there. Close that one first, split it, or give this one another port of rank 0's host. Where nothing seems to have it any "
        "more, a traceback that is kept still holds it (run it once more), or the name that you bind again (close it first)",
        field="rendezvous",
        value=text,
    )


def number(name: str, variable: str, argument: int | None, low: int, high: int) -> int:
    """The argument, or the variable of a launcher."""
    value: Any = os.environ.get(variable) if argument is None else argument
    if value is None:
        raise ConfigError(f"{name} is not known: pass it or set {variable}", field=name)
    try:
        number = int(value) if isinstance(value, str) else operator.index(value)
    except (TypeError, ValueError):
        number = low - 1
    if not low <= number <= high:
        raise ConfigError(f"{name} = {value!r} is not allowed: {low} to {high}", field=name, value=value)
    return number
