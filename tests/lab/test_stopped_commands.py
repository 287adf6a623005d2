"""Ctrl-Z of what runs in a lab or is one: it stops all that it has on the terminal, others are told, and `fg` lets it go on."""

import json
import shlex
import time
from pathlib import Path

import pytest
from gradwire.lab import service
from gradwire.lab.errors import NoAnswer
from gradwire.lab.service import Client
from lab_command import CTRL_Z, PREFIX, TIMEOUT_S, Shell

# A line, since what is typed is read by nobody else; words in two parts are whole only where they are printed.
READS = 'echo be""gun; read line; exit 7'
IS_ASKED_TO_END = """trap 'echo as""ked; exit' TERM; echo be""gun; sleep 600 & wait"""


pytestmark = pytest.mark.usefixtures("namespaces")


@pytest.fixture
def running(lab):
    result = lab("up", "--hosts", "2", "--switch", "nft")
    assert result.returncode == 0, result.stderr
    return lab


def states(script):
    """Of the shells that run it."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if (process / "cmdline").read_bytes().startswith(b"sh\0-c\0" + script.encode() + b"\0"):
                found.append((process / "stat").read_text().rpartition(")")[2].split()[0])
        except OSError:  # it has ended
            continue
    return found


def wait_for(condition):
    end = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


@pytest.mark.parametrize(("host", "count"), [("0", 1), ("all", 2)])
def test_a_program_on_a_host_stops_with_who_started_it_and_goes_on_with_it(running, host, count):
    with Shell(running.environment) as shell:
        shell.type(shlex.join([*PREFIX, "exec", host, "--", "sh", "-c", READS]) + "\n")
        for _ in range(count):
            shell.until("begun")
        for _ in range(2):
            shell.type(CTRL_Z)
            shell.until("Stopped")
            wait_for(lambda: states(READS) == ["T"] * count)
            shell.type("fg\n")
            wait_for(lambda: states(READS) == ["S"] * count)
        shell.type("\n" * count)
        wait_for(lambda: states(READS) == [])
        shell.type("echo sta''tus $?\n")
        shell.until("status 7")


def test_a_stopped_program_whose_caller_ends_is_asked_to_end(running):
    with Shell(running.environment) as shell:
        shell.type(shlex.join([*PREFIX, "exec", "0", "--", "sh", "-c", IS_ASKED_TO_END]) + "\n")
        shell.until("begun")
        shell.type(CTRL_Z)
        shell.until("Stopped")
        wait_for(lambda: set(states(IS_ASKED_TO_END)) == {"T"})  # a moment ago it may have been forking
        shell.type("kill -KILL %1\n")
        shell.until("asked")


def test_a_stopped_lab_is_told_to_who_asks_and_does_not_do_later_what_it_was_asked_for(lab, monkeypatch):
    monkeypatch.setattr(service, "_SILENT_SECONDS", 1)
    with Shell(lab.environment) as shell:
        shell.type(shlex.join([*PREFIX, "up", "--foreground", "--hosts", "1", "--switch", "nft"]) + "\n")
        shell.until("ready")
        (path,) = Path(lab.folder).glob("*/lab")
        shell.type(CTRL_Z)
        shell.until("Stopped")
        with pytest.raises(
            NoAnswer, match=r"^the lab lab does not answer; perhaps it is stopped: .* or kill -CONT -\d+$"
        ) as caught:
            Client(path).ask(do="set", hosts=[], rails=[], changes={"loss": 1.0})
        shell.type(f"{str(caught.value).rpartition(' or ')[2]}\n")
        (row,) = json.loads(lab("stats", "--json").stdout)
        assert row["loss"] == 0
        shell.type("kill %1\n")
        wait_for(lambda: lab.sockets() == [])
