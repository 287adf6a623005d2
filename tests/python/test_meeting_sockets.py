"""What ranks without torch meet over, on real sockets: packets that pass everywhere, a place that others reach, no word after the last."""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest
from gradwire import _meeting, _meeting_sockets
from gradwire._meeting import MeetingServer, MeetingStore
from gradwire.errors import RendezvousError

# 127.0.0.1, as a name that does not look like it: what Debian makes of a host's own name.
OWN_NAME = "2130706433"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def segment_bytes(end: socket.socket) -> int:
    return end.getsockopt(socket.IPPROTO_TCP, socket.TCP_MAXSEG)


@contextlib.contextmanager
def board(host: str = "127.0.0.1", world_size: int = 2, mtu: int | None = None) -> Iterator[tuple[MeetingServer, int]]:
    port = free_port()
    server = MeetingServer(host, port, world_size, mtu=mtu)
    try:
        yield server, port
    finally:
        server.end(None, 0.0)


@pytest.mark.parametrize(("mtu", "most"), [(None, 1200), (9000, 1200), (1000, 940)])
def test_both_ends_of_a_meeting_send_and_are_sent_small_packets(mtu: int | None, most: int) -> None:
    with board(mtu=mtu) as (_, port), socket.create_connection(("127.0.0.1", port)) as plain:
        assert 0 < segment_bytes(plain) <= most, "what listens asks for no more"
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with _meeting_sockets.connect("127.0.0.1", port, 60.0, mtu), listener.accept()[0] as plain:
            assert 0 < segment_bytes(plain) <= most, "who comes asks for no more"


def warned(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def test_a_name_that_means_this_host_alone_is_warned_of_at_once(caplog: pytest.LogCaptureFixture) -> None:
    with board(OWN_NAME) as (server, _):
        (warning,) = warned(caplog)
        assert "rank 0 listens at 127.0.0.1" in warning
        assert f"{OWN_NAME!r}" in warning
        assert "no other host reaches it" in server.why_missing([1])[0]


@pytest.mark.parametrize(("host", "world_size"), [("localhost", 2), ("127.0.0.1", 2), (OWN_NAME, 1)])
def test_nobody_is_warned_who_has_said_so_or_is_alone(
    caplog: pytest.LogCaptureFixture, host: str, world_size: int
) -> None:
    with board(host, world_size) as (server, _):
        assert warned(caplog) == []
        assert "no other host reaches it" in server.why_missing([1])[0], "where others are missing it is told"


def test_where_every_address_of_the_host_is_meant_nothing_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with board("0.0.0.0") as (server, _):
        assert warned(caplog) == []
        assert server.why_missing([1]) == []


def test_who_is_connected_and_has_said_nothing_is_told_of() -> None:
    with board("0.0.0.0") as (server, port), contextlib.closing(MeetingStore("127.0.0.1", port, 1, 60.0)):
        (reason,) = server.why_missing([1])
        assert "rank 1 from ('127.0.0.1'" in reason
        assert "its record has not come" in reason


def test_the_error_of_who_waits_in_vain_says_that_no_other_host_can_come() -> None:
    code = (
        "import gradwire\nfrom datetime import timedelta\n"
        f"gradwire.Communicator(rank=0, world_size=2, rendezvous='{OWN_NAME}:{free_port()}', timeout=timedelta(seconds=1))"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    last = ended.stderr.strip().splitlines()[-1]
    assert "MissingRankError" in last, ended.stderr
    assert "rank 0 listens at 127.0.0.1" in last


def test_a_board_that_does_not_answer_is_asked_nothing_more() -> None:
    frames: list[bytes] = []

    def hear(connection: socket.socket) -> None:
        with connection, connection.makefile("rb") as file:
            while length := file.read(4):
                frames.append(file.read(int.from_bytes(length, "big")))
                if len(frames) == 1:
                    connection.sendall(_meeting._frame({"value": None}))

    with socket.create_server(("127.0.0.1", 0)) as listener:
        hearing = threading.Thread(target=lambda: hear(listener.accept()[0]))
        hearing.start()
        store = MeetingStore("127.0.0.1", listener.getsockname()[1], 1, 0.1)
        for key in ("record", "why it gives up"):
            with pytest.raises(RendezvousError):
                store.set(key, "")
        hearing.join(60.0)
    assert [json.loads(frame).get("key") for frame in frames] == [None, "record"]
