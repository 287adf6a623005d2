"""The status socket's name and life: whose it is, and that nobody takes a living one for a dead one's."""

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest
from gradwire.lab import NamespacesUnavailable, sandbox
from gradwire.observe.client import find_sockets, job_of, process_of
from gradwire.observe.status import StatusServer, status_folder

SERVERS = 200
NOBODY, PR_SET_DUMPABLE = 65534, 4
LOOK = "from gradwire.observe.client import find_sockets\nprint('looks', flush=True)\nwhile True: find_sockets()"


@pytest.fixture(autouse=True)
def _folder(short_folder, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(short_folder))


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
    assert os.stat("/proc/self/ns/pid").st_ino not in {int(namespace) for _, namespace in names}


def test_a_socket_that_another_process_has_made_since_stays_when_this_one_stops():
    server = StatusServer("job", 0, {})
    server.path.unlink()
    server.path.touch()
    server.stop()
    assert server.path.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_root_of_a_users_own_namespace_has_the_users_folder(monkeypatch):
    """Not root's, which would then belong to somebody else."""
    monkeypatch.delenv("XDG_RUNTIME_DIR")
    reader, writer = os.pipe()

    def main():
        subprocess.run(["mount", "-t", "tmpfs", "none", "/tmp"], check=True)
        os.write(writer, f"{os.geteuid()} {status_folder()}".encode())
        return 0

    child = os.fork()
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
