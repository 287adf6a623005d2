"""Two ranks whose packets are tagged, on a lab network; see bodies/tags.py."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from gradwire.lab import Cluster, Link
from gradwire.lab.uml_cluster import UmlCluster
from launch import Outcome, checks_of, in_lab, launch

TAGGED = {"GRADWIRE_DSCP_CLASSES": "auto", "GRADWIRE_IMPORTANCE": "magnitude", "GLOO_SOCKET_IFNAME": "eth0"}
RATE_MBIT = 50.0
# What the class and the ECN field of received datagrams should be, as a packet filter reads them.
RULES = """table ip tags { chain input { type filter hook input priority 0;
ip protocol udp ip dscp af31 ip ecn ect0 counter comment "kept"
ip protocol udp ip dscp af31 ip ecn not-ect counter comment "dropped first"
ip protocol udp ip dscp cs5 ip ecn ect0 counter comment "control"
ip protocol udp udp dport 0-65535 counter comment "all"
}
}"""


def test_a_packet_filter_sees_the_classes_and_ecn_fields_that_were_asked_for(tmp_path: Path) -> None:
    nft = shutil.which("nft")
    if nft is None:
        pytest.skip("nft not found: install nftables")

    def main() -> Outcome:
        with Cluster(2, Link(rate_mbit=1000.0)) as cluster:
            with cluster.on_host(1):
                subprocess.run([nft, "-f", "-"], input=RULES, text=True, check=True)
            outcome = launch("tags", 2, tmp_path, env=TAGGED, spawn=cluster.spawn)
            with cluster.on_host(1):
                listing = subprocess.run([nft, "-j", "list", "ruleset"], capture_output=True, text=True, check=True)
            (tmp_path / "nft").write_text(listing.stdout)
            return outcome

    outcome = in_lab(tmp_path, main)
    for check in checks_of("tags"):
        outcome.require(check)
    rules = [entry["rule"] for entry in json.loads((tmp_path / "nft").read_text())["nftables"] if "rule" in entry]
    packets = {
        rule["comment"]: next(part["counter"]["packets"] for part in rule["expr"] if "counter" in part)
        for rule in rules
    }
    assert min(packets.values()) > 0, packets
    named = packets["kept"] + packets["dropped first"] + packets["control"]
    # Only exact collectives without a class of their own (the barrier) have another one.
    assert named <= packets["all"] <= named + 50, packets


def test_a_switch_with_red_and_ecn_drops_important_packets_less(tmp_path: Path) -> None:
    def main() -> Outcome:
        with UmlCluster(2, Link(rate_mbit=RATE_MBIT, host_rate_mbit=10 * RATE_MBIT)) as cluster:
            cluster.mark_long_queues(threshold_bytes=6_000)
            return launch("tags", 2, tmp_path, env={**TAGGED, "GRADWIRE_TEST_RED": "1"}, spawn=cluster.spawn)

    outcome = in_lab(tmp_path, main)
    for check in checks_of("tags"):
        outcome.require(check)


@pytest.mark.parametrize("check", checks_of("tolerant_tags"))
def test_a_group_whose_reductions_may_lose_tells_its_gradients_apart(tmp_path: Path, check: str) -> None:
    launch("tolerant_tags", 2, tmp_path, env={"GRADWIRE_IMPORTANCE": "magnitude"}).require(check)
