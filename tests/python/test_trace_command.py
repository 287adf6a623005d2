"""`gradwire trace`: how much it asks ranks for, which it asks at once, and what it says beside the trace."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from gradwire.cli import trace
from gradwire.observe.status import StatusServer
from test_timeline import answers, hangs_in_its_first_call, records_of, told_of

JOB = "train"


@pytest.fixture(autouse=True)
def _folder(short_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(short_folder))


class Ranks:
    """Ranks of this host, each with a status socket. `asked` has what each was asked for, by its number among them."""

    def __init__(self) -> None:
        self.asked: dict[int, list[dict[str, int]]] = {}
        self.servers: list[StatusServer] = []

    def add(self, answer: dict[str, Any], ended: int) -> None:
        """One that has ended so many collectives when it is asked, and tells the latest."""
        number = len(self.servers)

        def timelines(**options: int) -> dict[str, Any]:
            self.asked.setdefault(number, []).append(options)
            return told_of({"job": JOB, **answer}, max(0, ended - options.get("calls", ended)), ended)

        self.servers.append(StatusServer(JOB, number, {"timelines": timelines}))


@pytest.fixture
def ranks() -> Iterator[Ranks]:
    made = Ranks()
    yield made
    for server in made.servers:
        server.stop()


def run(*arguments: str) -> Result:
    return CliRunner().invoke(trace.command, [JOB, *arguments])


def shown(out: Path) -> list[set[int]]:
    """Numbers of the collectives of each process in the trace."""
    events = [event for event in json.loads(out.read_text())["traceEvents"] if event["ph"] == "X"]
    pids = sorted({event["pid"] for event in events})
    return [{event["args"]["sequence"] for event in events if event["pid"] == pid} for pid in pids]


def program(folder: Path, text: str) -> str:
    """In ssh's place: it has the host in $1, the command in $2 and the folder in $FOLDER."""
    shell = folder / "shell"
    shell.write_text(f"#!/bin/sh\nFOLDER={folder}\n{text}\n")
    shell.chmod(0o755)
    return str(shell)


def test_ranks_of_this_host_are_asked_for_little_more_than_is_shown(ranks: Ranks, tmp_path: Path) -> None:
    for answer, ended in zip(answers(600), (300, 310, 320), strict=True):
        ranks.add(answer, ended)
    out = tmp_path / "step.json"
    ran = run("-o", str(out))
    assert ran.exit_code == 0, ran.output
    assert shown(out) == [set(range(268, 300))] * 3
    assert ranks.asked == {rank: [{"calls": 160}] for rank in range(3)}


def test_ranks_that_were_asked_far_apart_are_asked_for_all_and_the_same_collectives_are_shown(
    ranks: Ranks, tmp_path: Path
) -> None:
    for answer, ended in zip(answers(600), (300, 450, 600), strict=True):
        ranks.add(answer, ended)
    out = tmp_path / "step.json"
    ran = run("-o", str(out))
    assert ran.exit_code == 0, ran.output
    assert shown(out) == [set(range(268, 300))] * 3
    assert ranks.asked == {rank: [{"calls": 160}, {}] for rank in range(3)}
    assert "own latest" not in ran.output
    assert "unknown" not in ran.output, "their clocks are aligned"


def test_of_several_groups_of_one_name_each_ranks_own_latest_are_shown_and_it_is_said(
    ranks: Ranks, tmp_path: Path
) -> None:
    first = answers(1000)[0]
    ranks.add(first, 1000)
    ranks.add({**first, "pid": 7}, 700)
    out = tmp_path / "step.json"
    ran = run("-o", str(out))
    assert shown(out) == [set(range(968, 1000)), set(range(668, 700))]
    line = "gradwire trace: group g: several groups have this name; there each one's own latest are shown"
    assert line in ran.stderr.splitlines()
    assert ranks.asked == {0: [{"calls": 160}], 1: [{"calls": 160}]}, "all would not tell more"


@pytest.mark.parametrize("there", [["--host", "node1"], []], ids=["of other hosts", "raw"])
def test_where_other_hosts_are_asked_too_ranks_tell_all_that_they_keep(
    ranks: Ranks, tmp_path: Path, there: list[str]
) -> None:
    here, other, _ = answers(600)
    ranks.add(here, 300)
    (tmp_path / "said").write_text(json.dumps({"job": JOB, **other, "host": "node1"}) + "\n")
    shell = program(tmp_path, 'echo "$2" > $FOLDER/asked; cat $FOLDER/said')
    out = tmp_path / "step.json"
    ran = run("--ssh", shell, *there, *(["-o", str(out)] if there else ["--raw"]))
    assert ran.exit_code == 0, ran.output
    assert ranks.asked == {0: [{}]}
    if there:
        assert (tmp_path / "asked").read_text() == f"gradwire trace --raw {JOB}\n"
        assert shown(out) == [set(range(268, 300))] * 2
    else:
        assert len(records_of(json.loads(ran.stdout))) == 300


def test_all_hosts_are_asked_at_once(ranks: Ranks, tmp_path: Path) -> None:
    found = answers(20)
    ranks.add(found[0], 20)
    for rank in (1, 2):
        (tmp_path / f"node{rank}").write_text(json.dumps({"job": JOB, **found[rank], "host": f"node{rank}"}) + "\n")
    # Each waits until the other one is there: nobody opens an end of a pipe before somebody opens the other.
    waits = "cd $FOLDER; case $1 in node1) timeout 60 sh -c ': > met';; *) timeout 60 cat met;; esac && cat $1"
    assert not (tmp_path / "met").exists()
    shell = program(tmp_path, f"mkfifo $FOLDER/met 2> /dev/null; {waits}")
    out = tmp_path / "step.json"
    ran = run("--ssh", shell, "--host", "node1", "--host", "node2", "-o", str(out))
    assert ran.exit_code == 0, ran.output
    assert shown(out) == [set(range(20))] * 3


def test_the_rank_to_whose_clock_the_others_are_aligned_is_named_and_one_that_hangs_is_said_to_be_unknown(
    ranks: Ranks, tmp_path: Path
) -> None:
    found = answers(20)
    hangs_in_its_first_call(found[0])
    for answer in found:
        ranks.add(answer, 20)
    ran = run("-o", str(tmp_path / "step.json"))
    assert ran.exit_code == 0, ran.output
    first, second, third = ran.stderr.splitlines()
    assert first == "gradwire trace: rank 0 on h, process 0: clock error unknown, by the hosts' clocks"
    assert second == "gradwire trace: rank 1 on h, process 1: the others are aligned to its clock"
    assert third.startswith("gradwire trace: rank 2 on h, process 2: clock error ")
    assert third.endswith(" us")
