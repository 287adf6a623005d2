"""Every collective beside gloo, bit for bit, in groups of 1 to 3 ranks; see bodies/equality.py.

`make test-torch` runs it with groups of 1, 2, 3, 4 and 8."""

from __future__ import annotations

import os

import pytest
from launch import Outcome, checks_of, launch

RANKS = 8 if os.environ.get("GRADWIRE_TEST_ALL") else 3


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return launch("equality", RANKS, tmp_path_factory.mktemp("equality"), timeout_s=400)


@pytest.mark.parametrize("check", checks_of("equality"))
def test_equality(outcome: Outcome, check: str) -> None:
    outcome.require(check)


def test_every_rank_ends_cleanly(outcome: Outcome) -> None:
    outcome.require_clean_exit()
