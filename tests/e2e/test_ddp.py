"""DDP on two and on four ranks; see bodies/ddp.py."""

from __future__ import annotations

import pytest
from launch import Outcome, checks_of, launch


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return launch("ddp", 2, tmp_path_factory.mktemp("ddp"))


@pytest.mark.parametrize("check", checks_of("ddp"))
def test_ddp(outcome: Outcome, check: str) -> None:
    outcome.require(check)


def test_every_rank_ends_cleanly(outcome: Outcome) -> None:
    outcome.require_clean_exit()
