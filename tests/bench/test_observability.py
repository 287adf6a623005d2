"""The benchmark of what being seen costs runs to its end and judges by neighbours; its quick mode shows no performance."""

import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

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


def test_nobody_looks_at_the_ranks_while_the_others_train(
    observability: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Each look begins in a block of the ranks that are seen, and is over when it ends."""
    before, looked = set(threading.enumerate()), threading.Semaphore(0)
    told: list[str] = []

    class Pair:
        def __init__(self, *_: Any, seen: bool) -> None:
            self._seen = seen

        def block(self) -> tuple[float, float]:
            if self._seen:
                assert looked.acquire(timeout=30)
                told.append("seen")
            else:
                told.append("unseen" if set(threading.enumerate()) == before else "looked at meanwhile")
            return 1.0, 1.0

        def end(self) -> None:
            told.append("end")

    monkeypatch.setattr(observability, "Pair", Pair)
    monkeypatch.setattr(observability.Looks, "_look", lambda _: looked.release())
    assert len(observability.measure(2, tmp_path, Console())) == 2
    assert told == ["seen", "unseen", "unseen", "seen", "seen", "unseen", "end", "end"]


def test_a_rank_that_does_not_answer_is_told(observability: Any) -> None:
    class Pair:
        port, folder = 1, Path("/nonexistent")

        def block(self) -> tuple[float, float]:
            while not looks._error:
                os.sched_yield()
            return 1.0, 1.0

    looks = observability.Looks(Pair())
    with pytest.raises(OSError, match="refused"):
        looks.block()


def test_it_runs_to_its_end(tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client")
    numbers = tmp_path / "numbers.json"
    command = [sys.executable, str(FOLDER / "observability.py"), "--quick", "--json", str(numbers)]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert len(json.loads(numbers.read_text())["rows"]) == 2
