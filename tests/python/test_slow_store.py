"""A Store that fails once while a rank waits there to join: it is let in when the Store answers again, and nobody refuses it meanwhile."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from gradwire import _bounded, _entrance, _in_time
from gradwire._boundary import Boundary
from gradwire._bounded import BoundedStore
from gradwire._entrance import Door, Watch
from gradwire._heritage import Reopening
from gradwire._meeting import ANSWER_MIN_S, MeetingServer, MeetingStore
from gradwire._part_of_store import PartOfStore
from gradwire._rendezvous import Place
from gradwire.errors import MissingRankError, RendezvousError
from one_process_store import Store

WORLD_SIZE, ROUND, WAITS = 4, 1, 2
RECORD, ANSWER = f"gradwire/{ROUND}/again/{WAITS}", f"gradwire/{ROUND}/answer/{WAITS}"
MEMBERS = [0, 1, 3]
TIMEOUT_S = 60.0


class Member(Boundary):
    """The first of the members; the others agree with it, and the newcomer comes if it has been told that the group runs."""

    def __init__(self, watch: Watch, answer: Callable[[], str]) -> None:
        owner: Any = SimpleNamespace(config=SimpleNamespace(on_peer_loss="continue", peer_timeout_s=0.0))
        native: Any = SimpleNamespace(watch=lambda: {"epoch": {"members": MEMBERS}}, admit=lambda _record: "members")
        place = Place(0, WORLD_SIZE, "group", timedelta(seconds=TIMEOUT_S))
        super().__init__(owner, native, watch, place, is_new=False)
        self._answer = answer

    def _reduce(self, value: int, _op: str) -> tuple[int, list[int]]:
        return value, MEMBERS

    def _barrier(self) -> list[int]:
        return sorted([*MEMBERS, WAITS])

    def _has_joined(self, _rank: int, life: int, _members: Any) -> bool:
        answer = json.loads(self._answer())
        return (answer["life"], answer.get("running")) == (life, "members")


class Later(Member):
    """A member that hears from the first one who waits; all others can let it in."""

    def __init__(self, watch: Watch, waits: int) -> None:
        super().__init__(watch, lambda: "")
        self._rank, self._waits = MEMBERS[1], waits

    def _reduce(self, value: int, op: str) -> tuple[int, list[int]]:
        return (self._waits if op == "max" else value), MEMBERS

    def _has_joined(self, *_: Any) -> bool:
        return True


class FailsOnce(Store):
    """One that takes too long for one request of a member's."""

    def __init__(self) -> None:
        super().__init__()
        self.fails: list[tuple[str, str]] = []

    def _ask(self, name: str, key: str) -> None:
        if self.fails and self.fails[0] == (name, key):
            del self.fails[0]
            if not self.fails:
                raise RendezvousError("the Store did not answer within 5 s")

    def set(self, key: str, value: str) -> None:
        self._ask("set", key)
        super().set(key, value)

    def get(self, key: str) -> bytes:
        self._ask("get", key)
        return super().get(key)


@pytest.mark.parametrize(
    "fails",
    [
        pytest.param([("get", RECORD)], id="while who waits is looked for"),
        pytest.param([("get", RECORD)] * 2, id="while the record is read"),
        pytest.param([("set", ANSWER)], id="while it is answered"),
    ],
)
def test_who_waits_is_let_in_when_the_store_answers_again(
    fails: list[tuple[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    for pause in ("REST_S", "VAIN_PAUSE_S", "VAIN_PAUSE_MAX_S"):
        monkeypatch.setattr(_entrance, pause, 0.0)
    store = FailsOnce()
    door, watch = Door(lambda: store, ROUND, WAITS, WORLD_SIZE), Watch(lambda: store, ROUND, 0, WORLD_SIZE)
    life = door.publish(lambda _life: "record")
    member = Member(watch, lambda: store.keys[ANSWER])
    store.fails = list(fails)
    assert member.cross().newcomer is None
    assert not store.fails, "nothing failed"
    assert json.loads(store.keys[ANSWER]) == {"life": 0}, "it has not been answered"
    assert member.cross().newcomer == WAITS
    assert door.answered(life, TIMEOUT_S, TIMEOUT_S) == "members"


def test_a_refusal_that_could_not_be_written_is_written_later(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_entrance, "VAIN_PAUSE_S", 0.0)
    store = FailsOnce()
    door, watch = Door(lambda: store, ROUND, WAITS, WORLD_SIZE), Watch(lambda: store, ROUND, 0, WORLD_SIZE)
    life = door.publish(lambda _life: "record")
    member = Member(watch, lambda: store.keys[ANSWER])

    def refuse(_record: str) -> str:
        raise RendezvousError("it has another secret")

    member._native.admit = refuse  # type: ignore[method-assign]
    store.fails = [("set", ANSWER)]
    for _ in range(2):
        assert member.cross().newcomer is None
    with pytest.raises(RendezvousError, match="another secret"):
        door.answered(life, TIMEOUT_S, TIMEOUT_S)


def test_a_member_that_does_not_reach_the_store_says_so_once_and_does_not_try_at_each_step(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, logger="gradwire")
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    store, is_reached, attempts = FailsOnce(), False, 0

    def connect() -> FailsOnce:
        nonlocal attempts
        attempts += 1
        if not is_reached:
            raise MissingRankError("no route", ranks=[0])
        return store

    life = Door(lambda: store, ROUND, WAITS, WORLD_SIZE).publish(lambda _life: "record")
    member = Later(Watch(connect, ROUND, MEMBERS[1], WORLD_SIZE), life * WORLD_SIZE + WAITS)
    for rests in (1, 2):
        for _ in range(3):
            assert member.cross().newcomer is None
        assert attempts == rests
        now[0] += _entrance.REST_S
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert f"rank {MEMBERS[1]} cannot read its record: no route" in caplog.text
    is_reached = True
    assert member.cross().newcomer == WAITS


def test_a_refusal_for_which_a_board_has_no_room_is_tried_again_after_a_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    for pause in ("VAIN_PAUSE_S", "VAIN_PAUSE_MAX_S"):
        monkeypatch.setattr(_entrance, pause, 2 * TIMEOUT_S)
    server = MeetingServer("127.0.0.1", 0, WORLD_SIZE)
    port = server._listeners[0].getsockname()[1]
    stores = [MeetingStore("127.0.0.1", port, None, TIMEOUT_S)]
    life = Door(lambda: stores[0], ROUND, WAITS, WORLD_SIZE).publish(lambda _life: "record")

    def connect() -> MeetingStore:
        stores.append(MeetingStore("127.0.0.1", port, None, TIMEOUT_S))
        return stores[-1]

    tried: list[str] = []

    def refuse(record: str) -> str:
        tried.append(record)
        raise RendezvousError("it has another secret " * 100)

    watch = Watch(connect, ROUND, 0, WORLD_SIZE)
    member = Member(watch, lambda: "")
    member._native.admit = refuse  # type: ignore[method-assign]
    server._room.bytes_max = server._room.held + 1000
    for _ in range(3):
        assert member.cross().newcomer is None
    assert tried == ["record"]
    assert json.loads(stores[0].get(ANSWER)) == {"life": 0}, f"life {life} was answered"
    watch.close()
    stores[0].close()
    server.end(None, 0.0)


class SlowServer(MeetingServer):
    """A board that keeps one answer back: the second one about the record of who waits, once it is told to."""

    def __init__(self) -> None:
        self.asked = 0
        self.released = asyncio.Event()
        super().__init__("127.0.0.1", 0, WORLD_SIZE)
        self.port = self._listeners[0].getsockname()[1]

    def release(self) -> None:
        self._loop.call_soon_threadsafe(self.released.set)

    async def _answer(self, request: dict[str, Any]) -> dict[str, Any]:
        answer = await super()._answer(request)
        if (request["op"], request.get("key")) == ("get", RECORD):
            self.asked += 1
            if self.asked == 2:
                await self.released.wait()
        return answer


@pytest.fixture
def server() -> Iterator[SlowServer]:
    server = SlowServer()
    yield server
    server.release()
    server.end(None, 0.0)


def test_an_answer_that_comes_too_late_is_not_taken_for_that_to_the_next_question(server: SlowServer) -> None:
    def connect(timeout_s: float = ANSWER_MIN_S) -> MeetingStore:
        return MeetingStore("127.0.0.1", server.port, None, timeout_s)

    patient = connect(TIMEOUT_S)
    door = Door(lambda: patient, ROUND, WAITS, WORLD_SIZE)
    life = door.publish(lambda _life: "record")
    watch = Watch(connect, ROUND, 0, WORLD_SIZE, reopening=Reopening(connect))
    member = Member(watch, lambda: patient.get(ANSWER))
    while server.asked < 2:
        assert member.cross().newcomer is None
    server.release()
    end = time.monotonic() + TIMEOUT_S
    while member.cross().newcomer is None and time.monotonic() < end:
        pass
    assert door.answered(life, TIMEOUT_S, TIMEOUT_S) == "members"
    watch.close()
    patient.close()


class Asked(Store):
    """One that notes which thread asks it, and keeps an answer back until it is told to give it."""

    def __init__(self) -> None:
        super().__init__()
        self.threads: set[int] = set()
        self.gives = threading.Event()
        self.gives.set()

    def check(self, keys: list[str]) -> bool:
        self.threads.add(threading.get_ident())
        assert self.gives.wait(TIMEOUT_S)
        return super().check(keys)

    def delete_key(self, key: str) -> bool:
        return self.keys.pop(key, None) is not None


def bounded_threads() -> int:
    return sum(thread.name == "gradwire-store" for thread in threading.enumerate())


def test_all_requests_are_made_on_one_thread_that_ends_with_the_store() -> None:
    store, before = Asked(), bounded_threads()
    bounded = BoundedStore(store, TIMEOUT_S)
    for number in range(3):
        bounded.set("key", str(number))
        assert bounded.check(["key"])
        assert bounded.get("key") == str(number).encode()
        assert bounded.add("count", 2) == 2 * (number + 1)
    bounded.compare_set("key", "", "other")
    assert bounded.get("key") == b"2"
    bounded.delete_key("key")
    with pytest.raises(KeyError):
        bounded.get("key")
    assert len(store.threads) == 1
    assert threading.get_ident() not in store.threads
    assert bounded_threads() == before + 1
    bounded.close()
    assert not bounded.check(["key"]), "another one is asked by another thread"
    del bounded
    end = time.monotonic() + TIMEOUT_S
    while bounded_threads() > before:
        assert time.monotonic() < end, "its thread stays"


def test_who_has_little_time_left_waits_no_longer_and_more_time_can_be_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_bounded, "ANSWER_MIN_S", 0.1)
    store = Asked()
    bounded = BoundedStore(store, TIMEOUT_S, until=time.monotonic())
    store.gives.clear()
    with pytest.raises(RendezvousError, match=r"the Store did not answer within 0\.1 s"):
        bounded.check(["key"])
    pending = bounded._pending
    assert pending is not None
    bounded.close()
    with pytest.raises(RendezvousError, match="has not answered an earlier request"):
        bounded.check(["key"])
    store.gives.set()
    assert pending.ended.wait(TIMEOUT_S)
    _bounded.give_time(PartOfStore(PartOfStore(bounded, "a/"), "b/"), time.monotonic() + TIMEOUT_S)
    store.gives.clear()
    threading.Timer(0.5, store.gives.set).start()
    assert not bounded.check(["key"])


def test_who_is_interrupted_leaves_no_request_behind_that_is_answered_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread that comes back from torch while the process ends would abort it."""
    monkeypatch.setattr(_in_time, "LET_GO_S", TIMEOUT_S)

    class Interrupts(Store):
        def check(self, keys: list[str]) -> bool:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)
            threading.Event().wait(0.5)
            return super().check(keys)

    bounded = BoundedStore(Interrupts(), TIMEOUT_S)
    with pytest.raises(KeyboardInterrupt):
        bounded.check(["key"])
    assert bounded._pending is not None
    assert bounded._pending.ended.is_set()


def test_a_forked_child_asks_by_a_thread_of_its_own() -> None:
    bounded = BoundedStore(Store(), TIMEOUT_S)
    bounded.set("key", "value")
    child = os.fork()
    if child == 0:
        signal.alarm(int(TIMEOUT_S))
        os._exit(bounded.get("key") != b"value")
    assert os.waitpid(child, 0)[1] == 0
    assert bounded.get("key") == b"value"


def test_a_rank_that_leaves_while_the_interpreter_ends_says_so_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python 3.12 starts no thread in a function of `atexit`."""

    def refuse_to_start(_thread: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    store = Store()
    bounded = BoundedStore(store, TIMEOUT_S)
    monkeypatch.setattr(threading.Thread, "start", refuse_to_start)
    Watch(lambda: bounded, ROUND, MEMBERS[0], WORLD_SIZE).leave()
    assert store.check([f"gradwire/{ROUND}/left/{MEMBERS[0]}"])
