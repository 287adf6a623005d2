"""Where the doctor asks a peer, without a network: as the engine would."""

import pytest
from doctors import GOOD
from gradwire.doctor import book, reach

ONE, OTHERS = "10.0.0.1", "10.0.0.2"


def at(*addresses, **changes):
    """What a rank says of itself."""
    return {"features": {**GOOD, "addresses": list(addresses), **changes}, "port": 47400}


@pytest.mark.parametrize(
    ("own", "peer", "expected"),
    [
        # As the engine has it: loopback first within one network namespace, unless somebody binds one address alone.
        (at(ONE), at(ONE), ["127.0.0.1", ONE]),
        (at(), at(), ["127.0.0.1"]),
        (at(ipv6=True), at(ipv6=True), ["::1"]),
        (at("fd00::1", ipv6=True), at("fd00::1", ipv6=True), ["::1", "fd00::1"]),
        (at(ONE, loopback=False), at(ONE), [ONE]),
        (at(ONE), at(ONE, loopback=False), [ONE]),
        (at(ONE), at(OTHERS, network_namespace=2), [OTHERS]),
        (at(ONE), at(OTHERS, boot_id="b"), [OTHERS]),
        # What is an address of this host too does not leave it.
        (at(ONE, "10.9.9.1"), at("10.9.9.1", OTHERS, boot_id="b"), [OTHERS]),
        (at(ONE), at(ONE, boot_id="b"), [ONE]),
        (at(ONE), at("fd00::2", ipv6=True, boot_id="b"), []),
        (at(ONE), at("fd00::2", ipv6=True), []),
        (at(ONE), at(boot_id="b"), []),
        (at(ONE, loopback=False), at(), []),
    ],
)
def test_a_peer_is_asked_where_the_engine_would(own, peer, expected):
    assert reach.addresses(own["features"], peer["features"]) == expected


@pytest.mark.parametrize(
    ("own", "peer", "heard", "text"),
    [
        (at(ONE), at(OTHERS, boot_id="b"), False, "nothing arrives at UDP port 47400 of 10.0.0.2"),
        (at(ONE), at(OTHERS, boot_id="b"), True, "no answer comes back to UDP port 47400 here"),
        (at(ONE), at("fd00::2", ipv6=True), False, "this rank uses its IPv4 addresses and that one its IPv6 ones"),
        (at("fd00::2", ipv6=True), at(ONE), False, "this rank uses its IPv6 addresses and that one its IPv4 ones"),
        (at(ONE), at(boot_id="b"), False, "it has no address that could be asked from here, loopback alone"),
        (at(boot_id="pid-1-a"), at(boot_id="pid-2-b"), False, "where /proc/sys/kernel/random/boot_id cannot be read"),
    ],
)
def test_a_peer_that_does_not_answer_is_told_with_the_reason(own, peer, heard, text):
    (found,) = reach.judge((0, 1), own, peer, answered=False, peer_heard=heard)
    assert (found.level, found.check, found.rank, found.peer) == ("problem", "reachability", 0, 1)
    assert text in found.text
    assert found.fix
    assert reach.judge((0, 1), own, peer, answered=True, peer_heard=True) == []


def test_ranks_meet_here_only_where_all_engines_started_in_one_namespace():
    none = {**at(), "features": None}
    assert reach.are_local([at(ONE), at()])
    assert not reach.are_local([at(ONE), at(ONE, network_namespace=2)])
    assert not reach.are_local([none, at()])
    assert not reach.are_local([at(), none])


@pytest.mark.parametrize(
    ("others", "mates"),
    [
        ([at(ONE), at(ONE)], [0, 1]),
        ([at(), at()], [0, 1]),
        ([at(ONE), at(ONE, network_namespace=2), at(ONE, boot_id="b"), at(ONE)], [0, 3]),
        ([at(ONE), at(OTHERS)], [0]),
        ([at(ONE), {**at(), "features": None}], [0]),
        ([{**at(), "features": None}, {**at(), "features": None}], [0]),
    ],
)
def test_the_ranks_of_a_host_are_those_of_its_network_namespace(others, mates):
    assert book.mates(others, 0) == mates
