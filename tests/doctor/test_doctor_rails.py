"""What is measured from each local address beside the kernel's own: loopback has many, and the peer here is deaf to one of them."""

import pytest
from doctors import needs_ipv6
from gradwire.config import Config
from gradwire.doctor import rails
from gradwire.doctor.marks import octets_of
from gradwire.doctor.probe import End, Prober
from gradwire.doctor.ways import Plan

RAIL, WANTED = "127.0.0.9", 1500
MLT = Config.mlt()


class Peer(Prober):
    """Handles what has come from the rail as `change` gives it back: bytes and octet; None: it is lost."""

    def __init__(self, change, address="127.0.0.1"):
        self.change, self.lost = change, []
        super().__init__(0, 1, token=1, address=address)

    def _handle(self, data, octet, sender, came_ns):
        changed = self.change(len(data) + 28, octet) if sender and sender[0] == RAIL else octet
        if changed is None:
            self.lost.append(len(data) + 28)
        else:
            super()._handle(data, changed, sender, came_ns)


def measured(change, packets=100):
    with Prober(0, 0, token=1) as prober, Peer(change) as peer:
        to = End("127.0.0.1", peer.port, 1)
        [way] = rails.ways(prober, to, ["127.0.0.1"], [RAIL])
        return rails.measure(way, Plan(packets, 0.005), MLT, WANTED)


def test_a_healthy_rail_passes_full_packets_and_all_marks():
    rail = measured(lambda _size, octet: octet)
    assert (rail.source, rail.sent, rail.lost, rail.large, rail.ip_bytes) == (RAIL, 100, 0, (25, 0), WANTED)
    assert rail.marks == tuple((octet, octet) for octet in octets_of(MLT))
    assert rail.is_path(WANTED)


def test_a_rail_that_small_packets_alone_pass_is_no_path_and_has_the_size_that_passes():
    rail = measured(lambda size, octet: octet if size <= 1313 else None)
    assert (rail.lost, rail.large, rail.ip_bytes) == (0, (25, 25), 1313)
    assert not rail.is_path(WANTED)
    assert not rail.is_dead


def test_a_rail_on_which_nothing_comes_back_is_measured_all_the_same():
    """What the peer has received it says on the way that works."""
    with Prober(0, 0, token=1) as prober, Peer(lambda _size, octet: octet) as peer:
        said, send = [], peer.socket.sendto
        peer.socket = Deaf(peer.socket, said, send)
        [way] = rails.ways(prober, End("127.0.0.1", peer.port, 1), ["127.0.0.1"], [RAIL])
        rail = rails.measure(way, Plan(100, 0.005), MLT, WANTED)
    assert rail.is_path(WANTED)
    assert len(rail.marks) == len(octets_of(MLT))
    assert RAIL not in said


class Deaf:
    """A socket that notes to whom it answers, and answers nothing on the rail."""

    def __init__(self, own, said, send):
        self._own, self._said, self._send = own, said, send

    def sendto(self, data, place):
        self._said.append(place[0])
        if place[0] != RAIL:
            self._send(data, place)

    def __getattr__(self, name):
        return getattr(self._own, name)


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda octet: octet & 3, lambda octet: octet & 3),
        (lambda octet: octet & ~3, lambda octet: octet & ~3),
        (lambda octet: None if octet >> 2 == 40 else octet, lambda octet: None if octet >> 2 == 40 else octet),
    ],
    ids=["bleached", "ECN cleared", "dropped"],
)
def test_marks_that_a_rail_changes_are_those_that_its_packets_arrive_with(change, expected):
    rail = measured(lambda _size, octet: change(octet) if octet else octet)
    assert rail.marks == tuple((octet, expected(octet)) for octet in octets_of(MLT))
    assert rail.is_path(WANTED)


def test_a_dead_rail_is_not_tried_further():
    with Prober(0, 0, token=1) as prober, Peer(lambda _size, _octet: None) as peer:
        [way] = rails.ways(prober, End("127.0.0.1", peer.port, 1), ["127.0.0.1"], [RAIL])
        rail = rails.measure(way, Plan(100, 0.005), MLT, WANTED)
    assert rail.is_dead
    assert peer.lost == [200] * 100
    assert not rail.is_path(WANTED)


@pytest.mark.parametrize(("address", "family"), [("127.0.0.1", 4), pytest.param("::1", 6, marks=needs_ipv6)])
def test_the_octet_of_counted_packets_is_told_of_both_families(address, family):
    with Prober(0, 0, token=1, address=address) as one, Prober(0, 1, token=1, address=address) as other:
        end = End(address, other.port, 1)
        found = one.count(end, 5, 10, size_bytes=200, batch=10, pause_s=0, octet=0xBA)
        plain = one.count(end, 6, 10, size_bytes=200, batch=10, pause_s=0)
    assert (found.arrived, found.octet, plain.octet) == (10, 0xBA, 0), family
    assert found.spacing_ns is None
