"""What `gradwire monitor` shows on a terminal that has no room for every rank and peer."""

from __future__ import annotations

import io
from typing import Any

import pytest
from gradwire.observe.view import Board, screen
from rich.console import Console
from rich.live import Live

FAILURE = "node2: ssh ended with 255"


def peer(number: int, count: int, waited_s: float, group: int) -> dict[str, Any]:
    waits = {"compute_s": 0.0, "network_s": waited_s, "receiver_s": 0.0}
    sent = {"packets_sent": count, "packets_lost": 0}
    return {
        "rank": number, "bytes_sent": count, "bytes_received": count, **sent, "rtt_smoothed_us": 100 + group,
        "straggler": waits, "paths": [{"path": 0, **sent, "rtt_smoothed_us": 1, "share": 1.0, "trusted": True}],
    }  # fmt: skip


def answer(
    rank: int, ranks: int, at_s: float, late: int | None, name: str = "group", first: int = 0, job: str = "job"
) -> dict[str, Any]:
    """Of a rank of a group that begins with the job's rank `first`; the last one of its ranks waits for another one of it."""
    own = rank - first
    waits = late is not None and own == ranks - 1
    waiting = {"during": "broadcast #7", "waited_s": 4.0, "straggler": late, "cause": "network"} if waits else None
    peers = [
        peer(number, int(at_s), 0.5 * at_s if waits and number == late else 0.0, first)
        for number in range(ranks)
        if number != own
    ]
    group = {
        "name": name,
        "rank": own,
        "formed_s": 1.0,
        "connected_s": 1.0,
        "peers": peers,
        "calls": [],
        "waiting": waiting,
    }
    said = [{"group": name, "rank": late, "cause": "network", "text": "its bytes are late"}] if waits else []
    return {
        "job": job,
        "rank": rank,
        "host": "node1",
        "pid": rank,
        "preset": "auto",
        "time_s": at_s,
        "stragglers": said,
        "groups": [group],
    }


def board_of(ranks: int, late: int | None, jobs: tuple[str, ...] = ("job",)) -> Board:
    board = Board()
    for at_s in (1.0, 3.0):
        for job in jobs:
            for rank in range(ranks):
                board.take(answer(rank, ranks, at_s, late, job=job), at_s)
    return board


def on_terminal(board: Board, width: int, height: int) -> list[str]:
    """Its lines as `gradwire monitor` draws them, one blank between cells."""
    out = io.StringIO()
    console = Console(file=out, width=width, height=height, force_terminal=True, color_system=None)
    with Live(console=console, screen=True, auto_refresh=False) as live:
        live.update(screen(board, 3.0, [FAILURE], console.height), refresh=True)
    drawn = out.getvalue().rpartition("\x1b[H")[2].partition("\x1b[?")[0]
    return [" ".join(line.split()) for line in drawn.splitlines()]


@pytest.mark.parametrize(("width", "height"), [(120, 40), (80, 24), (80, 12)])
@pytest.mark.parametrize("ranks", [8, 64])
def test_who_is_waited_for_and_which_host_failed_is_on_every_terminal(ranks: int, width: int, height: int) -> None:
    lines = on_terminal(board_of(ranks, 3), width, height)
    assert len([line for line in lines if line]) <= height
    assert any(line.startswith("straggler: rank 3 of group group (network)") for line in lines)
    assert FAILURE in lines
    assert f"job job: {ranks} ranks seen, preset auto" in lines


def test_of_the_rows_those_of_who_waits_are_shown_and_the_others_counted() -> None:
    lines = on_terminal(board_of(64, 3), 120, 40)
    assert any("broadcast #7, 4.0 s: waits for rank 3 (network)" in line for line in lines)
    assert any(line.startswith("63 3 ") and line.endswith("network 50%") for line in lines)
    ranks, peers = (
        {int(line.split()[1]) for line in lines if line.startswith("\u2026") and of in line}
        for of in ("more ranks", "more lines of peers")
    )
    shown = {line.split()[0] for line in lines if " node1 group " in line}
    assert ranks == {64 - len(shown)}
    rows = [line for line in lines if line.count(" 0.100 ") == 1]
    assert rows
    assert peers == {64 * 63 - len(rows)}


def test_two_ranks_have_room_for_everything() -> None:
    lines = on_terminal(board_of(2, 0), 120, 40)
    assert not [line for line in lines if line.startswith("\u2026")]
    assert len([line for line in lines if " 0.100 " in line]) == 2


def test_a_job_of_many_ranks_leaves_room_for_the_other_one() -> None:
    lines = on_terminal(board_of(16, 3, ("a", "b")), 120, 40)
    for job in ("a", "b"):
        assert f"job {job}: 16 ranks seen, preset auto" in lines
    assert len([line for line in lines if line.startswith("straggler:")]) == 2
    assert len([line for line in lines if line.endswith("network 50%")]) == 2


def test_a_file_has_everything() -> None:
    console = Console(file=io.StringIO(), width=180, color_system=None)
    console.print(screen(board_of(16, 3), 3.0, [FAILURE]))
    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    assert len([line for line in lines if " 0.100 " in line]) == 16 * 15
    assert FAILURE in lines


def test_peers_of_groups_of_a_part_of_all_ranks_stand_beside_their_group() -> None:
    board = Board()
    for at_s in (1.0, 3.0):
        for rank in range(4):
            name, first = ("front", 0) if rank < 2 else ("back", 2)
            board.take(answer(rank, 2, at_s, None, name, first), at_s)
    lines = on_terminal(board, 120, 40)
    assert {line.split()[0] for line in lines if " node1 " in line} == {"0", "1", "2", "3"}
    for name, rtt in (("front", "0.100"), ("back", "0.102")):
        assert len([line for line in lines if f" {rtt} " in line and line.endswith(f" {name}")]) == 2


def test_peers_of_a_group_of_the_last_ranks_stand_beside_it() -> None:
    board = Board()
    for at_s in (1.0, 3.0):
        for rank in (2, 3):
            board.take(answer(rank, 2, at_s, None, "back", 2), at_s)
    assert len([line for line in on_terminal(board, 120, 40) if " 0.102 " in line and line.endswith(" back")]) == 2


@pytest.mark.parametrize(("width", "height"), [(80, 24), (120, 40)])
def test_a_rank_that_all_wait_for_and_many_stragglers_leave_room_for_the_tables(width: int, height: int) -> None:
    board = Board()
    for rank in range(64):
        said = answer(rank, 64, 3.0, None)
        whom = [0 if rank else 1, *range(2, 40)]
        said["stragglers"] = [{"group": "group", "rank": late, "cause": "network", "text": "late"} for late in whom]
        board.take(said, 3.0)
    lines = on_terminal(board, width, height)
    assert len([line for line in lines if line]) <= height
    assert FAILURE in lines
    stragglers = [line for line in lines if line.startswith("straggler:")]
    assert stragglers[0].startswith("straggler: rank 1 of group group (network), waited for by rank 0: late")
    assert any(line.endswith("more stragglers") for line in lines)
    assert "waited for by rank 0, 1, 2, 3, 4, 5, 6, 7 and 56 more" in " ".join(lines)
    assert any(" node1 group " in line for line in lines)


def lossy_peers(paths: list[dict[str, Any]], packets_lost: int) -> Board:
    """Of 64 ranks the last one loses something on its way to rank 5."""
    board = Board()
    for at_s in (1.0, 3.0):
        for rank in range(64):
            said = answer(rank, 64, at_s, None)
            if rank == 63:
                other = said["groups"][0]["peers"][5]
                sent = 1000 * int(at_s)
                other |= {"packets_sent": sent, "packets_lost": packets_lost * int(at_s), "rtt_smoothed_us": 777}
                other["paths"] = [
                    {**other["paths"][0], "packets_sent": sent, "path": n, **path} for n, path in enumerate(paths)
                ]
            board.take(said, at_s)
    return board


@pytest.mark.parametrize(
    ("paths", "packets_lost"),
    [([{}], 4), ([{}, {"trusted": False}], 0)],
    ids=["four of a thousand", "a suspended path"],
)
def test_a_peer_that_little_is_lost_to_or_that_a_path_does_not_reach_is_among_those_shown(
    paths: list[dict[str, Any]], packets_lost: int
) -> None:
    lines = on_terminal(lossy_peers(paths, packets_lost), 120, 40)
    assert any(line.startswith("63 5 ") and " 0.777 " in line for line in lines), lines
