"""What the Store says of ranks that wait to join a group that runs, whoever looks at it."""

from __future__ import annotations

import pytest
from gradwire._entrance import Door, Watch
from gradwire.errors import MissingRankError, RendezvousError

WORLD_SIZE, ROUND, WAITS = 4, 1, 2


class Store:
    """Of one process, with the methods of torch's; a key that is not there is a KeyError."""

    def __init__(self) -> None:
        self.keys: dict[str, str] = {}

    def set(self, key: str, value: str) -> None:
        self.keys[key] = value

    def get(self, key: str) -> bytes:
        return self.keys[key].encode()

    def check(self, keys: list[str]) -> bool:
        return all(key in self.keys for key in keys)

    def add(self, key: str, amount: int) -> int:
        self.keys[key] = str(int(self.keys.get(key, "0")) + amount)
        return int(self.keys[key])


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
