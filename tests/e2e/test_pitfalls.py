"""Known ways to break a backend written in Python; see bodies/pitfalls.py, nested.py, in_flight.py, killed.py, killed_in_a_barrier.py."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest
from launch import HERE, Outcome, checks_of, launch

# Without importing it.
TORCH = tuple(map(int, version("torch").split(".")[:2]))


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return launch("pitfalls", 2, tmp_path_factory.mktemp("pitfalls"))


@pytest.mark.parametrize("check", checks_of("pitfalls"))
def test_pitfalls(outcome: Outcome, check: str) -> None:
    outcome.require(check)


def test_every_rank_ends_cleanly(outcome: Outcome) -> None:
    outcome.require_clean_exit()


def test_the_debug_level_detail_works(tmp_path: Path) -> None:
    outcome = launch("detail", 2, tmp_path, env={"TORCH_DISTRIBUTED_DEBUG": "DETAIL"})
    for check in checks_of("detail"):
        outcome.require(check)
    outcome.require_clean_exit()


def test_nested_collectives_end_with_sync_futures(tmp_path: Path) -> None:
    outcome = launch("nested", 2, tmp_path, env={"GRADWIRE_SYNC_FUTURES": "1"})
    for check in checks_of("nested"):
        outcome.require(check)
    outcome.require_clean_exit()


def test_a_process_that_ends_with_an_operation_in_flight_ends_cleanly(tmp_path: Path) -> None:
    outcome = launch("in_flight", 2, tmp_path)
    for check in checks_of("in_flight"):
        outcome.require(check)
    outcome.require_clean_exit()
    assert "panicked" not in outcome.transcript()
    assert "Fatal" not in outcome.transcript()


def test_survivors_name_a_killed_rank_within_ten_seconds(tmp_path: Path) -> None:
    outcome = launch("killed", 3, tmp_path, expected_dead=[1], env={"GRADWIRE_PEER_TIMEOUT_S": "5"})
    for check in checks_of("killed"):
        outcome.require(check)
    outcome.require_clean_exit()


def test_a_monitored_barrier_names_the_rank_that_was_killed_and_no_living_one(tmp_path: Path) -> None:
    outcome = launch("killed_in_a_barrier", 3, tmp_path, expected_dead=[2], env={"GRADWIRE_PEER_TIMEOUT_S": "5"})
    for check in checks_of("killed_in_a_barrier"):
        outcome.require(check)
    outcome.require_clean_exit()


@pytest.mark.skipif(TORCH < (2, 14), reason="before torch 2.14 a script imports gradwire.torch")
def test_torchrun_needs_nothing_but_the_name_of_the_backend(tmp_path: Path) -> None:
    done = tmp_path / "done"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environment = {**os.environ, "GRADWIRE_PORT": "0", "OMP_NUM_THREADS": "1"}
    script = str(HERE / "bodies" / "torchrun_script.py")
    ran = subprocess.run(
        [*command, script, str(done)], env=environment, capture_output=True, text=True, timeout=180, check=False
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert done.read_text() == "gradwire 2"
