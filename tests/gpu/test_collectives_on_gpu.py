"""Two ranks with tensors on one GPU, over CUDA's own streams; see on_gpu.py in the e2e bodies. Skipped where there is none."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("no GPU", allow_module_level=True)

sys.path.insert(0, str(Path(__file__).parents[1] / "e2e"))

from launch import Outcome, checks_of, launch


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return launch("on_gpu", 2, tmp_path_factory.mktemp("on_gpu"))


@pytest.mark.parametrize("check", checks_of("on_gpu"))
def test_on_gpu(outcome: Outcome, check: str) -> None:
    outcome.require(check)


def test_every_rank_ends_cleanly(outcome: Outcome) -> None:
    outcome.require_clean_exit()
