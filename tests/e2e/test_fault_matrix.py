"""The fault matrix: every fault in every phase of a group of three ranks in a lab network, under `on_peer_loss="raise"` and `"continue"`.

| fault, of rank 1 | what it is |
| --- | --- |
| kill, stop | SIGKILL, SIGSTOP |
| cut, mute, deaf | its link carries nothing; nothing that it sends; nothing that is sent to it |
| loss | 30 % of all packets of all three ranks, TCP included |
| corrupt, duplicate | a flipped bit in 30 % of all datagrams, 50 % that come twice; sealed, on all ranks, all the time |
| clock step | the wall clock goes back by an hour; the clock that the transport reads is monotonic and cannot be stepped |
| disk full | standard output and error, where logs go, take nothing |
| descriptors | no file descriptor is left |

A lost rank is named by all survivors within the peer timeout and a margin, by one verdict: none waits for a second timeout. Under
`"continue"` they have agreed by then who is left, and go on. Whatever can be survived is: results are exact, nobody fails and
nobody is left out.

Every call that ends after the fault has a limit, of the victim's too. No limit is a guess of how fast a machine is: each is a timeout that
is set, and `MARGIN_S`, in which a busy machine's threads get to run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from fault_cells import (
    BOOTSTRAP_S,
    CHAOS,
    CONNECT_S,
    FAULTS,
    LEAVE_S,
    LIMIT_S,
    LINGER_S,
    MARGIN_S,
    PATIENCE_S,
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

ALL = list(range(WORLD_SIZE))
SURVIVORS = [rank for rank in range(WORLD_SIZE) if rank != VICTIM]
LOST = ("kill", "stop", "cut", "mute", "deaf")
CALLS = ("reduction", "barrier", "small reduction")
# Of those by which each phase is seen in a run that has all of them; leaving is none of them.
CALLS_OF = {
    "bootstrap": ["bootstrap"],
    "reduce": ["reduction"],
    "gather": ["reduction"],
    "idle": CALLS[1:],
    "shutdown": [],
}
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
        the_victim_gives_up(found, ("EngineError", "AddressError", "RendezvousError"), BOOTSTRAP_S)
    elif (cell.fault, cell.phase) == ("loss", "bootstrap") and any(ending(found, rank)["error"] for rank in ALL):
        the_meeting_ends_in_time(found)
    elif cell.fault in CHAOS:
        judge_a_phase(found, cell.phase)
    else:
        all_stay(found)
        calls_end_in_time(found, ALL, found.fault_at, PEER_TIMEOUT_S, CALLS)
        if cell.phase == "bootstrap":  # as long as the ranks were told to wait for each other
            allowed_s = PATIENT_S + CONNECT_S if cell.fault == "loss" else BOOTSTRAP_S
            calls_end_in_time(found, ALL, found.fault_at, allowed_s, ["bootstrap"])


def judge_a_lost_rank(found: Seen, cell: Cell) -> None:
    """A group is formed by all ranks or not at all, and whoever leaves needs nobody: there the policy changes nothing."""
    if cell.phase == "shutdown":
        for rank in ALL:
            if rank != VICTIM or cell.fault != "kill":
                nobody_failed(found, rank, LEAVE_S + MARGIN_S)
    elif cell.phase == "bootstrap":
        for rank in SURVIVORS:
            is_named_in_the_meeting(found, rank, "MissingRankError")
        if cell.fault != "kill":
            the_victim_gives_up(found, ("MissingRankError", "RendezvousError"), BOOTSTRAP_S + LINGER_S)
    elif cell.on_peer_loss == "continue":
        the_others_go_on(found, cell)
    else:
        share_one_verdict(found, SURVIVORS, cell)
        the_lost_rank_finds_out_too(found, cell)
    if cell.fault == "kill":
        assert found.exits[VICTIM] == -9


def the_others_go_on(found: Seen, cell: Cell) -> None:
    """They agree in time, and finish every call among them; who was lost stops, if it lives."""
    agreed_at = found.fault_at
    for rank in SURVIVORS:
        nobody_failed(found, rank, LEAVE_S + MARGIN_S)
        took_part(found, rank, set(SURVIVORS))
        agreed = next(event for event in found.events[rank] if event["event"] == "members")
        assert agreed["members"] == SURVIVORS, agreed
        agreed_at = max(agreed_at, agreed["at"])
        if cell.phase == "idle":  # without any call, which is then made at once
            barrier = [event for event in found.events[rank] if event["event"] == "ended"][2]
            assert barrier["took"] <= MARGIN_S, barrier
        else:
            assert agreed["at"] - found.fault_at <= LIMIT_S, agreed
    calls_end_in_time(found, SURVIVORS, agreed_at, PEER_TIMEOUT_S, CALLS)
    if cell.fault != "kill":
        the_victim_gives_up(found, ("NotMemberError",), PEER_TIMEOUT_S + PATIENCE_S)


def judge_a_phase(found: Seen, phase: str) -> None:
    """Of a run in which the fault is there from the first datagram to the last."""
    told = [
        event for rank in ALL for event in found.events[rank] if event["event"] == "hits" and event["phase"] == phase
    ]
    assert len({event["phase"] for event in told}) == 1, f"the {phase} phase never came"
    assert sum(event["count"] for event in told) > 0, f"of the datagrams of the {phase} phase none was hit"
    all_stay(found)
    calls_end_in_time(found, ALL, 0.0, PEER_TIMEOUT_S, CALLS_OF[phase])


def all_stay(found: Seen) -> None:
    for rank in ALL:
        nobody_failed(found, rank, LEAVE_S + MARGIN_S)
        took_part(found, rank, set(ALL))


def calls_end_in_time(found: Seen, ranks: list[int], since: float, timeout_s: float, names: Sequence[str]) -> None:
    """Calls in which nobody is lost, of those that end after `since`: within the timeout from when the last rank has come to them.

    Whoever waited for longer waited for a rank that must have been found lost by then. Only the reduction that is large enough to have a
    middle may take as long as its bytes need: there no rank waits for so long without getting any.
    """
    calls = [[event for event in found.events[rank] if event["event"] == "ended"] for rank in ranks]
    for made in zip(*calls, strict=True):
        begun = max(since, *(call["at"] - call["took"] for call in made))
        for call in made:
            if call["at"] > since and call["call"] in names:
                waited = call.get("stalled_s", call["at"] - begun)
                assert waited <= timeout_s + MARGIN_S, f"nothing came for {waited} s: {call}"


def took_part(found: Seen, rank: int, members: set[int]) -> None:
    """Whose values the last result of a rank has; of `raise`, which knows no members, each result was compared with the sum of all."""
    results = [set(event["members"]) for event in found.events[rank] if event["event"] == "result"]
    assert not results or results[-1] == members, results
    if members == set(range(WORLD_SIZE)):
        assert all(result == members for result in results), results


def the_meeting_ends_in_time(found: Seen) -> None:
    """TCP may wait for longer than the ranks do. Then all say so: a group is formed by all or by none.

    A rank is missing if it was not heard of in time, and cannot be reached if it was, but has not heard of the others: until then it has
    nobody to answer. A third one is told of it.
    """
    assert found.exits == [0] * WORLD_SIZE, found.exits
    for rank in ALL:
        last = ending(found, rank)
        assert last["call"] == "bootstrap", last
        assert last["error"] in ("MissingRankError", "UnreachableError", "RendezvousError"), last
        assert last["at"] - found.fault_at <= PATIENT_S + CONNECT_S + LINGER_S + MARGIN_S, last


def the_victim_gives_up(found: Seen, errors: tuple[str, ...], limit_s: float) -> None:
    """By itself and with a typed error. Who was stopped has as long from when it runs again."""
    assert found.exits[VICTIM] == 0, found.exits
    last = ending(found, VICTIM)
    assert last["error"] in errors, last
    assert last["at"] - begins_to_wait(found) <= limit_s + MARGIN_S, last
    assert found.events[VICTIM][-1]["took"] <= LEAVE_S + MARGIN_S, "leaving took long"


def begins_to_wait(found: Seen) -> float:
    return found.fault_at if found.continued_at is None else found.continued_at


def ending(found: Seen, rank: int) -> dict[str, Any]:
    """The last call of a rank."""
    calls = [event for event in found.events[rank] if event["event"] == "ended"]
    assert calls, f"rank {rank} ended no call"
    return calls[-1]


def nobody_failed(found: Seen, rank: int, limit_s: float) -> None:
    """Clean to the end; leaving is quick."""
    assert found.exits[rank] == 0, f"rank {rank}: {found.exits[rank]}"
    assert [event for event in found.events[rank] if event.get("error")] == []
    assert found.events[rank][-1]["event"] == "closed"
    for closed in found.events[rank]:
        assert closed["event"] != "closed" or closed["took"] <= limit_s, "leaving took long"


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
    if cell.fault == "stop" or cell.phase != "idle":
        assert failure["at"] - begins_to_wait(found) <= LIMIT_S, failure
    else:  # it had found out when it called
        assert failure["took"] <= MARGIN_S, failure
    assert found.events[VICTIM][-1]["took"] <= LEAVE_S + MARGIN_S, "leaving took long"
