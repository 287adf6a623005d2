"""Benchmarks of collectives, to be run to their end or asked what they conclude."""

import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from gradwire.bench import plan, tcp
from gradwire.lab import NamespacesUnavailable, sandbox

FOLDER = Path(__file__).resolve().parents[2] / "bench" / "collective"


@pytest.fixture
def load_benchmark(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """Loads a benchmark as a module, by its name."""

    def load(name: str) -> Any:
        monkeypatch.syspath_prepend(str(FOLDER))
        spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, module)
        spec.loader.exec_module(module)
        return module

    return load


@pytest.fixture
def kernel_tcp(tmp_path: Path) -> set[str]:
    """Congestion controls that this kernel has, as the benchmarks see them: many have bbr as a module that only root may load."""
    file = tmp_path / "tcp.json"

    def look() -> int:
        file.write_text(json.dumps(sorted(tcp.available() or plan.TCP)))
        return 0

    try:
        assert sandbox.run(look) == 0
    except NamespacesUnavailable as error:
        pytest.skip(str(error))
    return set(json.loads(file.read_text()))


@pytest.fixture
def run_quick(tmp_path: Path) -> Callable[[str], dict[str, Any]]:
    """Runs a benchmark's quick mode with its files in `tmp_path`; returns the numbers that it wrote."""

    def run(name: str) -> dict[str, Any]:
        numbers = tmp_path / "numbers.json"
        command = [sys.executable, str(FOLDER / name), "--quick", "--json", str(numbers), "--out", str(tmp_path)]
        result = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
        assert result.returncode == 0, result.stdout + result.stderr
        return json.loads(numbers.read_text())

    return run
