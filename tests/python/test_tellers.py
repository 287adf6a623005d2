"""What the observer's thread says of a group: each look is handed what the group would tell it."""

from __future__ import annotations

import logging
import weakref
from typing import Any

import pytest
from gradwire.observe.observer import _Watched
from gradwire.observe.stragglers import StragglerWatch

LATE = {
    "during": "all_reduce #7",
    "sequence": 7,
    "waited_s": 9.0,
    "straggler": 2,
    "cause": "compute",
    "bytes_received": 10,
    "bytes_expected": 100,
    "silent_s": 0.1,
}


class Group:
    """Is always seen like this."""

    def __init__(self, seen: dict[str, Any]) -> None:
        self._seen = seen

    def watch_news(self) -> dict[str, Any]:
        return self._seen


def epoch(number: int, members: list[int]) -> dict[str, Any]:
    return {"number": number, "members": members, "lost": [], "joined": [], "is_member": True}


def warned(rank: int, told: dict[str, Any] | None, caplog: pytest.LogCaptureFixture, known: int = 5) -> bool:
    """Whether this rank of five warns that rank 2 calls late, where it knows of so many."""
    seen = {"waiting": LATE, "stragglers": [], "epoch": told, "unreached_threads": 0, "is_flooded": False}
    group: Any = Group(seen)
    stats = {"name": "group", "rank": rank, "world_size": known}
    caplog.clear()
    with caplog.at_level(logging.INFO, "gradwire"):
        _Watched(weakref.ref(group), stats, StragglerWatch(3.0)).look(group)
    (told_of,) = [record for record in caplog.records if record.message.startswith("straggler: rank 2")]
    return told_of.levelno == logging.WARNING


@pytest.mark.parametrize(
    ("told", "teller"),
    [
        (None, 3),
        (epoch(0, [0, 1, 2, 3, 4]), 3),
        (epoch(1, [0, 1, 2, 4]), 4),
        (epoch(2, [0, 1, 2]), 0),
        (epoch(3, [1, 2]), 1),
    ],
)
def test_the_next_rank_of_those_that_are_left_warns_of_one_that_calls_late(
    told: dict[str, Any] | None, teller: int, caplog: pytest.LogCaptureFixture
) -> None:
    ranks = range(5) if told is None else told["members"]
    assert [rank for rank in ranks if rank != 2 and warned(rank, told, caplog)] == [teller]


@pytest.mark.parametrize("joined", [3, 4])
def test_a_rank_that_has_joined_finds_the_same_one_as_all_others(joined: int, caplog: pytest.LogCaptureFixture) -> None:
    """It was told how many members there were when it joined, one more than the third."""
    told = epoch(2, [0, 2, 3, 4])
    known = {rank: 3 if rank == joined else 5 for rank in told["members"]}
    tellers = [rank for rank, many in known.items() if rank != 2 and warned(rank, told, caplog, many)]
    assert tellers == [3]
