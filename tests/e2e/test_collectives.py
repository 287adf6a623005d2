"""Every collective on three ranks; see bodies/collectives.py."""

from __future__ import annotations

import pytest
from launch import Outcome, checks_of, launch


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return launch("collectives", 3, tmp_path_factory.mktemp("collectives"))


@pytest.mark.parametrize("check", checks_of("collectives"))
def test_collectives(outcome: Outcome, check: str) -> None:
    outcome.require(check)


def test_every_rank_ends_cleanly(outcome: Outcome) -> None:
    outcome.require_clean_exit()
