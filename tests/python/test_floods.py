"""When a flood is worth a warning and what it says of it: a pure decision."""

import pytest
from gradwire.observe.floods import FloodWatch


class Counters:
    """Those of an engine."""

    def __init__(self) -> None:
        self.counted = {"datagrams_unknown": 5_000, "datagrams_not_authentic": 0, "datagrams_replayed": 0}

    def grown(self, **counts: int) -> dict[str, int]:
        for name, count in counts.items():
            self.counted[f"datagrams_{name}"] += count
        return dict(self.counted)


def test_a_flood_of_less_than_a_second_is_no_news_such_as_the_hellos_of_a_large_group() -> None:
    watch, engine = FloodWatch(), Counters()
    for second in range(3):
        for now_s in (second + 0.0, second + 0.4, second + 0.9):
            assert watch.update(now_s, True, engine.grown(unknown=300)) is None
        assert watch.update(second + 0.95, False, engine.grown()) is None


@pytest.mark.parametrize(
    ("kind", "words"),
    [("unknown", "for no group"), ("not_authentic", "nobody with the keys"), ("replayed", "has come before")],
)
def test_a_flood_that_lasts_is_told_once_with_what_most_of_it_is_and_so_is_its_end(kind: str, words: str) -> None:
    watch, engine = FloodWatch(), Counters()
    told = [watch.update(now_s, True, engine.grown(**{kind: 100})) for now_s in (0.0, 1.1, 2.2, 3.3, 4.4)]
    assert (told[0], told[2:]) == (None, [None] * 3)
    assert words in (told[1] or "")
    assert [watch.update(now_s, False, engine.grown()) for now_s in (5.5, 6.6)] == ["", None]
