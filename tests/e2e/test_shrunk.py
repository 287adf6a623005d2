"""Groups of `shrink_group`, on three ranks; see bodies/shrunk.py."""

from __future__ import annotations

import pytest
from launch import Outcome, checks_of, launch


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return launch("shrunk", 3, tmp_path_factory.mktemp("shrunk"))


@pytest.mark.parametrize("check", checks_of("shrunk"))
def test_shrunk(outcome: Outcome, check: str) -> None:
    outcome.require(check)


def test_every_rank_ends_cleanly(outcome: Outcome) -> None:
    outcome.require_clean_exit()
