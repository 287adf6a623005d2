"""The benchmark of a stranger's flood runs to its end, and the flood is refused; its quick mode shows no performance."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "bench" / "collective" / "flood.py"


@pytest.mark.usefixtures("namespaces")
def test_a_flood_is_counted_and_changes_no_result(tmp_path: Path) -> None:
    numbers = tmp_path / "numbers.json"
    command = [sys.executable, str(SCRIPT), "--quick", "--share", "0.3", "--size", "0.1"]
    command += ["--json", str(numbers), "--out", str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "times as long" in result.stdout
    found = json.loads(numbers.read_text())
    assert [row["phase"] for row in found["rows"]] == ["before", "during", "after"]
    assert all(row["steps"] >= 1 for row in found["rows"])
    # Of the flood's datagrams some may be lost on the way; none that came was taken for a rank's.
    assert 0 < found["refused"]["datagrams_unknown"] <= found["datagrams_sent"]
