"""Optimizer steps inside the next forward pass, on two ranks that lose packets, and ends of what may be lost; see bodies/early.py."""

from __future__ import annotations

import pytest
from launch import Outcome, checks_of, launch


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    env = {"GRADWIRE_CHAOS": "loss=1%,tail=20%,seed=7", "GRADWIRE_MTU": "1500"}
    return launch("early", 2, tmp_path_factory.mktemp("early"), env=env)


@pytest.mark.parametrize("check", checks_of("early"))
def test_early(outcome: Outcome, check: str) -> None:
    outcome.require(check)


def test_every_rank_ends_cleanly(outcome: Outcome) -> None:
    outcome.require_clean_exit()
