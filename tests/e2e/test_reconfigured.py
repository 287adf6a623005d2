"""A group that changes its members, on five processes; see bodies/reconfigured.py."""

from __future__ import annotations

import pytest
from launch import Outcome, checks_of, launch

KILLED = 3


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return launch("reconfigured", 5, tmp_path_factory.mktemp("reconfigured"), backend="", expected_dead=[KILLED])


@pytest.mark.parametrize("check", checks_of("reconfigured"))
def test_reconfigured(outcome: Outcome, check: str) -> None:
    outcome.require(check)


def test_every_rank_but_the_killed_one_ends_cleanly(outcome: Outcome) -> None:
    outcome.require_clean_exit()
