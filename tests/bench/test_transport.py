"""The transport benchmarks run to their end and write what they promise; their small modes show no performance."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "bench" / "transport"


# A benchmark on a kernel that has these congestion controls, of which bbr is on many a module that nobody has loaded.
ON_A_KERNEL = """
import pathlib, runpy, sys
from gradwire.bench import tcp
tcp.AVAILABLE = pathlib.Path(sys.argv[1])
sys.argv = sys.argv[2:]
sys.path.insert(0, str(pathlib.Path(sys.argv[0]).parent))
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.fixture(autouse=True)
def _needs_what_the_benches_need():
    for program in ("iperf3", "cargo", "cc", "ip"):
        if shutil.which(program, path=os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])) is None:
            pytest.skip(f"{program} is not installed")


@pytest.fixture(params=["bbr", "cubic"])
def best(request, kernel_tcp, tmp_path) -> str:
    """The first of the benches' congestion controls that the kernel has: they must run with what there is."""
    if request.param not in kernel_tcp:
        pytest.skip(f"this kernel has no {request.param}: modprobe tcp_{request.param}")
    (tmp_path / "available").write_text(f"reno {request.param}\n")
    return request.param


def run_small(name: str, out: Path) -> dict:
    numbers = out / "numbers.json"
    command = [sys.executable, "-c", ON_A_KERNEL, str(out / "available"), str(FOLDER / name), "--small"]
    command += ["--json", str(numbers), "--out", str(out)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    found = json.loads(numbers.read_text())
    assert found["machine"]["extension_sha256"]
    assert "--small" in found["command"]
    return found


def test_goodput_measures_gradwire_and_tcp_and_draws(tmp_path, best):
    rows = run_small("goodput.py", tmp_path)["rows"]
    assert [row["flow"] for row in rows] == ["gradwire", best]
    assert all(0 < row["share"] <= 1.02 for row in rows), rows
    assert (tmp_path / "goodput.png").stat().st_size > 10_000


def test_fairness_measures_both_flows_and_draws(tmp_path, best):
    (row,) = run_small("fairness.py", tmp_path)["rows"]
    assert row["peer"] == best
    assert row["gradwire_mbit"] > 0
    assert row["peer_mbit"] > 0
    assert row["link_used"] > 0  # of a second on a busy machine: what had waited in the buffer may be a large part
    assert (tmp_path / "fairness.png").stat().st_size > 10_000
