"""Results of calls that nobody waits for come with a later wait; see bodies/not_waited_for.py."""

from __future__ import annotations

import pytest
from launch import Outcome, checks_of, launch


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return launch("not_waited_for", 2, tmp_path_factory.mktemp("not_waited_for"))


@pytest.mark.parametrize("check", checks_of("not_waited_for"))
def test_not_waited_for(outcome: Outcome, check: str) -> None:
    outcome.require(check)


def test_every_rank_ends_cleanly(outcome: Outcome) -> None:
    outcome.require_clean_exit()
