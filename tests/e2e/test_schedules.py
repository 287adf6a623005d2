"""The operator's schedule in exact calls of torch, on three ranks; see bodies/schedules.py."""

from __future__ import annotations

import pytest
from launch import Outcome, checks_of, launch


@pytest.fixture(
    scope="module", params=["ring", "halving_doubling", "weighted_transpose", "parameter_server", "one_shot"]
)
def outcome(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    env = {"GRADWIRE_ALGORITHM": request.param}
    return launch("schedules", 3, tmp_path_factory.mktemp("schedules"), env=env)


@pytest.mark.parametrize("check", checks_of("schedules"))
def test_schedules(outcome: Outcome, check: str) -> None:
    outcome.require(check)


def test_every_rank_ends_cleanly(outcome: Outcome) -> None:
    outcome.require_clean_exit()
