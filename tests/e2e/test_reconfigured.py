"""A group that changes its members; see bodies/reconfigured.py and reconfigured_going_on.py."""

from __future__ import annotations

import pytest
from launch import Outcome, checks_of, launch

KILLED, KILLED_AT_WORK = 3, 2
GOES_ON = {"GRADWIRE_ON_PEER_LOSS": "continue", "GRADWIRE_PEER_TIMEOUT_S": "10"}


@pytest.fixture(scope="module", params=["raise", "continue"])
def outcome(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    env = GOES_ON if request.param == "continue" else {}
    folder = tmp_path_factory.mktemp("reconfigured")
    return launch("reconfigured", 5, folder, env=env, backend="", expected_dead=[KILLED])


@pytest.mark.parametrize("check", checks_of("reconfigured"))
def test_reconfigured(outcome: Outcome, check: str) -> None:
    outcome.require(check)


def test_every_rank_but_the_killed_one_ends_cleanly(outcome: Outcome) -> None:
    outcome.require_clean_exit()


@pytest.fixture(scope="module")
def going_on(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    folder = tmp_path_factory.mktemp("reconfigured_going_on")
    return launch("reconfigured_going_on", 4, folder, env=GOES_ON, backend="", expected_dead=[KILLED_AT_WORK])


@pytest.mark.parametrize("check", checks_of("reconfigured_going_on"))
def test_reconfigured_after_a_loss(going_on: Outcome, check: str) -> None:
    going_on.require(check)


def test_survivors_of_a_loss_end_cleanly(going_on: Outcome) -> None:
    going_on.require_clean_exit()
