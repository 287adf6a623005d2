"""Workers that are forked from one process: each is what a new interpreter would be, and none outlives the nursery."""

import json
import os
import resource
import select
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from gradwire.lab import NamespacesUnavailable, sandbox
from gradwire.lab.crew import WorkerFailed
from gradwire.lab.namespaces import Namespaces
from gradwire.lab.nursery import Nursery

# What it is, what it was given, and how it ends.
TELLS = """
import json, os, sys
print(json.dumps({
    "main": __name__, "argv": sys.argv, "mine": os.environ.get("MINE"), "names": len(os.environ), "folder": os.getcwd(),
    "session": os.getsid(0) == os.getpid(), "files": sorted(map(int, os.listdir("/proc/self/fd")))[:-1],
    "threads": len(os.listdir("/proc/self/task")), "imported": "fractions" in sys.modules,
}), flush=True)
print("to the errors", file=sys.stderr)
sys.stdin.read()
sys.exit(7)
"""
WAITS = "import sys; print('up', flush=True); sys.stdin.read()"
NAMESPACE = "import os; print(os.readlink('/proc/self/ns/net'))"


@pytest.fixture(scope="module")
def nursery():
    with Nursery(["fractions"], {"FROM": "the nursery"}) as nursery:
        yield nursery


@pytest.fixture
def script(tmp_path):
    def write(text):
        (tmp_path / "worker.py").write_text(text)
        return [sys.executable, str(tmp_path / "worker.py")]

    return write


PIPES = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}


@pytest.mark.parametrize("session", [True, False])
def test_a_worker_is_its_own_main_program_with_its_own_environment_files_and_status(
    nursery, script, tmp_path, monkeypatch, session
):
    monkeypatch.chdir(tmp_path)
    command = [*script(TELLS), "a", "b"]
    with (tmp_path / "log").open("w+b") as log:
        child = nursery.start(command, env={"MINE": "yes"}, stderr=log, start_new_session=session, **PIPES)
        told = json.loads(child.stdout.readline())
        assert child.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            child.wait(0.01)
        child.stdin.close()
        assert (child.wait(60), child.poll(), child.returncode) == (7, 7, 7)
        log.seek(0)
        assert log.read() == b"to the errors\n"
    assert told == {
        "main": "__main__", "argv": command[1:], "mine": "yes", "names": 1, "folder": str(tmp_path), "session": session,
        "files": [0, 1, 2], "threads": 1, "imported": True,
    }  # fmt: skip
    child.kill()  # nothing, as it has ended


def test_a_module_is_run_as_with_m(nursery, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    child = nursery.start([sys.executable, "-m", "json.tool", "--help"], env={}, stdout=subprocess.PIPE)
    assert (b"usage" in child.stdout.read(), child.wait(60)) == (True, 0)


def test_errors_may_go_where_the_output_goes(nursery, script):
    text = "import sys; print('out', flush=True); print('err', file=sys.stderr)"
    child = nursery.start(
        script(text), env={}, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    assert (child.stdout.read(), child.wait(60)) == (b"out\nerr\n", 0)


def test_each_worker_hears_the_end_of_its_own_input_whoever_came_after_it(nursery, script):
    command = script(WAITS)
    children = [nursery.start(command, env={}, **PIPES) for _ in range(3)]
    assert [child.stdout.readline() for child in children] == [b"up\n"] * 3
    for child in children:
        child.stdin.close()
        assert (child.wait(60), child.stdout.read()) == (0, b"")


def test_a_signal_is_its_status_as_of_a_child(nursery, script):
    command = script(WAITS)
    asked, ended = (nursery.start(command, env={}, **PIPES) for _ in range(2))
    asked.terminate()
    ended.kill()
    assert (asked.wait(60), ended.wait(60)) == (-15, -9)


def rest_of(process):
    """What comes until nobody has the other end of its output any more."""
    assert select.select([process.stdout], [], [], 30)[0], "somebody has it"
    return process.stdout.read()


def test_workers_end_with_the_nursery_and_with_whoever_has_it(script):
    with Nursery([]) as nursery:
        child = nursery.start(script(WAITS), env={}, **PIPES)
        assert child.stdout.readline() == b"up\n"
    assert child.wait(60) == -9
    assert rest_of(child) == b"", "it has ended"
    leader = f"""
import subprocess, sys
from gradwire.lab.nursery import Nursery
if __name__ == "__main__":
    child = Nursery([]).start({script(WAITS)!r}, env={{}}, stdin=subprocess.PIPE)
    sys.stdin.read()
    __import__("os")._exit(3)
"""
    running = subprocess.Popen([sys.executable, "-c", leader], **PIPES)
    assert running.stdout.readline() == b"up\n"
    running.stdin.close()
    assert (running.wait(60), rest_of(running)) == (3, b""), "the worker held this pipe"


def test_what_cannot_be_imported_is_told(script):
    with Nursery(["no_such_module"]) as nursery:
        for _ in range(2):
            with pytest.raises(WorkerFailed, match=r"(?s)no worker could be forked.*No module named 'no_such_module'"):
                nursery.start(script(WAITS), env={})


def test_a_process_that_a_module_starts_is_none_of_its_workers(script, tmp_path, monkeypatch):
    (tmp_path / "starts.py").write_text("import subprocess\nsubprocess.Popen(['true'])\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    with Nursery(["starts"]) as nursery:
        for status in (3, 4):
            child = nursery.start(script(f"import sys; sys.exit({status})"), env=dict(os.environ))
            assert child.wait(60) == status


def test_modules_of_the_folder_it_is_started_in_are_not_imported(script, tmp_path, monkeypatch):
    """By neither it nor a worker: whoever may write there would decide what root runs."""
    folder = tmp_path / "anybodys"
    folder.mkdir()
    for name in ("json", "select", "fractions", "decimal"):
        (folder / f"{name}.py").write_text("raise SystemExit('of the folder')")
    monkeypatch.chdir(folder)
    with Nursery(["fractions"]) as nursery:
        child = nursery.start(script("import decimal, sys; sys.exit(3)"), env={})
        assert child.wait(60) == 3
        child = nursery.start([sys.executable, "-m", "json.tool", "--help"], env={}, stdout=subprocess.PIPE)
        assert (b"usage" in child.stdout.read(), child.wait(60)) == (True, 0)


def test_a_worker_imports_from_the_folder_of_its_script(script, tmp_path):
    (tmp_path / "beside.py").write_text("STATUS = 3")
    with Nursery([]) as nursery:
        assert nursery.start(script("import beside, sys; sys.exit(beside.STATUS)"), env={}).wait(60) == 3


def test_it_is_ended_also_while_it_imports(tmp_path, monkeypatch):
    (tmp_path / "endless.py").write_text("import time\nopen('begun', 'w').close()\ntime.sleep(600)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.chdir(tmp_path)
    with Nursery(["endless"]) as nursery:
        while not (tmp_path / "begun").exists():
            assert nursery._process.poll() is None
            os.sched_yield()
    assert nursery._process.returncode == -9


def test_a_worker_for_which_there_is_no_room_is_told_and_later_ones_are_forked(script):
    """Of descriptors: the limit of processes counts all of a user's."""
    command = script("import sys; sys.exit(3)")
    with Nursery([]) as nursery:
        assert nursery.start(command, env={}).wait(60) == 3
        before = resource.prlimit(nursery._process.pid, resource.RLIMIT_NOFILE)
        few = 6  # it has the streams and two more among them
        resource.prlimit(nursery._process.pid, resource.RLIMIT_NOFILE, (few, before[1]))
        with pytest.raises(WorkerFailed, match=r"(?s)no worker could be forked.*Too many open files"):
            nursery.start(command, env={})
        resource.prlimit(nursery._process.pid, resource.RLIMIT_NOFILE, before)
        assert nursery.start(command, env={}).wait(60) == 3


@pytest.mark.parametrize("command", [[sys.executable], [sys.executable, "-c", "pass"], ["sh", "x"]])
def test_another_command_is_refused(nursery, command):
    with pytest.raises(ValueError, match=r"a script or a module of"):
        nursery.start(command, env={})


def test_several_threads_may_ask_at_once(nursery, script):
    command, statuses = script("import sys; sys.exit(int(sys.argv[1]))"), {}

    def ask(number):
        statuses[number] = nursery.start([*command, str(number)], env={}).wait(60)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert statuses == {number: number for number in range(20)}


def test_a_worker_is_in_the_network_namespace_of_the_thread_that_asked(script, tmp_path):
    def look() -> int:
        namespaces, found, command = Namespaces(), [], script(NAMESPACE)
        with Nursery([]) as nursery:
            for host in (namespaces.add(), namespaces.add()):
                child = namespaces.spawn(host, command, start=nursery.start, env={}, stdout=subprocess.PIPE)
                with namespaces.on_host(host):
                    here = os.readlink("/proc/thread-self/ns/net")
                found.append(child.stdout.read().decode().strip() == here)
            found.append(nursery.start(command, env={}, stdout=subprocess.PIPE).stdout.read().decode().strip()
                         == os.readlink("/proc/thread-self/ns/net"))  # fmt: skip
            namespaces.end_programs()
        namespaces.close()
        Path(tmp_path / "found").write_text(repr(found))
        return 0

    try:
        assert sandbox.run(look) == 0
    except NamespacesUnavailable as error:
        pytest.skip(str(error))
    assert (tmp_path / "found").read_text() == "[True, True, True]"
