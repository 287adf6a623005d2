"""The written switch configuration and the transport agree: what two ranks send lands in the queues that the plan has for it."""

from __future__ import annotations

import json
import re
from pathlib import Path

from gradwire.config import Config
from gradwire.lab import Link
from gradwire.lab.uml_cluster import UmlCluster
from gradwire.switch import linux, make_plan
from launch import Outcome, checks_of, in_lab, launch

RATE_MBIT = 200.0
CLASS = 1  # of the body's reductions; its barriers have class 0


# test of: mlt/switch-queues
def test_packets_of_the_transport_land_in_the_queues_of_the_plan(tmp_path: Path) -> None:
    plan = make_plan(RATE_MBIT, 4_000_000, Config.mlt())

    def main() -> Outcome:
        with UmlCluster(2, Link(rate_mbit=RATE_MBIT)) as cluster:
            for host in range(2):
                cluster.configure(host, lambda device: linux.commands(plan, device))
            environment = {**plan.environment, "GLOO_SOCKET_IFNAME": "eth0"}
            outcome = launch("tags", 2, tmp_path, env=environment, spawn=cluster.spawn)
            (tmp_path / "statistics").write_text(json.dumps([cluster.port_statistics(host) for host in range(2)]))
            return outcome

    outcome = in_lab(tmp_path, main)
    for check in checks_of("tags"):
        outcome.require(check)
    for statistics in json.loads((tmp_path / "statistics").read_text()):
        packets = {
            plan.queues[int(band, 16) - 1].name: int(count)
            for band, count in re.findall(r"parent 10:(\w+) .*\n Sent \d+ bytes (\d+) pkt", statistics)
        }
        # "other" has the TCP of the Store's and gloo's connections, and nothing of gradwire but what names no class.
        used = {name for name, count in packets.items() if count > 0}
        assert used == {"control", "class 0", f"class {CLASS}", "other"}, packets
        assert packets[f"class {CLASS}"] > 10 * packets["class 0"], packets
