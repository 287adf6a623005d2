"""Models that are wrapped again, on two ranks; see bodies/wrapped_again.py."""

from __future__ import annotations

import pytest
from launch import Outcome, checks_of, launch


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return launch("wrapped_again", 2, tmp_path_factory.mktemp("wrapped_again"))


@pytest.mark.parametrize("check", checks_of("wrapped_again"))
def test_wrapped_again(outcome: Outcome, check: str) -> None:
    outcome.require(check)


def test_every_rank_ends_cleanly(outcome: Outcome) -> None:
    outcome.require_clean_exit()
