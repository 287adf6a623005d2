"""What scripts build on DDP, on two ranks; see bodies/features.py."""

from __future__ import annotations

import pytest
from launch import Outcome, checks_of, launch


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return launch("features", 2, tmp_path_factory.mktemp("features"))


@pytest.mark.parametrize("check", checks_of("features"))
def test_features(outcome: Outcome, check: str) -> None:
    outcome.require(check)


def test_every_rank_ends_cleanly(outcome: Outcome) -> None:
    outcome.require_clean_exit()
