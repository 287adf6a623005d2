"""The status socket's name and life: whose it is, and that nobody takes a living one for a dead one's."""

import contextlib
import ctypes
import json
import logging
import os
import shutil
import socket
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from click.testing import CliRunner
from gradwire.cli import trace
from gradwire.errors import StatusFolderError
from gradwire.lab import NamespacesUnavailable, sandbox
from gradwire.observe import client, status
from gradwire.observe.client import Sources, find_sockets, job_of, process_of
from gradwire.observe.status import CLIENTS_MAX, StatusServer, is_alive, status_folder

SERVERS = 200
PATIENCE_S = 30.0
NOBODY, PR_SET_DUMPABLE = 65534, 4
START = """
import sys
from gradwire.observe.status import StatusServer
StatusServer(sys.argv[1], 0, {})
print("here", flush=True)
input()
"""
LOOK = "from gradwire.observe.client import find_sockets\nprint('looks', flush=True)\nwhile True: find_sockets()"


@pytest.fixture(autouse=True)
def _folder(short_folder, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(short_folder))


def test_how_many_calls_are_wanted_reaches_timelines_alone():
    asked = []

    def timelines(**options):
        asked.append(options)
        return '{"groups": []}'

    server = StatusServer("job", 0, {"stats": dict, "timelines": timelines})
    try:
        assert client.ask(server.path, "timelines", calls=3) == {"groups": []}, "a text is JSON already"
        assert client.ask(server.path, "timelines", calls=-1) == client.ask(server.path, "timelines") == {"groups": []}
        assert client.ask(server.path, "stats", calls=3) == {}
    finally:
        server.stop()
    assert asked == [{"calls": 3}, {"calls": 0}, {}]


def test_what_is_left_of_an_answer_is_not_copied_with_each_part_of_it(monkeypatch):
    """An answer has tens of megabytes, and a client that reads slowly takes it in thousands of parts."""
    sent_from = []

    class Slow(socket.socket):
        def send(self, data, *flags):
            sent_from.append(memoryview(data).obj)
            return super().send(data[:1000], *flags)

    monkeypatch.setattr(status, "stays_here", lambda made: Slow(fileno=made.detach()))
    server = StatusServer("job", 0, {"timelines": lambda: {"said": "x" * 50_000}})
    try:
        assert client.ask(server.path, "timelines") == {"said": "x" * 50_000}
    finally:
        server.stop()
    assert len(sent_from) > 50
    assert all(source is sent_from[0] for source in sent_from)


def test_who_looks_while_a_rank_starts_removes_none_of_its_sockets():
    with subprocess.Popen([sys.executable, "-c", LOOK], stdout=subprocess.PIPE) as looking:
        assert looking.stdout.readline() == b"looks\n"
        servers, found = [], []
        try:
            for number in range(SERVERS):
                servers.append(StatusServer("job", number, {}))
                for before in servers[:-1]:  # it has had a while to be removed
                    found.append(before.path.is_socket())
                    before.stop()
                del servers[:-1]
            assert looking.poll() is None, "nobody has looked"
        finally:
            looking.kill()
    servers.pop().stop()
    assert sum(found) == SERVERS - 1
    assert list(status_folder().iterdir()) == []


def test_a_name_tells_job_rank_and_process_and_those_of_another_namespace_have_others(tmp_path):
    server = StatusServer("10.0.0.1:29400", 3, {})
    assert find_sockets("10.0.0.1") == [server.path]
    assert (job_of(server.path), process_of(server.path)) == ("10.0.0.1:29400", f"rank 3 (process {os.getpid()})")
    found = tmp_path / "found"

    def main():
        namespace = StatusServer("job", 0, {})
        found.write_text(namespace.path.name)
        namespace.stop()
        return 0

    names = []
    try:
        for _ in range(2):  # processes of the same number
            assert sandbox.run(main) == 0
            names.append(found.read_text().removesuffix(".sock").split("-"))
    except NamespacesUnavailable as error:
        pytest.skip(str(error))
    finally:
        server.stop()
    assert names[0][0] == names[1][0]
    assert os.stat("/proc/self/ns/pid").st_ino not in {int(namespace) for _, namespace, _ in names}
    assert {host for _, _, host in names} == {server.path.stem.rpartition("-")[2]}


def left_behind(name):
    """A socket that refuses: of a process that has died, or of one of another host."""
    path = status_folder() / name
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(path))
    return path


def of_another_host(monkeypatch, tmp_path):
    """Name of what a process that may well live has there."""
    with monkeypatch.context() as elsewhere:
        (tmp_path / "boot_id").write_text("another one")
        elsewhere.setattr(status, "_BOOT_ID", tmp_path / "boot_id")
        return f"job.0.{status._process()}.sock"


def test_a_socket_of_another_host_is_left_where_it_is(monkeypatch, tmp_path):
    """On a file system that both share: nobody answers there from here, and its process may live."""
    theirs = left_behind(of_another_host(monkeypatch, tmp_path))
    assert find_sockets() == []
    server = StatusServer("job", 1, {})
    assert find_sockets() == [server.path]
    server.stop()
    assert theirs.is_socket()


def test_a_socket_of_another_host_of_which_nobody_has_said_for_a_day_that_it_is_in_use_is_removed(
    monkeypatch, tmp_path
):
    theirs = left_behind(of_another_host(monkeypatch, tmp_path))
    os.utime(theirs, (0, time.time() - status.ELSEWHERE_S - 60))
    assert find_sockets() == []
    assert not theirs.exists()


def test_a_rank_says_again_and_again_that_its_socket_is_in_use(monkeypatch):
    monkeypatch.setattr(status, "LOOK_EVERY_S", 0.05)
    server = StatusServer("job", 0, {})
    try:
        os.utime(server.path, (0, 0))
        end = time.monotonic() + PATIENCE_S
        while server.path.lstat().st_mtime == 0 and time.monotonic() < end:
            pass
        assert server.path.lstat().st_mtime > 0
    finally:
        server.stop()


@pytest.mark.parametrize("name", ["job.0.1-2.sock", "job.0.1-4026531836.sock"])
def test_what_earlier_versions_have_left_is_removed(name):
    left = left_behind(name)
    assert find_sockets() == []
    assert not left.exists()


def test_a_socket_that_another_process_has_made_since_stays_when_this_one_stops():
    server = StatusServer("job", 0, {})
    server.path.unlink()
    server.path.touch()
    server.stop()
    assert server.path.exists()


def test_who_clears_up_old_files_leaves_the_socket():
    """Of months: of a folder for temporary files it takes those that have no sticky bit, or that nobody has used for long."""
    server = StatusServer("job", 0, {})
    mode = server.path.lstat().st_mode
    server.stop()
    assert stat.S_ISSOCK(mode)
    assert stat.S_IMODE(mode) == 0o600 | stat.S_ISVTX


def found_within(seconds):
    end = time.monotonic() + seconds
    while not (found := find_sockets("job")) and time.monotonic() < end:
        pass
    return found


def followed(path):
    """A client, which has had one answer and gets one after the other."""
    lines = status.connect(path, PATIENCE_S).makefile("rw")
    lines.write('{"ask": "stats", "every_s": 0.1}\n')
    lines.flush()
    assert json.loads(lines.readline()) == {"rank": 0}
    return lines


@pytest.mark.parametrize("goes", ["file", "folder"])
def test_a_socket_that_somebody_has_removed_is_made_anew(monkeypatch, goes):
    monkeypatch.setattr(status, "LOOK_EVERY_S", 0.05)
    server = StatusServer("job", 0, {"stats": lambda: {"rank": 0}})
    try:
        before = followed(server.path)
        if goes == "file":
            server.path.unlink()
        else:
            shutil.rmtree(server.path.parent)
        assert found_within(PATIENCE_S) == [status_folder() / server.path.name]
        assert json.loads(before.readline()) == {"rank": 0}, "who was connected stays so"
        followed(server.path).close()
        before.close()
    finally:
        server.stop()
    assert list(status_folder().iterdir()) == []


def test_a_runtime_directory_that_went_with_the_last_login_is_not_waited_for(monkeypatch, short_folder):
    """The socket is made where a rank without one has it."""
    monkeypatch.setattr(status, "LOOK_EVERY_S", 0.05)
    elsewhere = short_folder / "elsewhere"
    elsewhere.mkdir()
    runtime = short_folder / "runtime"
    runtime.mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
    server = StatusServer("job", 0, {})
    try:
        monkeypatch.setattr(status, "status_folder", lambda: elsewhere)
        shutil.rmtree(runtime)
        there = elsewhere / server.path.name
        end = time.monotonic() + PATIENCE_S
        while not there.is_socket() and time.monotonic() < end:
            pass
        assert is_alive(there)
    finally:
        server.stop()
    assert list(elsewhere.iterdir()) == []


def test_a_socket_that_cannot_be_made_anew_is_told_once_and_made_when_it_can(monkeypatch, caplog):
    monkeypatch.setattr(status, "LOOK_EVERY_S", 0.05)
    caplog.set_level(logging.INFO, logger="gradwire")
    server = StatusServer("job", 0, {})
    looks = threading.Semaphore(0)

    def no_folder():
        looks.release()
        raise StatusFolderError("no folder", folder="nowhere")

    try:
        with monkeypatch.context() as refused:
            refused.setattr(status, "status_folder", no_folder)
            server.path.unlink()
            assert all(looks.acquire(timeout=PATIENCE_S) for _ in range(3))
        assert found_within(PATIENCE_S) == [server.path]
    finally:
        server.stop()
    first, *later = (record.levelname for record in caplog.records if "has gone" in record.message)
    assert first == "WARNING"
    assert set(later) == {"INFO"}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_root_of_a_users_own_namespace_has_the_users_folder(monkeypatch):
    """Not root's, which would then belong to somebody else."""
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    reader, writer = os.pipe()

    def main():
        subprocess.run(["mount", "-t", "tmpfs", "none", "/tmp"], check=True)
        os.write(writer, f"{os.geteuid()} {status_folder()}".encode())
        return 0

    child = sandbox.forked()
    if child == 0:
        try:
            os.setresgid(NOBODY, NOBODY, NOBODY)
            os.setresuid(NOBODY, NOBODY, NOBODY)
            ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)  # or its own files in /proc would stay root's
            os._exit(sandbox.run(main))
        except NamespacesUnavailable:
            os._exit(77)
        finally:
            os._exit(1)
    os.close(writer)
    _, status = os.waitpid(child, 0)
    if os.waitstatus_to_exitcode(status) == 77:
        pytest.skip("users cannot make namespaces here")
    with os.fdopen(reader) as told:
        assert told.read() == f"0 /tmp/gradwire-{NOBODY}"
    assert not Path(f"/tmp/gradwire-{NOBODY}").exists()


@contextlib.contextmanager
def stopped_rank(job):
    """Listens as a rank does, and takes nobody."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(status_folder() / f"{job}.0.1-1.sock"))
        listener.listen(CLIENTS_MAX)
        listener.settimeout(10)
        yield listener


def fill(listener, stack):
    """Has as many wait there as can."""
    with contextlib.suppress(BlockingIOError):
        while True:
            client = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            client.setblocking(False)
            client.connect(listener.getsockname())


def test_a_stopped_rank_for_which_as_many_wait_as_can_is_found_and_named():
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(stopped_rank("job"))
        fill(listener, stack)
        assert find_sockets() == [Path(listener.getsockname())]
        ran = CliRunner().invoke(trace.command, ["job"])
    assert "rank 0 (process 1) is left out, it does not answer" in ran.output


def test_who_watches_waits_for_a_stopped_rank_until_there_is_room():
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(stopped_rank("job"))
        fill(listener, stack)
        sources = Sources(0.1)
        sources.watch_sockets("job")
        for _ in range(CLIENTS_MAX + 1):  # it goes on
            stack.enter_context(listener.accept()[0])
        follower = stack.enter_context(listener.accept()[0])
        follower.settimeout(10)
        assert json.loads(follower.recv(4096)) == {"ask": "stats", "every_s": 0.1}
        assert sources.is_any


@pytest.mark.parametrize(("every_s", "job", "connections"), [(0.0, "job", 2), (3600.0, "other", 1)])
def test_who_watches_does_not_connect_to_a_stopped_rank_again_and_again(every_s, job, connections):
    """Once to find it and once to follow it: each more would wait there until nobody else can."""
    own = StatusServer("other", 0, {"stats": dict})
    sources = Sources(every_s)
    try:
        with stopped_rank("job") as listener, contextlib.ExitStack() as stack:
            sources.watch_sockets(job)
            for _ in range(connections):
                stack.enter_context(listener.accept()[0])
            for _ in range(5):
                sources.watch_sockets(job)
            listener.setblocking(False)
            with pytest.raises(BlockingIOError):
                stack.enter_context(listener.accept()[0])
    finally:
        own.stop()


def waiting(listener):
    """What those who wait there have sent."""
    sent = []
    listener.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while True:
            with listener.accept()[0] as caller:
                caller.settimeout(10)
                sent.append(caller.recv(4096))
    return sent


def test_who_watches_a_job_by_its_port_asks_a_stopped_rank_once(monkeypatch):
    """Each question is waited for, and stays there until nobody else can ask."""
    sources = Sources(0.0)
    with stopped_rank("job") as listener:
        with monkeypatch.context() as patch:
            patch.setattr(client, "ANSWER_TIMEOUT_S", 0.01)
            sources.watch_sockets("29400")
        own = StatusServer("other", 0, {"stats": lambda: {"port": 29400}})
        try:
            sources.watch_sockets("29400")
            assert sources.is_any
            assert [sent for sent in waiting(listener) if sent] == [b'{"ask": "stats"}\n']
        finally:
            own.stop()


def test_a_rank_that_is_watched_is_not_asked_whether_its_job_has_the_port():
    with stopped_rank("job") as listener:
        path = Path(listener.getsockname())
        assert find_sockets("29400", {path.name}) == [path]
        assert waiting(listener) == []


def test_a_process_that_starts_removes_what_killed_ones_have_left():
    running = [
        subprocess.Popen([sys.executable, "-c", START, job], stdout=subprocess.PIPE, stdin=subprocess.PIPE)
        for job in ("killed", "lives")
    ]
    try:
        assert [process.stdout.readline() for process in running] == [b"here\n"] * 2
        ours = status._process().partition("-")[2]
        killed, lives = (status_folder() / f"{process.args[-1]}.0.{process.pid}-{ours}.sock" for process in running)
        running[0].kill()
        running[0].wait()
        # Of containers: one listens, and of the other nobody knows by its number that it has ended.
        with stopped_rank("elsewhere"):
            left = status_folder() / "gone.0.1-2.sock"
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
                listener.bind(str(left))
            assert killed.is_socket(), "it was killed"
            server = StatusServer("new", 0, {})
            found = set(status_folder().iterdir())
            server.stop()
            assert found == {lives, server.path, status_folder() / "elsewhere.0.1-1.sock"}
    finally:
        for process in running:
            process.kill()
            process.communicate()


def test_a_process_that_starts_looks_at_a_bounded_number_of_sockets(monkeypatch):
    monkeypatch.setattr(status, "LOOKS", 3)
    for number in range(8):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
            listener.bind(str(status_folder() / f"gone.{number}.1-2.sock"))
    StatusServer("new", 0, {}).stop()
    assert len(list(status_folder().iterdir())) == 5
