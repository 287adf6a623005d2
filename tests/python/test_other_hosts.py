"""`gradwire monitor --host` and `gradwire trace --host`, with a program in ssh's place: what it reaches, and how it fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from gradwire.cli import monitor
from gradwire.observe import client
from gradwire.observe.client import Sources
from gradwire.observe.status import StatusServer

COMMAND = [sys.executable, "-c", "from gradwire.cli import main; main(prog_name='gradwire')"]
PATIENCE_S = 30.0
UNREACHABLE = "sh -c 'echo bash: gradwire: command not found >&2; exit 127'"


@pytest.fixture(autouse=True)
def _folder(short_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(short_folder))


@pytest.fixture
def ranks() -> Iterator[Any]:
    """Makes ranks of this host that have reduced once, by the names of their jobs."""
    servers: list[StatusServer] = []

    def make(*jobs: str) -> None:
        for job in jobs:
            said = {"timelines": lambda job=job, **_: answer(job, 0)}
            servers.append(StatusServer(job, 0, said))

    yield make
    for server in servers:
        server.stop()


def answer(job: str, rank: int) -> dict[str, Any]:
    """To `timelines`."""
    call = {"sequence": 1, "collective": "all_reduce"}
    groups = [{"name": "group", "rank": rank, "clock": {"monotonic_ns": 0, "wall_ns": 0}, "calls": [call]}]
    return {"job": job, "rank": rank, "host": f"node{rank}", "pid": 1, "groups": groups}


def ssh(folder: Path, said: dict[str, Any]) -> str:
    """A program that takes host and command, keeps them in `asked`, and prints this answer."""
    (folder / "said").write_text(json.dumps(said) + "\n")
    shell = folder / "shell"
    shell.write_text(f'#!/bin/sh\necho "$@" > {folder}/asked\ncat {folder}/said\n')
    shell.chmod(0o755)
    return str(shell)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, check=False)


@pytest.mark.parametrize("options", [["--json"], []])
def test_monitor_says_that_a_host_cannot_be_asked_and_ends_with_3(options: list[str]) -> None:
    ran = run("monitor", *options, "--every", "0.1", "--host", "node1", "--ssh", UNREACHABLE)
    assert ran.returncode == 3, ran.stderr
    assert ran.stderr == "gradwire monitor: node1: sh ended with 127: bash: gradwire: command not found\n"


def test_monitor_says_so_too_of_a_host_that_fails_before_it_is_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    class AtOnce(Sources):
        def watch_host(self, host: str, job: str | None, ssh: str) -> None:
            super().watch_host(host, job, ssh)
            while self._followed:
                os.sched_yield()

    monkeypatch.setattr(monitor, "Sources", AtOnce)
    ran = CliRunner().invoke(monitor.command, ["--json", "--every", "0.1", "--host", "node1", "--ssh", UNREACHABLE])
    assert ran.exit_code == 3
    assert "node1: sh ended with 127: bash: gradwire: command not found" in ran.stderr


def test_monitor_goes_on_with_those_that_answer(tmp_path: Path) -> None:
    said = {"job": "train", "rank": 0, "host": "node2", "pid": 1, "time_s": 1.0, "groups": []}
    (tmp_path / "said").write_text(json.dumps(said) + "\n")
    shell = f"sh -c '[ $0 = node2 ] && exec cat {tmp_path}/said; echo Permission denied >&2; exit 255'"
    ran = run("monitor", "--json", "--every", "0.1", "--host", "node1", "--host", "node2", "--ssh", shell)
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout)["host"] == "node2"
    assert ran.stderr == "gradwire monitor: node1: sh ended with 255: Permission denied\n"


def restarting(folder: Path, before: str = "") -> str:
    """In ssh's place: the ranks of its host answer once and end; the next time others do. It keeps how often it ran."""
    shell = folder / "shell"
    said = {"job": "train", "rank": 0, "host": "node1", "pid": "PID", "time_s": 1.0, "groups": []}
    (folder / "said").write_text(json.dumps(said).replace('"PID"', "PID"))
    ran = f"echo run >> {folder}/ran-$1; runs=$(grep -c . {folder}/ran-$1)"
    shell.write_text(f"#!/bin/sh\n{ran}\n{before}\nsed s/PID/$runs/ {folder}/said\n")
    shell.chmod(0o755)
    return str(shell)


def next_of(sources: Sources) -> dict[str, Any]:
    """The next answer, while hosts are looked at again and again."""
    end = time.monotonic() + PATIENCE_S
    while time.monotonic() < end:
        sources.ask_hosts_again()
        for answer in sources.take(0.01):
            return answer
    raise AssertionError("nothing comes any more")


def test_ranks_of_a_host_that_come_back_are_seen_while_others_are_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "ASK_AGAIN_S", 0.0)
    sources = Sources(0.1)
    try:
        sources._known.add("train.0.1-1.sock")  # a rank of this host, which goes on
        sources.watch_host("node1", None, restarting(tmp_path))
        assert [next_of(sources)["pid"] for _ in range(3)] == [1, 2, 3]
        assert sources.failures == []
    finally:
        sources.close()


def test_it_is_said_meanwhile_that_no_rank_is_there(tmp_path: Path) -> None:
    sources = Sources(0.1)
    try:
        sources._known.add("train.0.1-1.sock")
        sources.watch_host("node1", None, restarting(tmp_path, "test $runs = 1 || { echo no job >&2; exit 3; }"))
        assert next_of(sources)["pid"] == 1
        (host,) = sources._hosts
        for _ in range(2):
            while host.again_s is None:
                os.sched_yield()
            assert sources.lines_of_hosts() == ["node1: no rank there"]
            host.again_s = 0.0
            sources.ask_hosts_again()
        assert sources.failures == [], "it was reached"
    finally:
        sources.close()


def test_a_host_whose_ranks_have_ended_is_not_waited_for_while_it_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else hosts on which a job has ended would be asked in turns for ever."""
    monkeypatch.setattr(client, "ASK_AGAIN_S", 0.0)
    sources = Sources(0.1)
    try:
        sources._known.add("train.0.1-1.sock")
        sources.watch_host("node1", None, restarting(tmp_path, "test $runs = 1 || exec sleep 3600"))
        (host,), first = sources._hosts, sources._hosts[0].process
        assert next_of(sources)["pid"] == 1
        while host.process is first:
            sources.ask_hosts_again()
        assert sources.is_any
        sources._known.clear()
        assert not sources.is_any
    finally:
        sources.close()


@pytest.mark.timeout(60)
def test_a_job_that_has_ended_on_every_host_ends_the_monitor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "ASK_AGAIN_S", 0.0)
    shell = restarting(tmp_path, "test $runs = 1 || { echo no job >&2; exit 3; }")
    ran = CliRunner().invoke(
        monitor.command, ["--json", "--every", "0.1", "--host", "node1", "--host", "node2", "--ssh", shell]
    )
    assert (ran.exit_code, ran.stderr) == (0, "")


@pytest.mark.parametrize("command", ["monitor", "trace"])
@pytest.mark.parametrize("host", ["-oProxyCommand=touch it", ""])
def test_what_ssh_would_take_for_an_option_is_no_host(command: str, host: str, tmp_path: Path) -> None:
    shell = ssh(tmp_path, answer("train", 1))
    ran = run(command, "--host", host, "--ssh", shell)
    assert (ran.returncode, ran.stdout) == (2, "")
    assert f"Invalid value for '--host': {host!r} is no name of a host" in ran.stderr
    assert not (tmp_path / "asked").exists()


@pytest.mark.parametrize("command", ["monitor", "trace"])
@pytest.mark.parametrize(("shell", "why"), [("'", "No closing quotation"), ("", "it names no program")])
def test_what_is_no_command_is_no_way_to_a_host(command: str, shell: str, why: str) -> None:
    ran = run(command, "--host", "node1", "--ssh", shell)
    assert (ran.returncode, ran.stdout, why in ran.stderr) == (2, "", True), ran.stderr
    assert "Traceback" not in ran.stderr


def test_trace_asks_other_hosts_for_the_job_that_it_has_found_here(ranks: Any, tmp_path: Path) -> None:
    ranks("train")
    shell = ssh(tmp_path, answer("other", 1))
    ran = run("trace", "--host", "node1", "--ssh", shell)
    assert (tmp_path / "asked").read_text() == "node1 gradwire trace --raw train\n"
    assert (ran.returncode, ran.stdout) == (2, ""), "whatever that host has"
    assert "which job? There are other, train: gradwire trace JOB" in ran.stderr


def test_trace_of_several_jobs_asks_which(ranks: Any) -> None:
    ranks("train", "train-2")
    ran = run("trace", "--raw")
    assert (ran.returncode, ran.stdout) == (2, "")
    assert "which job? There are train, train-2: gradwire trace JOB" in ran.stderr
    ran = run("trace", "train", "--raw")
    assert json.loads(ran.stdout)["job"] == "train", "a whole name is not the beginning of another"
