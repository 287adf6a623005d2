"""Commands on the user-mode-linux switch, whatever they print or wait for."""

import json
import os
import select
import signal
import tempfile
from contextlib import suppress
from pathlib import Path

import pytest
from gradwire.lab import LabError, NamespacesUnavailable, ToolMissing, sandbox, uml_switch
from gradwire.lab.uml_switch import UmlSwitch

COMMANDS = {
    "no end of line": ("printf x", "x"),
    "nothing": ("true", ""),
    "lines": ("echo one; echo two >&2", "one\ntwo"),
    "the word that ends an answer": ("echo DONE 0; echo two", "DONE 0\ntwo"),
    "reads": ("cat; echo read", "read"),
    "is not text": (r"printf 'a\377b'", "a\ufffdb"),
}


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """What one switch says to all of them, and to those that fail."""
    file = tmp_path_factory.mktemp("uml") / "answers.json"

    def main() -> int:
        with UmlSwitch([]) as switch:
            found = {name: switch.run(command) for name, (command, _) in COMMANDS.items()}
            for name, command in (("refused", "echo why; exit 3"), ("for ever", "sleep 600"), ("child", "sleep 600 &")):
                try:
                    switch.run(command, limit_s=30 if name == "refused" else 0.5)
                except LabError as error:
                    found[name] = str(error)
            found["after"] = switch.run("echo here")
        file.write_text(json.dumps(found))
        return 0

    try:
        assert sandbox.run(main) == 0
    except (NamespacesUnavailable, ToolMissing) as error:
        pytest.skip(str(error))
    return json.loads(file.read_text())


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_is_answered_with_what_it_has_printed(answers, name):
    assert answers[name] == COMMANDS[name][1]


def test_one_that_fails_or_does_not_end_is_refused_and_the_next_one_runs(answers):
    assert answers["refused"] == "the switch refused `echo why; exit 3`: why"
    for name, command in (("for ever", "sleep 600"), ("child", "sleep 600 &")):
        assert answers[name] == f"the switch refused `{command}`: it has not ended after 0.5 s"
    assert answers["after"] == "here"


def test_a_folder_for_temporary_files_that_is_not_there_keeps_no_switch_from_starting(tmp_path, monkeypatch):
    """As of a batch system whose job has ended."""
    monkeypatch.setenv("TMPDIR", str(tmp_path / "gone"))
    monkeypatch.setattr(tempfile, "tempdir", None)  # which Python has found before
    file = tmp_path / "answer"

    def main() -> int:
        with UmlSwitch([]) as switch:
            file.write_text(switch.run("echo here"))
        return 0

    try:
        assert sandbox.run(main) == 0
    except (NamespacesUnavailable, ToolMissing) as error:
        pytest.skip(str(error))
    assert file.read_text() == "here"


def test_a_switch_that_does_not_answer_is_ended_and_told(tmp_path, monkeypatch):
    monkeypatch.setattr(uml_switch, "ANSWER_SECONDS", 0.5)
    file = tmp_path / "said"

    def main() -> int:
        with UmlSwitch([]) as switch:
            switch._kernel.send_signal(signal.SIGSTOP)
            for _ in range(2):
                try:
                    switch.run("true", limit_s=0.5)
                except LabError as error:
                    with file.open("a") as said:
                        said.write(f"{error}\n")
            return int(switch._kernel.poll() is None)

    try:
        assert sandbox.run(main) == 0
    except (NamespacesUnavailable, ToolMissing) as error:
        pytest.skip(str(error))
    assert file.read_text().splitlines() == [
        "the user-mode-linux switch has not answered for 1 s, and was ended: ",
        "the user-mode-linux switch is gone",
    ]


def started_by(switch):
    """Descriptors of the processes of the switch's session, by which each is told from what may get its number later."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended meanwhile
            number = int(folder.name)
            if os.getsid(number) == switch._kernel.pid:
                found.append(os.pidfd_open(number))
    return found


def have_ended(descriptors):
    waiting = select.poll()
    for descriptor in descriptors:
        waiting.register(descriptor, select.POLLIN)
    try:
        while descriptors and (ended := waiting.poll(60_000)):
            for descriptor, _ in ended:
                waiting.unregister(descriptor)
                descriptors.remove(descriptor)
                os.close(descriptor)
        return not descriptors
    finally:
        for descriptor in descriptors:
            os.close(descriptor)


@pytest.mark.parametrize("ends_by_itself", [False, True])
def test_outside_of_a_sandbox_all_that_the_switch_has_started_ends_with_it(ends_by_itself, monkeypatch):
    try:
        switch = UmlSwitch([])
    except ToolMissing as error:
        pytest.skip(str(error))
    with switch:
        processes = started_by(switch)
        assert len(processes) > 1, "it has started none: the test has shown nothing"
        if ends_by_itself:
            first = os.pidfd_open(switch._kernel.pid)
            os.kill(switch._kernel.pid, signal.SIGKILL)
            assert have_ended([first])
            with pytest.raises(LabError, match="is gone"):
                switch.run("true")
    assert have_ended(processes)
    monkeypatch.setattr(os, "killpg", lambda *_: pytest.fail("what has its number now was ended"))
    switch.close()
