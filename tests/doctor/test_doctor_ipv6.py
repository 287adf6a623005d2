"""`gradwire doctor` on hosts whose addresses are of IPv6 alone, and on those that have loopback alone."""

import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
from doctors import has_ipv6, lost_on_rails, needs_ipv6, run_doctors, start_doctor, texts, told
from gradwire.doctor.probe import End, Prober
from gradwire.lab import iproute
from gradwire.lab.namespaces import Namespaces
from sandboxed import in_sandbox

PORT = 47400
needs_nft = pytest.mark.skipif(shutil.which("nft") is None, reason="the program nft is not installed")


class Hosts:
    """Namespaces with loopback, and between the first two links whose addresses are fd00:n::1 and fd00:n::2 of IPv6 alone."""

    def __init__(self, hosts=2, links=1):
        iproute.require()
        self.layout = SimpleNamespace(hosts=hosts)
        self._namespaces = Namespaces()
        self.spawn, self.on_host = self._namespaces.spawn, self._namespaces.on_host
        for _ in range(hosts):
            self.run(self._namespaces.add(), "link set lo up")
        for number in range(links):
            self._join(number)

    def run(self, host, *lines):
        with self.on_host(host):
            iproute.ip(*lines)

    def filter(self, host, ruleset):
        """Has nftables do this with what comes to a host."""
        table = f"table ip6 faults {{\n chain c {{\n type filter hook prerouting priority -150;\n {ruleset}\n}}\n}}\n"
        with self.on_host(host):
            subprocess.run(["nft", "-f", "-"], input=table, text=True, check=True)

    def _join(self, number):
        device = f"eth{number}"
        iproute.ip(f"link add n{number} type veth peer name f{number}")
        for host, end in ((0, "n"), (1, "f")):
            iproute.ip(f"link set {end}{number} netns {self._namespaces.path(host)} name {device}")
        for host in (0, 1):  # without a look for others of the same address, which takes a second
            self.run(host, f"addr add fd00:{number}::{host + 1}/64 dev {device} nodad", f"link set {device} up")


def diagnose(tmp_path, fault=lambda _hosts: None, environment=None, links=1, **options):
    def main():
        hosts = Hosts(links=links)
        fault(hosts)
        return run_doctors(hosts, tmp_path, environment or {}, **options)

    return in_sandbox(tmp_path, main)


@needs_ipv6
def test_hosts_with_ipv6_addresses_alone_are_measured_over_ipv6(tmp_path):
    report = diagnose(tmp_path, packets=2000)
    assert report["statuses"] == [0, 0], report
    assert told(report, "problem", "warning") == set()
    for pair in report["pairs"]:
        assert (pair["ip_bytes"], pair["lost"], pair["reordered"], pair["paths"], pair["sent"]) == (1500, 0, 0, 1, 2000)
        assert pair["address"] == f"fd00:0::{pair['peer'] + 1}".replace(":0:", ":")
        assert all(sent == came for sent, came in pair["marks"])
        assert pair["rate_mbit"] is not None
    (used,) = [i for i in report["hosts"][1]["interfaces"] if i["used"]]
    assert (used["name"], used["address"], used["reason"]) == ("eth0", "fd00::2", "it is up and has an address")
    assert all(host["counters_after"]["cards"]["eth0"]["received"] > 2000 for host in report["hosts"])


@needs_ipv6
def test_one_host_with_ipv6_addresses_alone_names_them(tmp_path):
    def main():
        child = start_doctor(Hosts(), 0, [], {})
        return child.communicate(timeout=300)[0]

    output = in_sandbox(tmp_path, main)
    assert "eth0 fd00::1 (MTU 1500): used, it is up and has an address" in output
    assert "IPv4" not in output


@needs_ipv6
@needs_nft
def test_an_mtu_black_hole_of_ipv6_is_found_with_the_size_that_passes(tmp_path):
    """What IPv6 says is the length of the packet behind its header of 40 bytes."""
    report = diagnose(tmp_path, lambda hosts: hosts.filter(1, "ip6 length > 1362 drop"))
    assert report["statuses"] == [1, 1]
    assert told(report, "problem") == {("mtu", 0, 1)}
    assert {pair["rank"]: pair["ip_bytes"] for pair in report["pairs"]} == {0: 1402, 1: 1500}


@needs_ipv6
@needs_nft
def test_code_points_that_ipv6_loses_are_found(tmp_path):
    fault = "udp dport 1-65535 ip6 dscp set cs0"
    report = diagnose(tmp_path, lambda hosts: hosts.filter(1, fault), environment={"GRADWIRE_PRESET": "mlt"})
    assert told(report, "problem") == {("dscp", 0, 1)}
    assert "arrives as 0" in texts(report, "dscp")[0]
    assert not texts(report, "ecn")


@needs_ipv6
@needs_nft
def test_a_port_that_is_shut_over_ipv6_is_found_from_both_sides(tmp_path):
    report = diagnose(tmp_path, lambda hosts: hosts.filter(1, f"udp dport {PORT} drop"))
    assert report["statuses"] == [1, 1]
    assert told(report, "problem") == {("reachability", 0, 1), ("reachability", 1, 0)}
    there, back = texts(report, "reachability")
    assert f"nothing arrives at UDP port {PORT} of fd00::2" in there
    assert f"no answer comes back to UDP port {PORT} here" in back


@needs_ipv6
@needs_nft
def test_a_gray_rail_of_ipv6_is_found_and_named(tmp_path):
    """A tenth of what leaves from the second address is lost."""
    fault = "ip6 saddr fd00:1::1 numgen random mod 10 < 1 drop"
    report = diagnose(tmp_path, lambda hosts: hosts.filter(1, fault), links=2, packets=1000)
    assert report["statuses"] == [1, 1]
    assert told(report, "problem") == {("paths", 0, 1)}
    assert "from fd00:1::1" in texts(report, "paths")[0]
    assert all(pair["paths"] == 2 for pair in report["pairs"])


@needs_ipv6
@needs_nft
def test_rails_of_hosts_that_let_only_the_jobs_port_in_are_healthy_over_ipv6(tmp_path):
    def shut(hosts):
        for host in (0, 1):
            hosts.filter(host, f"udp dport {PORT} accept; meta l4proto udp drop")

    report = diagnose(tmp_path, shut, links=2, environment={"GRADWIRE_NETWORK_THREADS": "1"})
    assert report["statuses"] == [0, 0], report
    assert told(report, "problem", "warning") == set()
    assert [lost_on_rails(pair) for pair in report["pairs"]] == [
        [("fd00:1::1", 500, 0, [125, 0])],
        [("fd00:1::2", 500, 0, [125, 0])],
    ]


@needs_ipv6
def test_a_host_of_ipv4_and_one_of_ipv6_are_told_that_these_do_not_meet(tmp_path):
    report = diagnose(tmp_path, lambda hosts: hosts.run(0, "addr add 10.5.0.1/24 dev eth0"))
    assert report["statuses"] == [1, 1]
    assert told(report, "problem") == {("reachability", 0, 1), ("reachability", 1, 0)}
    assert "its IPv4 addresses and that one its IPv6 ones" in texts(report, "reachability")[0]


@pytest.mark.parametrize("address", ["127.0.0.1", pytest.param("::1", marks=needs_ipv6)])
def test_no_packet_is_sent_in_parts(tmp_path, address):
    def main():
        iproute.ip("link set lo up mtu 1500")
        with Prober(0, 0, token=1, address=address) as one, Prober(0, 1, token=1, address=address) as other:
            return [one.ask(End(address, other.port, 1), size_bytes) is not None for size_bytes in (1500, 1501)]

    assert in_sandbox(tmp_path, main) == [True, False]


def without_ipv6(hosts):
    for host in range(hosts.layout.hosts):
        with hosts.on_host(host):
            if has_ipv6():
                Path("/proc/sys/net/ipv6/conf/all/disable_ipv6").write_text("1")


def with_ipv6_alone(hosts):
    hosts.run(0, "addr del 127.0.0.1/8 dev lo")


@pytest.mark.parametrize(
    ("fault", "environment", "address"),
    [
        (without_ipv6, {}, "127.0.0.1"),
        (without_ipv6, {"GRADWIRE_INTERFACE": "lo"}, "127.0.0.1"),
        pytest.param(with_ipv6_alone, {}, "::1", marks=needs_ipv6),
    ],
)
def test_ranks_of_a_host_without_a_network_meet_over_loopback(tmp_path, fault, environment, address):
    report = diagnose(tmp_path, fault, environment, links=0, hosts=[0, 0])
    assert report["statuses"] == [0, 0], report
    assert told(report, "problem", "warning") == set()
    assert [(pair["address"], pair["lost"], pair["paths"]) for pair in report["pairs"]] == [(address, 0, 1)] * 2
    assert [host["port"] for host in report["hosts"]] == [PORT, PORT + 1]
    (lo,) = report["hosts"][0]["interfaces"]
    assert lo["used"]
    assert address in lo["address"].split()


def test_ranks_of_a_host_with_a_network_are_asked_over_loopback_first(tmp_path):
    def add_network(hosts):
        without_ipv6(hosts)
        hosts.run(
            0, "link add eth0 type veth peer name bare0", "addr add 10.5.0.1/24 dev eth0", "link set eth0 up", "link set bare0 up"
        )  # fmt: skip

    report = diagnose(tmp_path, add_network, links=0, hosts=[0, 0])
    assert report["statuses"] == [0, 0], report
    assert [pair["address"] for pair in report["pairs"]] == ["127.0.0.1"] * 2


def test_hosts_that_have_loopback_alone_are_told_that_there_is_no_way_between_them(tmp_path):
    report = diagnose(tmp_path, without_ipv6, links=0)
    assert report["statuses"] == [1, 1]
    assert told(report, "problem") == {("reachability", 0, 1), ("reachability", 1, 0)}
    assert {("interface", 0, None), ("interface", 1, None)} <= told(report, "warning")
    assert "loopback alone / on rank 1's host bring an interface up" in texts(report, "reachability")[0]
