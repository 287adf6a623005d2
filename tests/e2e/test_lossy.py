"""Three ranks on a lab network that loses 5 % of all packets; see bodies/lossy.py."""

from __future__ import annotations

import pytest
from gradwire.lab import Cluster, Link
from launch import Outcome, checks_of, in_lab, launch

LOSS = 0.05


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    folder = tmp_path_factory.mktemp("lossy")

    def main() -> Outcome:
        with Cluster(3, Link(rate_mbit=1000.0), loss=LOSS) as cluster:
            return launch("lossy", 3, folder, env={"GLOO_SOCKET_IFNAME": "eth0"}, spawn=cluster.spawn)

    return in_lab(folder, main)


@pytest.mark.parametrize("check", checks_of("lossy"))
def test_lossy(outcome: Outcome, check: str) -> None:
    outcome.require(check)


def test_every_rank_ends_cleanly(outcome: Outcome) -> None:
    outcome.require_clean_exit()
