"""Ranks that multiprocessing starts say goodbye although their process ends without atexit."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from free_ports import free_port
from launch import _clean_environment

SCRIPT = Path(__file__).parent / "children_rank.py"


def run(*arguments: str) -> list[str]:
    """What the ranks printed. One that goes without a word is taken for lost after 10 s at most, and not for one that left."""
    variables = {
        "GRADWIRE_PORT": "0",
        "GRADWIRE_PEER_TIMEOUT_S": "10",
        "GRADWIRE_RENDEZVOUS": f"127.0.0.1:{free_port()}",
    }
    environment = {**_clean_environment(), **variables}
    command = [sys.executable, str(SCRIPT), *arguments]
    both = subprocess.STDOUT
    done = subprocess.run(
        command, env=environment, text=True, stdout=subprocess.PIPE, stderr=both, timeout=300, check=False
    )
    assert done.returncode == 0, done.stdout
    return done.stdout.splitlines()


@pytest.mark.parametrize("method", ["fork", "forkserver", "spawn"])
def test_a_child_that_returns_without_closing_has_left(method: str) -> None:
    assert run(method, "returns") == ["left", "0"]


def test_a_child_may_call_as_late_as_its_python_lets_it() -> None:
    assert run("spawn", "calls_at_its_end") == ["left", "0"]


def test_a_thread_of_a_child_that_has_returned_goes_on_calling() -> None:
    assert run("fork", "leaves_a_thread") == ["the thread has ended", "left", "0"]
