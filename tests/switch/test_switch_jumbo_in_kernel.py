"""Jumbo frames through the written `tc` commands, loaded into a lab's switch as `gradwire switch --os tc | gradwire lab tc` does."""

import importlib.util
import shutil
import socket

import pytest
from click.testing import CliRunner
from gradwire.cli import main
from gradwire.lab.network import Layout, Network
from gradwire.lab.switches import Port
from gradwire.lab.uml_switch import PROGRAM
from sandboxed import in_sandbox

pytestmark = pytest.mark.skipif(shutil.which(PROGRAM) is None, reason=f"{PROGRAM} is not installed")

PACKETS = 20
PACKET_BYTES = 8900  # of IP
CODE_POINTS = (34, 18)  # a front class, and one behind it
CAPABLE = 0b10
PLANS = {
    "for jumbo frames": ["--mtu", "9000", "--buffer", "700"],
    "for jumbo frames, optimal": ["--mtu", "9000", "--buffer", "700", "--thresholds", "optimal"],
    "for others": ["--buffer", "256"],
}
if importlib.util.find_spec("scipy") is None:
    del PLANS["for jumbo frames, optimal"]


def commands(arguments):
    """Those of the script, as `gradwire lab tc` runs them."""
    options = ["--os", "tc", "--rate", "100", "--port", "vec1", "--classes", "4", *arguments]
    written = CliRunner().invoke(main, ["switch", *options])
    assert written.exit_code == 0, written.stderr
    return [line for line in written.stdout.splitlines() if line.startswith("tc ")]


def arrived(network):
    """How many packets of each code point and importance come through, sent one by one, so that no queue is ever long."""
    with network.on_host(1):
        inbox = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    inbox.bind((network.address(1), 0))
    inbox.settimeout(10)
    with network.on_host(0):
        outbox = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    return [passed(outbox, inbox, point << 2 | capable) for point in CODE_POINTS for capable in (0, CAPABLE)]


def passed(outbox, inbox, octet):
    """Up to the first that does not."""
    outbox.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, octet)
    for number in range(PACKETS):
        outbox.sendto(bytes(PACKET_BYTES - 28), inbox.getsockname())
        try:
            assert len(inbox.recv(PACKET_BYTES)) == PACKET_BYTES - 28
        except TimeoutError:
            return number
    return PACKETS


@pytest.fixture(scope="module")
def outcome(tmp_path_factory):
    def main():
        with Network(Layout(2, 1, Port(rate_mbit=100), 9000, "uml")) as network:
            found = {}
            for name, arguments in PLANS.items():
                network.run_on_switch(0, commands(arguments))
                found[name] = arrived(network)
            return found

    return in_sandbox(tmp_path_factory.mktemp("jumbo"), main)


@pytest.mark.parametrize("plan", PLANS)
def test_jumbo_frames_pass_a_slow_port(outcome, plan):
    """A port of 100 Mbit/s, whose token bucket is small; also where nobody gave the plan the MTU of the network."""
    assert outcome[plan] == [PACKETS] * len(CODE_POINTS) * 2
