"""Two ranks with two rails, the first of which takes nothing, or nothing large, in one direction from the start on."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from gradwire.lab.network import Layout, Network
from launch import Outcome, checks_of, in_lab, launch

DROP = """
table inet gradwire_test {{
    chain input {{
        type filter hook input priority 0;
        iifname "eth0" meta l4proto udp {what} counter drop
    }}
}}
"""


@pytest.mark.parametrize("what", ["ip length > 20", "ip length > 1000"], ids=["dead", "no large packets"])
@pytest.mark.parametrize("deaf", [0, 1])
def test_a_rank_goes_where_its_hellos_are_answered_not_where_answers_come_from(
    tmp_path: Path, what: str, deaf: int
) -> None:
    if shutil.which("nft") is None:
        pytest.skip("the program nft, which drops packets, is not installed")

    def main() -> Outcome:
        with Network(Layout(hosts=2, rails=2, switch="nft")) as network:
            with network.on_host(deaf):
                subprocess.run(["nft", "-f", "-"], input=DROP.format(what=what), text=True, check=True)
            env = {"GRADWIRE_CONNECT_TIMEOUT_S": "15"}
            return launch("rail_one_way", 2, tmp_path, env=env, spawn=network.spawn)

    outcome = in_lab(tmp_path, main)
    for check in checks_of("rail_one_way"):
        outcome.require(check)
    outcome.require_clean_exit()
