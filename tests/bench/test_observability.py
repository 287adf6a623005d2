"""The benchmark of what being seen costs runs to its end and judges by neighbours; its quick mode shows no performance."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "bench" / "torch"


@pytest.fixture
def observability(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The benchmark as a module, to ask what it concludes."""
    monkeypatch.syspath_prepend(str(FOLDER))
    import observability

    return observability


def row(off: float, on: float, cpu: float = 0.0) -> dict[str, float]:
    return {"off_ms": off, "on_ms": on, "off_cpu_ms": 10.0, "on_cpu_ms": 10.0 + cpu}


def test_the_cost_is_the_median_of_neighbours_and_all_of_the_processor_time(observability: Any) -> None:
    found = observability.conclude([row(10, 10.05), row(100, 100.5), row(10, 30, cpu=0.27)])
    assert round(found["cost"], 6) == 0.005
    assert round(found["cpu_cost"], 6) == 0.009
    assert found["met"]
    assert not observability.conclude([row(10, 10.2)])["met"]
    assert not observability.conclude([row(10, 10), row(10, 10), row(10, 10, cpu=0.33)])["met"]


def test_it_runs_to_its_end(tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client")
    numbers = tmp_path / "numbers.json"
    command = [sys.executable, str(FOLDER / "observability.py"), "--quick", "--json", str(numbers)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert len(json.loads(numbers.read_text())["rows"]) == 2
