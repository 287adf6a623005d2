"""An interface that has several IPv4 addresses: the engine knows all of them, and so does the doctor."""

import dataclasses

import pytest
from gradwire.config import Config
from gradwire.doctor import host
from gradwire.lab import iproute
from sandboxed import in_sandbox

FIRST, SECOND = "192.168.7.5", "10.5.0.7"


@pytest.mark.parametrize(
    ("asked", "used"),
    [("10.5.0.0/16", [SECOND]), ("192.168.7.0/24", [FIRST]), ("", [FIRST, SECOND]), ("v0", [FIRST, SECOND])],
)
def test_an_interface_is_used_where_any_of_its_addresses_is(tmp_path, asked, used):
    def main():
        iproute.ip(
            "link set lo up", "link add v0 type veth peer name v1", f"addr add {FIRST}/24 dev v0", f"addr add {SECOND}/16 dev v0",
            "link set v0 up", "link set v1 up",
        )  # fmt: skip
        facts = host.examine(Config(port=0, interface=asked))
        [found] = [dataclasses.asdict(each) for each in facts.interfaces if each.name == "v0"]
        return found, facts.used, facts.features["addresses"]

    found, names, addresses = in_sandbox(tmp_path, main)
    assert (found["used"], names) == (True, ["v0"])
    assert sorted(found["address"].split()) == sorted(used) == sorted(addresses)


def test_the_own_end_of_a_link_between_two_is_the_address(tmp_path):
    def main():
        iproute.ip("link add p0 type veth peer name p1", f"addr add {FIRST} peer {SECOND} dev p0")
        return host._ipv4_addresses()["p0"]

    assert in_sandbox(tmp_path, main) == [FIRST]
