"""Two groups of two ranks each, which lose every tenth packet; see bodies/owed_in_groups.py."""

from __future__ import annotations

import pytest
from launch import Outcome, checks_of, launch


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    lossy = {"GRADWIRE_CHAOS": "loss=10%,seed=3", "GRADWIRE_MTU": "1500"}
    return launch("owed_in_groups", 4, tmp_path_factory.mktemp("owed_in_groups"), env=lossy)


@pytest.mark.parametrize("check", checks_of("owed_in_groups"))
def test_owed_in_groups(outcome: Outcome, check: str) -> None:
    outcome.require(check)


def test_every_rank_ends_cleanly(outcome: Outcome) -> None:
    outcome.require_clean_exit()
