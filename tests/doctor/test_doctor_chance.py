"""Which losses are called too many: not those that may be chance, and those of a way that loses twice the limit."""

import dataclasses
import math
import random
from fractions import Fraction
from itertools import count

import pytest
from gradwire.config import Config
from gradwire.doctor import chance, pairs
from gradwire.doctor.findings import suffers
from gradwire.doctor.pairs import PairFacts
from gradwire.doctor.probe import Count, End
from gradwire.doctor.rails import Rail
from gradwire.doctor.ways import LOOKS_MORE, Plan, Way, planned_s

LIMIT = 0.005
CONFIG = Config()
PAIR = PairFacts(0, 1, "10.0.0.2", (0.1, 0.2), 1500, 1500, paths=1)


class Losing:
    """In place of a `Prober`: a way that loses each packet with this probability, from 1000 bytes on with that."""

    def __init__(self, small, large, seed):
        self._losses, self._random = (small, large), random.Random(seed)
        self.tests, self.packets = [], []

    def count(self, _to, test, packets, *, size_bytes, **_options):
        self.tests.append(test)
        self.packets.append(packets)
        return Count(packets - self._lost(packets, self._losses[size_bytes > 1000]), 0, 0)

    def _lost(self, packets, probability):
        """How many packets are lost, by the numbers of packets between two of them."""
        at = 0
        for lost in count():
            at += (
                1 + int(math.log(1 - self._random.random()) / math.log1p(-probability)) if probability else packets + 1
            )
            if at > packets:
                return lost
        return None


def facts_of(way, plan, as_rail):
    small, large = way.small_loss(plan), way.large_loss(plan, 1500)
    if as_rail:
        rail = Rail("10.0.1.1", small.sent, small.lost, 1500, (large.sent, large.lost))
        return dataclasses.replace(PAIR, sent=2000, rails=(rail,))
    return dataclasses.replace(PAIR, sent=small.sent, lost=small.lost, large=(large.sent, large.lost))


def problems(small, large, runs, as_rail=False):
    """Of so many runs those in which training would suffer."""
    way, plan = Way(Losing(small, large, seed=1), End("10.0.0.2", 47400, 1), rail=int(as_rail)), Plan(2000, LIMIT)
    every = (pairs.judge(facts_of(way, plan, as_rail), CONFIG, LIMIT) for _ in range(runs))
    return sum(suffers(findings) for findings in every)


@pytest.mark.parametrize("as_rail", [False, True])
def test_a_way_that_loses_a_fifth_of_the_limit_is_hardly_ever_called_a_problem(as_rail):
    """That of one look at 500 full packets was so in 1.4 % of the ways, and in half of the jobs of eight ranks."""
    assert problems(0.001, 0.001, 10_000, as_rail) == 0


def test_a_way_that_loses_just_the_limit_is_called_a_problem_in_one_of_a_thousand_ways_at_most():
    assert problems(LIMIT, LIMIT, 3_000) <= 3


@pytest.mark.parametrize("as_rail", [False, True])
def test_a_way_that_loses_twice_the_limit_is_nearly_always_called_a_problem(as_rail):
    assert problems(0.01, 0.01, 1_000, as_rail) >= 980


def test_a_way_that_loses_full_packets_alone_is_found_from_three_times_the_limit_on():
    assert problems(0, 0.015, 1_000) >= 960


def test_nothing_is_counted_again_where_it_is_known():
    for small, large in ((0, 0), (0.001, 0), (0.2, 0.2)):
        prober = Losing(small, large, seed=2)
        facts_of(Way(prober, End("10.0.0.2", 47400, 1)), Plan(2000, LIMIT), as_rail=False)
        assert prober.packets == [2000, 500]


class Open(Losing):
    """Loses so many of each count that it stays open."""

    def _lost(self, packets, _probability):
        return packets * 8 // 1000


@pytest.mark.parametrize("rail", [0, 3])
def test_what_may_be_chance_is_counted_again_under_other_numbers_and_the_sum_is_judged(rail):
    prober, told = Open(0, 0, seed=3), []
    way, plan = Way(prober, End("10.0.0.2", 47400, 1), rail), Plan(500, LIMIT, told.append)
    small, large = way.small_loss(plan), way.large_loss(plan, 1500)
    assert prober.packets == [500] * 5 + [125] + [500] * LOOKS_MORE
    assert len({*prober.tests}) == len(prober.tests)
    assert (small.sent, small.lost) == (2500, 20)
    assert (large.sent, large.lost) == (2125, 17)
    assert told[0] == "4 of 500 packets to rank 1 lost, which may be chance: counts again"
    assert len(told) == 2 * LOOKS_MORE
    [found] = pairs.judge(dataclasses.replace(PAIR, sent=2500, lost=20), Config(), LIMIT)
    assert (found.level, found.check) == ("warning", "loss")
    assert found.text.endswith("may be chance")


def test_a_peer_that_never_says_a_count_has_lost_all_and_is_not_asked_again():
    class Silent(Losing):
        def count(self, _to, _test, packets, **_options):
            self.packets.append(packets)

    prober = Silent(0, 0, seed=4)
    assert Way(prober, End("10.0.0.2", 47400, 1)).small_loss(Plan(500, LIMIT)) == (500, 500, 0)
    assert prober.packets == [500]


@pytest.mark.parametrize(("sent", "per_mille"), [(25, 5), (500, 5), (1200, 20), (1000, 500), (300, 970)])
def test_the_probability_is_that_of_the_binomial_distribution(sent, per_mille):
    """In whole numbers: each way to lose so many, in thousandths to the power of the packets."""
    for lost in {sent * per_mille // 1000 + 1, sent * per_mille // 1000 + 8, sent}:
        ways = sum(math.comb(sent, k) * per_mille**k * (1000 - per_mille) ** (sent - k) for k in range(lost, sent + 1))
        expected = float(Fraction(ways, 1000**sent))
        assert chance._at_least(lost, sent, per_mille / 1000) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("lost", "sent", "share", "is_more", "is_open"),
    [
        (0, 1000, 0.0, False, False),
        (1, 1000, 0.0, True, False),
        (5, 1000, 0.005, False, False),
        (6, 1000, 0.005, False, True),
        (16, 1000, 0.005, True, False),
        (1000, 1000, 1.0, False, False),
        (0, 0, 0.005, False, False),
    ],
)
def test_limits_of_nothing_and_of_all_are_taken_at_their_word(lost, sent, share, is_more, is_open):
    assert (chance.is_more(lost, sent, share), chance.is_open(lost, sent, share)) == (is_more, is_open)


def test_the_time_that_is_planned_has_every_count_of_every_way_in_it():
    once, most = planned_s(2000, again=False), planned_s(2000, again=True)
    assert once == pytest.approx(0.4 + 1.0)
    assert most >= once + LOOKS_MORE * (0.4 + 4.0)
    one, two = (pairs.planned_s(2000, addresses, 0) for addresses in (1, 2))
    assert (two[0] - one[0], two[1] - one[1]) == pytest.approx((once, most))
    assert one[0] == pytest.approx(once + 0.4)
    assert pairs.planned_s(2000, 1, 2)[1] == pytest.approx(one[1] + 4.0)
