"""Which ways between ranks are called slow."""

import dataclasses

import pytest
from gradwire.doctor import pairs
from gradwire.doctor.pairs import PairFacts

PAIR = PairFacts(0, 1, "10.0.0.2", (0.1, 0.2), 1500, 1500, 1000, paths=1)


def rated(rank, peer, rate_mbit, **changes):
    return dataclasses.replace(PAIR, rank=rank, peer=peer, rate_mbit=rate_mbit, **changes).described()


@pytest.mark.parametrize(
    ("ways", "slow"),
    [
        ([], []),
        ([rated(0, 1, None), rated(1, 0, None)], []),
        ([rated(0, 1, 40.0), rated(1, 0, 80.0)], []),
        ([rated(0, 1, 40.0), rated(1, 0, 81.0)], [1]),
        ([rated(0, 1, 40.0), rated(1, 0, None)], []),
        ([rated(1, 0, 10.0), rated(0, 1, 100.0)], []),
        # Of small packets no more can be told.
        ([rated(0, 1, 600.0), rated(1, 2, 3600.0, ip_bytes=9000), rated(2, 1, 3600.0, ip_bytes=9000)], []),
        # A slow host of three has most of the ways.
        (
            [
                rated(0, 1, 10.0),
                rated(0, 2, 9.0),
                rated(1, 0, 10.0),
                rated(2, 0, 9.0),
                rated(1, 2, 99.0),
                rated(2, 1, 98.0),
            ],
            [1, 2],
        ),
        # One way that seemed faster than all others makes none of them slow.
        ([rated(0, 1, 95.0), rated(0, 2, 94.0), rated(1, 0, 600.0)], []),
    ],
)
def test_ways_that_are_much_slower_than_most_are_told_by_who_measured_them(ways, slow):
    found = [finding for finding in pairs.judge_rates(ways) if finding.rank == 0]
    assert [(finding.level, finding.check, finding.peer) for finding in found] == [("warning", "rate", n) for n in slow]
