"""The command on this host alone."""

import json
import os
import subprocess
import sys

import pytest
from click.testing import CliRunner
from gradwire.cli import main


def doctor(*arguments, **variables):
    clean = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("GRADWIRE_", "RANK", "WORLD_SIZE", "LOCAL"))
    }
    command = [sys.executable, "-c", "from gradwire.cli import main; main()", "doctor", *arguments]
    return subprocess.run(command, env={**clean, **variables}, capture_output=True, text=True, check=False, timeout=300)


def test_one_host_alone_is_described():
    result = doctor("--json", GRADWIRE_PORT="0")
    report = json.loads(result.stdout)
    assert result.returncode == int(report["training_would_suffer"])
    (facts,) = report["hosts"]
    assert facts["features"]["receive_buffer_bytes"] > 0
    assert any(i["name"] == "lo" and "this host only" in i["reason"] for i in facts["interfaces"])
    assert report["pairs"] == []


def test_it_reads_well_without_json():
    text = doctor(GRADWIRE_PORT="0").stdout
    assert text.startswith("rank 0: ")
    assert "training" in text.splitlines()[-1]


@pytest.mark.parametrize(
    ("arguments", "variables"),
    [
        (["--rank", "2", "--world-size", "2"], {}),
        (["--world-size", "2", "--store", "http://x"], {}),
        ([], {"GRADWIRE_PRESET": "best"}),
        ([], {"RANK": "x"}),
        ([], {"RANK": "0", "WORLD_SIZE": "$N"}),
    ],
)
def test_wrong_usage_is_status_2(arguments, variables):
    result = doctor(*arguments, **variables)
    assert result.returncode == 2, result.stderr
    assert "Traceback" not in result.stderr


def test_help_teaches_with_examples_and_exit_statuses():
    result = CliRunner().invoke(main, ["doctor", "--help"])
    assert result.exit_code == 0
    assert "torchrun" in result.output
    assert "Exit status" in result.output
