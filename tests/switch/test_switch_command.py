"""`gradwire switch` from outside."""

import json
import sys

import pytest
from click.testing import CliRunner
from gradwire.cli import main

COMMON = ["--rate", "1000", "--buffer", "256"]


def run(*arguments, **variables):
    return CliRunner().invoke(main, ["switch", *arguments], env=variables)


@pytest.mark.parametrize("system", ["tc", "sonic", "onyx", "cumulus", "eos"])
def test_each_system_gets_text_and_the_summary_goes_elsewhere(system):
    result = run("--os", system, *COMMON, "--port", "portX")
    assert result.exit_code == 0, result.output
    assert "portX" in result.stdout
    assert "GRADWIRE_CLASSES=7" in result.stderr
    assert "expected loss" not in result.stdout
    if system == "sonic":
        json.loads(result.stdout)


def test_the_environment_of_the_job_decides_the_code_points():
    result = run(
        "--os", "sonic", *COMMON, GRADWIRE_CLASSES="2", GRADWIRE_DSCP_CLASSES="12,8", GRADWIRE_DSCP_CONTROL="46"
    )
    assert result.exit_code == 0, result.output
    table = json.loads(result.stdout)["DSCP_TO_TC_MAP"]["gradwire"]
    assert (table["46"], table["12"], table["8"], table["34"]) == ("7", "6", "5", "4")


def test_the_plan_as_json_and_a_picture(tmp_path):
    pytest.importorskip("matplotlib")
    pytest.importorskip("scipy")
    picture = tmp_path / "plan.png"
    result = run(
        "--os", "tc", *COMMON, "--layers", "1,2,3,4,5,6,7", "--thresholds", "optimal", "--json", "--plot", str(picture)
    )
    assert result.exit_code == 0, result.output
    plan = json.loads(result.stdout)
    assert [queue["name"] for queue in plan["queues"]] == ["control", *(f"class {number}" for number in range(7))]
    assert plan["queues"][7]["share"] == pytest.approx(7 / 28)
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_the_configuration_goes_into_a_file(tmp_path):
    result = run("--os", "tc", *COMMON, "--out", str(tmp_path / "port.sh"))
    assert result.exit_code == 0
    assert result.stdout == ""
    assert (tmp_path / "port.sh").read_text().startswith("#!/bin/sh")


@pytest.mark.parametrize(
    "arguments",
    [
        ["--os", "ios", *COMMON],
        ["--os", "tc", "--rate", "0", "--buffer", "256"],
        ["--os", "tc", "--rate", "1000", "--buffer", "10"],
        ["--os", "tc", *COMMON, "--layers", "nowhere.pt"],
        ["--os", "tc", *COMMON, "--first", "200"],
        ["--os", "tc", *COMMON, "--classes", "7", "--queues", "4"],
    ],
)
def test_wrong_usage_is_status_2_in_one_line(arguments):
    result = run(*arguments)
    assert result.exit_code == 2
    assert result.stderr.count("Error:") == 1
    assert "Traceback" not in result.stderr


def test_without_scipy_the_optimum_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    result = run("--os", "tc", *COMMON, "--thresholds", "optimal")
    assert result.exit_code == 2
    assert "gradwire[switch]" in result.stderr
