"""Three ranks of several network threads each, which lose every fiftieth packet; see bodies/network_threads.py."""

from __future__ import annotations

import pytest
from launch import Outcome, checks_of, launch


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    settings = {"GRADWIRE_NETWORK_THREADS": "3", "GRADWIRE_CHAOS": "loss=2%,seed=1", "GRADWIRE_MTU": "1500"}
    return launch("network_threads", 3, tmp_path_factory.mktemp("threads"), env=settings)


@pytest.mark.parametrize("check", checks_of("network_threads"))
def test_network_threads(outcome: Outcome, check: str) -> None:
    outcome.require(check)


def test_every_rank_ends_cleanly(outcome: Outcome) -> None:
    outcome.require_clean_exit()
