"""Join, ZeRO and synchronised statistics under loss, on two ranks; see bodies/tolerant_features.py."""

from __future__ import annotations

import pytest
from launch import Outcome, checks_of, launch


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    env = {"GRADWIRE_CHAOS": "loss=10%,seed=5", "GRADWIRE_MTU": "1500"}
    return launch("tolerant_features", 2, tmp_path_factory.mktemp("features"), env=env)


@pytest.mark.parametrize("check", checks_of("tolerant_features"))
def test_under_loss(outcome: Outcome, check: str) -> None:
    outcome.require(check)


def test_every_rank_ends_cleanly(outcome: Outcome) -> None:
    outcome.require_clean_exit()
