"""What DDP can be told, under `tolerate_loss`, on two ranks; see bodies/tolerant_options.py."""

from __future__ import annotations

import pytest
from launch import Outcome, checks_of, launch


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return launch("tolerant_options", 2, tmp_path_factory.mktemp("tolerant_options"))


@pytest.mark.parametrize("check", checks_of("tolerant_options"))
def test_tolerant_options(outcome: Outcome, check: str) -> None:
    outcome.require(check)


def test_every_rank_ends_cleanly(outcome: Outcome) -> None:
    outcome.require_clean_exit()
