"""Where a user's labs have their sockets, and what is said where they cannot be there."""

import os
import shutil
import socket
import stat
import threading
from types import SimpleNamespace

import pytest
from click.testing import CliRunner
from gradwire.cli import lab
from gradwire.lab import LabError, claim, sandbox
from gradwire.lab.claim import Claim, end_builder, folder, identity, keeper_of, new_path_of, path_of
from gradwire.lab.errors import NoLab
from gradwire.lab.service import Client, Service

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


@pytest.fixture
def usual(short_folder, monkeypatch):
    """Stands for /run/user/UID, which is there, and /tmp."""
    bases = [short_folder / name for name in ("run", "tmp")]
    for base in bases:
        base.mkdir()
    monkeypatch.setattr(claim, "_usual_folders", lambda own: [base / own.name for base in bases])
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(bases[0]))
    return bases


def test_a_lab_is_found_from_where_there_is_another_runtime_directory_or_none(short_folder, usual, monkeypatch):
    """As what cron or `su` starts has it, and a step of CI."""
    with_one, without = usual
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


def log_out(usual, monkeypatch):
    """As logind does with the runtime directory; the sessions that are left have none."""
    shutil.rmtree(usual[0])
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(usual[1]))


def log_in(usual, monkeypatch):
    usual[0].mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(usual[0]))


def test_a_lab_is_found_and_nobody_else_gets_its_name_right_after_the_last_logout(usual, monkeypatch):
    """Also before it has looked for its socket, or where it is stopped and does not look at all."""
    with Claim(new_path_of("lab"), identity(os.getpid())):
        log_out(usual, monkeypatch)
        log_in(usual, monkeypatch)
        assert keeper_of(path_of("lab")) == os.getpid(), "`down` ends it"
        with pytest.raises(LabError, match="is up already"):
            new_path_of("lab")
        with pytest.raises(LabError, match="is up already"):
            Claim(folder() / "lab", identity(os.getpid()))
    assert [list(base.iterdir()) for base in usual] == [[], []]
    assert not end_builder(path_of("lab"))


@pytest.fixture
def served(usual, monkeypatch, request):
    """The path of a lab that answers, without a network. Its thread has ended after the test, and none of its files are left."""
    monkeypatch.setattr("gradwire.lab.service._LOOK_SECONDS", getattr(request, "param", 0.05))
    network = SimpleNamespace(layout=SimpleNamespace(hosts=0, rails=0), kind="none", close=lambda: None)
    ended, is_up = [], threading.Event()

    def serve():
        try:
            with Claim(new_path_of("lab"), identity(os.getpid())) as taken:
                Service(network, taken).run(lambda _: is_up.set())
            ended.append("down")
        except LabError as error:
            ended.append(str(error))

    server = threading.Thread(target=serve)
    server.start()
    assert is_up.wait(60)
    yield SimpleNamespace(path=path_of("lab"), ended=ended, server=server)
    if server.is_alive():
        Client(path_of("lab")).ask(do="down")
    server.join(60)
    assert not server.is_alive()
    assert [list(base.iterdir()) for base in usual if base.exists()] == [[]] * sum(base.exists() for base in usual)


def wait_for(is_so):
    """Fails the test after a minute: that is no limit of the lab's."""
    given_up = threading.Event()
    timer = threading.Timer(60, given_up.set)
    timer.start()
    try:
        while not is_so():
            assert not given_up.is_set()
            os.sched_yield()
    finally:
        timer.cancel()


def answers(path):
    try:
        return Client(path).ask(do="describe")["switch"] == "none"
    except (NoLab, LabError):
        return False


def test_a_labs_socket_goes_where_it_is_found_with_each_login_and_logout(served, usual, monkeypatch):
    assert served.path.parent.parent == usual[0]
    log_out(usual, monkeypatch)
    wait_for(lambda: answers(path_of("lab")))
    assert path_of("lab").parent.parent == usual[1]
    log_in(usual, monkeypatch)
    wait_for(served.path.exists)
    wait_for(lambda: not (usual[1] / served.path.parent.name / "lab").exists())
    wait_for(lambda: answers(path_of("lab")))
    assert path_of("lab") == served.path


@pytest.mark.parametrize("removed", [["lab"], ["lab.lock"], ["lab", "lab.lock"]])
def test_what_somebody_removes_is_made_anew(served, removed):
    for name in removed:
        served.path.with_name(name).unlink()
    wait_for(lambda: all(served.path.with_name(name).exists() for name in removed) and answers(served.path))
    wait_for(lambda: keeper_of(served.path) == os.getpid())
    modes = [served.path.with_name(name).stat().st_mode & 0o7777 for name in ("lab", "lab.lock")]
    assert modes == [0o600 | stat.S_ISVTX] * 2, "whoever clears up old files leaves those with the sticky bit"


@pytest.mark.parametrize("served", [60], indirect=True)
def test_a_lab_whose_name_another_one_has_by_now_ends_and_leaves_that_alone(served, usual, short_folder):
    own = served.path.parent
    shutil.rmtree(usual[1] / own.name)
    own.rename(short_folder / "moved")
    with Claim(served.path, identity(os.getpid())) as other:
        answers(short_folder / "moved" / "lab")  # after each request it looks, unless it has by now
        served.server.join(60)
        assert "another lab has its name by now" in served.ended[0]
        assert other.holds(served.path)
        other.renew()
        assert other.path == served.path


def test_a_lab_in_a_folder_that_somebody_chose_is_found_in_tmp_where_that_is_gone(short_folder, usual, monkeypatch):
    chosen = short_folder / "chosen"
    chosen.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(chosen))
    with Claim(new_path_of("lab"), identity(os.getpid())) as taken:
        assert not list(usual[1].iterdir()), "the usual folders are others'"
        shutil.rmtree(chosen)
        taken.renew()
        assert taken.path.parent.parent == usual[1]
        chosen.mkdir()
        taken.renew()
        assert taken.path.parent.parent == chosen
    assert [list(base.iterdir()) for base in (*usual, chosen)] == [[], [], []]
