"""Who lets clients in while the process has no file descriptor left: it does not look again at once, and lets them in later."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import resource
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from gradwire import _accepting
from gradwire._meeting import LENGTH, MeetingServer
from gradwire.observe.metrics_server import MetricsServer
from gradwire.observe.status import StatusServer

PATIENCE_S = 30.0
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
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
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
