"""When a rank counts as a straggler: a pure decision, in made-up time."""

import random
from typing import Any

from gradwire.observe.stragglers import CAUSES, StragglerWatch

NOTHING = {"waiting": None, "stragglers": []}


def stuck(waited_s: float, rank: int = 2, cause: str = "compute", sequence: int = 7) -> dict[str, Any]:
    waiting = {
        "during": "all_reduce #7",
        "sequence": sequence,
        "waited_s": waited_s,
        "straggler": rank,
        "cause": cause,
        "bytes_received": 10,
        "bytes_expected": 100,
        "silent_s": 0.1,
    }
    return {"waiting": waiting, "stragglers": []}


def often(rank: int, cause: str, seconds: float, episodes: int) -> dict[str, Any]:
    stats: dict[str, float] = {
        f"{name}_{unit}": 0 for name in ("compute", "network", "receiver") for unit in ("s", "episodes")
    }
    stats |= {f"{cause}_s": seconds, f"{cause}_episodes": episodes}
    return {"waiting": None, "stragglers": [(rank, stats)]}


def test_a_collective_that_does_not_end_is_told_once_after_the_time_and_again_for_another_cause() -> None:
    watch = StragglerWatch(3.0)
    assert watch.update(1.0, stuck(2.9)) is None
    told = watch.update(2.0, stuck(3.1))
    assert told is not None
    assert (told.rank, told.cause) == (2, "compute")
    assert "rank 2" in told.text
    assert watch.update(3.0, stuck(4.1)) is None
    told = watch.update(4.0, stuck(5.1, cause="receiver"))
    assert told is not None
    assert told.cause == "receiver"
    assert watch.update(5.0, NOTHING) is None
    assert watch.current is None, "it has ended"


def test_a_dedicated_server_is_named_as_one_and_may_wait_itself() -> None:
    watch = StragglerWatch(3.0, workers=2)
    told = watch.update(2.0, stuck(3.1, rank=3, cause="network"))
    assert told is not None
    assert "for parameter server 1: it has called it" in told.text
    assert told.text.endswith("It may wait for a worker itself, and says so then")
    told = watch.update(4.0, stuck(5.1, rank=1, cause="network", sequence=8))
    assert told is not None
    assert "for rank 1: " in told.text
    assert "worker" not in told.text


def test_who_stood_still_itself_accuses_nobody_of_that_time() -> None:
    watch = StragglerWatch(3.0)
    assert watch.update(1.0, stuck(0.5, cause="receiver")) is None
    assert watch.update(16.0, stuck(15.5, cause="receiver"), still_s=14.0) is None
    assert watch.update(17.0, stuck(16.5, cause="receiver")) is None
    told = watch.update(18.0, stuck(17.5, cause="receiver"))
    assert told is not None, "it is waited for all the same"
    assert "has waited 3.5 s for rank 2" in told.text
    assert watch.update(19.0, NOTHING) is None
    told = watch.update(24.0, stuck(3.1, rank=1, sequence=8))
    assert told is not None, "what this process missed was another collective's"


def test_a_collective_that_began_late_in_a_standstill_is_not_charged_with_all_of_it() -> None:
    watch = StragglerWatch(3.0)
    assert watch.update(60.0, stuck(0.2), still_s=59.0) is None
    assert watch.update(62.0, stuck(2.2)) is None
    assert watch.update(63.3, stuck(3.3)) is not None


def test_many_short_waits_for_one_rank_are_told_once_and_again_when_it_was_well_meanwhile() -> None:
    watch = StragglerWatch(3.0)
    news = [watch.update(t, often(1, "network", 0.4 * t, int(2 * t))) for t in range(10)]
    told = [one for one in news if one is not None]
    assert [(one.rank, one.cause) for one in told] == [(1, "network")]
    assert news.index(told[0]) <= 4, "a few seconds"
    healed = [watch.update(10.0 + t, often(1, "network", 4.0, 20)) for t in range(70)]
    assert healed == [None] * 70
    assert watch.current is None
    again = [watch.update(80.0 + t, often(1, "network", 4.0 + 0.5 * t, 20 + t)) for t in range(10)]
    assert len([one for one in again if one is not None]) == 1


def test_what_comes_and_goes_or_is_seen_from_two_sides_is_told_once() -> None:
    watch = StragglerWatch(1.0)
    news = []
    for t in range(30):
        news.append(watch.update(3.0 * t, stuck(1.5, 1, "network", sequence=2 * t)))
        news.append(watch.update(3.0 * t + 1, stuck(1.9, 0, "receiver", sequence=2 * t)))
        news.append(watch.update(3.0 * t + 2, NOTHING))
    assert [(one.rank, one.cause) for one in news if one is not None] == [(1, "network"), (0, "receiver")]


def test_one_long_wait_such_as_a_checkpoint_is_no_news_and_neither_is_what_ranks_differ_by() -> None:
    watch = StragglerWatch(3.0)
    assert [watch.update(t, often(1, "compute", 2.5 if t > 5 else 0.0, 1 if t > 5 else 0)) for t in range(20)] == [
        None
    ] * 20
    watch = StragglerWatch(3.0)
    assert [watch.update(t, often(1, "compute", 0.05 * t, 10 * t)) for t in range(100)] == [None] * 100


def test_one_long_wait_among_many_of_a_millisecond_is_no_news_in_either_window() -> None:
    """A checkpoint in a job of many steps: the rank that makes it is also the later one of the two now and then."""
    for pause in (2.0, 16.0):
        watch = StragglerWatch(3.0)
        news = [watch.update(t, often(1, "compute", 0.01 * t + (pause if t > 30 else 0.0), 5 * t)) for t in range(120)]
        assert news == [None] * 120
        assert watch.current is None


def test_one_long_wait_does_not_hide_a_rank_that_is_waited_for_all_the_time() -> None:
    watch = StragglerWatch(3.0)
    news = [watch.update(t, often(1, "compute", 0.3 * t + (4.0 if t > 30 else 0.0), 5 * t)) for t in range(60)]
    assert len([one for one in news if one is not None]) == 1
    assert watch.current is not None


def test_steps_of_many_seconds_are_seen_in_the_longer_window() -> None:
    watch = StragglerWatch(3.0)
    news = [watch.update(t, often(3, "compute", 2.0 * (t // 8), t // 8)) for t in range(60)]
    assert [(one.rank, one.cause) for one in news if one is not None] == [(3, "compute")]


def test_a_long_setting_keeps_few_samples_and_finds_who_is_waited_for_often() -> None:
    watch = StragglerWatch(600.0)
    news = [watch.update(t, often(1, "network", 0.4 * t, t // 60)) for t in range(20_000)]
    told = [(t, one.rank, one.cause) for t, one in enumerate(news) if one is not None]
    assert [who for _, *who in told] == [[1, "network"]]
    assert told[0][0] <= 1200, "twice the setting"
    samples = watch._windows[-1].samples
    assert len(samples) < 300
    assert samples[-1].at_s == 19_999, "the newest one counts"


def blamed(waits: dict[tuple[int, str], tuple[float, int]]) -> list[tuple[int, dict[str, float]]]:
    """As `watch()` tells them, by rank."""
    return [
        (
            rank,
            {
                f"{name}_{unit}": waits.get((rank, name), (0.0, 0))[unit == "episodes"]
                for name in CAUSES
                for unit in ("s", "episodes")
            },
        )
        for rank in sorted({rank for rank, _ in waits})
    ]


def test_of_a_large_group_only_who_is_waited_for_is_looked_at_and_the_news_are_the_same() -> None:
    """511 peers, each of which was waited for at some time for every cause; then one in turn is, and one of them more often."""
    draw = random.Random(1)
    waits = {(rank, cause): (1.0, 5) for rank in range(511) for cause in CAUSES}
    of_all, of_news = StragglerWatch(3.0), StragglerWatch(3.0)
    stragglers = blamed(waits)
    told = []
    for t in range(400):
        before = dict(stragglers)
        for _ in range(3):
            key = (7, "network") if t > 200 and draw.random() < 0.2 else (draw.randrange(511), draw.choice(CAUSES))
            seconds, episodes = waits[key]
            waits[key] = (seconds + draw.random(), episodes + 1)
        stragglers = blamed(waits)
        news = [(rank, stats) for rank, stats in stragglers if before[rank] != stats or not t]
        assert len(news) <= 3 or not t
        both = [
            watch.update(float(t), {"waiting": None, "stragglers": told_of})
            for watch, told_of in ((of_all, stragglers), (of_news, news))
        ]
        assert both[0] == both[1], t
        told += [one for one in both[:1] if one is not None]
    assert (told[-1].rank, told[-1].cause) == (7, "network")
    for window in of_news._windows:
        assert window.total.keys() == {key for sample in window.samples for key in sample.waits}
        assert len(window.total) <= 3 * len(window.samples) <= 3 * (window.span_s + 1)


def test_a_rank_that_has_just_died_is_not_said_to_be_heard() -> None:
    """With a peer timeout of 2 s a rank that was silent for two heartbeats of 0.2 s is taken for one that takes nothing."""
    for silent_s, is_heard in ((0.3, True), (0.5, False)):
        waits = stuck(3.1, cause="receiver")
        waits["waiting"]["silent_s"] = silent_s
        told = StragglerWatch(3.0, peer_timeout_s=2.0).update(1.0, waits)
        assert told is not None
        assert ("it is heard" in told.text) == is_heard
        assert ("nothing heard from it for 0.5 s" in told.text) != is_heard
        told = StragglerWatch(3.0).update(1.0, waits)
        assert told is not None
        assert "it is heard" in told.text, "an answer may take a second"
