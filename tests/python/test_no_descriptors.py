"""Who lets clients in while the process has no file descriptor left: it does not look again at once, and lets them in later."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import resource
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from free_ports import free_port
from gradwire import _accepting
from gradwire._meeting import LENGTH, MeetingServer
from gradwire.observe.metrics_server import MetricsServer
from gradwire.observe.status import StatusServer

PATIENCE_S = 60.0
PAUSE_S = 0.1
LOOKS = 3


@contextlib.contextmanager
def status(_folder: Path) -> Iterator[tuple[int, Any, bytes]]:
    server = StatusServer("job", 0, {"stats": dict})
    try:
        yield socket.AF_UNIX, str(server.path), b'{"ask": "stats"}\n'
    finally:
        server.stop()


@contextlib.contextmanager
def metrics(_folder: Path) -> Iterator[tuple[int, Any, bytes]]:
    def answer(_environment: object, start_response: Callable[..., object]) -> list[bytes]:
        start_response("200 OK", [("Content-Type", "text/plain")])
        return [b"counted"]

    server = MetricsServer("127.0.0.1", 0, answer)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield socket.AF_INET, server.server_address, b"GET /metrics HTTP/1.0\r\n\r\n"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextlib.contextmanager
def meeting(_folder: Path) -> Iterator[tuple[int, Any, bytes]]:
    port = free_port()
    server = MeetingServer("127.0.0.1", port, 1)
    hello = json.dumps({"gradwire": 1, "rank": None, "nonce": "0"}).encode()
    try:
        yield socket.AF_INET, ("127.0.0.1", port), LENGTH.pack(len(hello)) + hello
    finally:
        server.end(None, 0.0)


@contextlib.contextmanager
def no_descriptor() -> Iterator[None]:
    """All are used."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    used: list[int] = []
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(map(int, os.listdir("/proc/self/fd"))) + 1, before[1]))
    try:
        with contextlib.suppress(OSError):
            while True:
                used.append(os.dup(0))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
        for descriptor in used:
            os.close(descriptor)


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """When a client could not be let in; so many times at most that a server which looks for ever ends."""
    found: list[float] = []
    accept = socket.socket.accept

    def watched(listener: socket.socket) -> Any:
        try:
            return accept(listener)
        except OSError as error:
            if error.errno == errno.EMFILE:
                found.append(time.monotonic())
            raise

    monkeypatch.setattr(socket.socket, "accept", watched)
    monkeypatch.setattr(_accepting, "ACCEPT_PAUSE_S", PAUSE_S)
    return found


@pytest.mark.parametrize("serving", [status, metrics, meeting])
def test_a_client_is_let_in_later_and_not_looked_for_all_the_time(
    serving: Any, looks: list[float], short_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(short_folder))
    with serving(short_folder) as (family, address, request), socket.socket(family) as client:
        client.settimeout(PATIENCE_S)
        with no_descriptor():
            client.connect(address)
            end = time.monotonic() + PATIENCE_S
            while len(looks) < LOOKS and time.monotonic() < end:
                threading.Event().wait(PAUSE_S / 10)
        assert len(looks) >= LOOKS, "nobody has looked again"
        assert looks[LOOKS - 1] - looks[0] >= (LOOKS - 1) * PAUSE_S, "it looks again before the pause is over"
        client.sendall(request)
        assert client.recv(1), "it was not let in"


# Serves a board for `RANKS` ranks with few descriptors, and lets all of them come; prints what came of it.
BOARD = """
import json, resource, sys
from gradwire._meeting import MeetingServer, MeetingStore
from gradwire.errors import EngineError

few, hard, ranks, port = map(int, sys.argv[1:])
resource.setrlimit(resource.RLIMIT_NOFILE, (few, hard))
try:
    MeetingServer("127.0.0.1", port, ranks)
except EngineError as error:
    print(json.dumps({"error": str(error), **error.fields}))
else:
    print(json.dumps({"came": len([MeetingStore("127.0.0.1", port, rank, 60.0) for rank in range(ranks)])}))
"""
RANKS, FEW = 60, 64


def served(hard: int) -> dict[str, Any]:
    port = free_port()
    arguments = map(str, (FEW, hard, RANKS, port))
    ended = subprocess.run(
        [sys.executable, "-c", BOARD, *arguments], capture_output=True, text=True, timeout=10 * PATIENCE_S, check=False
    )
    assert not ended.returncode, ended.stderr
    told: dict[str, Any] = json.loads(ended.stdout)
    return told


def test_rank_0_lets_all_ranks_in_where_the_soft_limit_is_too_low() -> None:
    assert served(resource.getrlimit(resource.RLIMIT_NOFILE)[1]) == {"came": RANKS}


def test_rank_0_says_at_once_that_the_hard_limit_is_too_low() -> None:
    told = served(FEW)
    assert (told["needed"], told["limit"]) == (RANKS + 1, FEW)
    assert told["in_use"] + told["needed"] > FEW
    assert (
        f"{RANKS + 1} file descriptors beside the {told['in_use']} that are in use, and the hard limit is {FEW}"
        in told["error"]
    )


def test_who_waits_in_vain_hears_that_rank_0_had_no_descriptor_left(looks: list[float]) -> None:
    server = MeetingServer("127.0.0.1", 0, 2)
    try:
        assert len(server.why_missing([1])) == 1
        with socket.socket() as client:
            with no_descriptor():
                client.connect(server._listeners[0].getsockname())
                end = time.monotonic() + PATIENCE_S
                while len(looks) < LOOKS and time.monotonic() < end:
                    threading.Event().wait(PAUSE_S / 10)
            assert "rank 0 had no file descriptor left" in server.why_missing([1])[0]
    finally:
        server.end(None, 0.0)
