"""Where a user's labs have their sockets, and what is said where they cannot be there."""

import os

import pytest
from click.testing import CliRunner
from gradwire.cli import lab
from gradwire.lab import LabError, sandbox
from gradwire.lab.service import folder

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
