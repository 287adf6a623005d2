"""Where a user's labs have their sockets, and what is said where they cannot be there."""

import os
import socket

import pytest
from click.testing import CliRunner
from gradwire.cli import lab
from gradwire.lab import LabError, sandbox, service
from gradwire.lab.service import Claim, folder, identity, new_path_of, path_of

NOBODY = 65534


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_the_runtime_directory_of_another_user_is_not_used(tmp_path, monkeypatch):
    """As `su` leaves it."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    assert folder() == tmp_path / "gradwire-lab-0"
    reader, writer = os.pipe()
    child = sandbox.forked()
    if child == 0:
        try:
            os.setresgid(NOBODY, NOBODY, NOBODY)
            os.setresuid(NOBODY, NOBODY, NOBODY)
            os.write(writer, str(folder()).encode())
        finally:
            os._exit(0)
    os.close(writer)
    os.waitpid(child, 0)
    with os.fdopen(reader) as told:
        assert told.read() == f"/tmp/gradwire-lab-{NOBODY}"


def test_a_runtime_directory_that_is_not_there_is_not_used(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "none"))
    assert str(folder()) == f"/tmp/gradwire-lab-{os.getuid()}"


def test_a_lab_is_found_from_where_there_is_another_runtime_directory_or_none(short_folder, monkeypatch):
    """As what cron or `su` starts has it, and a step of CI."""
    with_one, without = (short_folder / name for name in ("run", "tmp"))
    usual = []
    for base in (with_one, without):
        base.mkdir()
        usual.append(base / f"gradwire-lab-{os.getuid()}")
    monkeypatch.setattr(service, "_usual_folders", lambda: usual)
    for here, there in ((with_one, without), (without, with_one)):
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(here))
        path = new_path_of("lab")
        with Claim(path, identity(os.getpid())), socket.socket(socket.AF_UNIX) as listener:
            listener.bind(str(path))
            monkeypatch.setenv("XDG_RUNTIME_DIR", str(there))
            assert path_of("lab") == path
            with pytest.raises(LabError, match="the lab lab is up already"):
                new_path_of("lab")
            ran = CliRunner().invoke(lab.command, ["up", "--foreground"])
            assert (ran.exit_code, "is up already" in ran.output) == (3, True), ran.output
            assert new_path_of("other") == there / path.parent.name / "other"
            path.parent.chmod(0o755)
            assert path_of("lab").parent.parent == there, "anybody can have put it there"
            path.parent.chmod(0o700)
            path.unlink()
        assert path_of("lab").parent.parent == there
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(short_folder))
    assert path_of("lab").parent.parent == short_folder, "somebody chose it"


@pytest.mark.parametrize(("command", "status"), [(["exec", "0", "true"], 125), (["stats"], 3), (["down"], 3)])
def test_a_folder_that_is_open_to_others_is_one_line(command, status, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    open_to_others = tmp_path / f"gradwire-lab-{os.getuid()}"
    open_to_others.mkdir()
    open_to_others.chmod(0o755)
    with pytest.raises(LabError):
        folder()
    ran = CliRunner().invoke(lab.command, command)
    assert (ran.exit_code, ran.output) == (
        status,
        f"error: {open_to_others} belongs to somebody else or is open to others: remove it\n",
    )
