"""Two ranks with a GPU each; see on_own_gpus.py in the e2e bodies. Skipped where there are fewer than two."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

if torch.cuda.device_count() < 2:
    pytest.skip("fewer than two GPUs", allow_module_level=True)

sys.path.insert(0, str(Path(__file__).parents[1] / "e2e"))

from launch import Outcome, checks_of, launch


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return launch("on_own_gpus", 2, tmp_path_factory.mktemp("on_own_gpus"))


@pytest.mark.parametrize("check", checks_of("on_own_gpus"))
def test_on_own_gpus(outcome: Outcome, check: str) -> None:
    outcome.require(check)


def test_every_rank_ends_cleanly(outcome: Outcome) -> None:
    outcome.require_clean_exit()
