"""Groups that cannot form, on real ranks (bodies/start.py) and against a forged Store in this process."""

from __future__ import annotations

import contextlib
import json
import os
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from gradwire._board import VERSIONS, Board
from gradwire._part_of_store import PartOfStore
from launch import Outcome, checks_of, launch


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return launch("start", 2, tmp_path_factory.mktemp("start"), backend="")


@pytest.mark.parametrize("check", checks_of("start"))
def test_start(outcome: Outcome, check: str) -> None:
    outcome.require(check)


def test_every_rank_ends_cleanly(outcome: Outcome) -> None:
    outcome.require_clean_exit()


@pytest.fixture
def rendezvous(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module, with a fast and ephemeral configuration; the engine is stopped at the end."""
    torch = pytest.importorskip("torch")
    assert torch.distributed.is_available()
    from gradwire import _rendezvous, _runtime

    monkeypatch.setenv("GRADWIRE_PORT", "0")
    monkeypatch.setenv("GRADWIRE_CONNECT_TIMEOUT_S", "1")
    _runtime._process.runtime = None
    yield _rendezvous
    if _runtime._process.runtime is not None:
        _runtime._process.runtime.stop()
        _runtime._process.runtime = None


def place(rendezvous: Any, seconds: float, world_size: int = 3) -> Any:
    """Rank 0 of a group."""
    return rendezvous.Place(0, world_size, "test", timedelta(seconds=seconds))


def test_missing_ranks_are_named_when_the_timeout_is_over(rendezvous: Any) -> None:
    from gradwire.errors import MissingRankError
    from torch.distributed import HashStore

    store = HashStore()
    store.set(
        "gradwire/1/1",
        json.dumps({"rank": 1, "world_size": 3, "host": "elsewhere", "record": "", "settings": {}, **VERSIONS}),
    )
    started = time.monotonic()
    with pytest.raises(MissingRankError, match=r"rank\(s\) 2 of 3") as caught:
        rendezvous.form_group(store, place(rendezvous, 1.5))
    assert caught.value.ranks == [2]
    assert isinstance(caught.value, TimeoutError)
    assert 1.0 < time.monotonic() - started < 10.0


def test_a_wait_that_has_begun_before_is_over_when_its_time_is(
    rendezvous: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gradwire import _calling
    from gradwire.errors import MissingRankError
    from torch.distributed import HashStore

    hour = timedelta(hours=1)
    monkeypatch.setattr(_calling, "pause", lambda *_: pytest.fail("it waits"))
    waits = rendezvous.Place(0, 3, "test", hour, begun=time.monotonic() - hour.total_seconds())
    with pytest.raises(MissingRankError, match=r"rank\(s\) 1, 2 of 3 did not appear within 3600 s"):
        rendezvous.form_group(HashStore(), waits)


def test_a_server_takes_back_what_it_said_by_its_own_number(rendezvous: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed import HashStore

    boards: list[Board] = []
    monkeypatch.setattr(rendezvous, "_form_served", lambda board, *_: boards.append(board))
    rendezvous.join_served_group(HashStore(), rendezvous.Served(3, 2, 2), 5.0, 1)
    assert boards[0].said == "gradwire/here/server-1", "rank 3 is the second one"


@pytest.mark.parametrize("asked", ["add", "set"])
def test_a_store_that_fails_at_any_request_is_an_error_of_ours(
    rendezvous: Any, monkeypatch: pytest.MonkeyPatch, asked: str
) -> None:
    """Not torch's, which says of a connection that it was reset, and not what to do."""
    from gradwire.errors import RendezvousError
    from torch.distributed import HashStore

    def reset(*_arguments: Any) -> None:
        raise RuntimeError("Connection reset by peer")

    class Failing(PartOfStore):
        """One whose connection is broken off at this request."""

    monkeypatch.setattr(Failing, asked, reset)
    with pytest.raises(RendezvousError, match=r"the Store failed .*Connection reset by peer"):
        rendezvous.form_group(Failing(HashStore(), ""), place(rendezvous, 5.0))


@pytest.mark.parametrize("more", [{}, {"gradwire": "9.0.0"}, {**VERSIONS, "protocol": 200}])
def test_a_rank_that_comes_back_with_another_version_is_told_so(
    rendezvous: Any, monkeypatch: pytest.MonkeyPatch, more: dict[str, Any]
) -> None:
    """What else they wrote is not looked at: it may be anything."""
    from gradwire.errors import SettingsMismatchError
    from torch.distributed import HashStore

    monkeypatch.setenv("GRADWIRE_ON_PEER_LOSS", "continue")
    store = HashStore()
    store.add("gradwire/rounds/all", 1)
    store.set("gradwire/1/end", json.dumps({"rank": 0, "error": ""}))
    for rank in range(2):
        entry = {"rank": rank, "world_size": 2, "host": "elsewhere", "records": {}, **more}
        store.set(f"gradwire/1/{rank}", json.dumps(entry))
    told = (
        r"rank 0 on elsewhere has (gradwire|protocol) version .*, this process on .* has .*: install the same version"
    )
    with pytest.raises(SettingsMismatchError, match=told) as caught:
        rendezvous.form_group(store, place(rendezvous, 20, world_size=2))
    assert caught.value.theirs == (more.get("protocol") or more.get("gradwire", "(not said)"))


def test_a_wait_that_is_nearly_over_does_not_wait_for_ever(rendezvous: Any) -> None:
    from gradwire._calling import pause
    from torch.distributed import HashStore

    del rendezvous
    started = time.monotonic()
    pause(HashStore(), "nothing", 0.0002)  # rounds to 0 ms, which a Store takes for no limit
    assert time.monotonic() - started < 5.0


def test_an_address_that_answers_nothing_is_named_with_its_rank(rendezvous: Any) -> None:
    from gradwire.errors import UnreachableError
    from torch.distributed import HashStore

    store = HashStore()
    forger = threading.Thread(target=forge_rank_1, args=(store,))
    forger.start()
    started = time.monotonic()
    with pytest.raises(UnreachableError, match=r"198\.51\.100\.7") as caught:
        rendezvous.form_group(store, place(rendezvous, 20, world_size=2))
    forger.join()
    assert caught.value.ranks == [1]
    assert time.monotonic() - started < 10.0


def forge_rank_1(store: Any) -> None:
    """Publishes a record like that of rank 0, of another host that does not exist (a network for documentation)."""
    entry = json.loads(store.get("gradwire/1/0"))
    record = json.loads(entry["record"])
    record.update(rank=1, host="nowhere", pid=1, boot_id="another", network_namespace=1, addresses=["198.51.100.7"])
    record["connections"] = list(reversed(record["connections"]))
    entry.update(rank=1, host="nowhere", pid=1, record=json.dumps(record))
    store.set("gradwire/1/1", json.dumps(entry))
    Board(store, "gradwire/1", 1, 2).wait_for_readers(20.0, 20.0)


@pytest.mark.parametrize(
    ("settings", "record"),
    [
        ({"ack_every": 20}, {"ack_every": 20}),
        ({"ack_delay_us": 2000}, {"ack_delay_max_us": 2000}),
        ({"eager_bytes": 131072}, {"eager_bytes": 131072}),
        ({"peer_timeout_s": 7.5}, {"peer_timeout_us": 7_500_000}),
        ({"security": "off"}, {"security": "off"}),
    ],
)
def test_what_the_engine_tells_its_peers_is_what_the_configuration_says(
    settings: dict[str, Any], record: dict[str, Any]
) -> None:
    from gradwire import Config, _runtime

    plain, changed = _record_of(_runtime, Config(port=0)), _record_of(_runtime, Config(port=0, **settings))
    assert {name: changed[name] for name in record} == record
    assert all(plain[name] != value for name, value in record.items())


def _record_of(runtime: Any, config: Any) -> dict[str, Any]:
    """What an engine of this configuration publishes about itself."""
    engine = runtime._start_engine(config)
    try:
        published: dict[str, Any] = json.loads(engine.new_group(0, 2, "test").record())
        return published
    finally:
        engine.stop()


@pytest.mark.parametrize(
    ("give_way", "ranks", "gives"), [("auto", 1, False), ("auto", 2, True), ("on", 1, True), ("off", 2, False)]
)
def test_the_network_thread_gives_way_where_the_configuration_says_so(give_way: str, ranks: int, gives: bool) -> None:
    from gradwire import Config, _runtime

    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})  # of this thread and those that it starts
    try:
        engines = [_runtime._start_engine(Config(port=0, give_way=give_way)) for _ in range(ranks)]
    finally:
        os.sched_setaffinity(0, cores)
    try:
        joining = [engine.new_group(rank, ranks, "test") for rank, engine in enumerate(engines)]
        records = [group.record() for group in joining]
        with ThreadPoolExecutor(ranks) as threads:
            groups = list(threads.map(lambda group: group.join(records, 60.0), joining))
        # Questions are something that comes: the thread then looks for more before it sleeps, and may give way first.
        asked = [engine.stats()["yields"] for _ in range(100) for engine in engines]
        assert any(asked) == gives
        del groups
    finally:
        for engine in engines:
            engine.stop()


def _threads_named(name: str) -> int:
    found = 0
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it has ended meanwhile
            found += (task / "comm").read_text().strip() == name
    return found


def _await_threads_named(name: str, count: int) -> int:
    """A thread has its name a moment after it was started, and the system knows it a moment after it has ended."""
    deadline = time.monotonic() + 30
    while (found := _threads_named(name)) != count and time.monotonic() < deadline:
        time.sleep(0.01)
    return found


@pytest.mark.parametrize(
    ("send_thread", "cores", "starts"), [("auto", 1, False), ("auto", 4, True), ("on", 1, True), ("off", 2, False)]
)
def test_a_second_thread_sends_where_the_configuration_says_so(send_thread: str, cores: int, starts: bool) -> None:
    from gradwire import Config, _runtime

    allowed = os.sched_getaffinity(0)
    if len(allowed) < cores:
        pytest.skip(f"this process may use {len(allowed)} cores")
    before = _threads_named("gradwire-send")
    os.sched_setaffinity(0, set(sorted(allowed)[:cores]))  # of this thread and those that it starts
    try:
        engines = [_runtime._start_engine(Config(port=0, send_thread=send_thread, network_threads=1)) for _ in range(2)]
    finally:
        os.sched_setaffinity(0, allowed)
    try:
        joining = [engine.new_group(rank, 2, "test") for rank, engine in enumerate(engines)]
        records = [group.record() for group in joining]
        with ThreadPoolExecutor(2) as threads:
            groups = list(threads.map(lambda group: group.join(records, 60.0), joining))
        expected = before + (2 if starts else 0)
        assert _await_threads_named("gradwire-send", expected) == expected
        del groups
    finally:
        for engine in engines:
            engine.stop()
    assert _await_threads_named("gradwire-send", before) == before, "it ends with the engine"


def _cores_of_network_threads() -> dict[str, frozenset[int]]:
    cores = {}
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it has ended meanwhile
            if (task / "comm").read_text().strip() == "gradwire-net":
                cores[task.name] = frozenset(os.sched_getaffinity(int(task.name)))
    return cores


@pytest.mark.parametrize(("own_core", "stays"), [("on", True), ("off", False)])
def test_the_network_thread_stays_on_a_core_where_the_configuration_says_so(own_core: str, stays: bool) -> None:
    from gradwire import Config, _runtime

    allowed = sorted(os.sched_getaffinity(0))
    if len(allowed) < 2:
        pytest.skip("this process may use one core")
    before = _cores_of_network_threads()
    engines = [_runtime._start_engine(Config(port=0, own_core=own_core)) for _ in range(2)]
    try:
        joining = [engine.new_group(rank, 2, "test") for rank, engine in enumerate(engines)]
        records = [group.record() for group in joining]
        with ThreadPoolExecutor(2) as threads:
            groups = list(threads.map(lambda group: group.join(records, 60.0), joining))
        expected = [frozenset({core}) for core in allowed[:2]] if stays else [frozenset(allowed)] * 2
        deadline = time.monotonic() + 30  # a thread has its name a moment after it was started
        while time.monotonic() < deadline:
            found = [cores for thread, cores in _cores_of_network_threads().items() if thread not in before]
            if Counter(found) == Counter(expected):
                break
            time.sleep(0.01)
        assert Counter(found) == Counter(expected)
        del groups
    finally:
        for engine in engines:
            engine.stop()
