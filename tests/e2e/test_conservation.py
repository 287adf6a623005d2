"""Three ranks that lose every tenth packet they receive; see bodies/conservation.py."""

from __future__ import annotations

from pathlib import Path

import pytest
from launch import Outcome, checks_of, launch
from served_processes import servers, settings

CHECKPOINT = "check_a_checkpoint_carries_what_the_last_step_owes_to_another_process"


def run(folder: Path, carry: Path, seed: int, **env: str) -> Outcome:
    settings = {"GRADWIRE_CHAOS": f"loss=10%,seed={seed}", "GRADWIRE_MTU": "1500", "GRADWIRE_TEST_CARRY": str(carry)}
    settings["GRADWIRE_WARM_UP_ROUNDS"] = "3"
    return launch("conservation", 3, folder, env={**settings, **env})


@pytest.fixture(scope="module")
def carry(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("carry")


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory, carry: Path) -> Outcome:
    return run(tmp_path_factory.mktemp("conservation"), carry, seed=1)


@pytest.mark.parametrize("check", checks_of("conservation"))
def test_conservation(outcome: Outcome, check: str) -> None:
    outcome.require(check)


def test_what_dedicated_servers_lose_counts_exactly_once_later_too(tmp_path: Path) -> None:
    checks = (
        "check_what_was_lost_counts_exactly_once_later_over_servers",
        "check_a_value_counts_exactly_once_also_where_results_are_lost",
    )
    lossy = {"GRADWIRE_CHAOS": "loss=10%,seed=3", "GRADWIRE_MTU": "1500"}
    with servers(tmp_path, 2, **lossy):
        dedicated = settings(2) | {"GRADWIRE_TEST_ONLY": ",".join(checks)}
        outcome = run(tmp_path, tmp_path, seed=3, **dedicated)
    for check in checks:
        outcome.require(check)


def test_every_rank_ends_cleanly_and_says_that_faults_are_injected(outcome: Outcome) -> None:
    outcome.require_clean_exit()
    for output in outcome.outputs:
        assert "FAULT INJECTION IS ON" in output
        assert "chaos = loss=10%,seed=1 (environment GRADWIRE_CHAOS)" in output


def test_another_process_goes_on_from_the_checkpoint(outcome: Outcome, carry: Path, tmp_path: Path) -> None:
    outcome.require(CHECKPOINT)
    resumed = run(tmp_path, carry, seed=2, GRADWIRE_TEST_ONLY=CHECKPOINT)
    resumed.require(CHECKPOINT)
    resumed.require_clean_exit()
