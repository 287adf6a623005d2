"""What travels in clear, since it does not leave the host, is no way in for another host."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import warm
from gradwire.lab.network import Layout, Network
from launch import Outcome, checks_of, in_lab, launch


def test_another_host_can_end_nothing_of_a_job_on_one_host(tmp_path: Path) -> None:
    def main() -> Outcome:
        with Network(Layout(hosts=2, switch="nft")) as network:
            with network.on_host(1):
                stranger = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            with stranger:
                env = {
                    "ADDRESS_OF_THE_RANKS": network.address(0),
                    "STRANGERS_SOCKET": str(stranger.fileno()),
                    "GRADWIRE_PORT": "48000",
                }

                def spawn(_: int, script: list[str], **options: Any) -> Any:
                    options["start"] = warm.start_cold  # who is forked gets no more than streams
                    return network.spawn(0, script, pass_fds=[stranger.fileno()], **options)

                return launch("stranger_in_clear", 2, tmp_path, env=env, spawn=spawn)

    outcome = in_lab(tmp_path, main)
    for check in checks_of("stranger_in_clear"):
        outcome.require(check)
    outcome.require_clean_exit()
