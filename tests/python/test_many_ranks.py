"""What it costs to form a group of many ranks: requests to the Store, and turns of the thread that serves one."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
from free_ports import free_port
from gradwire import _meeting
from gradwire._board import LOOKS, VERSIONS, Board
from gradwire._meeting import MeetingServer, MeetingStore
from gradwire._named import first_named
from gradwire._part_of_store import PartOfStore
from gradwire.errors import MissingRankError, RendezvousError

WORLD_SIZE = 64
PREFIX = "gradwire/1"
PATIENCE_S = 60.0


@pytest.fixture
def served() -> Iterator[tuple[MeetingServer, int]]:
    port = free_port()
    server = MeetingServer("127.0.0.1", port, WORLD_SIZE)
    yield server, port
    server.end(None, 0.0)


@pytest.fixture
def store(served: tuple[MeetingServer, int]) -> Iterator[MeetingStore]:
    with contextlib.closing(MeetingStore("127.0.0.1", served[1], None, PATIENCE_S)) as store:
        yield store


class Counted(PartOfStore):
    """A Store of which the requests are counted."""

    def __init__(self, store: Any) -> None:
        super().__init__(store, "")
        self.count: Counter[str] = Counter()

    def get(self, key: str) -> Any:
        self.count["get"] += 1
        return super().get(key)

    def check(self, keys: Sequence[str]) -> bool:
        self.count["check"] += 1
        return super().check(keys)

    def wait(self, keys: Sequence[str], timeout: timedelta) -> None:
        self.count["wait"] += 1
        super().wait(keys, timeout)


def publish(store: Any, ranks: Sequence[int], **more: Any) -> None:
    for rank in ranks:
        Board(store, PREFIX, rank, WORLD_SIZE).publish({"record": "", "settings": {}, **more})


def test_who_waits_on_a_board_is_not_woken_by_what_others_write(served: tuple[MeetingServer, int]) -> None:
    server, port = served
    callbacks = Counter[str]()
    with contextlib.ExitStack() as stack:
        for _ in range(WORLD_SIZE):
            waits = stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S))
            waits.sendall(_meeting._frame({"gradwire": 1, "rank": None, "nonce": ""}))
            waits.sendall(_meeting._frame({"op": "wait", "key": "never", "timeout_s": 30.0}))
        end = time.monotonic() + PATIENCE_S
        while len(server._texts._awaited.get("never", ())) < WORLD_SIZE:
            assert time.monotonic() < end, "not all wait"
        writes = stack.enter_context(contextlib.closing(MeetingStore("127.0.0.1", port, 0, PATIENCE_S)))
        call_soon = server._loop.call_soon

        def counted(*args: Any, **options: Any) -> Any:
            callbacks["soon"] += 1
            return call_soon(*args, **options)

        server._loop.call_soon = counted  # type: ignore[method-assign]
        for number in range(WORLD_SIZE):
            writes.set(str(number), "")
        # A few turns for each request, and none for who waits: that would be one or more for each pair.
        assert callbacks["soon"] < WORLD_SIZE * WORLD_SIZE / 2
        writes.set("never", "")


def test_a_board_is_asked_for_many_keys_at_once(store: MeetingStore, monkeypatch: pytest.MonkeyPatch) -> None:
    publish(store, range(WORLD_SIZE))
    keys = [f"{PREFIX}/{rank}" for rank in range(WORLD_SIZE)]
    asked = []
    monkeypatch.setattr(store, "_ask", lambda request: asked.append(request) or MeetingStore._ask(store, request))
    assert store.check(keys)
    assert not store.check([*keys, "none"])
    assert store.check([])
    assert len(asked) == 2
    monkeypatch.setattr(_meeting, "KEYS_AT_ONCE", 10)
    assert store.check(keys)
    assert not store.check([*keys, "none"])


@pytest.mark.parametrize("keys", [None, "key", [1], ["k" * 300], ["\U0001f600"], {"key": 1}])
def test_keys_that_are_none_are_refused(store: MeetingStore, keys: Any) -> None:
    with pytest.raises(RendezvousError, match="refuses this rank: key"):
        store._ask({"op": "check", "keys": keys})


def test_records_that_are_there_take_one_request_each_and_one_more(store: MeetingStore) -> None:
    publish(store, range(WORLD_SIZE))
    counted = Counted(store)
    assert list(Board(counted, PREFIX, 0, WORLD_SIZE).collect(PATIENCE_S)) == list(range(WORLD_SIZE))
    assert counted.count == {"check": 1, "get": WORLD_SIZE}


def test_who_waits_for_many_asks_for_few_of_them_each_time(
    served: tuple[MeetingServer, int], store: MeetingStore
) -> None:
    """The others come in the order that is worst for who waits for the first one that is missing."""
    publish(store, [0])
    waits = threading.Event()

    class Waits(Counted):
        def wait(self, keys: Sequence[str], timeout: timedelta) -> None:
            waits.set()
            super().wait(keys, timeout)

    with contextlib.closing(MeetingStore("127.0.0.1", served[1], 0, PATIENCE_S)) as own, ThreadPoolExecutor(1) as pool:
        counted = Waits(own)
        collects = pool.submit(Board(counted, PREFIX, 0, WORLD_SIZE).collect, PATIENCE_S)
        for rank in range(1, WORLD_SIZE):
            assert waits.wait(PATIENCE_S)
            waits.clear()
            publish(store, [rank])
        assert len(collects.result(PATIENCE_S)) == WORLD_SIZE
    passes = counted.count["wait"] + counted.count["get"]
    assert counted.count["get"] == WORLD_SIZE
    assert counted.count["check"] <= (LOOKS + 2) * passes


def test_who_is_missing_is_named_one_by_one(store: MeetingStore) -> None:
    missing = [rank for rank in range(WORLD_SIZE) if rank % 3]
    publish(store, [rank for rank in range(WORLD_SIZE) if rank % 3 == 0])
    with pytest.raises(MissingRankError) as caught:
        Board(store, PREFIX, 0, WORLD_SIZE).collect(0.0)
    assert caught.value.ranks == missing
    assert "rank(s) 1, 2, 4, 5, 7, 8, 10, 11 and 34 more of 64 did not appear" in str(caught.value)


def test_who_has_not_read_is_named_like_who_is_missing(store: MeetingStore) -> None:
    error = Board(store, PREFIX, 0, WORLD_SIZE)._did_not_read(list(range(1, 20)), 1.0)
    assert error.ranks == list(range(1, 20))
    assert "rank(s) 1, 2, 3, 4, 5, 6, 7, 8 and 11 more of 64 appeared" in str(error)


@pytest.mark.parametrize(
    ("ranks", "text"),
    [([], ""), ([3], "3"), (range(8), "0, 1, 2, 3, 4, 5, 6, 7"), (range(9), "0, 1, 2, 3, 4, 5, 6, 7 and 1 more")],
)
def test_a_message_names_the_first_eight_ranks(ranks: Sequence[int], text: str) -> None:
    assert first_named(ranks) == text


def test_who_cannot_start_is_found_while_many_are_missing(store: MeetingStore) -> None:
    publish(store, [0])
    entry = {"error": "no memory", "host": "a", "world_size": WORLD_SIZE, **VERSIONS}
    store.set(f"{PREFIX}/20", json.dumps(entry))
    with pytest.raises(RendezvousError, match="rank 20 on a could not start: no memory"):
        Board(store, PREFIX, 0, WORLD_SIZE).collect(PATIENCE_S)
