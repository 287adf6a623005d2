"""`gradwire.Communicator` in real processes that cannot import torch, and rendezvous that fail."""

from __future__ import annotations

import ast
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from free_ports import free_port
from gradwire import Config, _board, _joining, _meeting
from gradwire.errors import ConfigError, MissingRankError, PortInUseError, RendezvousError
from launch import _clean_environment, _results

HERE = Path(__file__).parent
SCRIPT = HERE / "communicator_rank.py"
CHECKS = [
    node.name
    for node in ast.parse(SCRIPT.read_text()).body
    if isinstance(node, ast.FunctionDef) and node.name.startswith("check_")
]
# Prints what forming the group ended with.
FORM = """
import sys; sys.modules["torch"] = None
import gradwire, datetime
try:
    gradwire.Communicator(timeout=datetime.timedelta(seconds=float(sys.argv[1]))).close()
except BaseException as error:
    print(type(error).__name__, error)
else:
    print("formed")
"""
# Goes on when it is told to.
WHEN_TOLD = """
import sys; sys.modules["torch"] = None
import gradwire
gradwire.Communicator
print("ready", flush=True)
sys.stdin.readline()
"""
# Tries again when nobody came.
AGAIN = """
import sys; sys.modules["torch"] = None
import gradwire, datetime
try:
    gradwire.Communicator(timeout=datetime.timedelta(seconds=0.5))
except gradwire.errors.MissingRankError:
    print("nobody came", flush=True)
gradwire.Communicator(timeout=datetime.timedelta(seconds=60)).close()
print("formed")
"""
# One group after the other, at the same address and without a call that would keep the quick ones.
ONE_AFTER_ANOTHER = """
import sys; sys.modules["torch"] = None
import gradwire, datetime
for number in range(20):
    gradwire.Communicator(timeout=datetime.timedelta(seconds=60)).close()
print("formed all")
"""
# Loses the other rank, and forms a group with its next life.
SURVIVOR = """
import sys; sys.modules["torch"] = None
import gradwire, datetime
long = datetime.timedelta(seconds=60)
try:
    with gradwire.Communicator(timeout=long) as communicator:
        communicator.barrier()
except gradwire.errors.PeerLostError:
    print("lost", flush=True)
gradwire.Communicator(timeout=long).close()
print("formed")
"""
# Ends without a word when the group is there.
SHORT_LIFE = """
import sys; sys.modules["torch"] = None
import gradwire, datetime, os, signal
communicator = gradwire.Communicator(timeout=datetime.timedelta(seconds=60))
os.kill(os.getpid(), signal.SIGKILL)
"""
# Prints the schedules of an exact reduction and of one that may lose something.
SCHEDULES = """
import sys; sys.modules["torch"] = None
import gradwire, numpy
with gradwire.Communicator() as communicator:
    for tolerant in (False, True):
        print(communicator.all_reduce(numpy.ones(1000, "float32"), "mean", tolerate_loss=tolerant).report().collective)
"""


STARTED: list[subprocess.Popen[str]] = []


@pytest.fixture(autouse=True)
def _leaves_nobody() -> Iterator[None]:
    """Ranks of a test that has failed would wait for each other on ports that others get."""
    yield
    for process in STARTED:
        process.kill()
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()
    STARTED.clear()


def start(
    command: list[str], rank: int, world_size: int, port: int, *, stdin: int | None = None, **more: str
) -> subprocess.Popen[str]:
    variables = {
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "GRADWIRE_PORT": "0",
        "GRADWIRE_RENDEZVOUS": f"127.0.0.1:{port}",
    }
    environment = {**_clean_environment(), **variables, **more}
    pipe, both = subprocess.PIPE, subprocess.STDOUT
    STARTED.append(
        subprocess.Popen([sys.executable, *command], env=environment, text=True, stdin=stdin, stdout=pipe, stderr=both)
    )
    return STARTED[-1]


def form(rank: int, world_size: int, port: int, timeout_s: float = 60.0, **more: str) -> subprocess.Popen[str]:
    return start(["-c", FORM, str(timeout_s)], rank, world_size, port, **more)


def form_together(
    timeouts_s: list[float], world_size: int, port: int, *of_rank: dict[str, str]
) -> list[subprocess.Popen[str]]:
    """Ranks that begin when all have started: a short time to meet is none to start in."""
    processes = [
        start(["-c", WHEN_TOLD + FORM, str(timeout_s)], rank, world_size, port, stdin=subprocess.PIPE, **more)
        for rank, (timeout_s, more) in enumerate(zip(timeouts_s, of_rank or [{}] * len(timeouts_s), strict=True))
    ]
    for process in processes:
        assert first_line(process) == "ready\n"
    for process in reversed(processes):  # rank 0, which gives up first, as the last one
        assert process.stdin is not None
        process.stdin.write("\n")
        process.stdin.flush()
    return processes


def first_line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    assert select.select([process.stdout], [], [], 120)[0], "it says nothing"
    return process.stdout.readline()


def printed(process: subprocess.Popen[str]) -> str:
    return process.communicate(timeout=120)[0]


@pytest.fixture(
    scope="module",
    params=[(2, ""), (3, ""), (2, "tail=10%,seed=7"), (3, "tail=10%,seed=7")],
    ids=["2-ranks", "3-ranks", "2-ranks-with-loss", "3-ranks-with-loss"],
)
def ranks(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> list[tuple[dict[str, str], str]]:
    """What each rank's checks ended with, and what it printed."""
    world_size, chaos = request.param
    folder, port = tmp_path_factory.mktemp("communicator"), free_port()
    more = {"GRADWIRE_TEST_FOLDER": str(folder), **({"GRADWIRE_CHAOS": chaos} if chaos else {})}
    processes = [start([str(SCRIPT)], rank, world_size, port, **more) for rank in range(world_size)]
    outputs = [printed(process) for process in processes]
    return [(_results(folder, rank), output) for rank, output in enumerate(outputs)]


@pytest.mark.parametrize("check", CHECKS)
def test_collectives(ranks: list[tuple[dict[str, str], str]], check: str) -> None:
    for results, output in ranks:
        assert results.get(check) == "ok", results.get(check, output)


@pytest.mark.parametrize("algorithm", ["parameter_server", "halving_doubling", "one_shot"])
def test_the_operator_chooses_the_schedule(algorithm: str) -> None:
    port = free_port()
    processes = [start(["-c", SCHEDULES], rank, 2, port, GRADWIRE_ALGORITHM=algorithm) for rank in range(2)]
    for process in processes:
        exact, tolerant = printed(process).split()
        assert exact == f"all_reduce/{algorithm}"
        # Halving and doubling and one shot are always exact: what may lose something takes a transpose.
        assert tolerant == (exact if algorithm == "parameter_server" else "all_reduce/transpose")


def test_a_world_size_that_differs_is_named_on_both_ranks() -> None:
    port = free_port()
    processes = [form(0, 2, port), form(1, 3, port)]
    for process in processes:
        assert "WorldSizeError" in printed(process)


def test_missing_ranks_are_named_within_the_timeout() -> None:
    port = free_port()
    processes = form_together([6.0, 60.0], 3, port)
    assert "MissingRankError rank(s) 2 of 3 did not appear within 6 s" in printed(processes[0])
    told = printed(processes[1])
    assert "MissingRankError rank 0 gave up" in told
    assert "rank(s) 2 of 3" in told


def test_rank_0_that_never_comes_is_named() -> None:
    with pytest.raises(MissingRankError, match=r"rank\(s\) 0 did not appear") as caught:
        _meeting.MeetingStore("127.0.0.1", free_port(), 1, 0.3)
    assert caught.value.ranks == [0]
    assert str(caught.value).endswith(": Connection refused"), "what the system said"


def test_who_tries_again_forms_the_group_with_a_rank_that_has_just_come() -> None:
    port = free_port()
    early = start(["-c", AGAIN], 1, 2, port)
    assert first_line(early) == "nobody came\n"
    late = form(0, 2, port)
    assert [printed(process).splitlines()[-1] for process in (early, late)] == ["formed", "formed"]


@pytest.mark.parametrize("secret", [{}, {"GRADWIRE_SECRET": "0123456789abcdef0123456789abcdef"}])
def test_a_rank_that_has_been_in_a_group_forms_one_with_another_that_is_started_again(secret: dict[str, str]) -> None:
    port, more = free_port(), {"GRADWIRE_PEER_TIMEOUT_S": "6", **secret}
    survivor = start(["-c", SURVIVOR], 0, 2, port, **more)
    lost = start(["-c", SHORT_LIFE], 1, 2, port, **more)
    printed(lost)
    assert lost.returncode == -signal.SIGKILL
    again = form(1, 2, port, **more)
    outputs = printed(survivor), printed(again)
    assert [output.splitlines()[-1] for output in outputs] == ["formed", "formed"], outputs
    assert "lost" in outputs[0], outputs


@pytest.mark.parametrize("secret", [{}, {"GRADWIRE_SECRET": "0123456789abcdef0123456789abcdef"}])
def test_a_rank_that_comes_to_the_next_meeting_before_others_have_left_the_last_one_waits_for_it(
    secret: dict[str, str],
) -> None:
    port = free_port()
    processes = [start(["-c", ONE_AFTER_ANOTHER], rank, 3, port, **secret) for rank in range(3)]
    assert [printed(process) for process in processes] == ["formed all\n"] * 3


def test_a_secret_that_differs_is_named() -> None:
    port = free_port()
    secrets = ["first secret of this job", "other secret of that job"]
    of_rank = [{"GRADWIRE_SECRET": secret, "GRADWIRE_SECURITY": "on"} for secret in secrets]
    first, other = form_together([8.0, 60.0], 2, port, *of_rank)
    assert "SecretMismatchError the rendezvous at" in printed(other), "at once"
    told = printed(first)
    # Anybody could have said that it was rank 1: who waits for it goes on to, and is told afterwards.
    assert "MissingRankError" in told
    assert "who said it was rank 1 from ('127.0.0.1', " in told


@pytest.mark.parametrize("security", ["on", "auto"])
def test_rank_0_alone_without_the_secret_is_named_on_all_ranks(security: str) -> None:
    port = free_port()
    of_rank = [
        {"GRADWIRE_SECURITY": security, **({"GRADWIRE_SECRET": "a secret of this job"} if r else {})} for r in range(2)
    ]
    first, other = form_together([8.0, 60.0], 2, port, *of_rank)
    assert "has no job secret, and this rank has one" in printed(other), "at once"
    told = printed(first)
    assert "MissingRankError" in told
    assert "rank 1 from ('127.0.0.1', " in told
    assert "has a job secret, and rank 0 has none" in told


def test_a_secret_is_of_no_account_where_security_is_off() -> None:
    port = free_port()
    secrets = [{}, {"GRADWIRE_SECRET": "a secret of this job"}]
    processes = [form(r, 2, port, GRADWIRE_SECURITY="off", **secret) for r, secret in enumerate(secrets)]
    assert [printed(process).splitlines()[-1] for process in processes] == ["formed", "formed"]


def test_ranks_with_one_secret_meet() -> None:
    port = free_port()
    processes = [form(r, 2, port, GRADWIRE_SECRET="the secret of this job") for r in range(2)]
    assert [printed(process).splitlines()[-1] for process in processes] == ["formed", "formed"]


def test_a_secret_that_is_none_is_named_where_others_have_one() -> None:
    port = free_port()
    secrets = ["the secret of this job", "short"]
    first, other = (form(r, 2, port, 60.0 if r else 3.0, GRADWIRE_SECRET=s) for r, s in enumerate(secrets))
    assert "ConfigError GRADWIRE_SECRET has 5 bytes" in printed(other)
    assert "MissingRankError" in printed(first)


def test_a_port_in_use_is_named() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(PortInUseError, match=str(port)):
            _meeting.MeetingServer("127.0.0.1", port, 2)


def test_an_interrupt_ends_the_wait() -> None:
    port = free_port()
    process = form(0, 2, port)
    _meeting.MeetingStore("127.0.0.1", port, 1, 60.0).wait(["gradwire/1/0"], timedelta(seconds=30))
    process.send_signal(signal.SIGINT)  # rank 0 has published its record and waits for rank 1's
    assert "KeyboardInterrupt" in printed(process)


@pytest.fixture
def server():
    port = free_port()
    server = _meeting.MeetingServer("127.0.0.1", port, 2)
    yield server, port
    server.end(None, 0.0)


GARBAGE = {
    "http": b"GET / HTTP/1.1\r\n\r\n",
    "too-long": struct.pack(">I", _meeting.FRAME_BYTES_MAX + 1),
    "no-json": struct.pack(">I", 4) + b"\xff\xfe\x00\x01",
    "deep-json": _meeting._frame({"gradwire": 1, "rank": 1}) + struct.pack(">I", 200_000) + b"[" * 200_000,
    "no-object": struct.pack(">I", 2) + b"[]",
    "other-version": _meeting._frame({"gradwire": 2, "rank": 1}),
    "no-rank": _meeting._frame({"gradwire": 1, "rank": "x"}),
    "nobody": _meeting._frame({"gradwire": 1}),
    "no-request": _meeting._frame({"gradwire": 1, "rank": 1}) + _meeting._frame({"op": "eval", "key": "k"}),
    "no-key": _meeting._frame({"gradwire": 1, "rank": 1}) + _meeting._frame({"op": "set", "key": 3}),
    "long-key": _meeting._frame({"gradwire": 1, "rank": 1})
    + _meeting._frame({"op": "set", "key": "k" * 300, "value": ""}),
    "endless-wait": _meeting._frame({"gradwire": 1, "rank": 1})
    + _meeting._frame({"op": "wait", "key": "k", "timeout_s": 1e9}),
}


@pytest.mark.parametrize("garbage", GARBAGE.values(), ids=GARBAGE.keys())
def test_garbage_is_refused_and_the_meeting_goes_on(server, garbage: bytes) -> None:
    _, port = server
    with socket.create_connection(("127.0.0.1", port), timeout=30) as stranger:
        stranger.sendall(garbage)
        answer = b""
        while piece := stranger.recv(4096):  # until the server closes
            answer += piece
    assert b'{"error": ' in answer
    store = _meeting.MeetingStore("127.0.0.1", port, 1, 30.0)
    store.set("key", "value")
    assert store.get("key") == "value"
    store.close()


def test_the_board_is_bounded(server) -> None:
    _, port = server
    store = _meeting.MeetingStore("127.0.0.1", port, 1, 30.0)

    def fill() -> None:
        for number in range(10_000):
            store.set(str(number), "")

    with pytest.raises(RendezvousError, match="keys"):
        fill()


def test_a_rank_that_is_started_twice_is_refused(server) -> None:
    _, port = server
    first = _meeting.MeetingStore("127.0.0.1", port, 1, 30.0)
    with pytest.raises(RendezvousError, match="rank 1 is here already"):
        _meeting.MeetingStore("127.0.0.1", port, 1, 30.0)
    first.close()


def test_who_only_looks_takes_no_rank_and_holds_up_no_end() -> None:
    port = free_port()
    server = _meeting.MeetingServer("127.0.0.1", port, 2)
    lookers = [_meeting.MeetingStore("127.0.0.1", port, None, 30.0) for _ in range(2)]
    ranks = [_meeting.MeetingStore("127.0.0.1", port, rank, 30.0) for rank in range(2)]
    ranks[0].set("key", "value")
    assert [store.get("key") for store in lookers] == ["value", "value"]
    for store in ranks:
        store.close()
    ended = threading.Thread(target=server.end, args=(None, 600.0), daemon=True)
    ended.start()
    ended.join(60.0)
    assert not ended.is_alive(), "it waits for those who only look"
    for store in lookers:
        store.close()


def test_who_is_connected_goes_on_when_rank_0_has_gone_before_it_heard_that_all_are() -> None:
    port = free_port()
    server = _meeting.MeetingServer("127.0.0.1", port, 2)
    board = _board.Board(_meeting.MeetingStore("127.0.0.1", port, 1, 30.0), "gradwire/1", 1, 2)
    server.end(None, 0.0)
    board.confirm(30.0)


MISSING = MissingRankError("rank(s) 2 of 3 did not appear within 1 s", ranks=[2], waited_s=1.0)


@pytest.mark.parametrize("failure", [None, RendezvousError("no secret"), MISSING], ids=["formed", "failed", "missing"])
def test_who_is_connected_is_told_how_the_meeting_ended(failure: RendezvousError | None) -> None:
    port = free_port()
    server = _meeting.MeetingServer("127.0.0.1", port, 2)
    board = _board.Board(_meeting.MeetingStore("127.0.0.1", port, 1, 30.0), "gradwire/1", 1, 2)
    looks = _meeting.MeetingStore("127.0.0.1", port, None, 30.0)
    with ThreadPoolExecutor(2) as pool:
        confirmed = pool.submit(board.confirm, 60.0)
        looks.wait(["gradwire/1/joined"], timedelta(seconds=30))
        ended = pool.submit(server.end, failure, 0.0)
        if failure is None:
            confirmed.result(30.0)
        else:
            with pytest.raises(type(failure), match="rank 0 gave up") as caught:
                confirmed.result(30.0)
            assert str(caught.value).endswith(f": {type(failure).__name__}: {failure}")
            if failure is MISSING:
                cause = f"MissingRankError: {failure}"
                assert caught.value.fields == {"ranks": [2], "waited_s": 1.0, "cause": cause}
        board._store.close()
        ended.result(60.0)


def test_another_program_at_the_port_is_no_rendezvous() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]

        def greet() -> None:
            connection, _ = other.accept()
            with connection:
                connection.sendall(b"220 mail.example.org ESMTP\r\n")
                connection.recv(1000)

        thread = threading.Thread(target=greet)
        thread.start()
        with pytest.raises(RendezvousError, match="no rendezvous of gradwire's"):
            _meeting.MeetingStore("127.0.0.1", port, 1, 30.0)
        thread.join()


@pytest.mark.parametrize(
    "address",
    ["", "host", "host:", ":29400", "host:0", "host:65536", "host:http", "host:-1", "tcp://10.0.0.1:29400", "http://host:1",
     "//host:1", ("10.0.0.1", 29400), 29400],
)  # fmt: skip
def test_an_address_that_is_none_is_refused(address: Any) -> None:
    with pytest.raises(ConfigError, match="host:port"):
        _joining.address(address)


# In a process of its own: the configuration is the process's.
REFUSED = """
import gradwire, datetime
from gradwire import Config, _runtime
from gradwire.errors import ConfigError
address, config = "127.0.0.1:29400", Config(ack_every=5)
for arguments in (
    dict(rendezvous=address, rank=5, world_size=2),
    dict(rendezvous=address, rank=0, world_size=2, timeout=datetime.timedelta(0)),
    dict(rendezvous="nowhere", rank=0, world_size=2),
    dict(rank=0, world_size=2),
):
    try:
        gradwire.Communicator(**arguments, config=config)
    except ConfigError as error:
        print(error.field, _runtime.configuration().ack_every)
"""


def test_a_communicator_that_is_refused_leaves_no_configuration_behind() -> None:
    code = [sys.executable, "-c", REFUSED]
    printed = subprocess.check_output(code, text=True, env=_clean_environment())
    assert printed.split("\n")[:-1] == ["rank 10", "timeout 10", "rendezvous 10", "rendezvous 10"]


def test_a_rendezvous_of_the_configuration_that_comes_with_the_call_counts() -> None:
    assert _joining.address(None, Config(rendezvous="10.0.0.1:29400")) == ("10.0.0.1", 29400)
    assert _joining.address("10.0.0.2:29400", Config(rendezvous="10.0.0.1:29400")) == ("10.0.0.2", 29400)


def test_a_configuration_that_comes_too_late_is_called_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_joining, "current", lambda: SimpleNamespace(config=Config()))
    with pytest.raises(ConfigError, match=r"^config comes too late") as caught:
        _joining.apply(Config(ack_every=5))
    assert caught.value.field == "config"
    _joining.apply(Config())


def test_addresses() -> None:
    assert _meeting.parse_address("10.0.0.1:29400") == ("10.0.0.1", 29400)
    assert _meeting.parse_address("[fe80::1]:1") == ("fe80::1", 1)


def test_the_package_imports_neither_torch_nor_numpy() -> None:
    code = "import sys, gradwire; print(sorted({'torch', 'numpy'} & sys.modules.keys()))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


def test_the_documents_example_runs(tmp_path: Path) -> None:
    text = (HERE.parent.parent / "docs" / "communicator.md").read_text()
    example = tmp_path / "example.py"
    example.write_text(text.split("```python\n")[1].split("```")[0])
    port = free_port()
    outputs = [printed(process) for process in [start([str(example)], rank, 2, port) for rank in range(2)]]
    assert all("the mean of 2 ranks: 1.5" in output for output in outputs), outputs
