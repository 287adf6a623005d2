"""Calls that ranks disagree about, on three ranks; see bodies/failures.py."""

from __future__ import annotations

import pytest
from launch import Outcome, checks_of, launch


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return launch("failures", 3, tmp_path_factory.mktemp("failures"))


@pytest.mark.parametrize("check", checks_of("failures"))
def test_failures(outcome: Outcome, check: str) -> None:
    outcome.require(check)


def test_every_rank_ends_cleanly(outcome: Outcome) -> None:
    outcome.require_clean_exit()
