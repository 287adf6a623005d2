"""Two ranks on a lab network where the packet filter makes one of their four paths gray; see bodies/paths.py."""

from __future__ import annotations

import shutil

import pytest
from gradwire.lab import Cluster, Link
from launch import Outcome, checks_of, in_lab, launch

SETTINGS = {"GLOO_SOCKET_IFNAME": "eth0", "GRADWIRE_PATHS": "4", "GRADWIRE_PRESET": "reliable"}


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    if shutil.which("nft") is None:
        pytest.skip("the program nft, which makes a path gray, is not installed")
    folder = tmp_path_factory.mktemp("paths")

    def main() -> Outcome:
        with Cluster(2, Link(rate_mbit=500.0)) as cluster:
            return launch("paths", 2, folder, env=SETTINGS, spawn=cluster.spawn)

    return in_lab(folder, main)


@pytest.mark.parametrize("check", checks_of("paths"))
def test_paths(outcome: Outcome, check: str) -> None:
    outcome.require(check)


def test_every_rank_ends_cleanly(outcome: Outcome) -> None:
    outcome.require_clean_exit()
