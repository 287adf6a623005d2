"""How processes that were started together find each other on a Store where those of earlier starts have written."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from gradwire import _calling
from gradwire._board import Board
from gradwire._calling import Caller, be_called, latest_round, look_for_a_note, pause, server_is_called
from gradwire._part_of_store import PartOfStore
from gradwire.errors import MissingRankError, RendezvousError, WorldSizeError
from torch.distributed import FileStore, HashStore, PrefixStore, TCPStore

PATIENCE_S = 120.0


@pytest.fixture
def store() -> Any:
    return HashStore()


@pytest.fixture
def others() -> Any:
    with ThreadPoolExecutor(4) as pool:
        yield pool


def come(others: ThreadPoolExecutor, store: Any, rank: int, world_size: int = 2) -> Future[int]:
    return others.submit(be_called, store, rank, world_size, PATIENCE_S)


def call_until(caller: Caller, ranks: list[int], future: Future[int]) -> int:
    """What the one who is called hears."""
    done = threading.Event()
    future.add_done_callback(lambda _: done.set())
    while not done.wait(0.01):
        caller.call(ranks)
    return future.result()


def test_who_waits_in_vain_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    store = TCPStore("127.0.0.1", 0, 1, is_master=True)
    pause(store, "never", 0.05)
    store.set("here", "")
    pause(store, "here", PATIENCE_S)
    assert capfd.readouterr().err == ""


def test_who_has_ended_is_called_in_vain_and_who_takes_its_place_into_the_same_round(store: Any, others: Any) -> None:
    with pytest.raises(MissingRankError):
        be_called(store, 1, 2, 0.0)  # a process of an earlier start
    Caller(store, 2)  # its rank 0, which has ended too
    caller = Caller(store, 2)
    caller.call([1])
    assert call_until(caller, [1], come(others, store, 1)) == caller.round_number == 2


def test_who_cannot_start_is_believed_once_nobody_has_taken_its_place(
    store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(MissingRankError):
        be_called(store, 1, 2, 0.0, error="PortInUseError: 47401")
    caller = Caller(store, 2)
    caller.call([1])
    monkeypatch.setattr(_calling, "AGAIN_S", 0.0)
    with pytest.raises(RendezvousError, match=r"rank 1 on .* could not start: PortInUseError: 47401") as caught:
        caller.call([1])
    assert caught.value.rank == 1


def test_a_rank_0_that_cannot_start_tells_who_comes_later(store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_calling, "TELLING_S", 0.0)
    monkeypatch.setattr(_calling, "AGAIN_S", 0.0)
    Caller(store, 2).give_up([1], "ConfigError: no such setting")
    with pytest.raises(RendezvousError, match=r"rank 0 on .* gave up: ConfigError: no such setting"):
        be_called(store, 1, 2, 0.5)
    Caller(store, 2)  # it was started again
    with pytest.raises(MissingRankError):
        be_called(store, 1, 2, 0.5)


def test_a_rank_0_that_cannot_start_calls_who_is_there_or_comes_soon(store: Any, others: Any) -> None:
    telling = others.submit(Caller(store, 2).give_up, [1], "ConfigError: no such setting")
    while not store.check(["gradwire/gave_up"]):
        pass
    # It came after the round, so it waits for its call, and then reads why.
    assert be_called(store, 1, 2, PATIENCE_S) == latest_round(store) == 1
    telling.result(PATIENCE_S)


def test_a_rank_0_that_cannot_start_stays_until_who_came_just_then_has_read_why(
    store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = json.dumps({"number": "of rank 1", "host": "elsewhere", "error": ""})
    monkeypatch.setattr(_calling, "pause", lambda *_: store.set("gradwire/here/1", said))
    stays: list[str] = []
    monkeypatch.setattr(Caller, "stay", lambda caller: stays.extend(caller._called.values()))
    Caller(store, 2).give_up([1], "ConfigError: no such setting")
    assert stays == ["of rank 1"]


def test_nothing_of_a_call_stays_in_the_store_when_it_was_heard(store: Any, others: Any) -> None:
    waits = come(others, store, 1)
    while not store.check(["gradwire/here/1"]):
        pass
    number = json.loads(store.get("gradwire/here/1"))["number"]
    Caller(store, 2).call([1])
    assert waits.result(PATIENCE_S) == 1
    assert not store.check([f"gradwire/called/{number}"])


def test_who_waits_hears_why_rank_0_cannot_start(store: Any, others: Any) -> None:
    waits = come(others, store, 1)
    while not store.check(["gradwire/here/1"]):
        pass
    Caller(store, 2).give_up([1], "ConfigError: no such setting")
    # Called into the round, or at once.
    with pytest.raises(RendezvousError, match=r"rank 0 on .* gave up: ConfigError: no such setting"):
        look_for_a_note(store, waits.result(PATIENCE_S), 1)


def test_all_who_waited_for_a_rank_get_the_same_error(store: Any) -> None:
    caller = Caller(store, 3)
    caller.note("MissingRankError: rank(s) 2 of 3 did not appear within 1 s", [2], 1.0)
    with pytest.raises(MissingRankError, match=r"rank 0 on .* gave up: MissingRankError: rank\(s\) 2") as caught:
        look_for_a_note(store, caller.round_number, 1)
    assert (caught.value.ranks, caught.value.waited_s) == ([2], 1.0)
    with pytest.raises(RendezvousError, match=r"rank 0 on .* gave up") as late:
        look_for_a_note(store, caller.round_number, 2)
    assert not isinstance(late.value, MissingRankError), "it is not told that it waits for itself"


def test_who_comes_just_as_rank_0_gives_up_is_called_to_hear_why(store: Any, others: Any) -> None:
    caller = Caller(store, 3)
    caller.call([1, 2])
    waits = come(others, store, 1, world_size=3)
    while not store.check(["gradwire/here/1"]):
        pass
    caller.note("MissingRankError: rank(s) 1, 2 of 3 did not appear within 1 s", [1, 2], 1.0)
    caller.stay()
    with pytest.raises(RendezvousError, match="gave up"):
        look_for_a_note(store, waits.result(PATIENCE_S), 1)


def test_what_one_rank_wrote_does_not_keep_rank_0_from_telling_the_others(store: Any, others: Any) -> None:
    store.set("gradwire/here/1", "written by somebody else")
    caller = Caller(store, 3)
    with pytest.raises(RendezvousError, match="not written by this version"):
        caller.call([1, 2])
    waits = come(others, store, 2, world_size=3)
    while not store.check(["gradwire/here/2"]):
        pass
    caller.note("RendezvousError: what lies at gradwire/here/1")
    caller.stay()
    with pytest.raises(RendezvousError, match="gave up"):
        look_for_a_note(store, waits.result(PATIENCE_S), 2)


def test_who_cannot_start_is_not_kept_from_telling_by_processes_that_have_ended(store: Any, others: Any) -> None:
    with pytest.raises(MissingRankError):
        be_called(store, 1, 2, 0.0)
    caller = Caller(store, 2)
    telling = others.submit(caller.give_up, [1], "ConfigError: no such setting")
    assert be_called(store, 1, 2, PATIENCE_S) == caller.round_number
    telling.result(PATIENCE_S)


def test_a_round_that_is_given_up_ends_the_wait_of_who_came_before_it_began(store: Any, others: Any) -> None:
    waits = come(others, store, 2, world_size=3)
    while not store.check(["gradwire/here/2"]):
        pass
    caller = Caller(store, 3)
    caller.note("RendezvousError: rank 1 could not start")
    with pytest.raises(RendezvousError, match=r"rank 0 on .* gave up: RendezvousError: rank 1 could not start"):
        waits.result(PATIENCE_S)
    with pytest.raises(RendezvousError, match="gave up"):
        look_for_a_note(store, caller.round_number, 2)
    look_for_a_note(store, caller.round_number + 1, 2)


def test_ranks_beyond_the_world_of_rank_0_hear_of_it(store: Any, others: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    caller = Caller(store, 2)
    assert call_until(caller, [], come(others, store, 2, world_size=3)) == caller.round_number
    monkeypatch.setattr(_calling, "AGAIN_S", 0.0)
    store.set(f"gradwire/{latest_round(store)}/0", json.dumps({"host": "elsewhere", "world_size": 2}))
    with pytest.raises(WorldSizeError, match="world size 2, rank 2 with 3"):
        be_called(store, 2, 3, 0.5)


@pytest.mark.parametrize("word", ["smaller world", "note"])
def test_what_an_earlier_start_left_does_not_end_the_wait_for_a_rank_0_that_is_slow(
    store: Any, others: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, word: str
) -> None:
    monkeypatch.setattr(_calling, "AGAIN_S", 0.0)
    earlier = Caller(store, 2)
    store.set("gradwire/1/0", json.dumps({"host": "elsewhere", "world_size": 2}))
    if word == "note":
        earlier.note("ConfigError: no such setting")
    waits = come(others, store, 2, world_size=3)
    while not caplog.records:
        assert not waits.done(), waits.exception()
    assert "which may have ended" in caplog.text
    caller = Caller(store, 3)
    assert call_until(caller, [1, 2], waits) == caller.round_number == 2


def test_servers_are_called_by_their_numbers_and_those_too_many_too(store: Any, others: Any) -> None:
    with pytest.raises(MissingRankError, match=r"rank\(s\) 0 did not appear .*this is server 0 on"):
        server_is_called(store, 0, 0.0)  # it was killed while it waited
    Caller(store, 4, servers=2).note("RendezvousError: an earlier start")
    servers = [others.submit(server_is_called, store, index, PATIENCE_S) for index in range(3)]
    while not store.check([f"gradwire/here/server-{index}" for index in range(3)]):
        assert not any(server.done() for server in servers)
    caller = Caller(store, 4, servers=2)
    assert [call_until(caller, [2, 3], server) for server in servers] == [caller.round_number] * 3
    # A rank of workers of whom there are more than rank 0 knows.
    assert call_until(caller, [], come(others, store, 2, world_size=5)) == caller.round_number


def test_a_server_leaves_a_round_whose_workers_have_ended(store: Any, others: Any) -> None:
    """One of them died before it wrote its record, and the launcher ended the others."""
    waits = others.submit(server_is_called, store, 0, PATIENCE_S)
    caller = Caller(store, 3, servers=1)
    assert call_until(caller, [2], waits) == caller.round_number
    board = Board(store, f"gradwire/{caller.round_number}", 2, 3)
    board.called, board.is_servers = caller.round_number, True
    board.publish({"record": "", "settings": {}})
    collects = others.submit(board.collect, PATIENCE_S)
    Caller(store, 3, servers=1)
    with pytest.raises(RendezvousError, match="worker 0 has begun another round"):
        collects.result(PATIENCE_S)


def test_a_server_hears_of_a_round_that_is_given_up_while_it_waits(store: Any, others: Any) -> None:
    waits = others.submit(server_is_called, store, 0, PATIENCE_S)
    while not store.check(["gradwire/here/server-0"]):
        assert not waits.done()
    Caller(store, 2, servers=1).note("ConfigError: no such setting")
    with pytest.raises(RendezvousError, match=r"rank 0 on .* gave up: ConfigError: no such setting"):
        waits.result(PATIENCE_S)


def test_who_waits_on_a_store_that_ends_is_told_so(others: Any) -> None:
    held = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    waits = come(others, TCPStore("localhost", held.port, is_master=False), 1)
    held.wait(["gradwire/here/1"])
    del held
    with pytest.raises(RendezvousError, match=r"the Store failed while .* see there why that ended"):
        waits.result(PATIENCE_S)


STORES = {
    "hash": lambda _: HashStore(),
    "file": lambda folder: FileStore(str(folder / "store"), -1),
    "tcp": lambda _: TCPStore("127.0.0.1", 0, 1, is_master=True),
    "prefix": lambda _: PrefixStore("group/0", TCPStore("127.0.0.1", 0, 1, is_master=True)),
}


class TakenBack(PartOfStore):
    """A rank takes back that it is here as soon as it has been looked for: each look is the last one that finds it."""

    def _took_back(self, found: Any, *keys: str) -> Any:
        for key in keys:
            if "/here/" in key:
                self.underlying_store.delete_key(key)
        return found

    def get(self, key: str) -> Any:
        assert self.underlying_store.check([key]), f"who asks for {key} waits for it: it has gone since it was seen"
        return super().get(key)

    def check(self, keys: Sequence[str]) -> bool:
        return self._took_back(super().check(keys), *keys)

    def compare_set(self, key: str, expected: str, value: str) -> Any:
        return self._took_back(super().compare_set(key, expected, value), key)


@pytest.mark.parametrize("kind", STORES)
def test_rank_0_does_not_wait_for_what_a_rank_takes_back_while_it_looks(tmp_path: Path, kind: str) -> None:
    """As one does whose group has just been formed, when rank 0 forms the next one under that name already."""
    store = STORES[kind](tmp_path)
    with pytest.raises(MissingRankError):
        be_called(store, 1, 2, 0.0)
    number = json.loads(store.get("gradwire/here/1"))["number"]
    caller = Caller(TakenBack(store, ""), 2)
    for _ in range(2):
        caller.call([1])
    assert store.get(f"gradwire/called/{number}") == b"1"
    assert not store.check(["gradwire/here/1"])


def test_a_store_of_the_users_may_say_nothing_of_what_it_has(store: Any, others: Any) -> None:
    class Silent(PartOfStore):
        """As a Store of before, that a program has written for itself."""

        def compare_set(self, key: str, expected: str, value: str) -> None:
            super().compare_set(key, expected, value)

    caller = Caller(Silent(store, ""), 2)
    assert call_until(caller, [1], come(others, store, 1)) == caller.round_number


@pytest.mark.parametrize("here", ["", "[]", '{"number": 1, "host": "a", "error": ""}'])
def test_what_no_rank_wrote_is_named(store: Any, here: str) -> None:
    store.set("gradwire/here/1", here)
    with pytest.raises(RendezvousError, match="gradwire/here/1"):
        Caller(store, 2).call([1])
