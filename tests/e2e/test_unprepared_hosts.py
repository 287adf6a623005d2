"""Two ranks on hosts with several cards where nobody has set up routing by source; see bodies/unprepared.py."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from gradwire.lab import iproute
from gradwire.lab.errors import LabError
from gradwire.lab.network import Layout, Network
from launch import Outcome, checks_of, in_lab, launch

SETTINGS = {"GLOO_SOCKET_IFNAME": "eth0", "GRADWIRE_PATHS": "4", "GRADWIRE_PRESET": "reliable"}


def strip(network: Network, host: int, rp_filter: int) -> None:
    """Takes the lab's routing by source away, and adds a card that reaches nobody: in a network that the peer is in too."""
    for rail in range(2):
        iproute.ip(f"rule del from {network.address(host, rail)}")
    iproute.ip(
        "link add useless0 type veth peer name useless1",
        f"addr add 10.99.0.{host + 1}/24 dev useless0",
        "link set useless0 up",
        "link set useless1 up",
    )
    for device in ("all", "eth0", "eth1"):
        Path(f"/proc/sys/net/ipv4/conf/{device}/rp_filter").write_text(str(rp_filter))


def two_networks(network: Network, host: int) -> list[str]:
    """Returns the addresses of the cards that lead to the peer."""
    strip(network, host, rp_filter=1)  # strict, as some distributions have it
    return [network.address(host, 0), network.address(host, 1)]


def one_network(network: Network, host: int) -> list[str]:
    """The second card gets an address in the network of the first, on a cable of its own."""
    strip(network, host, rp_filter=2)
    own, peer = (f"10.77.0.{other + 11}" for other in (host, 1 - host))
    mac = f"02:67:77:01:00:{2 - host:02x}"
    with suppress(LabError):
        iproute.ip("addr flush dev eth1")
    iproute.ip(f"addr add {own}/24 dev eth1", f"neigh replace {peer} lladdr {mac} dev eth1 nud permanent")
    return [network.address(host, 0), own]


@pytest.mark.parametrize("prepare", [two_networks, one_network])
def test_unprepared_hosts(tmp_path: Path, prepare: Callable[[Network, int], list[str]]) -> None:
    if shutil.which("nft") is None:
        pytest.skip("the program nft, which cuts a card off, is not installed")

    def main() -> Outcome:
        with Network(Layout(hosts=2, rails=2, switch="nft")) as network:
            ways = []
            for host in range(2):
                with network.on_host(host):
                    ways.append(prepare(network, host))
            settings = {**SETTINGS, "GRADWIRE_TEST_WAYS": json.dumps(ways)}
            return launch("unprepared", 2, tmp_path, env=settings, spawn=network.spawn)

    outcome = in_lab(tmp_path, main)
    for check in checks_of("unprepared"):
        outcome.require(check)
    outcome.require_clean_exit()
