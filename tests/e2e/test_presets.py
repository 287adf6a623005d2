"""All presets on two ranks; see bodies/presets.py."""

from __future__ import annotations

import pytest
from launch import Outcome, checks_of, launch


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    options = {
        "GRADWIRE_WARM_UP_ROUNDS": "3",
        "GRADWIRE_DATA_PERCENTAGE": "85",
        "GRADWIRE_QUIET_PERCENTAGE": "20",
        "GRADWIRE_EPOCH_TRANSFERS": "100",
    }
    return launch("presets", 2, tmp_path_factory.mktemp("presets"), env=options)


@pytest.mark.parametrize("check", checks_of("presets"))
def test_presets(outcome: Outcome, check: str) -> None:
    outcome.require(check)


def test_every_rank_ends_cleanly(outcome: Outcome) -> None:
    outcome.require_clean_exit()
