"""A rank that was lost joins again over real processes (`on_peer_loss="continue"`).

Of four ranks one is killed or stopped, the others go on, and its next life gets what they have, exactly.

Every result is the mean over the ranks that its report announces (joining_rank.py checks each against the reference), and after each
step all who took part have the same bits.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from free_ports import free_port
from launch import _rank_variables, launch
from lives import LAST_LIFE, NEXT_IS_THERE
from test_communicator import start

SCRIPT = Path(__file__).parent / "joining_rank.py"
WORLD_SIZE, VICTIM = 4, 2
SURVIVORS = [0, 1, 3]
PEER_TIMEOUT_S = 10.0
# For a busy machine, and less than another peer timeout: a verdict that took two would show.
MARGIN_S = 9.0
LIMIT_S = 300.0
CASES = ("killed", "stopped", "wrong secret", "killed while joining")


@dataclass
class Case:
    name: str
    folder: Path
    port: int = field(default_factory=free_port)
    # Of the victim's engine, in all of its lives.
    own_port: int = field(default_factory=free_port)
    ranks: list[subprocess.Popen[str]] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)

    def begin(self, rank: int, **more: str) -> subprocess.Popen[str]:
        variables = {
            "GRADWIRE_ON_PEER_LOSS": "continue",
            "GRADWIRE_PEER_TIMEOUT_S": str(PEER_TIMEOUT_S),
            "GRADWIRE_SECURITY": "auto" if self.name == "stopped" else "on",
            "GRADWIRE_SECRET": "the secret of this job",
            "GRADWIRE_TEST_FOLDER": str(self.folder),
            "GRADWIRE_TEST_CASE": self.name,
            "OMP_NUM_THREADS": "1",
            **({"GRADWIRE_PORT": str(self.own_port)} if self.name == "killed" and rank == VICTIM else {}),
            **more,
        }
        process = start([str(SCRIPT)], rank, WORLD_SIZE, self.port, **variables)
        self.ranks.append(process)
        return process

    def awaited(self, rank: int) -> dict[str, str]:
        """Variables of the ranks, of which the victim is not lost before its next life waits for that."""
        return {NEXT_IS_THERE: str(self.folder / "next")} if rank == VICTIM else {}

    def next_life(self) -> dict[str, str]:
        """Variables of the victim's next life, which begins when the first one has ended."""
        return {**self.awaited(VICTIM), LAST_LIFE: str(self.ranks[VICTIM].pid), "GRADWIRE_TEST_LIFE": "1"}

    def events(self, rank: int, key: str, life: int | None = None) -> list[dict[str, Any]]:
        file = self.folder / f"events-{rank}"
        lines = file.read_text().splitlines() if file.exists() else []
        events = [json.loads(line) for line in lines if line.endswith("}")]
        return [event for event in events if key in event and life in (None, event["life"])]

    def wait(self, what: str, happened: Any, end: float) -> None:
        while not happened() and time.monotonic() < end:
            time.sleep(0.05)
        if not happened():
            (self.folder / "given-up").write_text("")
            self.outputs.append(f"waited in vain until {what}")

    def finish(self, end: float) -> None:
        for process in self.ranks:
            try:
                output = process.communicate(timeout=max(0.1, end - time.monotonic()))[0]
            except subprocess.TimeoutExpired:
                process.kill()
                output = "had to be ended: " + process.communicate()[0]
            self.outputs.append(f"--- exit {process.returncode}\n{output}")

    def transcript(self) -> str:
        ended = [self.events(rank, "ended") for rank in range(WORLD_SIZE)]
        return f"{self.name}: {ended}\n" + "\n".join(self.outputs)


def lose_and_bring_back(case: Case, end: float) -> None:
    """What happens to the victim, after all have been started."""
    victim = case.ranks[VICTIM]
    case.wait("the victim is lost", (case.folder / "lost").exists, end)
    if case.name == "stopped":
        case.wait("the others go on", lambda: any(e["epoch"] == 1 for e in case.events(0, "step")), end)
        victim.send_signal(signal.SIGCONT)
    elif case.name == "killed":
        victim.wait()  # its next life comes under the same address at once: nobody knows yet that this one is gone
    elif case.name == "wrong secret":
        case.begin(VICTIM, GRADWIRE_TEST_LIFE="1", GRADWIRE_SECRET="another secret of another job")
        case.wait("it was refused", lambda: case.events(VICTIM, "ended", life=1), end)
        (case.folder / "given-up").write_text("")
    else:
        for life in (1, 2):
            process = case.begin(VICTIM, GRADWIRE_TEST_LIFE=str(life))
            case.wait("it died while it joined", lambda process=process: process.poll() is not None, end)
        case.wait(
            "the others go on without it",
            lambda: (
                [e["epoch"] for e in case.events(0, "step")][-1] >= 3
                and len(case.events(0, "step")[-1]["members"]) == 3
            ),
            end,
        )
        (case.folder / "given-up").write_text("")


@pytest.fixture(scope="module")
def cases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Case]:
    """All at once: they mostly wait."""
    made = {name: Case(name, tmp_path_factory.mktemp(name.replace(" ", "-"))) for name in CASES}
    for case in made.values():
        for rank in range(WORLD_SIZE):
            case.begin(rank, **(case.awaited(rank) if case.name == "killed" else {}))
    made["killed"].begin(VICTIM, **made["killed"].next_life())
    end = time.monotonic() + LIMIT_S
    for case in made.values():
        lose_and_bring_back(case, end)
    for case in made.values():
        case.finish(end)
    return made


@pytest.mark.parametrize("name", CASES)
def test_after_each_step_all_who_took_part_have_the_same_bits(cases: dict[str, Case], name: str) -> None:
    case = cases[name]
    steps: dict[int, set[tuple[Any, ...]]] = {}
    for rank in range(WORLD_SIZE):
        for event in case.events(rank, "step"):
            assert rank in event["members"], event
            result = (event["epoch"], tuple(event["members"]), event["digest"])
            steps.setdefault(event["step"], set()).add(result)
    assert steps, case.transcript()
    # What a rank completed that was lost right afterwards is undone with it, so its word alone may differ; here it is lost between steps.
    assert all(len(results) == 1 for results in steps.values()), case.transcript()
    for rank in SURVIVORS:
        assert [event["ended"] for event in case.events(rank, "ended")] == ["done"], case.transcript()


@pytest.mark.parametrize("name", ["killed", "stopped"])
def test_the_next_life_gets_what_the_others_have_and_all_train_on(cases: dict[str, Case], name: str) -> None:
    case = cases[name]
    assert case.events(VICTIM, "ended", life=1)[-1]["ended"] == "done", case.transcript()
    joined = [case.events(rank, "joined", life=1 if rank == VICTIM else None) for rank in range(WORLD_SIZE)]
    told = {(event["at"], event["digest"]) for events in joined for event in events}
    assert [len(events) for events in joined] == [1] * WORLD_SIZE, case.transcript()
    assert len(told) == 1, f"not the same state everywhere: {told}"
    # What was not answered is said again a hundred times in a peer timeout; ranks that answer each other's answers send millions.
    assert max(event["sent"] for events in joined for event in events) < 20_000, told
    together = [event["step"] for event in case.events(VICTIM, "step", life=1)]
    assert len(together) >= 4, case.transcript()
    assert together[0] == joined[0][0]["at"], case.transcript()
    for rank in range(WORLD_SIZE):
        assert case.events(rank, "gathered")[-1]["gathered"] == [0, 1, 2, 3], "whole again"
        assert case.events(rank, "members")[-1]["members"] == [0, 1, 2, 3]


def test_a_rank_that_is_started_again_under_its_address_is_found_lost_in_time_by_one_verdict(
    cases: dict[str, Case],
) -> None:
    case = cases["killed"]
    ports = [event["port"] for event in case.events(VICTIM, "port")]
    assert ports == [case.own_port] * 2, "two lives at one address"
    lost_at = float((case.folder / "lost").read_text())
    begun = case.events(VICTIM, "port", life=1)[0]["time"]
    verdicts = [next(e for e in case.events(rank, "epoch") if e["epoch"] > 0) for rank in SURVIVORS]
    assert begun < min(event["time"] for event in verdicts), (
        "its next life was there before anybody knew that it was lost"
    )
    for verdict in verdicts:
        assert (verdict["epoch"], verdict["members"]) == (1, SURVIVORS), verdict
        assert [(lost["rank"], lost["epoch"]) for lost in verdict["lost"]] == [(VICTIM, 1)], verdict
        assert verdict["time"] - lost_at <= PEER_TIMEOUT_S + MARGIN_S, verdict
    told = [verdict["time"] for verdict in verdicts]
    assert max(told) - min(told) < PEER_TIMEOUT_S, "one waited for a timeout of its own"


def test_without_going_on_a_rank_that_is_started_again_under_its_address_is_named_by_all_in_time(
    tmp_path: Path,
) -> None:
    case = Case("restarted", tmp_path)
    script = SCRIPT.parent / "restarted_rank.py"
    variables = {
        "GRADWIRE_PEER_TIMEOUT_S": str(PEER_TIMEOUT_S),
        "GRADWIRE_TEST_FOLDER": str(tmp_path),
        "OMP_NUM_THREADS": "1",
    }
    own = {**variables, "GRADWIRE_PORT": str(case.own_port)}

    def begin(rank: int, **more: str) -> None:
        own_or_any = own if rank == VICTIM else variables
        case.ranks.append(start([str(script)], rank, WORLD_SIZE, case.port, **own_or_any, **more))

    for rank in range(WORLD_SIZE):
        begin(rank, GRADWIRE_TEST_LIFE="0", **case.awaited(rank))
    begin(VICTIM, **case.next_life())
    survivors = [case.ranks[rank] for rank in SURVIVORS]
    end = time.monotonic() + LIMIT_S
    case.wait("the others have ended", lambda: all(rank.poll() is not None for rank in survivors), end)
    (tmp_path / "told").write_text("")
    case.finish(end)
    lost, listens = case.events(VICTIM, "port")
    assert [lost["port"], listens["port"]] == [case.own_port] * 2, case.outputs
    failures = [case.events(rank, "event")[-1] for rank in SURVIVORS]
    assert listens["at"] < min(failure["at"] for failure in failures), (
        "it was there before anybody knew that it was lost"
    )
    for failure in failures:
        assert (failure["error"], failure["fields"]["rank"]) == ("PeerLostError", VICTIM), failure
        assert failure["at"] - lost["at"] <= PEER_TIMEOUT_S + MARGIN_S, failure
    told = [failure["at"] for failure in failures]
    assert max(told) - min(told) < PEER_TIMEOUT_S, "one waited for a timeout of its own"


def test_who_was_stopped_is_told_that_it_is_no_member_and_may_join_as_another_life(cases: dict[str, Case]) -> None:
    ended = cases["stopped"].events(VICTIM, "ended", life=0)
    assert [event["ended"] for event in ended] == ["NotMemberError: the others go on without it"]


def test_who_has_another_secret_is_refused_where_ranks_meet(cases: dict[str, Case]) -> None:
    case = cases["wrong secret"]
    ended = case.events(VICTIM, "ended", life=1)
    assert ended, case.transcript()
    assert ended[0]["ended"].startswith("SecretMismatchError"), case.transcript()
    assert "another job secret" in ended[0]["ended"], case.transcript()
    for rank in SURVIVORS:
        assert case.events(rank, "members")[-1]["members"] == SURVIVORS
        assert not case.events(rank, "joined")


def test_who_joins_gives_way_as_the_others_where_ranks_share_cores(cases: dict[str, Case]) -> None:
    case = cases["killed"]
    yields = [event["yields"] for event in case.events(VICTIM, "yields", life=1)]
    assert [count > 0 for count in yields] == [True], case.transcript()


def test_who_is_killed_while_it_joins_harms_nobody(cases: dict[str, Case]) -> None:
    case = cases["killed while joining"]
    for rank in SURVIVORS:
        assert case.events(rank, "members")[-1]["members"] == SURVIVORS, case.transcript()
        # One was never a member; the other was lost before or after the call by which the others know that it is one.
        assert len(case.events(rank, "joined")) <= 1, case.transcript()


def test_ddp_trains_on_with_the_state_that_the_others_have(tmp_path: Path) -> None:
    variables = {"GRADWIRE_ON_PEER_LOSS": "continue", "GRADWIRE_PEER_TIMEOUT_S": str(PEER_TIMEOUT_S)}
    again = BroughtBack(tmp_path, variables)
    again.start()
    outcome = launch("joining_again", WORLD_SIZE, tmp_path, env=variables, timeout_s=LIMIT_S, expected_dead=[VICTIM])
    again.join()
    outcome.outputs[VICTIM] += again.output
    outcome.expected_dead.clear()
    outcome.require("check_a_rank_that_joins_again_trains_on_with_the_same_bits")
    assert outcome.exit_codes[VICTIM] == -signal.SIGKILL


def test_who_forms_another_group_before_the_others_have_met_it_ends_at_once_and_harms_nobody(tmp_path: Path) -> None:
    variables = {"GRADWIRE_ON_PEER_LOSS": "continue", "GRADWIRE_PEER_TIMEOUT_S": str(PEER_TIMEOUT_S)}
    body = "joining_out_of_order"
    again = BroughtBack(tmp_path, variables, body)
    again.start()
    outcome = launch(body, WORLD_SIZE, tmp_path, env=variables, timeout_s=LIMIT_S, expected_dead=[VICTIM])
    again.join()
    outcome.outputs[VICTIM] += again.output
    outcome.expected_dead.clear()
    outcome.require("check_a_rank_that_is_back_forms_no_second_group_while_the_members_of_the_first_wait_for_it")


class BroughtBack(threading.Thread):
    """Starts the victim again, once it is lost."""

    def __init__(self, folder: Path, variables: dict[str, str], body: str = "joining_again") -> None:
        super().__init__()
        self.folder = folder
        self.body = body
        self.variables = {**os.environ, **_rank_variables(VICTIM, WORLD_SIZE, folder, "gradwire"), **variables}
        self.output = ""

    def run(self) -> None:
        end = time.monotonic() + LIMIT_S
        while not (self.folder / "lost").exists() and time.monotonic() < end:
            time.sleep(0.05)
        command = [sys.executable, str(SCRIPT.parent / "rank.py"), self.body]
        variables = {**self.variables, "GRADWIRE_TEST_LIFE": "1", "GRADWIRE_TEST_TIMEOUT_S": "120"}
        try:
            done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=LIMIT_S, check=False)
            self.output = f"--- the next life, exit {done.returncode}\n{done.stdout}{done.stderr}"
        except subprocess.TimeoutExpired as error:
            self.output = f"--- the next life did not end\n{error.stdout}{error.stderr}"
