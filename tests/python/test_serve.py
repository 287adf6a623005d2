"""`gradwire serve` from outside, as far as it goes without workers; the rest is in tests/e2e/test_served.py."""

import os
import subprocess
import sys

import pytest
from click.testing import CliRunner
from gradwire.cli import main
from gradwire.config import Config

COMMAND = [sys.executable, "-c", "from gradwire.cli import main; main()", "serve"]


def run(*arguments, **variables):
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("GRADWIRE_", "MASTER_"))}
    return subprocess.run(
        [*COMMAND, *arguments], env={**clean, **variables}, capture_output=True, text=True, check=False
    )


def test_help_teaches_with_examples_and_exit_statuses():
    result = CliRunner().invoke(main, ["serve", "--help"])
    assert result.exit_code == 0
    assert "GRADWIRE_SERVER_MODE=dedicated" in result.output
    assert "Exit status" in result.output


@pytest.mark.parametrize(
    "arguments", [["--index", "-1"], ["--servers", "0"], ["--memory", "0"], ["--store", "nowhere"], []]
)
def test_wrong_usage_is_status_2(arguments):
    result = run(*arguments)
    assert result.returncode == 2, result.stderr
    assert "Traceback" not in result.stderr


def test_workers_that_do_not_come_are_status_3(tmp_path):
    result = run("--store", f"file://{tmp_path / 'store'}", "--wait", "1")
    assert result.returncode == 3, result.stderr
    assert "rank(s) 0" in result.stderr


def test_the_configuration_says_how_many_servers_are_processes_of_their_own():
    assert Config(servers=3).dedicated_servers() == 0
    assert Config(server_mode="dedicated").dedicated_servers() == 1
    assert Config(server_mode="dedicated", servers=3).dedicated_servers() == 3
