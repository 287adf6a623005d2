"""The benchmark of sealing runs to its end and writes what it promises; its quick mode shows no performance."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "bench" / "collective" / "security.py"


@pytest.mark.usefixtures("namespaces")
def test_both_kinds_are_measured_by_turns(tmp_path: Path) -> None:
    numbers = tmp_path / "numbers.json"
    command = [sys.executable, str(SCRIPT), "--quick", "--json", str(numbers), "--out", str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "of the bandwidth in clear" in result.stdout
    found = json.loads(numbers.read_text())
    assert found["cipher"] in ("AES-256-GCM", "ChaCha20-Poly1305")
    assert [row["security"] for row in found["rows"]] == ["off", "on"]
    assert all(len(row["samples_ms"]) == 3 and row["busbw_mb_s"] > 0 for row in found["rows"])
    assert found["ratio"] > 0
