"""A default group that is gradwire's as a whole, of either kind; see bodies/whole_group.py."""

from __future__ import annotations

import pytest
from launch import Outcome, checks_of, launch


@pytest.fixture(scope="module", params=["before 2.14", "reconfigured"])
def outcome(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    env = {"GRADWIRE_TEST_GROUP": request.param}
    return launch("whole_group", 2, tmp_path_factory.mktemp("whole_group"), env=env, backend="")


@pytest.mark.parametrize("check", checks_of("whole_group"))
def test_whole_group(outcome: Outcome, check: str) -> None:
    outcome.require(check)


def test_every_rank_ends_cleanly(outcome: Outcome) -> None:
    outcome.require_clean_exit()
