"""Loss tolerance beside torch's compression, and parts of groups, on two ranks; see bodies/composition.py."""

from __future__ import annotations

import pytest
from launch import Outcome, checks_of, launch


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return launch("composition", 2, tmp_path_factory.mktemp("composition"))


@pytest.mark.parametrize("check", checks_of("composition"))
def test_composition(outcome: Outcome, check: str) -> None:
    outcome.require(check)


def test_every_rank_ends_cleanly(outcome: Outcome) -> None:
    outcome.require_clean_exit()
