"""Thresholds: the loss of an M/M/1/m queue against the chain itself, the sequence of DLCP, and the optimum of MLT."""

import itertools
import math
import random
from fractions import Fraction

import pytest
from gradwire.switch import SwitchError
from gradwire.switch.thresholds import (
    HEADROOM_PACKETS,
    THRESHOLD_SHARE,
    Traffic,
    arithmetic,
    log_avoidable_loss,
    loss,
    optimal,
)

THETA = 0.5


def chain_loss(utilisation, room):
    """The same by its definition: states 0 to `room` of a birth-death chain have weights rho^n; arrivals in the last are lost."""
    weights = [utilisation**count for count in range(room + 1)]
    return weights[-1] / sum(weights)


@pytest.mark.parametrize("utilisation", [0.01, 0.5, 0.999, 1.0, 1.001, 3.0, 50.0])
@pytest.mark.parametrize("room", [1, 2, 7, 60])
def test_the_loss_is_that_of_the_birth_death_chain(utilisation, room):
    assert loss(utilisation, room) == pytest.approx(chain_loss(utilisation, room), rel=1e-9)


@pytest.mark.parametrize("utilisation", [Fraction(1, 100), Fraction(3, 10), Fraction(9, 10), 1, Fraction(11, 10), 30])
@pytest.mark.parametrize("room", [1, 7, 60, 700])
def test_what_more_room_would_save_is_told_however_little_it_is(utilisation, room):
    """Down to one in 10^1400, which no float holds."""
    exact = chain_loss(Fraction(utilisation), room) - max(0, 1 - 1 / Fraction(utilisation))
    logarithm = math.log(exact.numerator) - math.log(exact.denominator)
    assert log_avoidable_loss(float(utilisation), room) == pytest.approx(logarithm, rel=1e-9)


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
    """To the precision of the solver, which reckons in parts of all room."""
    thresholds = [few / THETA for few in small]
    ends = [few + many for few, many in zip(small, large, strict=True)]
    return (
        min(*small, *large) >= 1 - 1e-6
        and sum(ends) <= room + 1e-6
        and all(end - threshold >= HEADROOM_PACKETS - 1e-6 for threshold, end in zip(thresholds, ends, strict=True))
        and all(threshold <= THRESHOLD_SHARE * end + 1e-6 for threshold, end in zip(thresholds, ends, strict=True))
        and all(early <= late + 1e-6 for early, late in itertools.pairwise(thresholds))
    )


def moved(draw, few, many):
    """A part of the room goes from one queue to another, or to all from there on, so that thresholds that are alike can rise together."""
    rooms, total = [[*few], [*many]], sum(few) + sum(many)
    amount = total * 10 ** draw.uniform(-6, -0.8)
    first = draw.randrange(len(few))
    receivers = draw.choice([range(first, first + 1), range(first, len(few))])
    for queue, change in [
        (draw.randrange(len(few)), -amount),
        *((queue, amount / len(receivers)) for queue in receivers),
    ]:
        small = draw.choice([0, THETA * THRESHOLD_SHARE, 1])  # the second keeps a threshold that is as large as may be
        rooms[0][queue] += change * small
        rooms[1][queue] += change * (1 - small)
    return rooms


# test of: mlt/threshold-optimiser
@pytest.mark.parametrize("load", [0.3, 0.6, 0.95, 1.2])
@pytest.mark.parametrize("room", [40, 150, 2_000, 30_000])
@pytest.mark.parametrize("seed", range(4))
def test_no_allowed_changes_of_the_optimum_cost_less(seed, room, load):
    """Whatever the buffer: in logarithms, since most of these losses are too small for a number."""
    pytest.importorskip("scipy")
    traffic = some_traffic(seed, load)
    few, many = optimal(traffic, room)
    assert feasible(few, many, room)
    found = best = traffic.log_avoidable_cost(few, many)[0]
    draw, tried = random.Random(seed), 0
    for _ in range(4_000):
        changed = moved(draw, few, many)
        if feasible(*changed, room):
            tried += 1
            cost = traffic.log_avoidable_cost(*changed)[0]
            if cost < best:
                best, (few, many) = cost, changed
    assert tried > 100
    assert best > found - 1e-6, "of the cost a millionth is what the solver's own tolerance may leave open"


def test_a_queue_without_layers_gets_the_least_that_rising_thresholds_leave_it():
    pytest.importorskip("scipy")
    traffic = Traffic([0.5, 0.0, 0.5], 0.9, THETA, [1, 0, 1], [4, 0, 4])
    few, many = optimal(traffic, 30_000)
    assert feasible(few, many, 30_000)
    assert few[1] == pytest.approx(few[0], rel=1e-3)


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
