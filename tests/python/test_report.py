"""The delivery report that Python users read."""

import copy
import dataclasses
import pickle
import struct

import pytest
from gradwire.report import Contributions, DeliveryReport, DeliveryTotals, PeerDelivery
from gradwire.torch._steps import StepRecord


def delivery(expected: int, received: int) -> PeerDelivery:
    return PeerDelivery(
        rank=1,
        elems_received=received,
        elems_expected=expected,
        closed_by="bound_met",
        waited_for_peer_s=0.0,
        network_time_s=0.0,
    )


def test_the_lost_share_is_that_of_contributions_and_not_of_results() -> None:
    # As `DeliveryReport::lost_share` in Rust: 25 of 100 elements that should have been averaged here.
    peers, sources = (delivery(75, 50), delivery(25, 25)), (delivery(100, 90),)
    report = DeliveryReport(peers=peers, sources=sources, bytes_expected=800, bytes_received=660)
    assert report.lost_share == 0.25
    assert DeliveryReport(sources=sources, bytes_expected=400, bytes_received=360).lost_share == 0.0


def test_a_worker_of_servers_tells_what_of_its_own_did_not_count_there() -> None:
    sources = (delivery(1000, 1000),)
    report = DeliveryReport(elems=1000, sources=sources, uncounted=((0, 50), (500, 700)), bytes_expected=4000)
    assert report.lost_share == 0.25
    assert report.contributions_delivered == (1000, 750)
    rotated = DeliveryReport(
        elems=1000, rotated_elems=2000, sources=sources, uncounted=((0, 500),), bytes_expected=8000
    )
    assert rotated.lost_share == 0.25
    assert DeliveryReport(elems=1000).lost_share == 0.0, "alone there is nothing to lose"


def test_a_step_is_the_sum_of_its_buckets_and_a_bucket_that_of_its_pieces() -> None:
    pieces = [
        DeliveryTotals(750, 700, 10, 3000, 40, 1, 0.5, 20, 250),
        DeliveryTotals(250, 250, 5, 1000, 0, 2, 0.75, 10, 150),
    ]
    bucket = DeliveryTotals.of_parts(pieces)
    assert bucket == DeliveryTotals(1000, 950, 15, 4000, 40, 3, 0.75, 30, 400)
    step = StepRecord().plus(bucket, elem_bytes=4).plus(bucket, elem_bytes=2)
    assert (step.buckets, step.bytes_expected, step.bytes_received, step.bytes_sent) == (2, 6000, 5700, 8000)
    assert (step.lost_share, step.elems_filled, step.elems, step.filled_share) == (pytest.approx(0.05), 60, 800, 0.075)
    assert StepRecord().filled_share == 0.0
    assert (step.elems_uncounted, step.ended_by_time, step.bytes_retransmitted) == (30, 6, 80)


def test_a_report_with_contributions_is_pickled_copied_and_compared() -> None:
    native = {"counts": bytearray(struct.pack("=4H", 3, 2, 1, 0)), "blocks": 2, "shard_elems": 20, "block_elems": 10}
    report = DeliveryReport(elems=40, contributions=Contributions.from_native(native))
    for again in (pickle.loads(pickle.dumps(report)), copy.deepcopy(report)):
        assert again == report
        assert hash(again) == hash(report)
        assert [again.contributions.of(elem) for elem in (0, 10, 20, 39)] == [3, 2, 1, 0]
        assert again.contributions.counts.shape == (2, 2)
    assert dataclasses.asdict(report)["contributions"]["block_elems"] == 10
    nothing = Contributions.from_native({"counts": bytearray(), "blocks": 1, "shard_elems": 1, "block_elems": 1})
    assert len(pickle.loads(pickle.dumps(nothing)).counts) == 0


def test_what_a_step_says_since_later_stands_behind_what_it_said_before() -> None:
    step = StepRecord(1, 2, 3, 4, 5, 6, 7, 8.0, 9, 10)
    assert (step.elems_uncounted, step.ended_by_time, step.comm_s) == (6, 7, 8.0)
    assert (step.elems_filled, step.elems) == (9, 10)
