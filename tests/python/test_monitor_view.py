"""What `gradwire monitor` finds and shows: jobs by where their ranks met, whatever their name, and a row for each peer and path."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from gradwire.cli import trace
from gradwire.cli.trace import _answers_there
from gradwire.config import Config
from gradwire.observe import client
from gradwire.observe.client import find_sockets
from gradwire.observe.observer import _job_name, meeting_address
from gradwire.observe.status import StatusServer
from gradwire.observe.view import GONE_S, PEERS, RANKS, SILENT_S, Board, screen
from rich.console import Console

ADDRESS = "10.0.0.1:29500"
LAUNCHERS = {
    "torchrun": {"TORCHELASTIC_RUN_ID": "run-7", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"},
    "slurm": {"SLURM_JOB_ID": "4711", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"},
    "no launcher": {"MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"},
}


@pytest.mark.parametrize("launcher", LAUNCHERS)
@pytest.mark.parametrize("job", [None, "named"])
def test_a_job_is_found_by_where_its_ranks_met(
    launcher: str, job: str | None, short_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(short_folder))
    for name in {name for variables in LAUNCHERS.values() for name in variables}:
        monkeypatch.delenv(name, raising=False)
    for name, value in LAUNCHERS[launcher].items():
        monkeypatch.setenv(name, value)
    meeting = meeting_address("")
    assert meeting == ADDRESS
    assert meeting_address("node1:29400") == "node1:29400", "a communicator knows where it met"
    name = _job_name(Config(job=job), meeting)
    answer = {"meeting": meeting, "port": 47400, "pid": 1}
    other = {"meeting": "[fd00::2]:29500", "port": 47401, "pid": 2}
    servers = [
        StatusServer(name, 0, {"stats": lambda: answer}),
        StatusServer("other", 0, {"stats": lambda: other}),
    ]
    try:
        own = servers[0].path
        for asked in (ADDRESS, "10.0.0.1", name, "47400"):
            assert find_sockets(asked) == [own], asked
        for asked in ("[fd00::2]:29500", "fd00::2:29500"):
            assert find_sockets(asked) == [servers[1].path], "as MASTER_ADDR and MASTER_PORT have it, too"
        for asked in (f"{ADDRESS}0", "10.0.0.3", "47402"):
            assert not find_sockets(asked), asked
    finally:
        for server in servers:
            server.stop()


def test_ranks_are_found_whether_they_or_who_looks_had_a_runtime_directory(
    short_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runtimes = [short_folder / name for name in ("run", "none", "chosen")]
    folders = [runtime / "gradwire" for runtime in runtimes]
    monkeypatch.setattr(client, "_usual_folders", lambda: folders[:2])
    servers = []
    try:
        for number, runtime in enumerate(runtimes):
            runtime.mkdir()
            monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
            servers.append(StatusServer("job", number, {"stats": dict}))
        paths = [server.path for server in servers]
        assert find_sockets("job") == paths[2:], "where somebody chose a directory nothing else counts"
        for runtime in runtimes[:2]:
            monkeypatch.setenv("XDG_RUNTIME_DIR", str(runtime))
            assert sorted(find_sockets("job")) == sorted(paths[:2])
        folders[0].chmod(0o755)
        assert find_sockets("job") == [paths[1]], "others could have put something there"
    finally:
        for server in servers:
            server.stop()


def shell_that_greets(folder: Path) -> str:
    """Stands for ssh to a host whose login shell prints lines of its own."""
    shell = folder / "shell"
    shell.write_text(
        "#!/bin/sh\necho Welcome to node1\necho '[]'\necho '{\"rank\": 7}'\necho Mind the maintenance\necho '{\"rank\": 8}'\n"
    )
    shell.chmod(0o755)
    return str(shell)


def test_what_a_login_shell_prints_is_no_answer_and_ends_nothing(tmp_path: Path) -> None:
    sources = client.Sources(1.0)
    sources.watch_host("node1", None, shell_that_greets(tmp_path))
    found: list[int] = []
    try:
        while len(found) < 2:
            answers = list(sources.take(30.0))
            assert answers, "nothing comes any more"
            found += [one["rank"] for one in answers]
    finally:
        sources.close()
    assert found == [7, 8]


def test_what_a_login_shell_prints_does_not_end_a_trace(tmp_path: Path) -> None:
    answers = _answers_there("node1", None, shell_that_greets(tmp_path))
    assert [one["rank"] for one in answers] == [7, 8]


def path(number: int, packets: int, lost: int, rtt_us: int, *, trusted: bool = True) -> dict[str, Any]:
    sent = {"packets_sent": packets, "packets_lost": lost}
    return {"path": number, **sent, "rtt_smoothed_us": rtt_us, "share": 0.5, "trusted": trusted}


def answer(at_s: float, scale: int) -> dict[str, Any]:
    """Of rank 0, which has sent to rank 1 over two paths and to rank 2 over one; counters grow with `scale`."""
    peers = [
        {"rank": 1, "bytes_sent": 5_000_000 * scale, "bytes_received": 3_000_000 * scale, "packets_sent": 1000 * scale,
         "packets_lost": 20 * scale, "rtt_smoothed_us": 1234, "straggler": {"compute_s": 0.5 * scale, "network_s": 0.0, "receiver_s": 0.0},
         "paths": [path(0, 600 * scale, 6 * scale, 1111), path(1, 400 * scale, 14 * scale, 2222, trusted=False)]},
        {"rank": 2, "bytes_sent": 250_000 * scale, "bytes_received": 0, "packets_sent": 200 * scale,
         "packets_lost": 0, "rtt_smoothed_us": 77, "straggler": {"compute_s": 0.0, "network_s": 0.0, "receiver_s": 0.0},
         "paths": [path(0, 200 * scale, 0, 77)]},
    ]  # fmt: skip
    ended = {"all_arrived": 0, "bound_met": 3 * scale, "soft_threshold": 0, "early_timeout": 0, "deadline": scale}
    call = {
        "collective": "all_reduce", "preset": "ltp", "calls": 8 * scale, "bytes_sent": 1000 * scale, "bytes_retransmitted": 50 * scale,
        "elems_uncounted": 0, "elapsed_s": {"sum": 0.08 * scale}, "compute_wait_s": {"sum": 0.02 * scale},
        "elems": 2000 * scale, "elems_filled": 5 * scale,
        "reduce": {"elems_expected": 1000 * scale, "elems_received": 990 * scale, "deadline_s": 0.0125, "ended_by": ended},
        "gather": {"ended_by": dict.fromkeys(ended, 0)},
    }  # fmt: skip
    group = {"name": "group", "rank": 0, "formed_s": 90.0, "peers": peers, "calls": [call], "waiting": None}
    late = {"group": "group", "rank": 2, "cause": "compute", "text": "it has not called"}
    facts = {
        "job": "named",
        "rank": 0,
        "host": "node1",
        "pid": 1,
        "preset": "ltp",
        "time_s": at_s,
        "stragglers": [late],
    }
    return {**facts, "groups": [group]}


def shown(board: Board, now_s: float) -> list[str]:
    """Its lines, one blank between cells."""
    console = Console(file=io.StringIO(), width=220, color_system=None)
    console.print(screen(board, now_s))
    assert isinstance(console.file, io.StringIO)
    return [" ".join(line.split()) for line in console.file.getvalue().splitlines()]


def test_the_screen_has_rates_round_trips_and_loss_of_each_peer_and_path() -> None:
    board = Board()
    board.take(answer(100.0, 1), 0.0)
    assert "0 node1 group - - - - - - - -" in shown(board, 0.0), "one answer gives no rates"
    board.take(answer(102.0, 3), 2.0)  # twice as much again, in two seconds
    lines = shown(board, 2.0)
    assert lines[0] == "job named: 1 ranks seen, preset ltp"
    # calls/s, mean, waited for computation, lost, filled in, repaired, what ended the waits, deadline
    assert "0 node1 group 8.0 10.00 25% 1.000% 0.250% 5.000% bound_met 75%, deadline 25% 12.5 ms" in lines
    # from, to, path, out MB/s, in MB/s, packets/s, RTT, lost, waited for
    assert "0 1 all 5.00 3.00 1000 1.234 2.00% compute 50%" in lines
    assert "0 600 1.111 1.00%" in lines
    assert "1 400 2.222 3.50% suspended" in lines
    assert "0 2 0.25 0.00 200 0.077 0.00%" in lines, "one path needs no row of its own"
    assert "straggler: rank 2 of group group (compute), waited for by rank 0: it has not called" in lines


@pytest.mark.parametrize("width", [180, 120, 80, 60, 50])
def test_no_number_and_no_head_is_cut_on_a_screen_of_any_width(width: int) -> None:
    board = Board()
    board.take(answer(100.0, 1), 0.0)
    waiting = answer(102.0, 3)
    waiting["groups"][0]["waiting"] = {"during": "broadcast #7", "waited_s": 4.0, "straggler": 2, "cause": "compute"}
    board.take(waiting, 2.0)
    console = Console(file=io.StringIO(), width=width, color_system=None)
    console.print(screen(board, 2.0))
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert "\u2026" not in text
    assert max(map(len, text.splitlines())) <= width
    words = [" ".join(line.split()) for line in text.splitlines()]
    for head in (*RANKS, *PEERS):
        assert any(f" {head} " in f" {line} " for line in words), head
    for name, number in [
        ("0 node1 group", "12.5 ms"),
        ("0 node1 group", "10.00"),
        ("0 1 all", "1.234"),
        ("0 2", "0.077"),
    ]:
        assert [line for line in words if line.startswith(name) and f" {number} " in f"{line} "], number
    (compute,) = [line for line in words if line.startswith("0 1 all") and "compute 50%" in line]
    assert compute


def over_servers(at_s: float, scale: int, collective: str = "all_reduce/parameter_server") -> dict[str, Any]:
    """Of a rank that reduces nothing: others are the servers, and a fifth of its contributions did not count there."""
    said = answer(at_s, scale)
    (call,) = said["groups"][0]["calls"]
    call |= {"collective": collective, "elems": 100 * scale, "elems_uncounted": 20 * scale}
    call["reduce"] |= {"elems_expected": 0, "elems_received": 0}
    return said


def test_the_loss_of_a_rank_that_is_no_server_is_that_of_its_own_contributions() -> None:
    board = Board()
    board.take(over_servers(100.0, 1), 0.0)
    assert board.take(over_servers(102.0, 3), 2.0)["rates"]["group"]["lost_share"] == pytest.approx(0.2)
    (line,) = [line for line in shown(board, 2.0) if line.startswith("0 node1 group")]
    assert " 20.000% " in line
    board.take(over_servers(104.0, 4, "broadcast"), 4.0)
    assert board.take(over_servers(106.0, 6, "broadcast"), 6.0)["rates"]["group"]["lost_share"] == 0.0


def test_what_is_filled_in_is_told_of_calls_that_may_lose_results_alone() -> None:
    board = Board()
    for scale in (1, 3):
        said = answer(100.0 + scale, scale)
        (call,) = said["groups"][0]["calls"]
        exact = {**call, "preset": "exact", "elems": 10**6 * scale, "elems_filled": 0}
        said["groups"][0]["calls"] = [call, exact]
        shares = board.take(said, float(scale))["rates"]
    assert shares["group"]["filled_share"] == pytest.approx(5 / 2000)
    assert shares["group"]["lost_share"] == pytest.approx(0.01)


def of_subgroup(said: dict[str, Any], process: int, name: str) -> dict[str, Any]:
    """The same of another process, which is in two groups and rank 0 of the second."""
    (whole,) = said["groups"]
    late = [{**one, "group": name} for one in said["stragglers"]]
    groups = [{**whole, "rank": process}, {**whole, "name": name, "rank": 0}]
    return {**said, "rank": process, "pid": process, "groups": groups, "stragglers": late}


def test_ranks_of_several_groups_are_told_apart() -> None:
    board = Board()
    for process, name in ((2, "front"), (4, "back")):
        board.take(of_subgroup(answer(100.0, 1), process, name), 0.0)
        waiting = of_subgroup(answer(102.0, 3), process, name)
        stuck = {"during": "broadcast #7", "waited_s": 4.0, "straggler": 2, "cause": "compute"}
        waiting["groups"][1]["waiting"] = stuck
        board.take(waiting, 2.0)
    lines = shown(board, 2.0)
    for process, name in ((2, "front"), (4, "back")):
        assert f"straggler: rank 2 of group {name} (compute), waited for by rank 0: it has not called" in lines
        assert f"{process} 2 0.25 0.00 200 0.077 0.00% group" in lines
        assert f"0 2 0.25 0.00 200 0.077 0.00% {name}" in lines
        (row,) = [line for line in lines if line.startswith(f"{process} node1 {name} ")]
        assert row.endswith("broadcast #7, 4.0 s: waits for rank 2 of the group (compute)")


def test_processes_that_a_restart_has_replaced_disappear() -> None:
    board = Board()
    board.take(answer(100.0, 1), 0.0)
    board.take({**answer(100.0, 1), "pid": 2}, GONE_S - 1.0)
    assert shown(board, GONE_S)[0].startswith("job named: 2 ranks seen")
    board.take({**answer(102.0, 3), "pid": 2}, GONE_S + 1.0)
    assert shown(board, GONE_S + 1.0)[0].startswith("job named: 1 ranks seen")


def test_the_screen_says_who_is_silent() -> None:
    board = Board()
    board.take(answer(100.0, 1), 0.0)
    board.take(answer(102.0, 3), 2.0)
    (line,) = [line for line in shown(board, 2.0 + SILENT_S + 1.0) if line.startswith("0 node1")]
    assert line.endswith("silent for 6 s")
    assert not [line for line in shown(board, 2.0 + SILENT_S + 1.0) if line.startswith("0 1 all")], "rates of then"
    assert not [line for line in shown(board, 2.0 + SILENT_S + 1.0) if line.startswith("straggler")], (
        "whom it waited for then"
    )
    assert [line for line in shown(board, 2.0 + SILENT_S) if line.startswith(("0 1 all", "straggler"))][1:], (
        "it has just answered"
    )


def test_an_empty_screen_says_so() -> None:
    assert shown(Board(), 0.0) == ["no rank has answered yet"]


def test_a_clock_that_is_set_back_gives_no_rates() -> None:
    board = Board()
    board.take(answer(100.0, 1), 0.0)
    for at_s in (99.0, 99.0):
        assert board.take(answer(at_s, 3), 2.0)["rates"] == {}
        assert "0 node1 group - - - - - - - -" in shown(board, 2.0)
    assert board.take(answer(101.0, 4), 4.0)["rates"]["group"]["calls_per_s"] == 4.0


def test_a_group_that_was_formed_again_under_its_name_has_no_rates_beside_the_one_before() -> None:
    board = Board()
    board.take(answer(100.0, 5), 0.0)
    anew = answer(102.0, 1)
    anew["groups"][0]["formed_s"] = 101.0
    assert board.take(anew, 2.0)["rates"] == {}
    later = answer(104.0, 3)
    later["groups"][0]["formed_s"] = 101.0
    assert board.take(later, 4.0)["rates"]["group"]["calls_per_s"] == 8.0


def test_connections_of_a_new_epoch_have_no_rates_beside_those_before_and_the_group_has() -> None:
    board = Board()
    for at_s, connected_s in ((100.0, 90.0), (102.0, 101.0), (104.0, 101.0)):
        said = answer(at_s, int(at_s))
        said["groups"][0] |= {
            "connected_s": connected_s,
            "peers": answer(0.0, int(at_s - connected_s))["groups"][0]["peers"],
        }
        found = board.take(said, at_s)["rates"].get("group")
        if at_s == 102.0:
            assert (found["peers"], found["calls_per_s"]) == ([], 8.0)
    (first, _) = found["peers"]
    assert first["sent_bytes_per_s"] == 5_000_000, "both answers are of the same connections"


def test_a_call_that_has_waited_for_longer_than_between_two_answers_is_all_of_the_time() -> None:
    board = Board()
    board.take(answer(100.0, 1), 0.0)
    waited = answer(101.0, 2)
    waited["groups"][0]["peers"][0]["straggler"]["compute_s"] += 16.0
    (peer, _) = board.take(waited, 1.0)["rates"]["group"]["peers"]
    assert peer["waited_share"] == {"compute": 1.0}


def test_a_trace_says_so_where_the_only_rank_left_does_not_answer(
    short_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(short_folder))
    server = StatusServer("named", 0, {})  # it hangs up
    try:
        ran = CliRunner().invoke(trace.command, ["named"])
    finally:
        server.stop()
    assert ran.exit_code == trace.EXIT_NOTHING
    said = ran.stderr.splitlines()
    assert "rank 0" in said[0]
    assert "is left out" in said[0]
    assert said[1:] == ["gradwire trace: no rank of job named has answered"]
