"""What a job is called where nothing but the meeting of its ranks names it: the same on all of them, and not as another job."""

from __future__ import annotations

import json
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import warm
from launch import _clean_environment
from observed import LONGEST_S, free_port

SCRIPT = Path(__file__).parent / "named_rank.py"
RANKS = 2
LAUNCHERS = ("TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "MASTER_ADDR", "MASTER_PORT")


def facts_of_ranks(method: str, runtime: Path) -> list[dict[str, Any]]:
    variables = {name: text for name, text in _clean_environment().items() if name not in LAUNCHERS}
    variables |= {"XDG_RUNTIME_DIR": str(runtime), "GRADWIRE_PORT": "0", "GRADWIRE_INTERFACE": "lo", **warm.THREADS}
    with warm.starter(elsewhere=False) as start, ExitStack() as open_files:
        files = [open_files.enter_context(tempfile.TemporaryFile()) for _ in range(RANKS)]
        ranks = [
            start([str(SCRIPT), method, str(rank), str(RANKS)], env=variables, stdout=files[rank])
            for rank in range(RANKS)
        ]
        try:
            assert [process.wait(LONGEST_S) for process in ranks] == [0] * RANKS
        finally:
            for process in ranks:
                process.kill()
        for said in files:
            said.seek(0)
        return [json.loads(said.read().splitlines()[-1]) for said in files]


@pytest.mark.parametrize("way", ["tcp", "store", "file"])
def test_a_job_is_called_by_where_its_ranks_met_and_found_by_it(way: str, tmp_path: Path, short_folder: Path) -> None:
    # Longer than a name may be: two jobs of one folder differ in its end alone.
    place = str(tmp_path / ("met-here-" * 5)) if way == "file" else f"127.0.0.1:{free_port()}"
    facts = facts_of_ranks(f"{way}://{place}", short_folder)
    assert facts[0] == facts[1]
    assert facts[0]["meeting"] == place
    assert facts[0]["found"] == {facts[0]["job"]: RANKS, place: RANKS}
    assert facts[0]["job"] == place or (way == "file" and len(facts[0]["job"]) <= len(place))
