"""`gradwire lab` from outside: what it builds obeys, and is gone afterwards, however it ends."""

import contextlib
import json
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from click.testing import CliRunner
from gradwire.cli import main
from gradwire.lab import sandbox
from gradwire.lab.uml_switch import PROGRAM
from lab_command import INSTALLED, PREFIX, TIMEOUT_S, Lab
from sandboxed import has_netem

KINDS = [
    "nft",
    pytest.param("soft", marks=pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")),
    pytest.param("uml", marks=pytest.mark.skipif(shutil.which(PROGRAM) is None, reason=f"{PROGRAM} is not installed")),
    pytest.param("netem", marks=pytest.mark.skipif(not has_netem(), reason="this kernel has no netem")),
]
SEND = "import socket; s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM); [s.sendto(b'x', ('10.77.0.2', 9)) for _ in range(50)]"


pytestmark = pytest.mark.usefixtures("namespaces")


@pytest.fixture(scope="module")
def running():
    """One that several tests use."""
    made = Lab()
    result = made("up", "--hosts", "2", "--switch", "nft", "--rails", "2")
    assert result.returncode == 0, result.stderr
    assert "10.77.0.1 to 10.77.0.2" in result.stdout
    yield made
    made.close()


def rows(lab):
    return {(row["host"], row["rail"]): row for row in json.loads(lab("stats", "--json").stdout)}


def test_a_program_has_the_callers_terminal_folder_and_status(running, tmp_path):
    script = "cat; pwd; echo $GRADWIRE_LAB_HOST >&2; exit 7"
    result = running("exec", "1", "--", "sh", "-c", script, input="hello\n", cwd=tmp_path)
    assert (result.stdout, result.stderr, result.returncode) == (f"hello\n{tmp_path}\n", "1\n", 7)


def test_all_hosts_run_it_at_once_and_the_worst_status_counts(running):
    result = running("exec", "all", "--", "sh", "-c", "echo on $GRADWIRE_LAB_HOST; exit $GRADWIRE_LAB_HOST")
    assert sorted(result.stdout.split("\n")) == ["", "on 0", "on 1"]
    assert result.returncode == 1


def test_a_program_gets_the_devices_of_all_rails_for_gloo_unless_the_caller_has_chosen(running, monkeypatch):
    program = ("exec", "0", "--", "sh", "-c", "echo $GLOO_SOCKET_IFNAME")
    monkeypatch.delitem(running.environment, "GLOO_SOCKET_IFNAME", raising=False)
    assert running(*program).stdout == "eth0,eth1\n"
    monkeypatch.setitem(running.environment, "GLOO_SOCKET_IFNAME", "eth1")
    assert running(*program).stdout == "eth1\n"


def test_a_lab_is_built_without_modules_of_the_current_folder(lab, tmp_path):
    """As the command itself, which is a script elsewhere: in /tmp anybody would decide what root runs."""
    (tmp_path / "click.py").write_text("raise SystemExit(9)")
    done = subprocess.run([*INSTALLED, "lab", "up", "--hosts", "1", "--switch", "nft"], env=lab.environment, cwd=tmp_path,
                          capture_output=True, text=True, timeout=TIMEOUT_S, check=False)  # fmt: skip
    assert (done.returncode, "10.77.0.1" in done.stdout) == (0, True), done.stderr


def test_ports_change_while_it_runs_and_are_counted(running):
    before = rows(running)[1, 0]["lost"]
    assert running("set", "--host", "1", "--rail", "0", "--loss", "1").returncode == 0
    assert running("exec", "0", "--", sys.executable, "-c", SEND).returncode == 0
    after = rows(running)
    assert after[1, 0]["lost"] - before == 50
    assert (after[1, 0]["loss"], after[1, 1]["loss"], after[0, 0]["loss"]) == (1, 0, 0)
    assert running("set", "--loss", "0").returncode == 0
    assert running("cut", "1").returncode == 0
    assert [row["is_cut"] for row in rows(running).values()] == [False, False, True, True]
    assert "cut" in running("stats").stdout
    assert running("heal").returncode == 0
    assert not any(row["is_cut"] for row in rows(running).values())


@pytest.mark.skipif(shutil.which(PROGRAM) is None, reason=f"{PROGRAM} is not installed")
def test_a_switch_that_is_a_kernel_gets_the_queues_of_a_script(lab):
    assert lab("up", "--hosts", "2", "--rails", "2", "--switch", "uml").returncode == 0
    arguments = ["switch", "--os", "tc", "--rate", "10", "--buffer", "256", "--port", "vec1"]
    script = CliRunner().invoke(main, arguments).stdout
    assert script.startswith("#!/bin/sh")
    loaded = lab("tc", "--rail", "1", input=script)
    assert (loaded.returncode, loaded.stdout, loaded.stderr) == (0, "", "")
    asked = [lab("tc", "--rail", rail, input=f"tc qdisc show dev {port}\n").stdout
             for rail, port in (("1", "vec1"), ("1", "vec0"), ("0", "vec1"))]  # fmt: skip
    assert [("qdisc prio 10:" in told, "qdisc netem 2:" in told) for told in asked] == [
        (True, False),
        (False, True),
        (False, True),
    ]
    assert [(row["passed"], row["rate_mbit"]) for row in rows(lab).values()] == [(0, 100)] * 3 + [(0, None)]
    assert lab("set", "--host", "1", "--rail", "1", "--loss", "0.5").returncode == 0
    assert [row["rate_mbit"] for row in rows(lab).values()] == [100] * 4
    told = lab("tc", "--rail", "1", input="tc qdisc show dev vec1\n").stdout
    assert ("qdisc prio" in told, "loss 50%" in told) == (False, True), told
    refused = lab("tc", input="true\ntc qdisc del dev vec7 root\n")
    assert (refused.returncode, "the switch refused `tc qdisc del dev vec7 root`" in refused.stderr) == (3, True)


@pytest.mark.skipif(shutil.which(PROGRAM) is None, reason=f"{PROGRAM} is not installed")
def test_figures_go_on_whatever_queue_a_script_gives_a_port(lab):
    """Also those that the lab's own queue cannot replace: of another kind with the same handle, or none at all."""

    def sent(total):
        """What is counted when the switch has had all."""
        assert lab("exec", "0", "--", sys.executable, "-c", SEND).returncode == 0
        end = time.monotonic() + 30
        while True:
            row = rows(lab)[1, 0]
            if row["passed"] + row["lost"] >= total or time.monotonic() > end:
                return row["passed"], row["lost"], row["loss"]

    assert lab("up", "--hosts", "2", "--switch", "uml", "--loss", "1").returncode == 0
    assert sent(50) == (0, 50, 1)
    root, total = "tc qdisc add dev vec1 root handle 1:", 50
    other_child = f"{root} tbf rate 10mbit burst 6056 limit 256000\ntc qdisc add dev vec1 parent 1:1 handle 2: prio\n"
    for lines in ("", f"{root} prio bands 3\n", other_child):
        done = lab("tc", input=f"tc qdisc del dev vec1 root 2>/dev/null || true\n{lines}")
        assert (done.returncode, done.stderr) == (0, "")
        total += 50
        assert sent(total) == (total - 50, 50, None)
        assert [line.split()[3:7] for line in lab("stats").stdout.splitlines()[2:]] == [["-"] * 4]
    assert lab("set", "--host", "1", "--loss", "1").returncode == 0
    assert sent(total + 50) == (total - 50, 100, 1)


def test_a_host_is_stopped_resumed_and_killed(running):
    with running.start("exec", "0", "--", "sh", "-c", "echo up; sleep 600", stdout=subprocess.PIPE) as caller:
        assert caller.stdout.readline() == "up\n"
        while running("resume", "0").stdout != "2 processes\n":  # until the shell has forked
            assert caller.poll() is None
        assert running("stop", "0").stdout == "2 processes\n"
        assert running("resume", "0").stdout == "2 processes\n"
        assert running("kill", "0").stdout == "2 processes\n"
        assert caller.wait(TIMEOUT_S) == 128 + signal.SIGKILL


@pytest.mark.parametrize("command", ["kill", "stop", "resume"])
def test_where_one_host_is_not_there_none_is_hit(running, command):
    with running.start(
        "exec", "0", "--", "sh", "-c", "echo up; read line; exit 7", stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as caller:
        assert caller.stdout.readline() == "up\n"
        refused = running(command, "0", "9")
        assert (refused.returncode, "there is no host 9" in refused.stderr) == (2, True), refused.stderr
        try:
            assert caller.communicate("\n", timeout=TIMEOUT_S) == ("", None)
        finally:
            running("kill", "0")
        assert caller.returncode == 7


def test_options_behind_the_host_are_the_programs(running):
    asked = running("exec", "0", sys.executable, "--help")
    assert (asked.returncode, asked.stdout.startswith("usage:"), "GRADWIRE_LAB_HOST" in asked.stdout) == (
        0,
        True,
        False,
    )
    counted = running("exec", "0", "sh", "-c", "echo $#", "sh", "-h", "--", "--rail", "1")
    assert (counted.returncode, counted.stdout) == (0, "4\n")
    assert "GRADWIRE_LAB_HOST" in running("exec", "--help").stdout
    assert running("exec", "0", "--").returncode == 2


def test_a_program_ends_with_its_caller(running):
    reader, writer = os.pipe()
    caller = running.start("exec", "0", "--", "sh", "-c", "echo up; exec sleep 600", stdout=writer)
    os.close(writer)
    assert os.read(reader, 10) == b"up\n"
    caller.kill()
    caller.wait()
    assert_closed(reader)


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["up"], 3, "is up already"),
        (["set", "--host", "5", "--loss", "0.1"], 2, "there is no host 5"),
        (["set", "--delay", "5"], 2, "needs netem"),
        (["set", "--buffer", "1"], 2, "is not in the range"),
        (["set", "--loss", "0.9", "--burst", "2"], 2, "bursts of 2 lose"),
        (["cut", "7"], 2, "there is no host 7"),
        (["stop", "7"], 2, "there is no host 7"),
        (["exec", "9", "--", "true"], 125, "there is no host 9"),
        (["exec", "0", "--", "no-such-program"], 127, "no-such-program: No such file"),
        (["exec", "0", "--", ""], 127, "error: '': No such file"),
        (["exec", "0", "--", "/etc/passwd/program"], 127, "Not a directory"),
        (["exec", "0", "--", "/etc/passwd"], 126, "/etc/passwd: Permission denied"),
        (["set"], 2, "nothing to change"),
        (["tc", "--rail", "7", os.devnull], 2, "there is no rail 7"),
        (["tc", os.devnull], 2, "as only one of kind uml does"),
        (["exec", "x", "--", "true"], 2, "is no host"),
        (["kill", "0", "--signal", "FOO"], 2, "there is no signal"),
    ],
)
def test_what_cannot_be_done_is_said_in_one_line(running, arguments, status, message):
    result = running(*arguments)
    assert (result.returncode, message in result.stderr) == (status, True), result.stderr
    assert "Traceback" not in result.stderr


def test_down_leaves_nothing(lab):
    links = sorted(os.listdir("/sys/class/net"))
    assert lab("up", "--hosts", "2", "--switch", "nft").returncode == 0
    reader, writer = os.pipe()
    caller = lab.start(
        "exec", "0", "--", "sh", "-c", "echo up; sleep 600 & wait", stdout=writer, stderr=subprocess.DEVNULL
    )
    os.close(writer)
    assert os.read(reader, 10) == b"up\n"
    assert lab("down").returncode == 0
    assert_closed(reader)
    assert caller.wait(TIMEOUT_S) != 0
    assert os.listdir(lab.folder) == []
    assert sorted(os.listdir("/sys/class/net")) == links
    assert lab("stats").returncode == 3
    assert lab("exec", "0", "--", "true").returncode == 125, "3 may be a program's own"
    assert os.listdir(lab.folder) == [], "who only asks leaves nothing"


def test_a_lab_whose_folder_was_removed_is_found_again_is_no_second_time_built_and_goes_down(lab):
    """As logind removes a runtime directory with the user's last logout."""
    assert lab("up", "--hosts", "1", "--switch", "nft").returncode == 0
    (lock,) = Path(lab.folder).glob("*/lab.lock")
    keeper = int(lock.read_text().split()[0])
    shutil.rmtree(lock.parent)
    end = time.monotonic() + TIMEOUT_S
    while lab("stats").returncode != 0:
        assert time.monotonic() < end
    second = lab("up", "--hosts", "1", "--switch", "nft")
    assert (second.returncode, "is up already" in second.stderr) == (3, True)
    ended = os.pidfd_open(keeper)
    assert lab("down").returncode == 0
    assert select.select([ended], [], [], TIMEOUT_S)[0]
    os.close(ended)
    assert os.listdir(lab.folder) == []


def test_down_ends_a_lab_in_the_foreground_well(lab):
    arguments = ("up", "--foreground", "--hosts", "1", "--switch", "nft")
    with lab.start(*arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as caller:
        assert caller.stdout.readline() == "ready\n"
        assert "kind nft: 10.77.0.1 to 10.77.0.1; gradwire lab down ends it" in caller.stdout.readline()
        assert lab("down").returncode == 0
        assert (caller.wait(TIMEOUT_S), caller.stderr.read()) == (0, "")


@pytest.mark.parametrize("more", [[], ["--foreground"]])
def test_what_was_built_is_told_as_json(lab, more):
    arguments = ("--name", "other", "up", "--hosts", "2", "--rails", "2", "--switch", "nft", "--json", *more)
    with lab.start(*arguments, stdout=subprocess.PIPE) as caller:
        told = json.loads(caller.stdout.readline())
        assert lab("--name", "other", "down").returncode == 0
        assert (caller.wait(TIMEOUT_S), caller.stdout.read()) == (0, "")
    addresses = [["10.77.0.1", "10.77.1.1"], ["10.77.0.2", "10.77.1.2"]]
    assert told == {"name": "other", "hosts": 2, "rails": 2, "switch": "nft", "addresses": addresses}


def test_ctrl_c_while_it_is_built_in_the_background_ends_that_too(lab):
    for _ in range(5):
        with lab.start(
            "up", "--hosts", "15", "--switch", "nft", start_new_session=True, stderr=subprocess.PIPE
        ) as caller:
            if (builder := wait_for_child(caller)) is not None:
                os.killpg(caller.pid, signal.SIGINT)  # what a terminal does: the builder has a session of its own
            said = caller.communicate(timeout=TIMEOUT_S)[1]
            if caller.returncode != 0:
                break
        assert lab("down").returncode == 0, "it was built before this process ran again"
    else:
        raise AssertionError("it was built each time before it was interrupted")
    assert builder is not None, said
    assert not Path(f"/proc/{builder}").exists()
    assert os.listdir(lab.folder) == []


def test_sigterm_while_it_is_built_in_the_background_ends_that_too(lab):
    with lab.start("up", "--hosts", "15", "--rails", "8", "--switch", "nft", stderr=subprocess.PIPE) as caller:
        builder = wait_for_child(caller)
        caller.terminate()
        said = caller.communicate(timeout=TIMEOUT_S)[1]
    assert (caller.returncode, said) == (sandbox.EXIT_TERMINATED, "")
    assert not Path(f"/proc/{builder}").exists()
    assert os.listdir(lab.folder) == []


def test_down_ends_what_is_still_being_built_and_others_are_told_so(lab):
    for _ in range(5):  # on a busy machine it may be over before the commands have begun
        with lab.start("up", "--hosts", "15", "--rails", "8", "--switch", "nft", stderr=subprocess.PIPE) as caller:
            while not any(path.read_text() for path in Path(lab.folder).glob("*/lab.lock")):
                assert caller.poll() is None
            asked, ended = lab("stats"), lab("down")
            said = caller.communicate(timeout=TIMEOUT_S)[1]
        if caller.returncode != 0 and asked.returncode != 0:
            break
    assert (asked.returncode, "is being built or taken down" in asked.stderr) == (3, True), asked.stderr
    assert (ended.returncode, ended.stderr) == (0, "")
    assert (caller.returncode, said) == (3, "error: it was taken down while it was built\n")
    assert os.listdir(lab.folder) == []


def test_of_two_that_build_one_lab_at_once_one_does(lab):
    callers = [lab.start("up", "--hosts", "8", "--switch", "nft", stderr=subprocess.PIPE) for _ in range(2)]
    told = [caller.communicate(timeout=TIMEOUT_S)[1] for caller in callers]
    assert sorted(caller.returncode for caller in callers) == [0, 3], told
    assert sum("is up already" in text for text in told) == 1
    assert sorted(lab.sockets()) == ["lab", "lab.lock"]
    assert lab("down").returncode == 0
    assert os.listdir(lab.folder) == []


def test_who_asks_for_nothing_keeps_nobody_waiting_for_good(running):
    """Nor does what is no request keep the descriptors that came with it."""
    with socket.socket(socket.AF_UNIX) as silent, socket.socket(socket.AF_UNIX) as other:
        (name,) = [name for name in running.sockets() if not name.endswith(".lock")]
        (path,) = Path(running.folder).glob(f"*/{name}")
        silent.connect(str(path))
        assert running("stats").returncode == 0
        other.connect(str(path))
        reader, writer = os.pipe()
        socket.send_fds(other, [b"nonsense\n"], [writer])
        os.close(writer)
        assert_closed(reader)


@pytest.mark.parametrize("arguments", [("up", "--switch", "nft"), ("stats",)])
def test_a_socket_whose_name_is_too_long_is_said_in_one_line(lab, arguments):
    result = lab("--name", "x" * 100, *arguments)
    assert (result.returncode, "too long" in result.stderr, result.stderr.count("\n")) == (3, True, 1), result.stderr
    assert os.listdir(lab.folder) == []


def wait_for_child(caller):
    """The first process that it has started and that has become another program; None: it ended before it was seen."""
    while caller.poll() is None:
        for status in Path("/proc").glob("[0-9]*/status"):
            with contextlib.suppress(OSError):
                is_child = f"\nPPid:\t{caller.pid}\n" in status.read_text()
                if is_child and b"--foreground" in status.with_name("cmdline").read_bytes():
                    return int(status.parent.name)
    return None


@pytest.mark.parametrize("kind", KINDS)
def test_ctrl_c_leaves_nothing(lab, kind):
    with lab.start(
        "up", "--foreground", "--hosts", "1", "--switch", kind, stdout=subprocess.PIPE, start_new_session=True
    ) as caller:
        assert caller.stdout.readline() == "ready\n"
        assert lab("stats").returncode == 0
        os.killpg(caller.pid, signal.SIGINT)  # what a terminal does
        assert caller.wait(TIMEOUT_S) == sandbox.EXIT_INTERRUPTED
        assert_closed(caller.stdout.fileno())
    assert lab.sockets() == []
    assert os.listdir(lab.temporary) == []


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_to_the_process_alone_leaves_nothing(lab, kind, number):
    arguments = ("up", "--foreground", "--hosts", "1", "--switch", kind)
    with lab.start(*arguments, stdout=subprocess.PIPE) as caller:
        assert caller.stdout.readline() == "ready\n"
        caller.send_signal(number)
        assert caller.wait(TIMEOUT_S) == 128 + number
        assert_closed(caller.stdout.fileno())
    assert os.listdir(lab.folder) == []
    assert os.listdir(lab.temporary) == []


def test_a_script_that_is_no_text_is_wrong_usage():
    found = CliRunner().invoke(main, ["lab", "tc"], input=b"\xff\xfe")
    assert (found.exit_code, type(found.exception)) == (2, SystemExit)
    assert "<stdin> is no text in UTF-8" in found.output


@pytest.mark.parametrize("kind", KINDS)
def test_a_kill_leaves_socket_and_lock_only_and_another_can_be_made(lab, kind):
    arguments = ("up", "--foreground", "--hosts", "1", "--switch", kind)
    with lab.start(*arguments, stdout=subprocess.PIPE) as caller:
        assert caller.stdout.readline() == "ready\n"
        caller.kill()
        caller.wait()
        assert_closed(caller.stdout.fileno())
    assert sorted(lab.sockets()) == ["lab", "lab.lock"]
    assert os.listdir(lab.temporary) == []
    assert lab("up", "--hosts", "1", "--switch", "nft").returncode == 0


@pytest.mark.parametrize(
    ("command", "defaults"),
    [("up", {"rate": "100", "delay": "0", "loss": "0", "burst": "1", "buffer": "256", "bucket": "four"}), ("set", {})],
)
def test_only_building_has_defaults_for_ports(command, defaults):
    """`set` leaves what is not given as it is."""
    text = " ".join(CliRunner().invoke(main, ["lab", command, "--help"]).output.split())
    options = {
        name: text.split(f"--{name} ")[1].split(" --")[0]
        for name in ("rate", "delay", "loss", "burst", "buffer", "bucket")
    }
    found = {name: re.search(r"\[default: (\w+)[\w ]*\]", told) for name, told in options.items()}
    assert {name: match[1] for name, match in found.items() if match} == defaults


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--switch nft --delay 1", "error: a delay needs netem"),
        ("--switch soft --mtu 9000", "error: the switch `soft` carries 1500 bytes at most"),
        ("--switch soft --bucket 20", "error: the small program has no token bucket"),
        ("--switch uml --mtu 9000 --buffer 8", "error: a buffer of 8192 bytes holds no packet of 9000"),
        ("--rate 100000 --delay 10000", "error: a port holds 4 GB at most"),
    ],
)
def test_options_that_contradict_each_other_are_wrong_usage(lab, options, message):
    result = lab("up", *options.split())
    assert (result.returncode, result.stderr.startswith(message)) == (2, True), result.stderr
    assert lab.sockets() == []


@pytest.mark.skipif(has_netem(), reason="this kernel has netem, which can")
def test_what_the_kind_that_auto_finds_cannot_do_is_wrong_usage_too(lab, tmp_path):
    for folder in lab.environment["PATH"].split(os.pathsep):
        for program in Path(folder).glob("*"):
            if program.name != PROGRAM and not os.path.lexists(tmp_path / program.name):
                (tmp_path / program.name).symlink_to(program)
    lab.environment["PATH"] = str(tmp_path)
    result = lab("up", "--mtu", "9000", "--delay", "1")
    assert (result.returncode, result.stderr.startswith("error: a delay needs netem")) == (2, True), result.stderr
    assert lab.sockets() == []


@pytest.mark.parametrize("closed", [(0,), (1,), (2,), (0, 1, 2)])
def test_a_program_whose_caller_has_closed_a_standard_stream_gets_the_null_device(running, closed):
    """And not the connection by which its caller hears of its end."""
    report = "import os; open(os.environ['REPORT'], 'w').write(' '.join(os.readlink(f'/proc/self/fd/{n}') for n in range(3)))"
    with tempfile.NamedTemporaryFile("r") as told:
        running.environment["REPORT"] = told.name
        words = ["exec", "0", "--", sys.executable, "-c", report]
        shut = " ".join(f"{descriptor}>&-" for descriptor in closed)
        done = subprocess.run(
            ["sh", "-c", f'exec "$@" {shut}', "sh", *PREFIX, *words], env=running.environment, capture_output=True, text=True,
            stdin=subprocess.PIPE, timeout=TIMEOUT_S, check=False,
        )  # fmt: skip
        streams = told.read().split()
    assert (done.returncode, done.stderr) == (0, "")
    assert [n for n, stream in enumerate(streams) if stream == os.devnull] == list(closed), streams


def test_a_program_that_reads_and_writes_closed_streams_comes_to_its_own_end(running):
    words = ["exec", "0", "--", "sh", "-c", "cat; echo told >&2; echo done; exit 5"]
    done = subprocess.run(["sh", "-c", 'exec "$@" <&- 2>&-', "sh", *PREFIX, *words], env=running.environment, capture_output=True,
                          text=True, stdin=subprocess.PIPE, timeout=TIMEOUT_S, check=False)  # fmt: skip
    assert (done.returncode, done.stdout) == (5, "done\n")


def test_a_large_environment_comes_through(running):
    variable = "x" * 110_000
    count = (
        "exec",
        "0",
        "--",
        sys.executable,
        "-c",
        "import os; print(sum(len(v) for v in os.environ.values()) > 12 * 110_000)",
    )
    large = {**running.environment, **{f"LARGE{index}": variable for index in range(12)}}
    done = subprocess.run([*PREFIX, *count], env=large, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "True\n", "")


def test_a_program_with_more_than_the_kernel_lets_it_have_cannot_be_run(running, monkeypatch):
    monkeypatch.setattr(os, "environ", {**running.environment, "LARGE": "x" * (1 << 21)})
    (path,) = Path(running.folder).glob("*/lab")
    monkeypatch.setattr("gradwire.cli.lab.path_of", lambda _: path)
    with tempfile.TemporaryFile() as said:
        kept = os.dup(2)
        os.dup2(said.fileno(), 2)
        try:
            result = CliRunner().invoke(main, ["lab", "exec", "0", "--", "true"])
        finally:
            os.dup2(kept, 2)
            os.close(kept)
        said.seek(0)
        assert (result.exit_code, b"Argument list too long" in said.read()) == (126, True)


def test_a_program_started_in_a_folder_that_is_gone_is_not_run(running, tmp_path):
    gone = tmp_path / "gone"
    gone.mkdir()
    done = subprocess.run(
        ["sh", "-c", 'cd "$0" && rmdir "$0" && exec "$@"', gone, *PREFIX, "exec", "0", "--", "true"], env=running.environment,
        capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (
        125,
        "error: the folder that this was started in is gone: start it in another one\n",
    )


def assert_closed(descriptor):
    """The other end of a pipe is closed by everyone within the time limit."""
    ready, _, _ = select.select([descriptor], [], [], TIMEOUT_S)
    assert ready
    assert os.read(descriptor, 1) in (b"", "")
