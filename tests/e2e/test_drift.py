"""Three ranks that lose packets, under a preset that may lose results; see bodies/drift.py."""

from __future__ import annotations

import pytest
from launch import Outcome, checks_of, launch


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    settings = {"GRADWIRE_CHAOS": "loss=5%,seed=4", "GRADWIRE_MTU": "1500", "GRADWIRE_WARM_UP_ROUNDS": "3"}
    return launch("drift", 3, tmp_path_factory.mktemp("drift"), env=settings)


@pytest.mark.parametrize("check", checks_of("drift"))
def test_drift(outcome: Outcome, check: str) -> None:
    outcome.require(check)


def test_every_rank_ends_cleanly(outcome: Outcome) -> None:
    outcome.require_clean_exit()
