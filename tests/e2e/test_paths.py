"""Two ranks on a lab network where the packet filter makes one of their four paths gray; see bodies/paths.py."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from gradwire.lab import Cluster, Link, NamespacesUnavailable, sandbox
from launch import Outcome, checks_of, launch

SETTINGS = {"GLOO_SOCKET_IFNAME": "eth0", "GRADWIRE_PATHS": "4", "GRADWIRE_PRESET": "reliable"}


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    if shutil.which("nft") is None:
        pytest.skip("the program nft, which makes a path gray, is not installed")
    folder = tmp_path_factory.mktemp("paths")

    def main() -> int:
        with Cluster(2, Link(rate_mbit=500.0)) as cluster:
            ran = launch("paths", 2, folder, env=SETTINGS, spawn=cluster.spawn)
        (folder / "outcome").write_text(json.dumps({**vars(ran), "expected_dead": []}))
        return 0

    try:
        status = sandbox.run(main)
    except NamespacesUnavailable as error:
        pytest.skip(str(error))
    assert status == 0, "the lab failed, see the error above"
    fields = json.loads(Path(folder / "outcome").read_text())
    return Outcome(**{**fields, "expected_dead": set()})


@pytest.mark.parametrize("check", checks_of("paths"))
def test_paths(outcome: Outcome, check: str) -> None:
    outcome.require(check)


def test_every_rank_ends_cleanly(outcome: Outcome) -> None:
    outcome.require_clean_exit()
