"""A group that cannot be formed is explained alike to all of its ranks, also where the Store ends with rank 0."""

from __future__ import annotations

import json
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import warm
from free_ports import free_port
from gradwire import Config, _board, _rendezvous
from gradwire._board import Board
from gradwire.errors import ConfigError, MissingRankError, SettingsMismatchError
from launch import _clean_environment
from served_processes import COMMAND, settings

HERE = Path(__file__).parent
WORKERS = 2
LONGEST_S = 120.0
TIMES = 3


def words_of_ranks(
    env_of_rank: list[dict[str, str]], folder: Path, timeout_s: float, server: dict[str, str] | None = None
) -> list[str]:
    """What each rank says, and a dedicated server, if there is one with such variables."""
    port, serve = free_port(), folder / "serve.py"
    serve.write_text(COMMAND)
    commands = [
        ([str(HERE / "refused_rank.py"), str(port), str(rank), str(len(env_of_rank)), str(timeout_s)], env)
        for rank, env in enumerate(env_of_rank)
    ]
    if server is not None:
        commands.append(([str(serve), "serve", "--index", "0", "--store", f"tcp://127.0.0.1:{port}"], server))
    with warm.starter(elsewhere=False) as start, ExitStack() as opened:
        files = [opened.enter_context(tempfile.TemporaryFile()) for _ in commands]
        # What torch says in C++ of a Store that has ended is of no interest, and would stand behind ours.
        logs = [opened.enter_context(tempfile.TemporaryFile()) for _ in commands]
        running = [
            start(
                command,
                env={**_clean_environment(), "GRADWIRE_PORT": "0", **warm.THREADS, **env},
                stdout=file,
                stderr=file if "serve" in command else log,
            )
            for (command, env), file, log in zip(commands, files, logs, strict=True)
        ]
        try:
            for process in running:
                process.wait(LONGEST_S)
        finally:
            for process in running:
                process.kill()
        for file in files:
            file.seek(0)
        return [file.read().decode() for file in files]


def test_dedicated_servers_that_do_not_come_are_called_what_they_are(tmp_path: Path) -> None:
    for words in words_of_ranks([settings(1)] * WORKERS, tmp_path, 8.0):
        assert "MissingRankError" in words, words
        assert "parameter server(s) 0 of 2 worker(s) and 1 server(s) did not appear" in words, words
        assert "gradwire serve --index 0" in words, words
        assert "rank(s) 2" not in words, words


@pytest.mark.parametrize("_time", range(TIMES))
def test_a_server_of_another_preset_is_named_to_all(tmp_path: Path, _time: int) -> None:
    *workers, server = words_of_ranks([settings(1)] * WORKERS, tmp_path, 60.0, {"GRADWIRE_PRESET": "mlt"})
    for words in workers:
        assert words.startswith("SettingsMismatchError: parameter server 0 on "), words
        assert "has preset = mlt, rank " in words, words
    assert "has preset = auto, parameter server 0 has mlt" in server, server


@pytest.mark.parametrize("_time", range(TIMES))
@pytest.mark.parametrize(
    ("name", "values", "error"),
    [
        ("GRADWIRE_PRESET", ["auto", "auto", "mlt"], "SettingsMismatchError: rank "),
        ("GRADWIRE_SECRET", ["the first of two secrets", "the second of two secrets"], "SecretMismatchError: "),
    ],
)
def test_all_ranks_name_what_differs_though_the_store_ends_with_rank_0(
    tmp_path: Path, name: str, values: list[str], error: str, _time: int
) -> None:
    env = [{name: value, "GRADWIRE_SECURITY": "on"} for value in values]
    for words in words_of_ranks(env, tmp_path, 60.0):
        assert words.startswith(error), words


class Others:
    """In place of the wait of rank 0: the other rank sees why, and so ends it."""

    def __init__(self, store: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        self.waits = 0
        self._store = store
        monkeypatch.setattr(_board, "pause", self._wait)

    def _wait(self, *_: Any) -> None:
        self.waits += 1
        Board(self._store, "gradwire/1", 1, WORKERS).see_out(LONGEST_S)


def test_rank_0_stays_until_the_others_know_why_and_no_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.distributed import HashStore

    store = HashStore()
    others = Others(store, monkeypatch)
    with pytest.raises(ConfigError), _rendezvous._seeing_out(Board(store, "gradwire/1", 0, WORKERS)):
        Config(preset="of nobody")
    assert others.waits == 1
    monkeypatch.setattr(_board, "pause", lambda *_: pytest.fail("it waits for what has been"))
    with pytest.raises(ConfigError), _rendezvous._seeing_out(Board(store, "gradwire/2", 1, WORKERS)):
        Config(preset="of nobody")
    Board(store, "gradwire/3", 0, WORKERS).see_out(0.0)


def test_servers_and_workers_that_are_missing_are_both_named() -> None:
    from torch.distributed import HashStore

    board = Board(HashStore(), "gradwire/1", 0, 4)
    board.workers = 2
    board.publish({"record": "", "settings": {}})
    with pytest.raises(
        MissingRankError, match=r"rank\(s\) 1 and parameter server\(s\) 0, 1 of 2 worker\(s\)"
    ) as caught:
        board.collect(0.0)
    assert caught.value.ranks == [1, 2, 3]
    other = {**json.loads(board._store.get("gradwire/1/0")), "gradwire": "0.0.1"}
    board._store.set("gradwire/1/3", json.dumps(other))
    with pytest.raises(SettingsMismatchError, match=r"parameter server 1 on .* has gradwire version 0\.0\.1"):
        board.collect(0.0)
