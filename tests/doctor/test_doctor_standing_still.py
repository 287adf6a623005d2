"""A peer that stands still for a while is no black hole, and one that has gone holds nobody up for long."""

import socket

import pytest
from gradwire.doctor import marks, pairs, probe
from gradwire.doctor.probe import End, Prober

OCTET = 40 << 2 | marks.CAPABLE
FULL_BYTES = 1500


class Standing(Prober):
    """Reads nothing until so many packets have come, and then all of them in their order, as a process does that gets a core again."""

    def __init__(self, packets):
        self.packets, self.held = packets, []
        super().__init__(0, 1, token=1, address="127.0.0.1")

    def _handle(self, *packet):
        self.held.append(packet)
        if len(self.held) >= self.packets:
            for each in self.held[:]:
                super()._handle(*each)
            self.packets = 0
            self.held.clear()


class Narrow(Prober):
    """Loses what is of full size, or has a mark."""

    def _handle(self, data, octet, *rest):
        if len(data) < FULL_BYTES / 2 and not octet:
            super()._handle(data, octet, *rest)


@pytest.fixture
def asking():
    with Prober(0, 0, token=1, address="127.0.0.1") as prober:
        yield prober


# One beyond the tries of either kind; and once more all of them.
@pytest.mark.parametrize("packets", [6, 11])
def test_a_peer_that_stands_still_loses_neither_large_packets_nor_marked_ones(asking, packets):
    for found in (
        lambda end: pairs._passes(asking, end, FULL_BYTES),
        lambda end: pairs._arriving(asking, end, OCTET) == OCTET,
    ):
        with Standing(packets) as peer:
            assert found(End("127.0.0.1", peer.port, 1))


def test_a_peer_that_comes_back_after_it_counted_as_gone_is_no_black_hole(asking, monkeypatch):
    monkeypatch.setattr(probe, "_ROUNDS", 2)
    with Standing(probe._ROUNDS * (pairs._MTU_TRIES + 1) + 1) as peer:
        assert pairs._largest(asking, End("127.0.0.1", peer.port, 1), FULL_BYTES) == FULL_BYTES


def test_a_peer_that_comes_back_after_it_counted_as_gone_has_lost_no_mark(asking, monkeypatch):
    monkeypatch.setattr(probe, "_ROUNDS", 2)
    with Standing(probe._ROUNDS * (pairs._TAG_TRIES + 1) + 1) as peer:
        assert pairs._arriving(asking, End("127.0.0.1", peer.port, 1), OCTET) == OCTET


def test_what_is_lost_where_plain_probes_are_not_is_told(asking):
    with Narrow(0, 1, token=1, address="127.0.0.1") as peer:
        end = End("127.0.0.1", peer.port, 1)
        assert not pairs._passes(asking, end, FULL_BYTES)
        assert pairs._arriving(asking, end, OCTET) is None
        assert pairs._passes(asking, end, end.least_bytes)


def test_a_peer_that_has_gone_is_asked_in_many_rounds_once(asking):
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as silent:
        silent.bind(("127.0.0.1", 0))
        silent.setblocking(False)
        end = End(*silent.getsockname(), 1)
        for rounds in (probe._ROUNDS, 1, 1):
            assert asking.ask_for_certain(end, 1) is None
            for _ in range(2 * rounds):
                silent.recv(FULL_BYTES)
            with pytest.raises(BlockingIOError):
                silent.recv(FULL_BYTES)
