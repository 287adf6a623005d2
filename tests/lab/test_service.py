"""The two ends of a lab's socket, where one of them is slow."""

import json
import os
import socket
import tempfile
import threading
from pathlib import Path

import pytest
from gradwire.lab.service import Client


@pytest.fixture
def path():
    with tempfile.TemporaryDirectory(prefix="gw-") as folder:
        yield Path(folder, "lab")


def test_an_answer_that_comes_before_the_client_goes_on_is_read(path, monkeypatch):
    """A short program has ended, and the lab has answered and closed, before a busy machine lets the client run again."""
    has_closed = threading.Event()
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(path))
    listener.listen()
    listener.settimeout(10)

    def serve():
        with listener, listener.accept()[0] as connection:
            data, descriptors, _, _ = socket.recv_fds(connection, 1 << 16, 3)
            for descriptor in descriptors:
                os.close(descriptor)
            connection.sendall(json.dumps({"result": json.loads(data)["host"]}).encode() + b"\n")
        has_closed.set()

    send = socket.send_fds

    def send_and_wait(*arguments):
        sent = send(*arguments)
        assert has_closed.wait(10)
        return sent

    monkeypatch.setattr(socket, "send_fds", send_and_wait)
    server = threading.Thread(target=serve)
    server.start()
    try:
        assert Client(path).ask((0, 1, 2), do="exec", host=7) == 7
    finally:
        server.join()
