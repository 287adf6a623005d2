"""Three ranks that lose every tenth packet they receive, and sharded models whose parameters take turns; see bodies/sharded_feedback.py."""

from __future__ import annotations

import pytest
from launch import Outcome, checks_of, launch

TENTH = {"GRADWIRE_CHAOS": "loss=10%,seed=1", "GRADWIRE_MTU": "1500"}


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return launch("sharded_feedback", 3, tmp_path_factory.mktemp("sharded_feedback"), env=TENTH)


@pytest.mark.parametrize("check", checks_of("sharded_feedback"))
def test_feedback_of_sharded_models(outcome: Outcome, check: str) -> None:
    outcome.require(check)


def test_every_rank_ends_cleanly(outcome: Outcome) -> None:
    outcome.require_clean_exit()
