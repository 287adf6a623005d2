"""A record of an earlier run with the same secret, shown to a rank by who can write to the store: a stranger at its port is no rank."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from gradwire import _native
from gradwire.errors import GroupError

PATIENCE_S = 60.0
HELLO, REPLY, HEADER_BYTES = 4, 64, 24


def record_of_an_earlier_run(settings: dict[str, Any]) -> tuple[str, int]:
    """The record of rank 1 of two, and the port that is free again."""
    engine = _native.Engine(settings)
    record, port = engine.new_group(1, 2, "0").record(), engine.port
    engine.stop()
    return record, port


@contextmanager
def stranger(port: int, to: int) -> Iterator[None]:
    """Says back what the hellos at `port` say, by each connection id that the engine at port `to` may have chosen for them."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as listening:
        listening.bind(("127.0.0.1", port))
        listening.settimeout(0.05)
        is_over = threading.Event()

        def answer() -> None:
            while not is_over.is_set():
                try:
                    hello = listening.recv(1 << 16)
                except TimeoutError:
                    continue
                if hello[0] & 15 != HELLO or hello[1] & REPLY:
                    continue
                address, sent_at = hello[16:20], hello[20:24]
                for number in range(1, 256):
                    header = (
                        bytes([hello[0], REPLY, 0, 0]) + struct.pack("<I", number << 16) + bytes(8) + address + sent_at
                    )
                    listening.sendto(header + hello[HEADER_BYTES : HEADER_BYTES + 8] + sent_at, ("127.0.0.1", to))

        thread = threading.Thread(target=answer)
        thread.start()
        try:
            yield
        finally:
            is_over.set()
            thread.join()


@pytest.mark.parametrize("secret", [None, b"the secret of this job"], ids=["none", "one"])
def test_who_says_back_a_hello_is_taken_for_a_rank_only_where_there_is_no_secret(secret: bytes | None) -> None:
    settings = {"port": 0, "security": "auto", "secret": secret, "network_threads": 1}
    old, port = record_of_an_earlier_run(settings)
    engine = _native.Engine(settings)
    try:
        group = engine.new_group(0, 2, "0")
        with stranger(port, engine.port):
            if secret is None:
                group.join([group.record(), old], PATIENCE_S)
            else:
                with pytest.raises(GroupError, match=r"what answers as rank 1 .* does not know the job secret"):
                    group.join([group.record(), old], PATIENCE_S)
    finally:
        engine.stop()
