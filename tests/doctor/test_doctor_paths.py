"""The paths that the doctor counts, over routers that are real kernels' (network namespaces that forward)."""

import os
from pathlib import Path

import pytest
from doctors import needs_ipv6
from gradwire.doctor import pairs
from gradwire.doctor.probe import trace
from gradwire.lab import iproute
from gradwire.lab.namespaces import Namespaces
from sandboxed import in_sandbox

HASH_POLICY = "fib_multipath_hash_policy"
PORT, HOPS, WAIT_S = 47400, 6, 0.2


def of_ipv4(number, place=0):
    return f"10.50.{number}.{place}"


def of_ipv6(number, place=0):
    return f"fd50:{number + 1}::{place or ''}"


class Routed:
    """Namespaces in a row or beside each other, joined by links 10.50.n.0/24, or of IPv6, that count up; host 0 asks."""

    def __init__(self, hosts, address=of_ipv4):
        iproute.require()
        self._address = address
        self._namespaces = Namespaces()
        self._links = 0
        for host in range(hosts):
            self._namespaces.add()
            self._on(host, "link set lo up")
            with self._namespaces.on_host(host):
                Path("/proc/sys/net/ipv4/ip_forward").write_text("1")
                if address is of_ipv6:
                    # Without a look for others of the same address, before whose end nothing is forwarded.
                    for name, value in (("all/forwarding", 1), ("all/accept_dad", 0), ("default/accept_dad", 0)):
                        Path(f"/proc/sys/net/ipv6/conf/{name}").write_text(str(value))

    def join(self, near, far):
        """A link whose near end is 10.50.n.1 and whose far end is 10.50.n.2, or the same of IPv6."""
        number, self._links = self._links, self._links + 1
        iproute.ip(f"link add n{number} type veth peer name f{number}")
        for host, end, place in ((near, "n", 1), (far, "f", 2)):
            device = f"{end}{number}"
            iproute.ip(f"link set {device} netns {self._namespaces.path(host)}")
            bits, how = (24, "") if self._address is of_ipv4 else (64, "nodad")
            address = f"{self._address(number, place)}/{bits}"
            self._on(host, f"addr add {address} dev {device} {how}", f"link set {device} up")

    def route(self, host, to, *gateways):
        words = f"via {gateways[0]}" if len(gateways) == 1 else " ".join(f"nexthop via {each}" for each in gateways)
        self._on(host, f"route add {to} {words}")

    def set(self, host, name, value):
        with self._namespaces.on_host(host):
            Path(f"/proc/sys/net/ipv4/{name}").write_text(str(value))

    def trace(self, to, flows):
        """What the flows met; JSON, which is how it leaves the sandbox, has no whole numbers as keys."""
        with self._namespaces.on_host(0):
            return [sorted(way.items()) for way in trace(self._address(0, 1), (to, PORT), flows, HOPS, WAIT_S)]

    def _on(self, host, *lines):
        with self._namespaces.on_host(host):
            iproute.ip(*lines)


def ways_of(told):
    return [dict(map(tuple, way)) for way in told]


@pytest.mark.parametrize("address", [of_ipv4, pytest.param(of_ipv6, marks=needs_ipv6)])
def test_a_chain_of_routers_is_one_path(tmp_path, address):
    """Each says something before the next packet leaves, and falls silent for the last flows: six answers, then one a second."""
    bits = 24 if address is of_ipv4 else 64

    def main():
        network = Routed(5, address)
        for near in range(4):
            network.join(near, near + 1)
        network.route(0, "default", address(0, 2))
        for router in (1, 2):
            network.route(router, f"{address(3)}/{bits}", address(router, 2))
        for router in (2, 3, 4):
            network.route(router, f"{address(0)}/{bits}", address(router - 1, 1))
        return network.trace(address(3, 2), pairs._FLOWS)

    ways = ways_of(in_sandbox(tmp_path, main))
    assert ways[0] == {hop: address(hop - 1, 2) for hop in (1, 2, 3)}  # and nothing of the host, whose port is closed
    assert pairs._distinct(ways) == 1


@pytest.mark.skipif(
    not os.path.exists(f"/proc/sys/net/ipv4/{HASH_POLICY}"), reason="this kernel has no multipath routes"
)
def test_routes_over_two_routers_are_two_paths(tmp_path):
    """Of 24 flows all take the same of two ways in one case of eight million."""

    def main():
        network = Routed(5)
        for near, far in ((0, 1), (1, 2), (1, 3), (2, 4), (3, 4)):
            network.join(near, far)
        network.set(1, HASH_POLICY, 1)  # by ports, too
        network.route(0, "default", "10.50.0.2")
        network.route(1, "10.50.9.0/24", "10.50.1.2", "10.50.2.2")
        for router, gateway, back in ((2, "10.50.3.2", "10.50.1.1"), (3, "10.50.4.2", "10.50.2.1")):
            network.route(router, "10.50.9.0/24", gateway)
            network.route(router, "10.50.0.0/24", back)
        network.route(4, "10.50.0.0/24", "10.50.3.1")
        return network.trace("10.50.9.1", 24)

    ways = ways_of(in_sandbox(tmp_path, main))
    assert {way[2] for way in ways if 2 in way} == {"10.50.1.2", "10.50.2.2"}
    assert pairs._distinct(ways) == 2
