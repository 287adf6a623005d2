"""The profile of a DDP step runs to its end, and its conclusions are those of the ranges in it."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "bench" / "torch"
# One rank by SIGSEGV or SIGABRT.
CRASHED = ("-11, None", "None, -11", "-6, None", "None, -6")


@pytest.fixture
def overlap(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The benchmark as a module, to ask what it concludes."""
    monkeypatch.syspath_prepend(str(FOLDER))
    import overlap

    return overlap


def step(*reductions: tuple[float, float], variant: str = "gradwire") -> dict[str, Any]:
    return {"variant": variant, "forward": (0.0, 1.0), "backward": (1.0, 20.0), "reductions": list(reductions)}


def test_what_runs_before_the_last_bucket_is_hidden(overlap: Any) -> None:
    found = overlap.overlap_of(step((2.0, 5.0), (4.0, 6.0), (8.0, 12.0), (10.0, 20.0)))
    assert (found["comm_ms"], found["hidden_ms"], found["in_flight"]) == (16.0, 6.0, 2)


def test_buckets_one_after_the_other_are_not_in_flight_at_once(overlap: Any) -> None:
    assert overlap.overlap_of(step((2.0, 4.0), (4.0, 6.0)))["in_flight"] == 1
    assert overlap.overlap_of(step((2.0, 7.0), (4.0, 9.0), (6.0, 8.0)))["in_flight"] == 3


def test_one_step_without_two_buckets_at_once_misses_the_target(overlap: Any) -> None:
    together, apart = ((2.0, 5.0), (4.0, 6.0)), ((2.0, 4.0), (5.0, 6.0))
    steps = [step(*ranges, variant=variant) for variant in overlap.VARIANTS for ranges in (together, together, apart)]
    assert [row["met"] for row in overlap.rows_of(steps)] == [True, False, False]


def test_steps_are_told_beside_those_of_gloo(overlap: Any) -> None:
    steps = [step((2.0, 5.0), (4.0, 6.0), variant=variant) for variant in overlap.VARIANTS]
    steps[1]["backward"] = (1.0, 30.0)
    assert [row["beside_gloo"] for row in overlap.rows_of(steps)] == [1.0, 1.5, 1.0]


def test_it_runs_to_its_end(tmp_path: Path) -> None:
    file = tmp_path / "overlap.json"
    command = [sys.executable, str(FOLDER / "overlap.py"), "--quick", "--json", str(file), "--out", str(tmp_path)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    if ran.returncode == 2 and "namespaces" in ran.stderr:
        pytest.skip(ran.stderr)
    if any(f"ranks ended with [{ends}]" in ran.stderr + ran.stdout for ends in CRASHED):
        # Not understood yet: on a loaded machine one run in ten ends so, with torch 2.15 in the destructor of what its profiler recorded.
        pytest.xfail("a rank crashed where torch's profiler frees its buffers")
    assert ran.returncode == 0, ran.stdout + ran.stderr
    rows = json.loads(file.read_text())["rows"]
    assert [(row["variant"], row["buckets"]) for row in rows] == [
        ("gloo", 8), ("gradwire", 8), ("gradwire, tolerant", 8),
    ]  # fmt: skip
    assert (tmp_path / "overlap.png").stat().st_size > 10_000
