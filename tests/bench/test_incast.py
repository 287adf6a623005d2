"""The incast benchmark runs to its end, writes what it promises, and judges it; its quick mode shows no performance."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from gradwire.lab import NamespacesUnavailable, sandbox

FOLDER = Path(__file__).resolve().parents[2] / "bench" / "collective"


def load(name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The benchmark as a module, to ask what it concludes."""
    monkeypatch.syspath_prepend(str(FOLDER))
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    spec.loader.exec_module(module)
    return module


def run_quick(name: str, out: Path) -> dict:
    numbers = out / "numbers.json"
    command = [sys.executable, str(FOLDER / name), "--quick", "--json", str(numbers), "--out", str(out)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return json.loads(numbers.read_text())


def test_incast_times_each_factor_and_draws(tmp_path):
    try:
        assert sandbox.run(lambda: 0) == 0
    except NamespacesUnavailable as error:
        pytest.skip(str(error))
    rows = run_quick("incast.py", tmp_path)["rows"]
    assert [(row["incast"], row["rounds"], len(row["samples_ms"])) for row in rows] == [(1, 6, 3), (3, 2, 3)]
    assert all(0 < row["min_ms"] <= row["p50_ms"] for row in rows)
    assert (tmp_path / "incast.png").stat().st_size > 10_000


def test_incast_is_judged_by_every_step(monkeypatch):
    incast = load("incast", monkeypatch)
    for times, falls in (((4.0, 3.0, 2.0), True), ((4.0, 3.0, 3.0), False), ((4.0, 5.0, 2.0), False)):
        assert incast.falls([{"p50_ms": time} for time in times]) is falls
