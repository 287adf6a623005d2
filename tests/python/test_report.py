"""The delivery report that Python users read."""

from gradwire.report import DeliveryReport, PeerDelivery
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
    step = StepRecord().plus(report, elem_bytes=4)
    assert (step.bytes_expected, step.bytes_received, step.lost_share) == (4000, 3000, 0.25)
    rotated = DeliveryReport(
        elems=1000, rotated_elems=2000, sources=sources, uncounted=((0, 500),), bytes_expected=8000
    )
    assert rotated.lost_share == 0.25
    assert DeliveryReport(elems=1000).lost_share == 0.0, "alone there is nothing to lose"
