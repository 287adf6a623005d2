"""The fault matrix: every fault in every phase of a group of three ranks in a lab network, under `on_peer_loss="raise"` and `"continue"`.

| fault, of rank 1 | what it is |
| --- | --- |
| kill, stop | SIGKILL, SIGSTOP |
| cut, mute, deaf | its link carries nothing; nothing that it sends; nothing that is sent to it |
| loss | 30 % of all packets of all three ranks, TCP included |
| corrupt, duplicate | a flipped bit in 10 % of all datagrams, 30 % that come twice; sealed, on all ranks, all the time |
| clock step | the wall clock goes back by an hour; the clock that the transport reads is monotonic and cannot be stepped |
| disk full | standard output and error, where logs go, take nothing |
| descriptors | no file descriptor is left |

A lost rank is named by all survivors within the peer timeout and a margin, by one verdict: none waits for a second timeout. Under
`"continue"` they have agreed by then who is left, and go on. Whatever can be survived is: results are exact, nobody fails and
nobody is left out.
"""

from __future__ import annotations

from typing import Any

import pytest
from fault_cells import (
    BOOTSTRAP_S,
    CHAOS,
    FAULTS,
    LEAVE_S,
    LIMIT_S,
    LINGER_S,
    MARGIN_S,
    PATIENT_S,
    PEER_TIMEOUT_S,
    PHASES,
    SILENCE_MIN_S,
    VICTIM,
    WORLD_SIZE,
    Cell,
    Seen,
    run_cells,
)

SURVIVORS = [rank for rank in range(WORLD_SIZE) if rank != VICTIM]
LOST = ("kill", "stop", "cut", "mute", "deaf")
POLICIES = ("raise", "continue")
CELLS = tuple(Cell(fault, phase, policy) for policy in POLICIES for fault in FAULTS for phase in PHASES)


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[Cell, Seen]:
    return run_cells(list(dict.fromkeys(cell.run for cell in CELLS)), tmp_path_factory.mktemp("faults"))


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.key)
def test_fault(seen: dict[Cell, Seen], cell: Cell) -> None:
    found = seen[cell.run]
    try:
        if cell.fault not in CHAOS:
            assert found.fault_at is not None, "the phase never came"
        judge(found, cell)
    except AssertionError as error:
        raise AssertionError(f"{error}\n{found.describe()}") from None


def judge(found: Seen, cell: Cell) -> None:
    if cell.fault in LOST:
        judge_a_lost_rank(found, cell)
    elif (cell.fault, cell.phase) == ("descriptors", "bootstrap"):
        for rank in SURVIVORS:
            is_named_in_the_meeting(found, rank, "RendezvousError")
        assert ending(found, VICTIM)["error"] in ("EngineError", "AddressError", "RendezvousError")
    elif (cell.fault, cell.phase) == ("loss", "bootstrap"):
        ends_in_time(found)
    else:
        for rank in range(WORLD_SIZE):
            nobody_failed(found, rank, LEAVE_S + MARGIN_S)
            took_part(found, rank, set(range(WORLD_SIZE)))


def judge_a_lost_rank(found: Seen, cell: Cell) -> None:
    """A group is formed by all ranks or not at all, and whoever leaves needs nobody: there the policy changes nothing."""
    if cell.phase == "shutdown":
        for rank in range(WORLD_SIZE):
            if rank != VICTIM or cell.fault != "kill":
                nobody_failed(found, rank, LEAVE_S + MARGIN_S)
    elif cell.phase == "bootstrap":
        for rank in SURVIVORS:
            is_named_in_the_meeting(found, rank, "MissingRankError")
    elif cell.on_peer_loss == "continue":
        the_others_go_on(found, cell)
    else:
        share_one_verdict(found, SURVIVORS, cell)
        the_lost_rank_finds_out_too(found, cell)
    if cell.fault == "kill":
        assert found.exits[VICTIM] == -9


def the_others_go_on(found: Seen, cell: Cell) -> None:
    """They agree in time, and finish every call among them; who was lost stops, if it lives."""
    for rank in SURVIVORS:
        nobody_failed(found, rank, LEAVE_S + MARGIN_S)
        took_part(found, rank, set(SURVIVORS))
        agreed = next(event for event in found.events[rank] if event["event"] == "members")
        assert agreed["members"] == SURVIVORS, agreed
        if cell.phase == "idle":  # without any call, which is then made at once
            barrier = [event for event in found.events[rank] if event["event"] == "ended"][2]
            assert barrier["took"] <= MARGIN_S, barrier
        else:
            assert agreed["at"] - found.fault_at <= LIMIT_S, agreed
    if cell.fault != "kill":
        assert found.exits[VICTIM] == 0, found.exits
        assert ending(found, VICTIM)["error"] == "NotMemberError", ending(found, VICTIM)


def took_part(found: Seen, rank: int, members: set[int]) -> None:
    """Whose values the last result of a rank has; of `raise`, which knows no members, each result was compared with the sum of all."""
    results = [set(event["members"]) for event in found.events[rank] if event["event"] == "result"]
    assert not results or results[-1] == members, results
    if members == set(range(WORLD_SIZE)):
        assert all(result == members for result in results), results


def ends_in_time(found: Seen) -> None:
    """TCP may wait for longer than the ranks do. Then they say so."""
    for rank in range(WORLD_SIZE):
        last = ending(found, rank)
        assert last["error"] in (None, "MissingRankError", "RendezvousError", "UnreachableError"), last
        assert last["took"] <= PATIENT_S + LINGER_S + MARGIN_S, last


def ending(found: Seen, rank: int) -> dict[str, Any]:
    """The last call of a rank."""
    calls = [event for event in found.events[rank] if event["event"] == "ended"]
    assert calls, f"rank {rank} ended no call"
    return calls[-1]


def nobody_failed(found: Seen, rank: int, limit_s: float) -> None:
    """Clean to the end; leaving is quick."""
    assert found.exits[rank] == 0, f"rank {rank}: {found.exits[rank]}"
    assert [event for event in found.events[rank] if event.get("error")] == []
    closed = found.events[rank][-1]
    assert closed["event"] == "closed"
    assert closed["took"] <= limit_s, "leaving took long"


def is_named_in_the_meeting(found: Seen, rank: int, error: str) -> None:
    """The rank that never came is named within the time that the group may take to form."""
    last = ending(found, rank)
    assert found.exits[rank] == 0
    assert last["error"] == error, last
    assert f"{VICTIM}" in last["text"], last
    assert last["at"] - found.fault_at <= BOOTSTRAP_S + LINGER_S + MARGIN_S, last


def share_one_verdict(found: Seen, survivors: list[int], cell: Cell) -> None:
    """All name the rank, its host, the collective and what had arrived; in time, and together."""
    failures = [ending(found, rank) for rank in survivors]
    for rank, failure in zip(survivors, failures, strict=True):
        fields = failure["fields"]
        assert found.exits[rank] == 0
        assert (failure["error"], fields.get("rank")) == ("PeerLostError", VICTIM), failure
        assert fields["host"] in failure["text"], failure
        assert fields["detail"] in failure["text"], failure
        assert SILENCE_MIN_S <= fields["silent_s"] <= LIMIT_S, failure
        assert found.events[rank][-1]["took"] <= LEAVE_S + MARGIN_S, "leaving took long"
        if cell.phase == "idle":  # found out without any call, which fails at once
            assert "idle" in fields["during"], failure
            assert failure["took"] <= MARGIN_S, failure
        else:
            assert "all_reduce" in fields["during"], failure
            assert failure["at"] - found.fault_at <= LIMIT_S, failure
    if cell.phase != "idle":
        told = [failure["at"] for failure in failures]
        assert max(told) - min(told) < PEER_TIMEOUT_S, "one waited for a timeout of its own"
        assert any(f"in the {cell.phase} stage" in failure["fields"]["detail"] for failure in failures), failures


def the_lost_rank_finds_out_too(found: Seen, cell: Cell) -> None:
    """If it lives: at once when somebody can tell it, else when it has heard nobody for the peer timeout."""
    if cell.fault == "kill":
        return
    assert found.exits[VICTIM] == 0, found.exits
    failure = ending(found, VICTIM)
    assert failure["error"] in ("PeerLostError", "PeerLeftError"), failure
    if cell.fault == "cut":
        assert "may be the one that is cut off" in failure["text"], failure
    if cell.fault != "stop" and cell.phase != "idle":
        assert failure["at"] - found.fault_at <= LIMIT_S, failure
