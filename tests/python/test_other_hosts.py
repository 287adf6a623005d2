"""`gradwire monitor --host`, with a program in ssh's place: what it reaches, and how it fails."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

COMMAND = [sys.executable, "-c", "from gradwire.cli import main; main(prog_name='gradwire')"]
UNREACHABLE = "sh -c 'echo bash: gradwire: command not found >&2; exit 127'"


@pytest.fixture(autouse=True)
def _folder(short_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(short_folder))


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("options", [["--json"], []])
def test_monitor_says_that_a_host_cannot_be_asked_and_ends_with_3(options: list[str]) -> None:
    ran = run("monitor", *options, "--every", "0.1", "--host", "node1", "--ssh", UNREACHABLE)
    assert ran.returncode == 3, ran.stderr
    assert ran.stderr == "gradwire monitor: node1: sh ended with 127: bash: gradwire: command not found\n"


def test_monitor_goes_on_with_those_that_answer(tmp_path: Path) -> None:
    said = {"job": "train", "rank": 0, "host": "node2", "pid": 1, "time_s": 1.0, "groups": []}
    (tmp_path / "said").write_text(json.dumps(said) + "\n")
    shell = f"sh -c '[ $0 = node2 ] && exec cat {tmp_path}/said; echo Permission denied >&2; exit 255'"
    ran = run("monitor", "--json", "--every", "0.1", "--host", "node1", "--host", "node2", "--ssh", shell)
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout)["host"] == "node2"
    assert ran.stderr == "gradwire monitor: node1: sh ended with 255: Permission denied\n"
