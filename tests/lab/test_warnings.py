"""What Python's logger warns of while a job runs over a network with something wrong."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from gradwire.lab.network import Layout, Network
from sandboxed import in_sandbox

PROGRAM = Path(__file__).with_name("rank_until_warned.py")
PORT = 47400
RULES = f"""table ip faults {{
 chain c {{
  type filter hook prerouting priority -150;
  udp dport {PORT + 64} drop
 }}
}}
"""
STRANGER = """
import socket, sys
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
    while True:
        stranger.sendto(bytes(1000), (sys.argv[1], int(sys.argv[2])))
"""


def warned_of(tmp_path, words, ranks, fault, **settings):
    """What each of two ranks was warned of with these words, until so many had been. `fault(network)` comes before they start."""
    return said_by(tmp_path, [str(PROGRAM), str(ranks), words], fault, **settings)


def said_by(tmp_path, program, fault, **settings):
    """What each of two ranks that run the program has printed."""

    def main():
        with Network(Layout(hosts=2, switch="nft")) as network:
            fault(network)
            place = {"GRADWIRE_RENDEZVOUS": f"{network.address(0)}:29500", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}
            common = {**os.environ, "GRADWIRE_STRAGGLER_WARNING_S": "0.3", **place, **settings}
            command, pipe = [sys.executable, *program], subprocess.PIPE
            children = [
                network.spawn(rank, command, env={**common, "RANK": str(rank)}, stdout=pipe, stderr=pipe, text=True)
                for rank in range(2)
            ]
            ended = [child.communicate(timeout=120) for child in children]
            assert [child.returncode for child in children] == [0, 0], ended
            return [json.loads(out) for out, _ in ended]

    return in_sandbox(tmp_path, main)


@pytest.mark.skipif(shutil.which("nft") is None, reason="the program nft is not installed")
def test_threads_that_a_firewall_keeps_apart_are_done_without_and_told(tmp_path):
    def shut(network):
        with network.on_host(1):
            subprocess.run(["nft", "-f", "-"], input=RULES, text=True, check=True)

    settings = {"GRADWIRE_NETWORK_THREADS": "2", "GRADWIRE_CONNECT_TIMEOUT_S": "10"}
    for rank, said in enumerate(warned_of(tmp_path, "network threads", 2, shut, **settings)):
        (text,) = said
        assert f"1 of the network threads of rank {rank} are not used" in text
        assert "does a firewall let all of their UDP ports through" in text


def test_a_flood_of_strangers_is_told_by_who_gets_it(tmp_path):
    def flood(network):
        """The sandbox ends it."""
        network.spawn(1, [sys.executable, "-c", STRANGER, network.address(0), str(PORT)], env=dict(os.environ))

    flooded, other = warned_of(tmp_path, "a flood of this process", 1, flood)
    assert any(f"which listens on UDP port {PORT}: most of it is for no group" in text for text in flooded)
    assert other == []


def test_a_device_that_takes_no_full_datagrams_any_more_is_told_by_its_host_with_the_kernels_error(tmp_path):
    other, shrunk = said_by(tmp_path, [str(PROGRAM.with_name("rank_refused.py")), "1"], lambda _: None)
    assert other == []
    (text,) = shrunk
    assert text.startswith("the kernel of this host refuses what rank 1 sends, which is lost: ")
    assert "Message too long (EMSGSIZE): has the MTU of an interface become smaller?" in text
