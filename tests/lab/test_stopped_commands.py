"""Ctrl-Z of what runs in a lab or is one: it stops all that it has on the terminal, others are told, and `fg` lets it go on."""

import json
import shlex
import time
from pathlib import Path

import pytest
from gradwire.lab import NamespacesUnavailable, sandbox, service
from gradwire.lab.errors import NoAnswer
from gradwire.lab.service import Client
from lab_command import CTRL_Z, PREFIX, TIMEOUT_S, Lab, Shell


@pytest.fixture(scope="module", autouse=True)
def _namespaces():
    try:
        sandbox.run(lambda: 0)
    except NamespacesUnavailable as error:
        pytest.skip(str(error))


@pytest.fixture
def lab():
    made = Lab()
    yield made
    made.close()


def wait_for(condition):
    end = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


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
