"""Two ranks between which a router drops what is larger than a thousand bytes, and tells nobody."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
from gradwire.lab.network import Layout, Network
from launch import Outcome, checks_of, in_lab, launch

DROP = """
table inet gradwire_test {
    chain input {
        type filter hook input priority 0;
        meta l4proto udp ip length > 1000 counter drop
    }
}
"""


def test_an_mtu_that_is_smaller_than_the_interfaces_say(tmp_path: Path) -> None:
    if shutil.which("nft") is None:
        pytest.skip("the program nft, which drops large packets, is not installed")

    def main() -> Outcome:
        with Network(Layout(hosts=2, switch="nft")) as network:
            for host in range(2):
                with network.on_host(host):
                    subprocess.run(["nft", "-f", "-"], input=DROP, text=True, check=True)
            return launch("smaller_mtu", 2, tmp_path, backend="", spawn=network.spawn)

    outcome = in_lab(tmp_path, main)
    for check in checks_of("smaller_mtu"):
        outcome.require(check)
    outcome.require_clean_exit()
