"""`on_peer_loss="continue"` over real processes: ranks of a group of four are lost, and a majority goes on.

Every result is the mean over the ranks that its report announces (going_on_rank.py checks each against the reference), all
survivors announce the same ranks for the same call, and whoever is in no majority stops with a typed error.
"""

from __future__ import annotations

import json
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from free_ports import free_port
from launch import launch
from test_communicator import start

SCRIPT = Path(__file__).parent / "going_on_rank.py"
WORLD_SIZE = 4
PEER_TIMEOUT_S = 10.0
# A minority gives up after three peer timeouts, once it has noticed; the rest is for a busy machine.
LIMIT_S = 400.0


@dataclass(frozen=True)
class Case:
    victims: tuple[int, ...]
    signal: str
    phase: str
    security: str = "auto"
    world_size: int = WORLD_SIZE


CASES = {
    "kill-in-reduce": Case((2,), "SIGKILL", "reduce", "on"),
    "kill-in-gather": Case((1,), "SIGKILL", "gather"),
    "kill-idle": Case((3,), "SIGKILL", "idle"),
    "kill-rank-0": Case((0,), "SIGKILL", "reduce"),
    "kill-in-a-sum": Case((2,), "SIGKILL", "sum"),
    "stop": Case((1,), "SIGSTOP", "idle"),
    "two-at-once": Case((0, 2), "SIGKILL", "idle"),
    "host-of-rank-0": Case((0, 1), "SIGKILL", "idle", world_size=5),
}


@dataclass
class Seen:
    events: list[list[dict[str, Any]]]
    outputs: list[str]

    def of(self, rank: int, key: str) -> list[dict[str, Any]]:
        return [event for event in self.events[rank] if key in event]

    def announced(self, rank: int) -> dict[tuple[Any, Any], tuple[int, tuple[int, ...]]]:
        calls = self.of(rank, "step")
        return {(call["step"], call["bucket"]): (call["epoch"], tuple(call["members"])) for call in calls}

    def ended(self, rank: int) -> dict[str, Any]:
        endings = self.of(rank, "ended")
        assert endings, f"rank {rank} did not end\n{self.outputs}"
        return endings[0]


def start_case(case: Case, folder: Path) -> list[subprocess.Popen[str]]:
    more = {
        "GRADWIRE_ON_PEER_LOSS": "continue",
        "GRADWIRE_PEER_TIMEOUT_S": str(PEER_TIMEOUT_S),
        "GRADWIRE_SECURITY": case.security,
        "GRADWIRE_TEST_FOLDER": str(folder),
        "GRADWIRE_TEST_VICTIMS": ",".join(map(str, case.victims)),
        "GRADWIRE_TEST_SIGNAL": case.signal,
        "GRADWIRE_TEST_PHASE": case.phase,
        "OMP_NUM_THREADS": "1",
    }
    port = free_port()
    return [start([str(SCRIPT)], rank, case.world_size, port, **more) for rank in range(case.world_size)]


def finish(case: Case, ranks: list[subprocess.Popen[str]], folder: Path, end: float) -> Seen:
    survivors = [rank for rank in range(case.world_size) if rank not in case.victims]
    outputs = [""] * case.world_size
    if case.signal == "SIGSTOP":
        wake_when_the_others_are_done(ranks[case.victims[0]], folder / f"events-{survivors[0]}", end)
    for rank in [*survivors, *case.victims]:
        try:
            outputs[rank] = ranks[rank].communicate(timeout=max(0.1, end - time.monotonic()))[0]
        except subprocess.TimeoutExpired:
            ranks[rank].kill()
            outputs[rank] = f"rank {rank} had to be ended: " + ranks[rank].communicate()[0]
    files = [folder / f"events-{rank}" for rank in range(case.world_size)]
    events = [[json.loads(line) for line in file.read_text().splitlines()] if file.exists() else [] for file in files]
    return Seen(events, outputs)


def wake_when_the_others_are_done(stopped: subprocess.Popen[str], events: Path, end: float) -> None:
    while not (events.exists() and '"ended"' in events.read_text()) and time.monotonic() < end:
        time.sleep(0.05)
    stopped.send_signal(signal.SIGCONT)


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Seen]:
    """All at once: they mostly wait."""
    folders = {name: tmp_path_factory.mktemp(name) for name in CASES}
    started = {name: start_case(case, folders[name]) for name, case in CASES.items()}
    end = time.monotonic() + LIMIT_S
    return {name: finish(case, started[name], folders[name], end) for name, case in CASES.items()}


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if len(case.victims) == 1])
def test_a_majority_goes_on_and_announces_who_is_in_each_result(seen: dict[str, Seen], name: str) -> None:
    found, (victim,) = seen[name], CASES[name].victims
    survivors = [rank for rank in range(WORLD_SIZE) if rank != victim]
    for rank in survivors:
        assert found.ended(rank)["ended"] == "done", found.outputs
        assert found.of(rank, "members")[-1]["members"] == survivors
    announced = [found.announced(rank) for rank in survivors]
    assert announced[0] == announced[1] == announced[2]
    assert (1, tuple(survivors)) in announced[0].values(), "the loss was never noticed"


def test_a_sum_in_flight_is_refused_on_every_survivor_and_the_group_goes_on(seen: dict[str, Seen]) -> None:
    found = seen["kill-in-a-sum"]
    for rank in (0, 1, 3):
        refused = [(event["refused"], event["rank"]) for event in found.of(rank, "refused")]
        assert refused == [("sum", 2), ("all_gather", 2)], found.outputs


def test_who_was_left_out_and_lives_stops_with_a_typed_error(seen: dict[str, Seen]) -> None:
    ended = seen["stop"].ended(1)
    assert ended["ended"] == "NotMemberError: the others go on without it", ended
    assert ended["again"] == ended["ended"], "a later call fails alike"


def test_half_of_the_ranks_is_no_majority_and_stops(seen: dict[str, Seen]) -> None:
    found = seen["two-at-once"]
    for rank in (1, 3):
        ended = found.ended(rank)
        assert ended["ended"].startswith("NotMemberError: no majority"), (ended, found.outputs)
        assert ended["again"] == ended["ended"]
        assert max(epoch for epoch, _ in found.announced(rank).values()) == 0


def test_a_majority_goes_on_without_the_lowest_ranks_that_are_killed_together(seen: dict[str, Seen]) -> None:
    found, survivors = seen["host-of-rank-0"], [2, 3, 4]
    for rank in survivors:
        assert found.ended(rank)["ended"] == "done", found.outputs
        assert found.of(rank, "members")[-1]["members"] == survivors
    announced = [found.announced(rank) for rank in survivors]
    assert announced[0] == announced[1] == announced[2]
    assert (1, tuple(survivors)) in announced[0].values(), "both were left out together"


def test_ddp_trains_on_with_the_mean_over_who_is_left(tmp_path: Path) -> None:
    variables = {"GRADWIRE_ON_PEER_LOSS": "continue", "GRADWIRE_PEER_TIMEOUT_S": str(PEER_TIMEOUT_S)}
    outcome = launch("lost_while_training", WORLD_SIZE, tmp_path, env=variables, expected_dead=[2])
    outcome.require("check_sparse_gradients_which_cannot_go_on_are_refused")
    outcome.require("check_comparisons_of_replicas_which_cannot_go_on_are_refused")
    outcome.require("check_who_waits_for_others_between_two_steps_waits_as_long_as_the_group_says")
    outcome.require("check_the_survivors_train_on_with_the_mean_of_their_gradients")
    outcome.require("check_a_barrier_that_names_who_does_not_come_names_the_lost_rank_on_all_and_the_group_goes_on")
    outcome.require_clean_exit()
    assert outcome.exit_codes[2] == -signal.SIGKILL
