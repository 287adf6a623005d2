"""Callbacks that wait for other calls do not hold up training for ever; see bodies/waiting_callbacks.py."""

from __future__ import annotations

import pytest
from launch import Outcome, checks_of, launch


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return launch("waiting_callbacks", 2, tmp_path_factory.mktemp("waiting"))


@pytest.mark.parametrize("check", checks_of("waiting_callbacks"))
def test_callbacks(outcome: Outcome, check: str) -> None:
    outcome.require(check)


def test_one_warning_says_what_happened_where_and_what_helps(outcome: Outcome) -> None:
    assert [text.count("GRADWIRE_SYNC_FUTURES=1") for text in outcome.outputs] == [1, 0], outcome.transcript()
    assert "in add" in outcome.outputs[0]


def test_every_rank_ends_cleanly(outcome: Outcome) -> None:
    outcome.require_clean_exit()
    assert "Fatal" not in outcome.transcript()
