"""Three ranks on a lab network that loses 5 % of all packets; see bodies/lossy.py."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from gradwire.lab import Cluster, Link, NamespacesUnavailable, sandbox
from launch import Outcome, checks_of, launch

LOSS = 0.05


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    folder = tmp_path_factory.mktemp("lossy")

    def main() -> int:
        with Cluster(3, Link(rate_mbit=1000.0), loss=LOSS) as cluster:
            ran = launch("lossy", 3, folder, env={"GLOO_SOCKET_IFNAME": "eth0"}, spawn=cluster.spawn)
        (folder / "outcome").write_text(json.dumps({**vars(ran), "expected_dead": []}))
        return 0

    try:
        status = sandbox.run(main)
    except NamespacesUnavailable as error:
        pytest.skip(str(error))
    assert status == 0, "the lab failed, see the error above"
    fields = json.loads(Path(folder / "outcome").read_text())
    return Outcome(**{**fields, "expected_dead": set()})


@pytest.mark.parametrize("check", checks_of("lossy"))
def test_lossy(outcome: Outcome, check: str) -> None:
    outcome.require(check)


def test_every_rank_ends_cleanly(outcome: Outcome) -> None:
    outcome.require_clean_exit()
