"""Two ranks with a link to each of two switches, one of which loses packets or takes none: real rails, by the lab."""

from __future__ import annotations

import json
from pathlib import Path

from gradwire.lab.network import Layout, Network
from launch import Outcome, checks_of, in_lab, launch

SETTINGS = {"GLOO_SOCKET_IFNAME": "eth0", "GRADWIRE_PATHS": "4", "GRADWIRE_PRESET": "reliable"}
GRAY_LOSS = 0.2


def test_both_rails_are_used_and_the_gray_one_less(tmp_path: Path) -> None:
    def main() -> Outcome:
        with Network(Layout(hosts=2, rails=2, switch="nft")) as network:
            network.set([1], [1], loss=GRAY_LOSS)
            outcome = launch("rails", 2, tmp_path, env=SETTINGS, spawn=network.spawn)
            (tmp_path / "rows").write_text(json.dumps(network.statistics()))
            return outcome

    outcome = in_lab(tmp_path, main)
    for check in checks_of("rails"):
        outcome.require(check)
    rows = {(row["host"], row["rail"]): row for row in json.loads((tmp_path / "rows").read_text())}
    sent = [rows[0, rail]["tx_bytes"] for rail in range(2)]
    assert rows[1, 1]["lost"] > 0
    assert sent[1] > 100_000, "the second rail was never used"
    # Without regard to loss two of the four paths, or three, would go over the second rail: half of the bytes at least.
    assert sent[1] < sent[0], sent


def test_a_rail_that_takes_nothing_any_more_does_not_hold_up_the_other(tmp_path: Path) -> None:
    def main() -> Outcome:
        with Network(Layout(hosts=2, rails=2, switch="nft")) as network:
            return launch("stuck_rail", 2, tmp_path, env=SETTINGS, spawn=network.spawn)

    outcome = in_lab(tmp_path, main)
    for check in checks_of("stuck_rail"):
        outcome.require(check)
