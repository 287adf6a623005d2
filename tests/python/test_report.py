"""The delivery report that Python users read."""

from gradwire.report import DeliveryReport, PeerDelivery


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
