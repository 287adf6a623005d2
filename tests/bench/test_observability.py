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


def test_the_cost_is_the_median_of_neighbours(observability: Any) -> None:
    found = observability.conclude([{"off_ms": off, "on_ms": on} for off, on in ((10, 10.05), (100, 100.5), (10, 30))])
    assert round(found["cost"], 6) == 0.005
    assert found["met"]
    assert not observability.conclude([{"off_ms": 10.0, "on_ms": 10.2}])["met"]


def test_it_runs_to_its_end(tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client")
    numbers = tmp_path / "numbers.json"
    command = [sys.executable, str(FOLDER / "observability.py"), "--quick", "--json", str(numbers)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert len(json.loads(numbers.read_text())["rows"]) == 2
