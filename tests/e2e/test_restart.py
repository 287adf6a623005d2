"""torchrun starts the workers again when one was killed; see bodies/restart_script.py and bodies/dying_early_script.py."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from launch import HERE

STEPS, FATAL = 6, 3


def run(script: str, *arguments: str, restarts: int) -> str:
    """What it said."""
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node=2",
        f"--max-restarts={restarts}",
    ]
    words = [str(HERE / "bodies" / script), *arguments]
    environment = {**os.environ, "GRADWIRE_PORT": "0", "OMP_NUM_THREADS": "1"}
    ran = subprocess.run([*command, *words], env=environment, capture_output=True, text=True, timeout=180, check=False)
    said = ran.stdout + ran.stderr
    assert ran.returncode == 0, said
    return said


def trained(folder: Path, fatal: int) -> dict[str, Any]:
    folder.mkdir()
    said = run("restart_script.py", str(folder), str(STEPS), str(fatal), restarts=2)
    return {**torch.load(folder / "result.pt", weights_only=True), "said": said}


def test_training_goes_on_from_the_checkpoint_when_a_worker_was_killed(tmp_path: Path) -> None:
    calm, broken = trained(tmp_path / "calm", fatal=-1), trained(tmp_path / "broken", FATAL)
    assert (calm["restarts"], calm["first"]) == (0, 0)
    assert (broken["restarts"], broken["first"]) == (1, FATAL), broken["said"]
    assert broken["weights"] == calm["weights"], "the training went on from something else"


@pytest.mark.parametrize("group", [0, 1], ids=["of all ranks", "the next one"])
def test_what_a_worker_wrote_that_waited_in_vain_for_a_group_is_not_taken_for_the_next_ones(
    tmp_path: Path, group: int
) -> None:
    """On one Store of torchrun's for all attempts."""
    run("dying_early_script.py", str(tmp_path), str(group), restarts=1)
    assert (tmp_path / "restarts").read_text() == "1"
