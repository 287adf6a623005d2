"""Rank 0, which serves the board where lost ranks come back, is lost itself and started again (`on_peer_loss="continue"`).

Its next life serves an empty board. It finds the group that runs there, because a member writes again what a newcomer needs, and
joins like any other rank; so do ranks that are lost later, or were together with it. Each result is checked by joining_rank.py, and
after each step all who took part have the same bits.
"""

from __future__ import annotations

import json
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from free_ports import free_port
from test_communicator import start

SCRIPT = Path(__file__).parent / "joining_rank.py"
LIMIT_S = 400.0
# For each case how many ranks there are, and who is killed: rank, life, from which step on, after so many steps of all together.
CASES: dict[str, tuple[int, list[list[int]]]] = {
    # On the second board a rank joins that was lost while it was served, and the board is lost with rank 0 once more.
    "again and again": (4, [[0, 0, 3, 0], [2, 0, 0, 2], [0, 1, 0, 4]]),
    "with another": (5, [[0, 0, 3, 0], [3, 0, 3, 0]]),
}
TOGETHER = 6


@dataclass
class Job:
    """The ranks of one case, each of which is started again when it was killed."""

    name: str
    folder: Path
    port: int = field(default_factory=free_port)
    running: dict[int, subprocess.Popen[str]] = field(default_factory=dict)
    lives: dict[int, int] = field(default_factory=dict)
    outputs: list[str] = field(default_factory=list)

    @property
    def ranks(self) -> range:
        return range(CASES[self.name][0])

    def begin(self, rank: int) -> None:
        self.lives[rank] = self.lives.get(rank, -1) + 1
        variables = {
            "GRADWIRE_ON_PEER_LOSS": "continue",
            "GRADWIRE_PEER_TIMEOUT_S": "10",
            # Of the other case rank 0 makes the secret, which its next life does not know.
            "GRADWIRE_SECURITY": "on",
            **({"GRADWIRE_SECRET": "the secret of this job"} if self.name == "again and again" else {}),
            "GRADWIRE_TEST_FOLDER": str(self.folder),
            "GRADWIRE_TEST_CASE": "killed",
            "GRADWIRE_TEST_DEATHS": json.dumps(CASES[self.name][1]),
            "GRADWIRE_TEST_TOGETHER": str(TOGETHER),
            "GRADWIRE_TEST_LIFE": str(self.lives[rank]),
            "OMP_NUM_THREADS": "1",
        }
        self.running[rank] = start([str(SCRIPT)], rank, len(self.ranks), self.port, **variables)

    def look(self) -> None:
        """Starts who was killed again."""
        for rank, process in list(self.running.items()):
            if process.poll() is None:
                continue
            del self.running[rank]
            self.outputs.append(
                f"--- rank {rank}, life {self.lives[rank]}: {process.returncode}\n{process.communicate()[0]}"
            )
            if process.returncode < 0:
                self.begin(rank)

    def events(self, key: str) -> list[dict[str, Any]]:
        found = []
        for rank in self.ranks:
            for line in (self.folder / f"events-{rank}").read_text().splitlines():
                event = json.loads(line) if line.endswith("}") else {}
                found += [{"rank": rank, **event}] if key in event else []
        return found

    def transcript(self) -> str:
        return f"{self.name}: {self.events('ended')}\n" + "\n".join(self.outputs)


@pytest.fixture(scope="module")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Job]:
    """All at once: they mostly wait."""
    jobs = {name: Job(name, tmp_path_factory.mktemp(name.replace(" ", "-"))) for name in CASES}
    for job in jobs.values():
        for rank in job.ranks:
            job.begin(rank)
    end = time.monotonic() + LIMIT_S
    while any(job.running for job in jobs.values()) and time.monotonic() < end:
        for job in jobs.values():
            job.look()
        time.sleep(0.05)
    for job in jobs.values():
        for rank, process in job.running.items():
            process.kill()
            job.outputs.append(f"--- rank {rank} had to be ended\n{process.communicate()[0]}")
    return jobs


@pytest.mark.parametrize("name", CASES)
def test_rank_0_finds_the_group_on_its_new_board_and_all_train_on(jobs: dict[str, Job], name: str) -> None:
    job = jobs[name]
    ended = {(event["rank"], event["life"]): event["ended"] for event in job.events("ended")}
    assert ended == dict.fromkeys(job.lives.items(), "done"), job.transcript()
    killed = [rank for rank, *_ in CASES[name][1]]
    assert job.lives == {rank: killed.count(rank) for rank in job.ranks}
    assert all(event["members"] == list(job.ranks) for event in job.events("members") if "digest" not in event)
    assert {event["rank"] for event in job.events("gathered")} == set(job.ranks), job.transcript()


@pytest.mark.parametrize("name", CASES)
def test_after_each_step_all_have_the_same_bits_also_who_has_just_joined(jobs: dict[str, Job], name: str) -> None:
    job = jobs[name]
    for key, number in (("joined", "at"), ("epoch", "step")):
        results: dict[int, set[tuple[Any, ...]]] = {}
        for event in job.events(key):
            results.setdefault(event[number], set()).add((tuple(event.get("members", ())), event["digest"]))
        assert results, job.transcript()
        assert all(len(different) == 1 for different in results.values()), job.transcript()
    joined = {(event["rank"], event["life"]) for event in job.events("joined")}
    assert {(rank, life + 1) for rank, life, *_ in CASES[name][1]} <= joined, job.transcript()
