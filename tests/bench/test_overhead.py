"""The overhead benchmark runs to its end and judges each target; its quick mode shows no performance."""

import importlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from gradwire.bench.machine import machine

FOLDER = Path(__file__).resolve().parents[2] / "bench" / "torch"


@pytest.fixture
def overhead(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The benchmark as a module, to ask what it concludes."""
    monkeypatch.syspath_prepend(str(FOLDER))
    import overhead

    return overhead


def blocks(measure: str, gloo: list[float], gradwire: list[float]) -> list[dict[str, Any]]:
    return [
        {"turn": turn, "measure": measure, "backend": backend, "seconds": seconds, "cpu": 2 * seconds}
        for backend, times in (("gloo", gloo), ("gradwire", gradwire))
        for turn, seconds in enumerate(times)
    ]


@pytest.mark.parametrize("name", ["overhead", "overlap", "gpu", "observability"])
def test_numbers_are_of_gradwires_commit_wherever_it_is_called(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    bench = importlib.import_module(name)
    monkeypatch.chdir(tmp_path)
    found, expected = bench.machine(), machine()
    assert [found.get(fact) for fact in ("commit", "gradwire")] == [expected["commit"], expected["gradwire"]]


def test_a_ratio_is_the_median_of_neighbours(overhead: Any) -> None:
    ranks = [blocks("barrier", [1.0, 10.0, 1.0], [1.4, 14.0, 9.0])] * 2
    (row,) = overhead.rows_of(ranks)
    assert (round(row["ratio"], 6), row["met"]) == (1.4, True)
    (row,) = overhead.rows_of([blocks("ddp_step", [1.0], [1.06])] * 2)
    assert not row["met"]
    (row,) = overhead.rows_of([blocks("large", [0.016], [0.032])] * 2)
    assert (row["met"], row["gloo_cpu_s_per_gb"], row["gradwire_cpu_s_per_gb"]) == (True, 4.0, 8.0)


def test_it_runs_to_its_end(tmp_path: Path) -> None:
    numbers = tmp_path / "numbers.json"
    command = [sys.executable, str(FOLDER / "overhead.py"), "--quick", "--json", str(numbers)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    rows = json.loads(numbers.read_text())["rows"]
    assert [row["measure"] for row in rows] == ["all_reduce", "all_gather", "barrier", "ddp_step", "large"]
    assert all(row["gloo_us"] > 0 and row["gradwire_us"] > 0 for row in rows)
