"""Thresholds: the loss of an M/M/1/m queue against the chain itself, the sequence of DLCP, and the optimum of MLT."""

import itertools
import random

import pytest
from gradwire.switch import SwitchError
from gradwire.switch.thresholds import HEADROOM_PACKETS, THRESHOLD_SHARE, Traffic, arithmetic, loss, optimal

THETA = 0.5


def chain_loss(utilisation, room):
    """The same by its definition: states 0 to `room` of a birth-death chain have weights rho^n; arrivals in the last are lost."""
    weights = [utilisation**count for count in range(room + 1)]
    return weights[-1] / sum(weights)


@pytest.mark.parametrize("utilisation", [0.01, 0.5, 0.999, 1.0, 1.001, 3.0, 50.0])
@pytest.mark.parametrize("room", [1, 2, 7, 60])
def test_the_loss_is_that_of_the_birth_death_chain(utilisation, room):
    assert loss(utilisation, room) == pytest.approx(chain_loss(utilisation, room), rel=1e-9)


def test_no_room_loses_everything_and_extremes_stay_in_range():
    assert loss(0.5, 0) == pytest.approx(1.0)
    assert loss(0.0, 5) == 0.0
    assert 0 <= loss(1e-12, 500) <= loss(1e12, 500) <= 1


# test of: dlcp/arithmetic-thresholds
def test_thresholds_are_the_arithmetic_sequence_of_dlcp():
    found = arithmetic(7, 10_000, 0.25)
    assert found == [10_000, 12_500, 15_000, 17_500, 20_000, 22_500, 25_000]
    assert arithmetic(1, 5_000, 1.0) == [5_000]


def test_a_queue_is_served_what_the_ones_before_it_leave():
    traffic = Traffic([0.5, 0.25, 0.25], 0.8, THETA, [1, 1, 1], [1, 1, 1])
    assert traffic.utilisations() == pytest.approx([0.4 / 1, 0.2 / 0.6, 0.2 / 0.4])
    # The paper's form of the same: the product of the idle shares of the queues before.
    first, second, third = traffic.utilisations()
    assert third == pytest.approx(0.2 / ((1 - first) * (1 - second)))


def test_behind_an_overloaded_queue_everything_is_lost():
    traffic = Traffic([0.9, 0.1], 1.5, THETA, [1, 1], [1, 1])
    (_, _), (small, large) = traffic.losses([20, 20], [20, 20])
    assert small == pytest.approx(1.0)
    assert large == pytest.approx(1.0)


def some_traffic(seed, load):
    draw = random.Random(seed)
    shares = [draw.uniform(0.2, 1) for _ in range(draw.choice([1, 3, 7]))]
    total = sum(shares)
    costs = [draw.uniform(0.5, 2) for _ in shares]
    return Traffic([share / total for share in shares], load, THETA, costs, [4 * cost for cost in costs])


def feasible(small, large, room):
    thresholds = [few / THETA for few in small]
    ends = [few + many for few, many in zip(small, large, strict=True)]
    return (
        min(*small, *large) >= 1 - 1e-6
        and sum(ends) <= room + 1e-6
        and all(end - threshold >= HEADROOM_PACKETS - 1e-6 for threshold, end in zip(thresholds, ends, strict=True))
        and all(threshold <= THRESHOLD_SHARE * end + 1e-6 for threshold, end in zip(thresholds, ends, strict=True))
        and all(early <= late + 1e-6 for early, late in itertools.pairwise(thresholds))
    )


# test of: mlt/threshold-optimiser
@pytest.mark.parametrize("load", [0.6, 0.95, 1.2])
@pytest.mark.parametrize("seed", range(4))
def test_no_allowed_change_of_the_optimum_costs_less(seed, load):
    pytest.importorskip("scipy")
    traffic, room = some_traffic(seed, load), 150
    small, large = optimal(traffic, room)
    assert feasible(small, large, room)
    best = traffic.cost(traffic.losses(small, large))
    draw, tried = random.Random(seed), 0
    for _ in range(4_000):
        # Room moves from one place to another, and now and then all of it is drawn anew.
        moved = [*small, *large]
        amount = draw.choice([0.01, 0.3, 5.0])
        moved[draw.randrange(len(moved))] -= amount
        moved[draw.randrange(len(moved))] += amount
        if draw.random() < 0.2:
            drawn = [draw.uniform(1, 40) for _ in moved]
            moved = [value * room / sum(drawn) for value in drawn]
        few, many = moved[: len(small)], moved[len(small) :]
        if feasible(few, many, room):
            tried += 1
            # One part in a thousand is what the optimiser's own tolerance leaves open.
            assert traffic.cost(traffic.losses(few, many)) >= best * 0.999
    assert tried > 100


def test_a_larger_layer_gets_more_room():
    pytest.importorskip("scipy")
    traffic = Traffic([0.2, 0.6, 0.2], 0.9, THETA, [1, 1, 1], [4, 4, 4])
    small, large = optimal(traffic, 120)
    alike = Traffic([1 / 3] * 3, 0.9, THETA, [1, 1, 1], [4, 4, 4])
    other_small, other_large = optimal(alike, 120)
    assert small[1] + large[1] > other_small[1] + other_large[1]


def test_a_buffer_that_is_too_small_says_what_would_do():
    pytest.importorskip("scipy")
    with pytest.raises(SwitchError, match="8 at least"):
        optimal(Traffic([0.5, 0.5], 0.5, THETA, [1, 1], [1, 1]), 7.0)
