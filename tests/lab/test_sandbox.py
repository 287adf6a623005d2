"""The sandbox: what is made in it is gone with it, however it ends; its result is the caller's."""

import errno
import gc
import os
import select
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from gradwire.lab import LabError, NamespacesUnavailable, sandbox

TIMEOUT_S = 300


pytestmark = pytest.mark.usefixtures("namespaces")


def links() -> list[str]:
    return sorted(os.listdir("/sys/class/net"))


def test_the_exit_status_of_the_function_is_returned():
    assert sandbox.run(lambda: 7) == 7


@pytest.mark.parametrize("is_due", [False, True], ids=["later", "with the fork"])
def test_what_the_caller_left_for_its_collector_ends_in_the_caller_alone(is_due):
    ended_in = []

    class Left:
        def __del__(self):
            ended_in.append(os.getpid())

    def allocate_and_collect() -> int:
        kept = [[] for _ in range(1000)]
        gc.collect()
        return len(ended_in) if len(kept) == 1000 else 2

    def leave() -> None:
        left = [Left()]
        left.append(left)

    before, allocates = gc.get_threshold(), [is_due]
    os.register_at_fork(after_in_child=lambda: [[] for _ in range(1000 * any(allocates))])
    gc.collect()
    gc.set_threshold(1_000_000)  # or it might go before
    try:
        leave()
        if is_due:
            gc.set_threshold(500)
        assert sandbox.run(allocate_and_collect) == 0
    finally:
        gc.set_threshold(*before)
        allocates.clear()
    gc.collect()
    assert ended_in == [os.getpid()]


def test_a_lab_error_is_one_line_and_status_1(capfd):
    def fail() -> int:
        raise LabError("no such luck")

    assert sandbox.run(fail) == 1
    assert capfd.readouterr().err == "error: no such luck\n"


def test_the_network_is_its_own_and_gone_afterwards():
    before = links()

    def main() -> int:
        subprocess.run(["ip", "link", "add", "left-over", "type", "veth", "peer", "name", "other"], check=True)
        return 0

    assert sandbox.run(main) == 0
    assert links() == before


def test_the_function_is_a_child_of_process_1_and_processes_it_leaves_are_killed():
    reader, writer = os.pipe()

    def main() -> int:
        os.set_inheritable(writer, True)
        subprocess.Popen(["sleep", "600"], pass_fds=[writer], start_new_session=True)
        return 0 if os.getppid() == 1 else 1

    assert sandbox.run(main) == 0
    os.close(writer)
    assert_closed(reader)


def test_what_a_killed_program_leaves_is_reaped_and_children_keep_their_status():
    def main() -> int:
        child = subprocess.Popen(["sh", "-c", "exit 7"])
        parent = subprocess.Popen(["sh", "-c", "sleep 600 & echo $!; exec sleep 600"], stdout=subprocess.PIPE)
        orphan = int(parent.stdout.readline())
        parent.kill()
        parent.wait()
        os.kill(orphan, signal.SIGKILL)
        deadline = time.monotonic() + TIMEOUT_S
        try:
            while time.monotonic() < deadline:
                os.kill(orphan, 0)
                os.sched_yield()
        except ProcessLookupError:
            return child.wait()
        return 1

    assert sandbox.run(main) == 7


def test_a_killed_function_has_the_shells_status():
    assert sandbox.run(lambda: os.kill(os.getpid(), signal.SIGKILL)) == 128 + signal.SIGKILL


SCRIPT = """
import os, signal, subprocess, sys
from gradwire.lab import sandbox
def main():
    subprocess.Popen(["sleep", "600"], pass_fds=[1], start_new_session=True)
    print("up", flush=True)
    signal.pause()
    return 0
sys.exit(sandbox.run(main))
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_killed_caller_takes_everything_with_it(number):
    with subprocess.Popen([sys.executable, "-c", SCRIPT], stdout=subprocess.PIPE) as caller:
        assert caller.stdout.readline() == b"up\n"
        caller.send_signal(number)
        assert caller.wait(TIMEOUT_S) == -number
        assert_closed(caller.stdout.fileno())  # every process that held the output has ended


IN_ORDER = """
import select, sys
from gradwire.lab import sandbox
def main():
    try:
        print("up", flush=True)
        while True:  # pause() would wait for ever for a signal that came just before it
            select.select([], [], [], 0.05)
    except (SystemExit, KeyboardInterrupt) as end:
        print("leaving with", getattr(end, "code", 130), flush=True)
        sys.stdin.read()  # what another signal would end
        print("left", flush=True)
        raise
sys.exit(sandbox.run(main, terminates_in_order=True))
"""


@pytest.mark.parametrize("whole_group", [False, True])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_terminated_or_interrupted_caller_that_wants_it_so_lets_the_function_leave_once(whole_group, number):
    """To a whole group it is sent many times: to the function's process directly, as a terminal's Ctrl-C is, and by those above it."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", IN_ORDER], **pipes, start_new_session=True) as caller:
        assert caller.stdout.readline() == b"up\n"
        for _ in range(2):
            (os.killpg if whole_group else os.kill)(caller.pid, number)
        status = 128 + number
        assert caller.stdout.readline() == f"leaving with {status}\n".encode()
        (os.killpg if whole_group else os.kill)(caller.pid, number)
        caller.stdin.close()
        assert caller.stdout.read() == b"left\n"
        assert caller.wait(TIMEOUT_S) == status


AFTER_A_FORK = """
import os, signal, sys
fork, forks = os.fork, []
def slow_fork():
    forks.append(fork())
    if forks[-1] and len(forks) == int(sys.argv[1]):
        while not signal.sigpending() & {signal.SIGINT, signal.SIGTERM, signal.SIGHUP}:
            os.sched_yield()
    return forks[-1]
os.fork = slow_fork
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
@pytest.mark.parametrize("process", ["caller", "keeper", "process 1"])
def test_a_signal_that_comes_right_after_a_fork_is_passed_on(process, number):
    """Each of them has forked, and the function runs, before it has said what the signal shall do."""
    fork = {"caller": 1, "keeper": 2, "process 1": 3}[process]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", AFTER_A_FORK + IN_ORDER, str(fork)], **pipes) as caller:
        assert caller.stdout.readline() == b"up\n"
        caller.send_signal(number)
        status = 128 + number
        assert caller.stdout.readline() == f"leaving with {status}\n".encode()
        caller.stdin.close()
        assert caller.stdout.read() == b"left\n"
        assert caller.wait(TIMEOUT_S) == status


SEES_MOUNTS = """
import os, sys
from gradwire.lab import sandbox
def main():
    print("up", flush=True)
    sys.stdin.readline()
    return len(os.listdir(sys.argv[1]))
sys.exit(sandbox.run(main))
"""


def test_what_is_mounted_outside_is_so_inside_too(tmp_path):
    """As the runtime directory of the next login: a lab's socket is there, or nobody finds it."""

    def outside() -> int:
        subprocess.run(["mount", "--make-rshared", "/"], check=True)
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        with subprocess.Popen([sys.executable, "-c", SEES_MOUNTS, tmp_path], **pipes) as inside:
            assert inside.stdout.readline() == b"up\n"
            subprocess.run(["mount", "-t", "tmpfs", "none", tmp_path], check=True)
            for name in ("one", "two", "three"):
                (tmp_path / name).touch()
            inside.stdin.close()
            return inside.wait(TIMEOUT_S)

    assert sandbox.run(outside) == 3
    assert not list(tmp_path.iterdir())


def test_a_hang_up_that_is_ignored_stays_so():
    """As `nohup` has it."""
    program = f"import signal; signal.signal(signal.SIGHUP, signal.SIG_IGN)\n{IN_ORDER}"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", program], **pipes, start_new_session=True) as caller:
        assert caller.stdout.readline() == b"up\n"
        os.killpg(caller.pid, signal.SIGHUP)
        os.kill(caller.pid, signal.SIGTERM)
        assert caller.stdout.readline() == f"leaving with {128 + signal.SIGTERM}\n".encode()
        caller.stdin.close()
        assert caller.wait(TIMEOUT_S) == 128 + signal.SIGTERM


def test_the_callers_own_signal_mask_and_handlers_stay():
    def main() -> int:
        return len(signal.pthread_sigmask(signal.SIG_BLOCK, set()) & {signal.SIGINT, signal.SIGTERM, signal.SIGHUP})

    def own():
        return (
            signal.pthread_sigmask(signal.SIG_BLOCK, set()),
            signal.getsignal(signal.SIGINT),
            signal.getsignal(signal.SIGTERM),
            signal.getsignal(signal.SIGHUP),
        )

    before = own()
    assert sandbox.run(main) == 0
    assert sandbox.run(main, terminates_in_order=True) == 0
    assert own() == before


def test_a_thread_that_is_not_the_main_one_may_run_it():
    with ThreadPoolExecutor() as pool:
        assert pool.submit(sandbox.run, lambda: 7).result() == 7


@pytest.mark.parametrize("send", [os.kill, os.killpg], ids=["caller", "group"])
def test_an_interrupt_ends_it_with_the_shells_status(send):
    """To the caller alone, as from another program, or to its group, as from a terminal."""
    with subprocess.Popen([sys.executable, "-c", SCRIPT], stdout=subprocess.PIPE, start_new_session=True) as caller:
        assert caller.stdout.readline() == b"up\n"
        send(caller.pid, signal.SIGINT)
        assert caller.wait(TIMEOUT_S) == sandbox.EXIT_INTERRUPTED
        assert_closed(caller.stdout.fileno())


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become somebody else")
def test_an_unprivileged_user_needs_no_root(tmp_path):
    interpreter = Path("/usr/bin/python3")  # one that another user may read
    if not interpreter.exists():
        pytest.skip("no system-wide python3")
    package = Path(sandbox.__file__).parents[1]
    subprocess.run(["cp", "-r", package / "lab", tmp_path / "lab"], check=True)
    program = "import sys; sys.path.insert(0, sys.argv[1]); import lab_user"
    (tmp_path / "lab_user.py").write_text(UNPRIVILEGED)
    tmp_path.chmod(0o755)
    reachable = all(parent.stat().st_mode & 0o1 for parent in tmp_path.parents)
    if not reachable:
        for parent in tmp_path.parents:
            if parent.owner() == "root" and parent != Path("/"):
                parent.chmod(parent.stat().st_mode | 0o11)
    command = [
        "setpriv",
        "--reuid",
        "65534",
        "--regid",
        "65534",
        "--clear-groups",
        interpreter,
        "-c",
        program,
        tmp_path,
    ]
    result = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert (result.returncode, result.stdout) == (0, "65534 becomes 0\n"), result.stderr


@pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("unshare"), reason="needs root and unshare")
def test_a_container_that_hides_parts_of_proc_is_told_so():
    """There Linux lets nobody who has made himself a user namespace mount another /proc; root without its rights is such a one."""
    program = "from gradwire.lab import sandbox; sandbox.run(lambda: print('it ran') or 0)"
    hidden = "mount -t tmpfs none /proc/tty && exec setpriv --bounding-set=-sys_admin --inh-caps=-sys_admin"
    command = ["unshare", "--mount", "sh", "-c", f'{hidden} "$@"', "sh", sys.executable, "-c", program]
    result = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert "it ran" not in result.stdout
    assert "NamespacesUnavailable: no /proc of its own for the lab here" in result.stderr


@pytest.mark.parametrize(
    ("number", "there", "told", "not_told"),
    [
        (errno.ENOSPC, {"user/max_user_namespaces": "0", "user/max_net_namespaces": "9"},
         ["user.max_user_namespaces=0 user.max_net_namespaces=9)"], ["run as root", "max_pid", "unprivileged_userns"]),
        (errno.EPERM, {"kernel/unprivileged_userns_clone": "0"},
         ["run as root", "(sysctl kernel.unprivileged_userns_clone=1)"], ["apparmor", "max_"]),
        (errno.EPERM, {"kernel/unprivileged_userns_clone": "1"}, ["run as root", "--privileged"], ["sysctl"]),
    ],
)  # fmt: skip
def test_where_there_are_no_namespaces_it_is_said_why_and_what_this_kernel_has_against_it(
    tmp_path, monkeypatch, number, there, told, not_told
):
    for name, value in there.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(f"{value}\n")

    def refuse() -> None:
        raise OSError(number, "")

    monkeypatch.setattr(sandbox, "_SYSCTLS", tmp_path)
    monkeypatch.setattr(sandbox, "_enter_namespaces", refuse)
    with pytest.raises(NamespacesUnavailable) as refused:
        sandbox.run(lambda: 0)
    text = str(refused.value)
    assert f"no network namespaces here ({os.strerror(number)})" in text
    assert [word for word in told if word not in text] == [word for word in not_told if word in text] == [], text


def test_a_status_of_the_function_is_not_taken_for_one_of_the_keeper():
    assert sandbox.run(lambda: sandbox._EXIT_NO_NAMESPACES) == sandbox._EXIT_NO_NAMESPACES


def test_streams_that_the_caller_has_closed_are_no_error():
    program = "import sys; from gradwire.lab import sandbox; sys.exit(sandbox.run(lambda: 7))"
    command = ["sh", "-c", 'exec "$@" >&- 2>&-', "sh", sys.executable, "-c", program]
    assert subprocess.run(command, check=False, timeout=TIMEOUT_S).returncode == 7


UNPRIVILEGED = """
import importlib.util, os, subprocess, sys, types
folder = sys.argv[1]
package = types.ModuleType("gradwire")
package.__path__ = [folder]
sys.modules["gradwire"] = package
from gradwire.lab import Cluster, sandbox
user = os.geteuid()
def main():
    with Cluster(2, loss=0.5) as cluster:
        cluster.loss_counters()
    print(f"{user} becomes {os.geteuid()}", flush=True)
    return 0
sys.exit(sandbox.run(main))
"""


def assert_closed(descriptor: int) -> None:
    """The other end of a pipe is closed by everyone within the time limit."""
    ready, _, _ = select.select([descriptor], [], [], TIMEOUT_S)
    assert ready
    assert os.read(descriptor, 1) == b""
