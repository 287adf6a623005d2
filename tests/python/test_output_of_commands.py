"""What `gradwire` does where its output cannot be written: a full disk, or a reader that has gone."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

COMMAND = [sys.executable, "-c", "from gradwire.cli import main; main()"]
PLAN = ["switch", "--os", "tc", "--rate", "1000", "--buffer", "256"]
COMMANDS = [["--help"], ["--version"], ["doctor"], PLAN, ["lab", "--help"]]


def run(arguments: list[str], stdout: int, stderr: int = subprocess.PIPE) -> subprocess.CompletedProcess[str]:
    # As users have it: what Python could not write it tries to write again at its end.
    env = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    return subprocess.run(
        [*COMMAND, *arguments], stdout=stdout, stderr=stderr, text=True, env=env, check=False, timeout=120
    )


@pytest.mark.parametrize("arguments", COMMANDS, ids=" ".join)
def test_output_to_a_full_disk_is_status_2_and_one_line(arguments: list[str]) -> None:
    with Path("/dev/full").open("w") as full:
        result = run(arguments, full.fileno())
    text = "gradwire: the output cannot be written: No space left on device\n"
    assert (result.returncode, result.stderr) == (2, text)


@pytest.mark.parametrize("arguments", COMMANDS, ids=" ".join)
def test_output_that_nobody_reads_is_status_2_without_a_word(arguments: list[str]) -> None:
    there, here = os.pipe()
    os.close(there)
    result = run(arguments, here)
    os.close(here)
    assert (result.returncode, result.stderr) == (2, "")


def test_a_summary_that_cannot_be_written_is_status_2_though_the_configuration_was() -> None:
    with Path("/dev/full").open("w") as full:
        result = run(PLAN, subprocess.PIPE, full.fileno())
    assert (result.returncode, result.stdout.startswith("#!/bin/sh")) == (2, True)


def test_a_monitor_with_nowhere_to_write_ends_at_once(tmp_path: Path) -> None:
    """Without a job it would end with 3, and with one never."""
    closed = ["sh", "-c", 'exec "$@" >&-', "sh", *COMMAND, "monitor"]
    env = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)}
    result = subprocess.run(closed, stderr=subprocess.PIPE, text=True, env=env, check=False, timeout=120)
    assert (result.returncode, "the standard output is closed" in result.stderr) == (2, True), result.stderr


NOT_BEGUN = [
    ["bench"],
    ["demo"],
    ["doctor"],
    ["lab", "up", "--foreground"],
    ["lab", "stats"],
    PLAN,
    [*PLAN, "--json"],
    ["simulate", "--bytes", "4096"],
    ["simulate", "--bytes", "4096", "--json", "-"],
    ["trace"],
    ["trace", "--raw", "-o", "step.json"],
]


@pytest.mark.parametrize("arguments", NOT_BEGUN, ids=" ".join)
def test_what_has_nowhere_to_write_results_is_not_begun(tmp_path: Path, arguments: list[str]) -> None:
    closed = ["sh", "-c", 'exec "$@" >&-', "sh", *COMMAND, *arguments]
    env = {**os.environ, "XDG_RUNTIME_DIR": str(tmp_path)}
    result = subprocess.run(closed, stderr=subprocess.PIPE, text=True, env=env, check=False, timeout=120, cwd=tmp_path)
    assert (result.returncode, "the standard output is closed" in result.stderr) == (2, True), result.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "option"),
    [(PLAN, "--out"), (["simulate", "--bytes", "4096", "--workers", "2", "--servers", "0"], "--json")],
    ids=["switch", "simulate"],
)
def test_what_is_written_to_a_file_needs_no_standard_output(tmp_path: Path, arguments: list[str], option: str) -> None:
    closed = ["sh", "-c", 'exec "$@" >&-', "sh", *COMMAND, *arguments, option, "written"]
    result = subprocess.run(closed, stderr=subprocess.PIPE, text=True, check=False, timeout=120, cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "written").stat().st_size > 0
