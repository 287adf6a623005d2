"""`gradwire serve` from outside, as far as it goes without workers; the rest is in tests/e2e/test_served.py."""

import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time

import pytest
from click.testing import CliRunner
from gradwire import _board, _rendezvous
from gradwire._board import VERSIONS, Board
from gradwire._runtime import group_settings
from gradwire.cli import main
from gradwire.config import Config
from gradwire.errors import MissingRankError, RendezvousError
from gradwire.torch import _serving
from torch.distributed import HashStore

COMMAND = [sys.executable, "-c", "from gradwire.cli import main; main()", "serve"]


def run(*arguments, timeout=None, **variables):
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("GRADWIRE_", "MASTER_"))}
    return subprocess.run(
        [*COMMAND, *arguments], env={**clean, **variables}, capture_output=True, text=True, check=False, timeout=timeout
    )


def test_help_teaches_with_examples_and_exit_statuses():
    result = CliRunner().invoke(main, ["serve", "--help"])
    assert result.exit_code == 0
    assert "GRADWIRE_SERVER_MODE=dedicated" in result.output
    assert "Exit status" in result.output


@pytest.mark.parametrize(
    "arguments",
    [
        ["--index", "-1"],
        ["--servers", "0"],
        ["--memory", "0"],
        ["--store", "nowhere"],
        ["--store", "file:///nowhere/store", "--index", "2", "--servers", "2", "--wait", "1"],
        [],
    ],
)
def test_wrong_usage_is_status_2(arguments):
    result = run(*arguments)
    assert result.returncode == 2, result.stderr
    assert "Traceback" not in result.stderr


def test_a_missing_folder_for_the_statistics_is_said_before_anybody_is_waited_for(tmp_path):
    result = run(
        "--store", f"file://{tmp_path / 'store'}", "--wait", "1", "--json", str(tmp_path / "missing" / "x.json")
    )
    assert (result.returncode, f"there is no folder {tmp_path / 'missing'}" in result.stderr) == (2, True), (
        result.stderr
    )


def test_a_folder_in_which_no_file_can_be_made_is_said_before_anybody_is_waited_for(tmp_path):
    result = run("--store", f"file://{tmp_path / 'store'}", "--wait", "1", "--json", "/proc/x.json")
    assert (result.returncode, "--json /proc/x.json: " in result.stderr) == (2, True), result.stderr


def test_where_no_worker_has_come_there_are_no_statistics_as_the_help_says(tmp_path):
    result = run("--store", f"file://{tmp_path / 'store'}", "--wait", "1", "--json", "-")
    assert (result.returncode, result.stdout) == (3, ""), result.stderr
    help_text = " ".join(CliRunner().invoke(main, ["serve", "--help"]).output.split())
    assert "whatever ends it once all workers have come; before that there are none" in help_text


def test_workers_that_do_not_come_are_status_3(tmp_path):
    result = run("--store", f"file://{tmp_path / 'store'}", "--wait", "1")
    assert result.returncode == 3, result.stderr
    assert "rank(s) 0" in result.stderr


@pytest.fixture
def closed_port():
    """Where nobody listens, and nobody else will: it is bound."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield taken.getsockname()[1]


def ended_by(number, server):
    """What it said, and its status; torch would wait twice as long as it is told to, and hear nothing meanwhile."""
    server.send_signal(number)
    try:
        said = server.communicate(timeout=60)[1]
    finally:
        server.kill()
    assert "Traceback" not in said, said
    return server.returncode


def test_sigterm_is_heard_while_there_is_no_store_yet(closed_port):
    address = f"tcp://127.0.0.1:{closed_port}"
    with subprocess.Popen([*COMMAND, "--store", address, "--wait", "300"], stderr=subprocess.PIPE, text=True) as server:
        assert "waits for the workers" in server.stderr.readline()
        assert ended_by(signal.SIGTERM, server) == 143


@pytest.mark.parametrize(("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)])
def test_a_signal_is_heard_while_who_has_the_port_says_nothing(number, status):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"tcp://127.0.0.1:{silent.getsockname()[1]}"
        command = [*COMMAND, "--store", address, "--wait", "300"]
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as server:
            silent.accept()
            assert ended_by(number, server) == status


def test_nobody_is_waited_for_longer_than_is_allowed(closed_port):
    address = f"tcp://127.0.0.1:{closed_port}"
    begun = time.monotonic()
    with pytest.raises(RendezvousError, match=r"within 1 s: .*refused"):
        _serving.open_store(address, 1.0)
    service = _serving.Service(0, None, None, 1, 20.0, begun - 15.0)
    assert 0 < service.left_s() <= 5.0, "what the Store has taken is taken off the wait for the workers"


def test_what_worker_0_wants_is_waited_for_within_the_time_in_which_it_should_call(monkeypatch):
    begun = time.monotonic()
    board = Board(HashStore(), "gradwire/1", 0, 0)
    board.started = begun - 600.0
    monkeypatch.setattr(_board, "pause", lambda *_: pytest.fail("it waits"))
    with pytest.raises(MissingRankError, match="within 600 s"):
        board.first(600.0)
    monkeypatch.setattr(_rendezvous, "server_is_called", lambda *_: 1)
    monkeypatch.setattr(Board, "first", lambda board, _: {"host": "a", "error": f"{board.started >= begun}"})
    with pytest.raises(RendezvousError, match="could not start: True"):
        _rendezvous.first_worker(HashStore(), 0, 600.0)


@pytest.mark.parametrize("place", ["", "missing/store"])
def test_a_file_that_can_be_none_is_said_at_once(tmp_path, place):
    """Torch would look for a folder that is not there for five minutes."""
    try:
        result = run("--store", f"file://{tmp_path / place}", "--wait", "1", timeout=60)
    except subprocess.TimeoutExpired:
        pytest.fail("it waits")
    assert (result.returncode, len(result.stderr.splitlines()), "cannot be opened" in result.stderr) == (2, 1, True), (
        result.stderr
    )


@pytest.mark.parametrize("address", ["nowhere", "tcp://node0:0", "file:///missing/store"])
def test_what_is_wrong_with_an_address_is_said_before_torch_is_imported(tmp_path, address):
    (tmp_path / "torch.py").write_text("raise SystemExit('torch is imported')")
    result = run("--store", address, PYTHONPATH=os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    assert (result.returncode, f"store = {address!r}" in result.stderr) == (2, True), result.stderr


def test_the_configuration_says_how_many_servers_are_processes_of_their_own():
    assert Config(servers=3).dedicated_servers() == 0
    assert Config(server_mode="dedicated").dedicated_servers() == 1
    assert Config(server_mode="dedicated", servers=3).dedicated_servers() == 3


@pytest.mark.parametrize(
    "more",
    [
        {"_origins": {"security": ["environment GRADWIRE_SECURITY", "off"]}, "security": "off"},
        {"metrics_host": "0.0.0.0", "metrics_port": 9000},
        {"otlp_endpoint": "http://10.0.0.1/"},
        {"chaos": "loss=50%"},
    ],
)
def test_a_server_takes_nothing_from_worker_0_but_what_all_ranks_must_agree_about(monkeypatch, more):
    """Whoever can write to the Store could have written it."""
    monkeypatch.setenv("GRADWIRE_SECRET", "the secret of this job")
    monkeypatch.setattr(secrets, "token_hex", lambda _: "number")
    monkeypatch.setattr(_serving, "configure", lambda _: pytest.fail("it was configured so"))
    with pytest.raises(RendezvousError, match=", ".join(sorted(more.keys() - {"security"}))):
        serve({**group_settings(Config(server_mode="dedicated")), **more})


def serve(published):
    """For a worker 0 that has published these settings."""
    store, below = HashStore(), "gradwire-served/gradwire"
    entry = {"record": "{}", "settings": published, "rank": 0, "world_size": 3, "host": "a", "workers": 2, **VERSIONS}
    store.set(f"{below}/called/number", "1")
    store.set(f"{below}/1/0", json.dumps(entry))
    _serving.serve(store, _serving.Service(0, None, None, 1 << 20, 1.0), lambda _: None, lambda _: None)


@pytest.mark.parametrize(
    ("program", "operator"),
    [({"loss_bound": 0.1}, {"GRADWIRE_PRESET": "reliable"}), ({"preset": "reliable"}, {"GRADWIRE_LOSS_BOUND": "0.1"})],
)
def test_a_server_takes_what_a_worker_has_partly_from_its_operator(monkeypatch, program, operator):
    class ConfiguredError(Exception):
        pass

    def configured(config):
        assert (config.preset, config.loss_bound) == ("reliable", 0.1)
        raise ConfiguredError

    monkeypatch.setattr(secrets, "token_hex", lambda _: "number")
    monkeypatch.setattr(_serving, "configure", configured)
    worker = Config.from_env(Config(server_mode="dedicated", **program), operator)
    with pytest.raises(ConfiguredError):
        serve(group_settings(worker))
