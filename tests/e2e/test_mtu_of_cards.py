"""The largest packet of a host's own cards, as the kernel says it."""

from __future__ import annotations

from pathlib import Path

import pytest
from gradwire import _native
from gradwire.lab import iproute, sandbox

MTU, HEADERS = 1400, 28  # of IPv4 and UDP


@pytest.mark.usefixtures("namespaces")
@pytest.mark.parametrize("loopback", ["up", "down"])
def test_the_mtu_of_a_card_is_known_whether_loopback_is_up_or_not(tmp_path: Path, loopback: str) -> None:
    found = tmp_path / "found"

    def main() -> int:
        iproute.ip(
            f"link set lo {loopback}",
            f"link add card mtu {MTU} type veth peer name other mtu {MTU}",
            "addr add 10.99.0.1/24 dev card",
            "link set card up",
            "link set other up",
        )
        engine = _native.Engine({"port": 0, "network_threads": 1})
        found.write_text(str(engine.features()["datagram_bytes"]))
        engine.stop()
        return 0

    assert sandbox.run(main) == 0
    assert int(found.read_text()) == MTU - HEADERS
