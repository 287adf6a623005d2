"""`log_level` shows what it says in a program that has not set logging up, and leaves alone what a program has set."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

ENGINE = """
import logging
from gradwire import _runtime

{before}
_runtime.runtime()
{after}
print(logging.getLogger("gradwire").level)
"""


def level_and_log(level: str | None, before: str = "", after: str = "") -> tuple[int, str]:
    """Level of the logger and what standard error has after a process's engine has started."""
    environment = {name: text for name, text in os.environ.items() if name != "GRADWIRE_LOG_LEVEL"} | {
        "GRADWIRE_PORT": "0"
    }
    if level is not None:
        environment["GRADWIRE_LOG_LEVEL"] = level
    script = ENGINE.format(before=before, after=after)
    ended = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True)
    return int(ended.stdout), ended.stderr


@pytest.mark.parametrize("level", ["info", "debug"])
def test_messages_are_shown_though_the_program_sets_no_logging_up(level: str) -> None:
    _, log = level_and_log(level)
    assert log.count("INFO:gradwire:engine on UDP port") == 1


def test_a_program_that_sets_logging_up_shows_them_once() -> None:
    early = 'logging.basicConfig(format="own %(message)s")'
    _, log = level_and_log("info", before=early)
    assert log.count("engine on UDP port") == log.count("own engine on UDP port") == 1
    _, log = level_and_log("info", after=f'{early}; logging.getLogger("gradwire").info("told")')
    assert log.count("told") == log.count("own told") == 1


def test_a_level_that_the_program_has_set_stays() -> None:
    own = 'logging.basicConfig(); logging.getLogger("gradwire").setLevel(logging.INFO)'
    level, log = level_and_log(None, before=own)
    assert level == 20
    assert "engine on UDP port" in log
    assert level_and_log("error", before=own)[0] == 40
    assert level_and_log(None)[0] == 0
