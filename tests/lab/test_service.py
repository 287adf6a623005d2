"""The two ends of a lab's socket, where one of them is slow."""

import json
import os
import socket
import tempfile
import threading
from pathlib import Path

import pytest
from gradwire.lab import service
from gradwire.lab.errors import NoAnswer
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
    listener.settimeout(60)

    def serve():
        with listener, listener.accept()[0] as connection:
            data, descriptors, _, _ = socket.recv_fds(connection, 1 << 16, 3)
            for descriptor in descriptors:
                os.close(descriptor)
            connection.sendall(b"heard\n" + json.dumps({"result": json.loads(data)["host"]}).encode() + b"\n")
        has_closed.set()

    send = socket.send_fds

    def send_and_wait(*arguments):
        sent = send(*arguments)
        assert has_closed.wait(60)
        return sent

    monkeypatch.setattr(socket, "send_fds", send_and_wait)
    server = threading.Thread(target=serve)
    server.start()
    try:
        assert Client(path).ask((0, 1, 2), do="exec", host=7) == 7
    finally:
        server.join()


@pytest.fixture
def listener(path, monkeypatch):
    monkeypatch.setattr(service, "_SILENT_SECONDS", 1)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(path))
        listener.listen(0)
        listener.settimeout(60)
        yield listener


def hear(listener):
    connection, _ = listener.accept()
    connection.recv(1 << 16)
    connection.sendall(b"heard\n")
    return connection


def test_a_lab_that_has_much_to_do_is_waited_for_as_long_as_it_hears_others(path, listener, monkeypatch):
    monkeypatch.setattr(service, "_SILENT_SECONDS", 5)  # as a busy machine may not let the server run for a while

    def serve():
        with hear(listener) as first:
            for _ in range(2):  # each comes when the answer is long in coming
                hear(listener).close()
            first.sendall(b'{"result": 7}\n')

    server = threading.Thread(target=serve)
    server.start()
    try:
        assert Client(path).ask(do="run") == 7
    finally:
        server.join()


def test_a_lab_that_is_stopped_while_it_works_is_told(path, listener):
    connections = []
    server = threading.Thread(target=lambda: connections.append(hear(listener)))
    server.start()
    try:
        with pytest.raises(NoAnswer, match="perhaps it is stopped"):
            Client(path).ask(do="run")
    finally:
        server.join()
        for connection in connections:
            connection.close()


@pytest.mark.usefixtures("listener")
def test_a_stopped_lab_that_many_wait_for_already_is_told(path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as other:
        other.connect(str(path))  # there is room for one
        with pytest.raises(NoAnswer, match="perhaps it is stopped"):
            Client(path).ask(do="stats")
