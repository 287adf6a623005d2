"""torchrun starts the workers again when one was killed; see bodies/restart_script.py and bodies/dying_early_script.py."""

from __future__ import annotations

import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import warm
from gradwire.lab.namespaces import Start
from launch import HERE

STEPS, FATAL, RANKS = 6, 3, 2
TIMEOUT_S = 180
SETTINGS = {"GRADWIRE_PORT": "0", **warm.THREADS}


def run(start: Start, script: str, *arguments: str, restarts: int) -> str:
    """What torchrun and its workers said; `start` starts torchrun."""
    command = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}", f"--max-restarts={restarts}"]
    with tempfile.TemporaryFile() as said:
        words = [*command, str(HERE / "bodies" / script), *arguments]
        agent = start(words, env={**os.environ, **SETTINGS}, stdout=said, stderr=subprocess.STDOUT)
        try:
            status = agent.wait(TIMEOUT_S)
        finally:
            agent.kill()
        said.seek(0)
        text = said.read().decode(errors="replace")
    assert status == 0, text
    return text


def result_of(folder: Path) -> dict[str, Any]:
    return dict(torch.load(folder / "result.pt", weights_only=True))


def undisturbed(folder: Path) -> dict[str, Any]:
    """The same training by ranks that nobody starts again."""
    folder.mkdir()
    script = [str(HERE / "bodies" / "restart_script.py"), str(folder), str(STEPS), "-1", f"file://{folder / 'store'}"]
    job = {**os.environ, **SETTINGS, "WORLD_SIZE": str(RANKS)}
    with warm.starter(elsewhere=False) as start:
        ranks = [start(script, env={**job, "RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(RANKS)]
        try:
            assert [rank.wait(TIMEOUT_S) for rank in ranks] == [0] * RANKS
        finally:
            for rank in ranks:
                rank.kill()
    return result_of(folder)


def test_training_goes_on_from_the_checkpoint_when_a_worker_was_killed(tmp_path: Path) -> None:
    calm, folder = undisturbed(tmp_path / "calm"), tmp_path / "broken"
    folder.mkdir()
    said = run(warm.start_cold, "restart_script.py", str(folder), str(STEPS), str(FATAL), "env://", restarts=2)
    broken = result_of(folder)
    assert (calm["restarts"], calm["first"]) == (None, 0)
    assert (broken["restarts"], broken["first"]) == ("1", FATAL), said
    assert broken["weights"] == calm["weights"], "the training went on from something else"


@pytest.mark.parametrize("group", [0, 1], ids=["of all ranks", "the next one"])
def test_what_a_worker_wrote_that_waited_in_vain_for_a_group_is_not_taken_for_the_next_ones(
    tmp_path: Path, group: int
) -> None:
    """On one Store of torchrun's for all attempts."""
    with warm.starter(elsewhere=False) as start:
        run(start, "dying_early_script.py", str(tmp_path), str(group), restarts=1)
    assert (tmp_path / "restarts").read_text() == "1"
