"""A rank that takes long to read the records of all others: nobody's time to connect begins before it has."""

from __future__ import annotations

import contextlib
import logging
import logging.handlers
import os
import queue
import re
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from free_ports import free_port
from gradwire import _board
from gradwire._board import Board
from gradwire._calling import Caller
from gradwire._meeting import MeetingServer, MeetingStore
from gradwire._part_of_store import PartOfStore
from gradwire.errors import MissingRankError, RendezvousError
from test_communicator import FORM, form, printed, start
from torch.distributed import FileStore, HashStore, PrefixStore, TCPStore

WORLD_SIZE, SLOW = 3, 2
PREFIX = "gradwire/1"
PATIENCE_S = 60.0
CONNECT_S = 0.2
KINDS = ("tcp", "hash", "file", "prefix", "board")
# As `FORM`, and reads nothing that lies on the board before somebody has opened and closed a pipe.
SLOW_FORM = (
    """
import os, sys; sys.modules["torch"] = None
from gradwire._meeting import MeetingStore
get = MeetingStore.get
def slow(store, key):
    if key == "gradwire/1/1":
        open(os.environ["PIPE"]).read()
    return get(store, key)
MeetingStore.get = slow
"""
    + FORM
)


@pytest.fixture(params=KINDS)
def connect(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    """Gives each rank its Store, of a kind each."""
    kind, port = request.param, free_port()
    held: Any = HashStore()
    server = MeetingServer("127.0.0.1", port, WORLD_SIZE) if kind == "board" else None
    if kind == "tcp":
        held = TCPStore("localhost", 0, is_master=True, wait_for_workers=False)

    def connect(rank: int) -> Any:
        match kind:
            case "tcp":
                return TCPStore("localhost", held.port, is_master=False)
            case "file":
                return FileStore(str(tmp_path / "store"), -1)
            case "prefix":
                return PrefixStore("group", held)
            case "board":
                return MeetingStore("127.0.0.1", port, rank, PATIENCE_S)
        return held

    yield connect
    if server is not None:
        server.end(None, 0.0)


class Slow(PartOfStore):
    """A Store that gives what lies there only when it is allowed to."""

    def __init__(self, store: Any) -> None:
        super().__init__(store, "")
        self.may_read = threading.Event()

    def get(self, key: str) -> Any:
        assert self.may_read.wait(PATIENCE_S)
        return super().get(key)


@pytest.fixture
def warned() -> Iterator[queue.Queue[logging.LogRecord]]:
    """What ranks say while they wait."""
    told: queue.Queue[logging.LogRecord] = queue.Queue()
    handler = logging.handlers.QueueHandler(told)
    logging.getLogger("gradwire").addHandler(handler)
    yield told
    logging.getLogger("gradwire").removeHandler(handler)


@pytest.fixture
def others() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(WORLD_SIZE) as pool:
        yield pool


def publish(store: Any, rank: int) -> Board:
    board = Board(store, PREFIX, rank, WORLD_SIZE)
    board.publish({"record": "", "settings": {}})
    return board


def read(board: Board, timeout_s: float = PATIENCE_S, connect_s: float = CONNECT_S) -> None:
    board.collect(timeout_s)
    board.wait_for_readers(timeout_s, connect_s)


def waiting(others: ThreadPoolExecutor, store: Any, warned: queue.Queue[logging.LogRecord]) -> Future[None]:
    """Rank 1, that waits for others longer than it would for their packets."""
    future = others.submit(read, publish(store, 1))
    assert "rank 1 waits for rank(s) 0, 2, which have not read" in warned.get(timeout=PATIENCE_S).getMessage()
    return future


def test_who_has_read_waits_for_a_rank_that_reads_longer_than_the_time_to_connect(
    connect: Callable[[int], Any], others: ThreadPoolExecutor, warned: queue.Queue[logging.LogRecord]
) -> None:
    stores = [connect(rank) for rank in range(WORLD_SIZE)]
    stores[SLOW] = slow = Slow(stores[SLOW])
    boards = [publish(store, rank) for rank, store in enumerate(stores)]
    try:
        futures = [others.submit(read, board) for board in boards]
        told = [warned.get(timeout=PATIENCE_S).getMessage() for _ in range(WORLD_SIZE - 1)]
        ranks = dict(
            re.fullmatch(r"rank (\d) waits for (rank\(s\) .*), which have not read all records yet", text).groups()
            for text in told
        )
        # On a busy machine the other one may not have read yet either.
        assert ranks["0"] in ("rank(s) 2", "rank(s) 1, 2"), told
        assert ranks["1"] in ("rank(s) 2", "rank(s) 0, 2"), told
        assert not any(future.done() for future in futures)
    finally:
        slow.may_read.set()
    for future in futures:
        future.result(PATIENCE_S)
    for store in stores:
        with contextlib.suppress(AttributeError):
            store.close()


def test_a_rank_that_never_reads_is_named_when_the_time_of_the_group_is_over() -> None:
    store = HashStore()
    for rank in (0, SLOW):
        publish(store, rank)
    board = publish(store, 1)
    with ThreadPoolExecutor(1) as pool:
        # With more time than the next one, which is to be the first to give up.
        first = pool.submit(read, Board(store, PREFIX, 0, WORLD_SIZE), 5.0, 0.1)
        store.wait([f"{PREFIX}/read/0"], timedelta(seconds=PATIENCE_S))
        with pytest.raises(MissingRankError, match=r"rank\(s\) 2 of 3 appeared, and did not read") as caught:
            read(board, 0.5, 0.1)
        assert caught.value.ranks == [SLOW]
        with pytest.raises(MissingRankError, match=r"rank\(s\) 2 of 3 appeared, and did not read"):
            first.result(PATIENCE_S)


def test_a_rank_that_ended_before_it_had_read_is_named_long_before_the_time_of_the_group_is_over(
    others: ThreadPoolExecutor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_board, "STUCK_S", 0.0)
    store = HashStore()
    boards = [publish(store, rank) for rank in (0, 1, SLOW)]
    first = others.submit(read, boards[0])
    store.wait([f"{PREFIX}/read/0"], timedelta(seconds=PATIENCE_S))
    with pytest.raises(MissingRankError, match=r"rank\(s\) 2 of 3 appeared, and did not read"):
        read(boards[1])
    with pytest.raises(MissingRankError):
        first.result(PATIENCE_S)


class GoesOn(PartOfStore):
    """A Store on which a rank that reads for long is always further than before."""

    def __init__(self, store: Any) -> None:
        super().__init__(store, "")
        self.looks = 0

    def check(self, keys: list[str]) -> bool:
        return keys == [f"{PREFIX}/reading/{SLOW}"] or bool(super().check(keys))

    def get(self, key: str) -> Any:
        if key != f"{PREFIX}/reading/{SLOW}":
            return super().get(key)
        self.looks += 1
        return str(self.looks)


def test_a_rank_that_goes_on_reading_is_waited_for(
    others: ThreadPoolExecutor, warned: queue.Queue[logging.LogRecord], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_board, "STUCK_S", 0.0)
    monkeypatch.setattr(_board, "TELLS_EVERY_S", 0.0)
    store = HashStore()
    slow, waits = publish(store, SLOW), publish(GoesOn(store), 1)
    Board(store, PREFIX, 0, WORLD_SIZE).publish({"record": "", "settings": {}})
    store.set(f"{PREFIX}/read/0", "1")
    store.add(f"{PREFIX}/read", 1)
    future = others.submit(read, waits)
    for _ in range(4):
        assert f"rank(s) {SLOW}, which have not read" in warned.get(timeout=PATIENCE_S).getMessage()
    read(slow)
    future.result(PATIENCE_S)
    assert store.check([f"{PREFIX}/reading/{SLOW}"]), "it has said how far it was"


def test_who_waits_for_readers_hears_that_rank_0_has_given_up(
    others: ThreadPoolExecutor, warned: queue.Queue[logging.LogRecord]
) -> None:
    store = HashStore()
    for rank in (0, SLOW):
        publish(store, rank)
    caller = Caller(store, WORLD_SIZE)
    board = publish(store, 1)
    board.called = caller.round_number
    future = others.submit(read, board)
    assert "rank 1 waits" in warned.get(timeout=PATIENCE_S).getMessage()
    caller.note("MissingRankError: rank(s) 2 of 3 appeared", [SLOW], 1.0)
    with pytest.raises(MissingRankError, match=r"rank 0 on .* gave up") as caught:
        future.result(PATIENCE_S)
    assert caught.value.ranks == [SLOW]


def test_who_waits_for_readers_hears_why_a_rank_could_not_connect(
    others: ThreadPoolExecutor, warned: queue.Queue[logging.LogRecord]
) -> None:
    store = HashStore()
    for rank in (0, SLOW):
        publish(store, rank)
    future = waiting(others, store, warned)
    Board(store, PREFIX, SLOW, WORLD_SIZE).conclude("SettingsMismatchError: rank 0 has another preset")
    with pytest.raises(RendezvousError, match=r"rank 2 could not connect: SettingsMismatchError") as caught:
        future.result(PATIENCE_S)
    assert caught.value.rank == SLOW


def test_a_group_is_formed_with_a_rank_that_reads_longer_than_the_time_to_connect(tmp_path: Path) -> None:
    port, pipe = free_port(), str(tmp_path / "pipe")
    os.mkfifo(pipe)
    first = form(0, 2, port, GRADWIRE_CONNECT_TIMEOUT_S="5")
    slow = start(["-c", SLOW_FORM, "60"], 1, 2, port, PIPE=pipe)
    assert first.stdout is not None
    told = first.stdout.readline()
    with open(pipe, "w"):
        pass
    assert "rank 0 waits for rank(s) 1, which have not read all records yet" in told
    assert [printed(process).splitlines()[-1] for process in (first, slow)] == ["formed", "formed"]


class Outrun(PartOfStore):
    """A Store of a rank whose first look at who has read was answered before another one has read, and the next after it failed."""

    def __init__(self, store: Any, then: Callable[[], None]) -> None:
        super().__init__(store, "")
        self._then: Callable[[], None] | None = then

    def check(self, keys: list[str]) -> bool:
        found = super().check(keys)
        if keys == [f"{PREFIX}/read/all"] and self._then is not None:
            then, self._then = self._then, None
            then()
        return found


def test_where_another_rank_has_failed_since_all_have_read_this_one_finds_out_by_itself_what_is_wrong() -> None:
    held = HashStore()

    def fails() -> None:
        read(other)
        other.conclude("the job secret of rank 0 does not match")

    other, this = Board(held, PREFIX, 1, 2), Board(Outrun(held, fails), PREFIX, 0, 2)
    for board in (other, this):
        board.publish({"record": "", "settings": {}})
    read(this)
    with pytest.raises(RendezvousError, match="rank 1 could not connect: the job secret of rank 0"):
        this.confirm(CONNECT_S)
