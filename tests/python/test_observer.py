"""Which groups an observer asks: until they are left, and not only until one question has no answer."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
from gradwire import _native
from gradwire.config import Config
from gradwire.errors import GradwireError
from gradwire.observe.observer import Observer


class Owner:
    """A process with an engine."""

    def __init__(self) -> None:
        self.engine = _native.Engine({"port": 0})


class Group:
    """One whose network thread answers or does not, as it is told."""

    def __init__(self) -> None:
        self.answers = True
        self.epoch: dict[str, Any] | None = None

    def stats(self) -> dict[str, Any]:
        return self._answer({"name": "group", "rank": 0, "world_size": 2, "epoch": self.epoch})

    def timeline(self, calls: int | None = None) -> str:
        return json.dumps(self._answer({"calls": [], "asked": calls}))

    def watch_news(self) -> dict[str, Any]:
        seen = {"epoch": self.epoch, "unreached_threads": 0, "waiting": None, "stragglers": [], "is_flooded": False}
        return self._answer(seen)

    def _answer(self, answer: dict[str, Any]) -> dict[str, Any]:
        if not self.answers:
            raise GradwireError("the engine has stopped")
        return answer


@pytest.fixture
def owner() -> Iterator[Owner]:
    there = Owner()
    yield there
    there.engine.stop()


def timelines_of(observer: Observer, calls: int | None = None) -> dict[str, Any]:
    answer: dict[str, Any] = json.loads(observer.timelines(calls))
    return answer


QUESTIONS = {
    "stats": lambda observer: len(observer.stats()["groups"]),
    "timelines": lambda observer: len(timelines_of(observer)["groups"]),
    "watch": lambda observer: observer._look_at_all() or len(observer._live()),
}


@pytest.mark.parametrize("question", QUESTIONS)
def test_a_group_is_forgotten_when_it_answers_two_questions_in_a_row_with_nothing(
    owner: Owner, question: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", logger="gradwire")
    observer = Observer(owner, Config(status_socket=False, straggler_warning_s=0.0))  # type: ignore[arg-type]
    group, asked = Group(), QUESTIONS[question]
    observer.add(group, None)  # type: ignore[arg-type]
    for _ in range(2):
        group.answers = False
        asked(observer)
        group.answers = True
        assert asked(observer) == 1, "one question without an answer"
    group.answers = False
    asked(observer)
    asked(observer)
    group.answers = True
    assert asked(observer) == 0
    assert [record.message for record in caplog.records if "not observed any more" in record.message] == [
        "group group was left, or does not answer, and is not observed any more: the engine has stopped"
    ]


def test_groups_that_their_first_ranks_called_alike_have_names_of_their_own_in_metrics(owner: Owner) -> None:
    observer = Observer(owner, Config(status_socket=False, straggler_warning_s=0.0))  # type: ignore[arg-type]
    groups = [Group() for _ in range(3)]
    for group in groups:
        observer.add(group, None)  # type: ignore[arg-type]
    assert [group["name"] for group in observer.stats()["groups"]] == ["group", "group (2)", "group (3)"]
    assert [group["name"] for group in timelines_of(observer)["groups"]] == ["group", "group (2)", "group (3)"]


def test_a_timeline_is_one_text_of_all_groups_with_as_many_calls_as_are_asked_for(owner: Owner) -> None:
    observer = Observer(owner, Config(status_socket=False, straggler_warning_s=0.0))  # type: ignore[arg-type]
    assert timelines_of(observer)["groups"] == []
    groups = [Group() for _ in range(2)]
    for group in groups:
        observer.add(group, None)  # type: ignore[arg-type]
    answer = timelines_of(observer, 7)
    assert answer["pid"] == os.getpid()
    assert answer["groups"] == [{"name": name, "rank": 0, "calls": [], "asked": 7} for name in ("group", "group (2)")]


def test_a_group_that_is_formed_again_under_its_name_is_another_one(owner: Owner) -> None:
    observer = Observer(owner, Config(status_socket=False, straggler_warning_s=0.0))  # type: ignore[arg-type]
    lives = []
    for _ in range(2):
        group = Group()
        observer.add(group, None)  # type: ignore[arg-type]
        lives += observer.stats()["groups"]
        del group
    assert [life["name"] for life in lives] == ["group", "group"]
    assert lives[0]["formed_s"] < lives[1]["formed_s"]


def test_groups_that_are_gone_are_let_go_where_nobody_asks_for_them(owner: Owner) -> None:
    observer = Observer(owner, Config(status_socket=False, straggler_warning_s=0.0))  # type: ignore[arg-type]
    stays = Group()
    observer.add(stays, None)  # type: ignore[arg-type]
    for _ in range(20):
        observer.add(group := Group(), None)  # type: ignore[arg-type]
        del group
    assert len(observer._groups) == 2, "one that lives, and the latest"


ASKS = {**QUESTIONS, "add": lambda observer: observer.add(LATEST, None)}
LATEST = Group()


@pytest.mark.timeout(60)  # one that waits for its own thread waits for ever
@pytest.mark.parametrize("question", ASKS)
def test_a_signal_handler_may_ask_and_form_a_group_where_it_interrupts_a_look_at_all_groups(
    owner: Owner, question: str
) -> None:
    observer = Observer(owner, Config(status_socket=False, straggler_warning_s=0.0))  # type: ignore[arg-type]
    stays, gone, comes = Group(), Group(), Group()
    observer.add(stays, None)  # type: ignore[arg-type]
    observer.add(gone, None)  # type: ignore[arg-type]
    del gone
    looked_at, seen = observer._groups[0], []
    lives = looked_at.group

    def interrupted() -> Any:
        looked_at.group = lives
        signal.raise_signal(signal.SIGUSR1)
        return lives()

    def handler(*_: object) -> None:
        seen.append(len(observer.stats()["groups"]))
        seen.append(len(timelines_of(observer)["groups"]))
        observer.add(comes, None)  # type: ignore[arg-type]

    before = signal.signal(signal.SIGUSR1, handler)
    looked_at.group = interrupted  # type: ignore[assignment]
    try:
        ASKS[question](observer)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert seen == [1, 1]
    known = [watched.group() for watched in observer._groups]
    assert known == [stays, comes, *([LATEST] if question == "add" else [])]
    assert len({watched.name for watched in observer._groups}) == len(known)


@pytest.mark.parametrize("sees", ["watch", "stats"])
def test_connections_count_anew_with_each_epoch_and_the_group_does_not(owner: Owner, sees: str) -> None:
    observer = Observer(owner, Config(status_socket=False, straggler_warning_s=0.0))  # type: ignore[arg-type]
    group = Group()
    group.epoch = {"number": 3, "members": [0, 1], "lost": [], "joined": []}  # it has joined while the group ran
    observer.add(group, None)  # type: ignore[arg-type]
    (first,) = observer.stats()["groups"]
    assert first["connected_s"] == first["formed_s"]
    group.epoch = {**group.epoch, "number": 4, "members": [0]}
    QUESTIONS[sees](observer)
    seen_s = time.time()
    (second,) = observer.stats()["groups"]
    assert second["formed_s"] == first["formed_s"] < second["connected_s"] <= seen_s


@pytest.mark.parametrize(
    ("world", "expected"),
    [
        (None, 0),  # torch has formed no group yet, or is not there
        ((5, 8), 5),  # a group of a part of all ranks
        ((0, 1), 0),
    ],
)
def test_a_process_has_the_rank_that_torch_gave_it(
    owner: Owner, world: tuple[int, int] | None, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Distributed:
        is_available = staticmethod(lambda: True)
        is_initialized = staticmethod(lambda: world is not None)
        get_rank = staticmethod(lambda: world[0])
        get_world_size = staticmethod(lambda: world[1])

    monkeypatch.setitem(sys.modules, "torch.distributed", Distributed)  # type: ignore[misc]
    observer = Observer(owner, Config(status_socket=False, straggler_warning_s=0.0))  # type: ignore[arg-type]
    observer.add(group := Group(), None)  # type: ignore[arg-type]
    assert observer.stats()["rank"] == expected
    assert observer.stats()["groups"][0]["rank"] == group.stats()["rank"], "that of the group stays"


def test_a_group_that_has_more_ranks_than_torch_knows_of_numbers_its_processes(
    owner: Owner, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Distributed:
        is_available = is_initialized = staticmethod(lambda: True)
        get_rank = staticmethod(lambda: 7)
        get_world_size = staticmethod(lambda: 1)

    monkeypatch.setitem(sys.modules, "torch.distributed", Distributed)  # type: ignore[misc]
    observer = Observer(owner, Config(status_socket=False, straggler_warning_s=0.0))  # type: ignore[arg-type]
    observer.add(Group(), None)  # type: ignore[arg-type]
    assert observer.rank == 0


def test_a_rank_that_has_joined_takes_none_of_the_others_for_a_server(owner: Owner) -> None:
    """It hears how many members there are, not that of four ranks the second is missing."""
    observer = Observer(owner, Config(status_socket=False, straggler_warning_s=0.0))  # type: ignore[arg-type]
    joined, fixed = Group(), Group()
    joined.epoch = {"number": 1, "members": [0, 2], "lost": [], "joined": []}
    observer.add(joined, None)  # type: ignore[arg-type]
    observer.add(fixed, None)  # type: ignore[arg-type]
    names = [watched.watch.name_of(2) for watched in observer._groups]
    assert names == ["rank 2", "parameter server 0"], "where lost ranks end a group there may be some"


def changed(number: int, rank: int) -> dict[str, Any]:
    return {"rank": rank, "host": f"node{rank}", "epoch": number}


def test_ranks_do_not_go_on_without_one_that_is_back(owner: Owner, caplog: pytest.LogCaptureFixture) -> None:
    """Two epochs between two looks: ranks 2 and 3 are lost, and rank 2 is back."""
    observer = Observer(owner, Config(status_socket=False, straggler_warning_s=0.0))  # type: ignore[arg-type]
    group = Group()
    observer.add(group, None)  # type: ignore[arg-type]
    lost, joined = [changed(1, 2), changed(1, 3)], [changed(2, 2)]
    group.epoch = {"number": 2, "members": [0, 1, 2], "lost": lost, "joined": joined}
    observer._look_at_all()
    group.epoch = {
        "number": 4,
        "members": [0, 1, 2],
        "lost": [*lost, changed(3, 1)],
        "joined": [*joined, changed(4, 1)],
    }
    observer._look_at_all()
    assert [record.message for record in caplog.records if "epoch" in record.message] == [
        "group group, epoch 2: rank 2 (node2) has joined",
        "group group, epoch 2: ranks 0, 1, 2 go on without rank 3 (node3)",
        "group group, epoch 4: rank 1 (node1) has joined",
    ]
