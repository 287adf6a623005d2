"""What the Store says of ranks that wait to join a group that runs, whoever looks at it."""

from __future__ import annotations

import json
import logging
import re
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from gradwire import _board, _heritage, _rendezvous
from gradwire._board import Board, RunsAlready
from gradwire._boundary import Boundary
from gradwire._entrance import Door, NoMemberLeftError, Watch
from gradwire._heritage import ANEW, RUNNING, Reopening, heritage, running_round
from gradwire._part_of_store import PartOfStore
from gradwire._rendezvous import SERVED, Place, _running_round
from gradwire._uncrossed import check_that_all_are_crossed
from gradwire.errors import InvalidRequestError, MissingRankError, RendezvousError, SettingsMismatchError
from one_process_store import Store

WORLD_SIZE, ROUND, WAITS = 4, 1, 2


@pytest.fixture
def store() -> Store:
    return Store()


def door_of(store: Store) -> Door:
    return Door(lambda: store, ROUND, WAITS, WORLD_SIZE)


def watch_of(store: Store, rank: int) -> Watch:
    return Watch(lambda: store, ROUND, rank, WORLD_SIZE)


def waiting(life: int) -> int:
    return life * WORLD_SIZE + WAITS


def test_a_life_waits_until_it_is_answered(store: Store) -> None:
    door, member = door_of(store), watch_of(store, 0)
    assert member.newcomer() == 0
    life = door.publish(str)
    assert [member.newcomer(), member.newcomer()] == [waiting(life)] * 2
    member.answer(WAITS, life, running="members")
    assert member.newcomer() == 0
    assert door.answered(life, 60.0, 60.0) == "members"


@pytest.mark.parametrize("answer", [{"running": "members"}, {"refused": "it has another secret"}])
def test_who_becomes_the_first_member_tries_no_life_again_that_was_answered(
    store: Store, answer: dict[str, str]
) -> None:
    life = door_of(store).publish(str)
    watch_of(store, 0).answer(WAITS, life, **answer)
    assert watch_of(store, 1).newcomer() == 0
    later = door_of(store).publish(str)
    assert later > life
    assert watch_of(store, 1).newcomer() == waiting(later)


def test_a_later_life_that_is_about_to_write_its_record_wakes_no_earlier_one(store: Store) -> None:
    life = door_of(store).publish(str)
    watch_of(store, 0).answer(WAITS, life, running="members")

    def in_the_middle(later: int) -> str:
        assert later > life
        assert watch_of(store, 1).newcomer() == 0
        return "record"

    door_of(store).publish(in_the_middle)


def test_who_is_refused_learns_why(store: Store) -> None:
    door = door_of(store)
    life = door.publish(str)
    watch_of(store, 0).answer(WAITS, life, refused="it has another secret")
    with pytest.raises(RendezvousError, match="another secret"):
        door.answered(life, 60.0, 60.0)


def test_who_tried_twice_is_told_how_long_it_waited_in_all(store: Store) -> None:
    door = door_of(store)
    with pytest.raises(MissingRankError, match="within 60 s") as caught:
        door.answered(door.publish(str), 60.0, 0.0)
    assert caught.value.waited_s == 60.0


def formed(store: Store, number: int = ROUND) -> None:
    """What is on the board of a group to which lost ranks may come back."""
    for rank in range(WORLD_SIZE):
        store.set(f"gradwire/{number}/{rank}", "its record")
    store.set(f"gradwire/{number}/end", json.dumps({"rank": 0, "error": ""}))


def test_a_group_whose_records_were_not_kept_is_none_to_come_back_to(store: Store) -> None:
    formed(store)
    assert _running_round(store, 0, WORLD_SIZE, ROUND + 1) == ROUND
    del store.keys[f"gradwire/{ROUND}/1"]  # as where lost ranks may not come back
    assert _running_round(store, 0, WORLD_SIZE, ROUND + 1) == 0


def test_ranks_that_all_wait_have_no_members_to_wait_for(store: Store) -> None:
    doors = [Door(lambda: store, ROUND, rank, WORLD_SIZE) for rank in range(WORLD_SIZE)]
    formed(store)
    lives = [door.publish(str) for door in doors[:-1]]
    with pytest.raises(MissingRankError):
        doors[0].answered(lives[0], 60.0, 0.1)  # the last one may live
    assert _running_round(store, 0, WORLD_SIZE, ROUND + 1) == ROUND
    lives.append(doors[-1].publish(str))
    for door, life in zip(doors, lives, strict=True):
        with pytest.raises(NoMemberLeftError):
            door.answered(life, 60.0, 60.0)
    assert _running_round(store, 0, WORLD_SIZE, ROUND + 1) == 0


def test_an_earlier_life_that_leaves_late_keeps_no_later_one_out(store: Store) -> None:
    formed(store)
    door = door_of(store)
    life = door.publish(str)
    watch_of(store, 0).answer(WAITS, life, running="members")
    watch_of(store, WAITS).leave()  # it was cut off, and does not know that it is no member
    assert _running_round(store, WAITS, WORLD_SIZE, ROUND + 1) == ROUND
    assert not door._is_no_member(WAITS)
    Watch(lambda: store, ROUND, WAITS, WORLD_SIZE, life=life).leave()
    assert _running_round(store, WAITS, WORLD_SIZE, ROUND + 1) == 0
    assert door._is_no_member(WAITS)


def test_who_has_joined_a_group_joins_no_other_one_before_the_members_that_wait_for_it_have_seen_it(
    store: Store,
) -> None:
    formed(store)
    owner: Any = SimpleNamespace(config=SimpleNamespace(on_peer_loss="continue"))
    native: Any = SimpleNamespace(stats=lambda: {"epoch": None})
    place = Place(WAITS, WORLD_SIZE, "the first one", timedelta(seconds=60))
    boundary = Boundary(owner, native, watch_of(store, WAITS), place, is_new=True)
    kept = dict(store.keys)
    for _ in range(2):
        with pytest.raises(InvalidRequestError, match=r"call sync\(\) there before group 'another' is formed"):
            _rendezvous._join_running(store, replace(place, name="another"), ROUND)
    assert store.keys == kept, "nobody waits for it"
    boundary._barrier = lambda: range(WORLD_SIZE)  # type: ignore[method-assign]
    assert boundary.cross().newcomer == WAITS
    check_that_all_are_crossed("another")
    Boundary(owner, native, watch_of(store, WAITS), place, is_new=True).leave()
    check_that_all_are_crossed("another")


def test_one_that_was_answered_may_be_a_member(store: Store) -> None:
    doors = [Door(lambda: store, ROUND, rank, WORLD_SIZE) for rank in range(WORLD_SIZE)]
    lives = [door.publish(str) for door in doors]
    watch_of(store, 0).answer(0, lives[0], running="members")
    with pytest.raises(MissingRankError):
        doors[1].answered(lives[1], 60.0, 0.1)
    doors[0].publish(str)  # it was lost, and comes again
    with pytest.raises(NoMemberLeftError):
        doors[1].answered(lives[1], 60.0, 60.0)


def test_ranks_that_have_left_are_no_members_to_wait_for(store: Store) -> None:
    door, (first, *others) = door_of(store), (rank for rank in range(WORLD_SIZE) if rank != WAITS)
    formed(store)
    life = door.publish(str)
    for other in others:
        watch_of(store, other).leave()
    with pytest.raises(MissingRankError):
        door.answered(life, 60.0, 0.1)  # one is still a member
    watch_of(store, first).leave()
    with pytest.raises(NoMemberLeftError):
        door.answered(life, 60.0, 60.0)
    assert _running_round(store, WAITS, WORLD_SIZE, ROUND + 1) == 0, (
        "it forms the next group with them, should they come again"
    )


def test_who_was_let_in_and_did_not_come_is_let_in_again_after_pauses(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    member, other = watch_of(store, 0), Door(lambda: store, ROUND, WAITS + 1, WORLD_SIZE)
    for pause_s in (10.0, 20.0, 40.0):
        life = door_of(store).publish(str)
        assert member.newcomer() == waiting(life)
        member.answer(WAITS, life, running="members")
        member.waited(WAITS, has_joined=False)
        later = door_of(store).publish(str)
        now[0] += pause_s - 1
        assert member.newcomer() == 0
        # Others need not wait for that.
        others = other.publish(str)
        assert member.newcomer() == others * WORLD_SIZE + WAITS + 1
        member.answer(WAITS + 1, others, running="members")
        now[0] += 1
        assert member.newcomer() == waiting(later)
        member.answer(WAITS, later, running="members")
    member.waited(WAITS, has_joined=True)
    life = door_of(store).publish(str)
    assert member.newcomer() == waiting(life)


# Rank 0 serves a new, empty Store.

ENTRIES = {rank: {"rank": rank, "record": f"sealed {rank}"} for rank in range(WORLD_SIZE)}
MEMBERS = [1, 3]


class Host:
    """Serves one Store after the other."""

    def __init__(self) -> None:
        self.store: Store | None = Store()
        self.store.keys[f"gradwire/{ROUND}/end"] = json.dumps({"rank": 0, "error": ""})

    def connect(self) -> Store:
        if self.store is None:
            raise MissingRankError("rank 0 is gone", ranks=[0])
        return self.store


def member_of(host: Host, rank: int, life: int = 0) -> Watch:
    return Watch(host.connect, ROUND, rank, WORLD_SIZE, heritage=heritage(ENTRIES, life))


def come(store: Store, rank: int) -> int:
    """A rank's own round."""
    return store.add(f"gradwire/rounds/{rank}", 1)


@pytest.fixture
def host() -> Host:
    return Host()


def test_a_member_writes_again_what_a_newcomer_needs_and_a_rank_that_came_before_finds_it(
    host: Host, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, logger="gradwire")  # whatever another test of this process has set
    member, first = member_of(host, 1), host.store
    earlier = Door(lambda: first, ROUND, 2, WORLD_SIZE).publish(str)
    assert member.newcomer(MEMBERS) == earlier * WORLD_SIZE + 2
    member.answer(2, earlier, running="members")
    assert member.newcomer(MEMBERS) == 0
    member.note(7)
    member.close()
    host.store = store = Store()
    number = come(store, 0)
    board = Board(store, f"gradwire/{number}", 0, WORLD_SIZE, continues=number)
    board.publish({"record": "of its new life", "settings": {}})
    assert member.newcomer(MEMBERS) == 0
    with pytest.raises(RunsAlready) as found:
        board.collect(60.0)
    running = found.value.round_number
    assert running == ROUND + ANEW
    for rank, entry in ENTRIES.items():
        assert json.loads(store.get(f"gradwire/{running}/{rank}")) == entry
    door = Door(lambda: store, running, 0, WORLD_SIZE)
    life = door.publish(str)
    assert life == 8, "later than all that the members have heard of"
    assert member.newcomer(MEMBERS) == life * WORLD_SIZE
    assert not caplog.records, "nothing failed meanwhile"
    member.answer(0, life, running="members")
    assert door.answered(life, 60.0, 60.0) == "members"


def test_a_rank_that_comes_later_finds_the_group_at_once_unless_it_has_left(host: Host) -> None:
    member_of(host, 1).newcomer(MEMBERS)
    host.store = store = Store()
    member_of(host, 1).newcomer(MEMBERS)
    running = running_round(store)
    assert _running_round(store, 2, WORLD_SIZE, come(store, 2)) == running
    member_of(host, 3).leave()
    assert _running_round(store, 3, WORLD_SIZE, come(store, 3)) == 0
    assert come(store, 1) == come(store, 2) - 1 == running + 1, "the next group is formed in the same round by all"


def test_two_members_that_write_at_once_agree(host: Host) -> None:
    host.store = store = Store()
    first, second = member_of(host, 1), member_of(host, 3)
    assert first._open() is second._open()
    assert first.newcomer(MEMBERS) == second.newcomer(MEMBERS) == 0
    life = Door(lambda: store, running_round(store), 0, WORLD_SIZE).publish(str)
    assert first.newcomer(MEMBERS) == second.newcomer(MEMBERS) == life * WORLD_SIZE


def test_what_a_member_began_that_was_lost_is_finished_by_the_next(host: Host) -> None:
    class Breaks(Store):
        def compare_set(self, *_: str) -> None:
            raise OSError("gone")

    breaks = host.store = Breaks()
    assert member_of(host, 1).newcomer(MEMBERS) == 0
    host.store = store = Store()
    store.keys.update(breaks.keys)
    member_of(host, 3).newcomer([3])
    assert running_round(store) == ROUND + ANEW


def test_who_missed_an_earlier_board_goes_by_what_the_first_member_has_written(host: Host) -> None:
    host.store = Store()
    first = member_of(host, 1)
    first.newcomer(MEMBERS)
    first.close()
    host.store = store = Store()
    first.newcomer(MEMBERS)
    assert running_round(store) == ROUND + 2 * ANEW
    life = Door(lambda: store, running_round(store), 0, WORLD_SIZE).publish(str)
    assert member_of(host, 3).newcomer(MEMBERS) == life * WORLD_SIZE


def test_a_later_life_of_who_has_joined_is_counted_behind_its_own(host: Host) -> None:
    host.store = store = Store()
    member_of(host, 3, life=5).newcomer(MEMBERS)
    assert Door(lambda: store, running_round(store), 0, WORLD_SIZE).publish(str) == 6


def test_a_board_where_a_living_member_seems_to_come_anew_is_another_jobs(host: Host) -> None:
    host.store = store = Store()
    come(store, 0)
    come(store, 3)
    member = member_of(host, 1)
    assert member.newcomer(MEMBERS) == 0
    assert RUNNING not in store.keys
    assert member.newcomer([1]) == 0, "rank 3 was lost, and had come before that was known"
    assert RUNNING in store.keys


def test_a_group_that_was_formed_in_a_later_round_of_a_board_is_not_taken_for_the_one_before(host: Host) -> None:
    host.store = store = Store()
    member_of(host, 1).newcomer(MEMBERS)
    later = running_round(store) + 1
    formed(store, later)
    assert _running_round(store, 2, WORLD_SIZE, later + 1) == later
    board = Board(store, f"gradwire/{later + 1}", 0, WORLD_SIZE, continues=later + 1)
    with pytest.raises(MissingRankError):
        board.collect(0.0)


def test_who_leaves_says_so_only_where_its_group_is_known(host: Host) -> None:
    host.store = Store()
    member_of(host, 1).leave()
    assert not host.store.keys, "a group that is formed there has a round of the same number"


@pytest.mark.parametrize("key", [f"gradwire/{ROUND}/waiting", f"gradwire/{ROUND}/again/2", RUNNING])
@pytest.mark.parametrize("value", ["", "[]", "{}", '{"life": "x"}', '{"life": 1099511627776}', '{"life": -1}'])
def test_what_no_rank_wrote_is_no_error_of_a_step(host: Host, key: str, value: str) -> None:
    assert host.store is not None
    if key == RUNNING:
        host.store = Store()
    host.store.set(f"gradwire/{ROUND}/waiting", "1")
    host.store.set(f"gradwire/{ROUND}/answer/2", '{"life": 0}')
    host.store.set(key, value)
    assert member_of(host, 1).newcomer(MEMBERS) == 0


def test_a_board_that_is_gone_is_looked_for_beside_the_steps(host: Host) -> None:
    asked, back = threading.Event(), threading.Event()

    def connect() -> Store:
        asked.set()
        assert back.wait(60.0)
        return host.connect()

    reopening = Reopening(connect)
    assert reopening.take() is None
    assert asked.wait(60.0)
    assert reopening.take() is None, "nobody waits"
    host.store = Store()
    back.set()
    while (store := reopening.take()) is None:
        pass
    assert store is host.store


def test_a_connection_that_comes_too_late_is_closed() -> None:
    asked, back, closed = threading.Event(), threading.Event(), threading.Event()

    class Late(Store):
        def close(self) -> None:
            closed.set()

    def connect() -> Store:
        asked.set()
        assert back.wait(60.0)
        return Late()

    reopening = Reopening(connect)
    assert reopening.take() is None
    assert asked.wait(60.0)
    reopening.close()
    back.set()
    assert closed.wait(60.0)


@pytest.mark.timeout(60)  # one that waits for its own thread waits for ever
def test_a_signal_handler_may_close_it_while_its_thread_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    def connect() -> Store:
        raise RendezvousError("nobody answers")

    def interrupted(target: Callable[[], object], name: str) -> threading.Thread:
        threads.append(start_thread(target, name))
        reopening.close()
        return threads[-1]

    reopening, threads, start_thread = Reopening(connect), list[threading.Thread](), _heritage.start_thread
    monkeypatch.setattr(_heritage, "start_thread", interrupted)
    assert reopening.take() is None
    (thread,) = threads
    thread.join()


def test_workers_learn_at_once_that_a_server_of_another_version_will_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Store()
    below, ours = PartOfStore(store, f"{SERVED}/"), dict(_board.VERSIONS)
    monkeypatch.setattr(_board, "VERSIONS", {**ours, "gradwire": "0.0.9"})
    worker = Board(below, "gradwire/7", 0, 3)
    worker.publish({"record": "its own", "settings": {}, "workers": 2})
    Board(below, "gradwire/7", 1, 3).publish({"record": "its own", "settings": {}, "workers": 2})
    monkeypatch.setattr(_board, "VERSIONS", ours)
    monkeypatch.setattr(_rendezvous, "server_is_called", lambda *_: 7)
    with pytest.raises(SettingsMismatchError, match=r"rank 0 on .* has gradwire version 0\.0\.9"):
        _rendezvous.first_worker(store, 0, 60.0)
    monkeypatch.setattr(_board, "VERSIONS", {**ours, "gradwire": "0.0.9"})
    with pytest.raises(SettingsMismatchError, match=f"rank 2 on .* version {re.escape(ours['gradwire'])}"):
        worker.collect(60.0)
