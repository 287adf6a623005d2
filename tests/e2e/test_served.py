"""Dedicated parameter servers as processes of their own; see bodies/served.py, served_killed.py and served_stopped.py."""

from __future__ import annotations

import json
import signal
from datetime import timedelta
from pathlib import Path

import pytest
from launch import Outcome, checks_of, launch
from served_processes import Server, cold_server, servers, settings
from torch.distributed import FileStore

WORKERS = 2


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> tuple[Outcome, list[tuple[int, str]], list[dict[str, int]]]:
    """A training with two servers: the workers' outcome, and each server's status, words and statistics."""
    folder = tmp_path_factory.mktemp("served")
    with servers(folder, 2) as running:
        outcome = launch("served", WORKERS, folder, env=settings(2))
        ends = [(server.words(), server.returncode) for server in running]
    numbers = [json.loads((folder / f"server-{i}").read_text()) if not code else {} for i, (_, code) in enumerate(ends)]
    return outcome, [(code, text) for text, code in ends], numbers


@pytest.mark.parametrize("check", checks_of("served"))
def test_served(served: tuple[Outcome, list[tuple[int, str]], list[dict[str, int]]], check: str) -> None:
    served[0].require(check)


# test of: ltp/dedicated-servers
def test_servers_end_by_themselves_when_the_last_worker_has_left(
    served: tuple[Outcome, list[tuple[int, str]], list[dict[str, int]]],
) -> None:
    outcome, ends, numbers = served
    outcome.require_clean_exit()
    for index, (code, text) in enumerate(ends):
        assert code == 0, text + outcome.transcript()
        assert f"server {index} of 2 serves 2 workers" in text
        assert "every worker has left" in text
    for index, stats in enumerate(numbers):
        assert (stats["index"], stats["error"]) == (index, None)
        assert stats["served"]["calls"] > 10
        assert stats["served"]["elems_received"] > 0


# test of: ltp/dedicated-servers
def test_exact_calls_of_torch_go_over_the_servers_where_the_operator_says_so(tmp_path: Path) -> None:
    with servers(tmp_path, 2) as running:
        outcome = launch("schedules", 3, tmp_path, env={**settings(2), "GRADWIRE_ALGORITHM": "parameter_server"})
        words = [server.words() for server in running]
    for check in checks_of("schedules"):
        outcome.require(check)
    outcome.require_clean_exit()
    assert [server.returncode for server in running] == [0, 0], words
    for index in range(2):
        served = json.loads((tmp_path / f"server-{index}").read_text())["served"]
        assert served["calls"] > 100
        assert served["elems_received"] == served["elems_expected"] > 0


def words_of(running: list[Server], check: str, folder: Path) -> list[str]:
    """What two servers said at their end, which must be a good one, to workers that made the calls of one check."""
    outcome = launch("served", WORKERS, folder, env={**settings(2), "GRADWIRE_TEST_ONLY": check})
    words = [server.words() for server in running]
    outcome.require(check)
    outcome.require_clean_exit()
    assert [server.returncode for server in running] == [0, 0], words
    return words


def test_a_server_that_no_call_came_to_says_so_and_how_one_would(tmp_path: Path) -> None:
    check = "check_other_collectives_and_groups_go_on_without_the_servers"
    with servers(tmp_path, 2) as running:
        words = words_of(running, check, tmp_path)
    assert all("GRADWIRE_ALGORITHM=parameter_server" in said for said in words), words


@pytest.mark.parametrize("configured", [True, False], ids=["configured", "generated"])
def test_traffic_with_servers_is_sealed(tmp_path: Path, configured: bool) -> None:
    secret = {"GRADWIRE_SECRET": "the secret of this job"} if configured else {}
    with servers(tmp_path, 2, **secret) as running:  # a server takes the setting from the workers
        env = {**settings(2), "GRADWIRE_SECURITY": "on", **secret}
        outcome = launch("served_sealed", WORKERS, tmp_path, env=env)
        ends = [server.words() for server in running]
    for check in checks_of("served_sealed"):
        outcome.require(check)
    outcome.require_clean_exit()
    assert [server.returncode for server in running] == [0, 0], ends
    for index in range(2):
        stats = json.loads((tmp_path / f"server-{index}").read_text())
        assert stats["served"]["elems_received"] > 0
        assert stats["security"]["cipher"] is not None
    assert not any(value in text for value in secret.values() for text in (*ends, outcome.transcript()))


@pytest.mark.parametrize("theirs", ["something else altogether", None], ids=["another", "none"])
def test_a_server_without_the_workers_secret_is_named_on_all(tmp_path: Path, theirs: str | None) -> None:
    with servers(tmp_path, 1, **({"GRADWIRE_SECRET": theirs} if theirs else {})) as (server,):
        env = {**settings(1), "GRADWIRE_SECURITY": "on", "GRADWIRE_SECRET": "the secret of this job"}
        outcome = launch("served_wrong_secret", WORKERS, tmp_path, env=env, backend="")
        words = server.words()
    outcome.require("check_the_server_is_named")
    assert server.returncode == 3, words
    assert "secret" in words
    assert "Traceback" not in words


# test of: ltp/dedicated-servers
@pytest.mark.parametrize("victim", ["server", "worker"])
def test_death_is_named_to_every_survivor(tmp_path: Path, victim: str) -> None:
    with servers(tmp_path, 1) as (server,):
        pid = str(server.process.pid) if victim == "server" else victim
        env = {**settings(1), "GRADWIRE_PEER_TIMEOUT_S": "5", "GRADWIRE_TEST_VICTIM": pid}
        dead = [1] if victim == "worker" else []
        outcome = launch("served_killed", WORKERS, tmp_path, env=env, expected_dead=dead)
        outcome.require("check_whoever_survives_is_told_who_died")
        words = server.words()
    if victim == "worker":
        assert server.returncode == 1, words
        assert "rank 1 " in words
        assert "is lost" in words
        stats = json.loads((tmp_path / "server-0").read_text())
        assert stats["error"] in words
        assert stats["served"]["calls"] > 0


STOPS = {"SIGINT": (130, "interrupted"), "SIGTERM": (143, "terminated")}


@pytest.mark.parametrize(("name", "during"), [("SIGINT", "idle"), ("SIGTERM", "call")])
def test_a_server_that_is_stopped_says_so_and_every_worker_is_told_which(
    tmp_path: Path, name: str, during: str
) -> None:
    code, word = STOPS[name]
    with servers(tmp_path, 1) as (server,):
        stop = {
            "GRADWIRE_TEST_SERVER": str(server.process.pid),
            "GRADWIRE_TEST_SIGNAL": name,
            "GRADWIRE_TEST_DURING": during,
        }
        # What tells the workers is the server's word, not its silence.
        outcome = launch(
            "served_stopped", WORKERS, tmp_path, env={**settings(1), "GRADWIRE_PEER_TIMEOUT_S": "60", **stop}
        )
        outcome.require("check_the_next_call_names_the_server")
        words = server.words()
    assert server.returncode == code, words
    assert word in words
    assert "Traceback" not in words
    stats = json.loads((tmp_path / "server-0").read_text())
    assert stats["error"] == word
    assert stats["served"]["calls"] > 0


@pytest.mark.parametrize("name", STOPS)
def test_a_server_whose_workers_have_not_come_can_be_stopped(tmp_path: Path, name: str) -> None:
    code, word = STOPS[name]
    with cold_server(tmp_path) as server:
        assert server.stderr is not None
        said = server.stderr.readline()
        assert "waits for the workers" in said
        server.send_signal(signal.Signals[name])
        words = server.communicate(timeout=60)[1]
    assert server.returncode == code, words
    assert word in words
    assert "Traceback" not in words


def test_a_server_that_was_started_again_while_it_waited_is_called_by_the_workers(tmp_path: Path) -> None:
    """As what keeps services running does with one that was killed."""
    with servers(tmp_path, 1) as (early,):
        FileStore(str(tmp_path / "store"), -1).wait(["gradwire-served/gradwire/here/server-0"], timedelta(seconds=60))
        early.process.kill()
        early.process.wait()
    check = "check_reductions_of_every_size_are_exact_and_said_to_be_over_servers"
    with servers(tmp_path, 2) as running:
        words_of(running, check, tmp_path)
