"""torchrun starts the workers again when one was killed; see bodies/restart_script.py."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from launch import HERE

STEPS, FATAL = 6, 3


def trained(folder: Path, fatal: int) -> dict[str, Any]:
    folder.mkdir()
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=2"]
    script = [str(HERE / "bodies" / "restart_script.py"), str(folder), str(STEPS), str(fatal)]
    environment = {**os.environ, "GRADWIRE_PORT": "0", "OMP_NUM_THREADS": "1"}
    ran = subprocess.run([*command, *script], env=environment, capture_output=True, text=True, timeout=180, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    result: dict[str, Any] = torch.load(folder / "result.pt", weights_only=True)
    return result


def test_training_goes_on_from_the_checkpoint_when_a_worker_was_killed(tmp_path: Path) -> None:
    calm, broken = trained(tmp_path / "calm", fatal=-1), trained(tmp_path / "broken", FATAL)
    assert (calm["restarts"], calm["first"]) == (0, 0)
    assert (broken["restarts"], broken["first"]) == (1, FATAL)
    assert broken["weights"] == calm["weights"], "the training went on from something else"
