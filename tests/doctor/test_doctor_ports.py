"""Ranks of one host that no launcher numbers: each has a port of its own, as the job's would."""

import socket
from contextlib import closing

import pytest
from doctors import arguments_of, report_of, start_doctor
from gradwire._launcher import LOCAL_RANK_VARIABLES
from gradwire.config import PORT_BASE, Config
from gradwire.doctor import host
from gradwire.lab import iproute
from sandboxed import in_sandbox
from test_doctor_ipv6 import Hosts, without_ipv6


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    for name in LOCAL_RANK_VARIABLES:
        monkeypatch.delenv(name, raising=False)


def examined(**settings):
    """This host, by an engine that has loopback alone, and its ports."""
    iproute.ip("link set lo up")
    return host.examine_and_keep(Config(interface="lo", **settings))


def test_a_rank_keeps_the_port_that_its_engine_had(tmp_path):
    def main():
        found, kept = [], []
        for _ in range(3):
            facts, ports = examined(network_threads=2)
            found.append((facts.port, list(facts.threads.ports)))
            kept.append(ports)
        for each in kept:
            each.close()
        again, ports = examined(network_threads=1)
        ports.close()
        return found, again.port

    expected = [[PORT_BASE + at, [PORT_BASE + at, PORT_BASE + 64 + at]] for at in range(3)]
    assert in_sandbox(tmp_path, main) == [expected, PORT_BASE]


@pytest.mark.parametrize("taken", [PORT_BASE, PORT_BASE + 64])
def test_a_port_that_another_rank_takes_as_the_engine_leaves_it_is_not_this_ranks(tmp_path, monkeypatch, taken):
    """As where two ranks look at their host at the same time."""
    at_port = host._at_port

    def and_taken(config, port):
        found = at_port(config, port)
        if port == PORT_BASE:
            others.append(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
            others[0].bind(("0.0.0.0", taken))
        return found

    def main():
        monkeypatch.setattr(host, "_at_port", and_taken)
        facts, kept = examined(network_threads=2)
        with kept, closing(others[0]), closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as first:
            first.bind(("0.0.0.0", {PORT_BASE: PORT_BASE + 64, PORT_BASE + 64: PORT_BASE}[taken]))  # nobody has kept it
            return facts.port, [own.getsockname()[1] for own in kept.sockets], kept.lost, facts.error

    others = []
    assert in_sandbox(tmp_path, main) == [PORT_BASE + 1, [PORT_BASE + 1, PORT_BASE + 65], None, ""]


def test_a_port_that_the_user_set_is_kept_to(tmp_path):
    def main():
        first, kept = examined(port=PORT_BASE, network_threads=1)
        with kept:
            second, none = examined(port=PORT_BASE, network_threads=1)
        return first.port, second.features, second.error, len(none.sockets)

    port, features, error, sockets = in_sandbox(tmp_path, main)
    assert (port, features, sockets) == (PORT_BASE, None, 0)
    assert str(PORT_BASE) in error


@pytest.mark.parametrize("first", [0, 1])
def test_two_ranks_of_a_host_that_are_started_by_hand_have_two_ports(tmp_path, first):
    def main():
        hosts = Hosts(hosts=1, links=0)
        without_ipv6(hosts)
        children = {}
        for rank in (first, 1 - first):
            children[rank] = start_doctor(hosts, 0, arguments_of(rank, 2, tmp_path, 100), {})
        return report_of([children[0], children[1]])

    report = in_sandbox(tmp_path, main)
    assert report["statuses"] == [0, 0], report
    assert {each["port"] for each in report["hosts"]} == {PORT_BASE, PORT_BASE + 1}
