"""What ranks without torch meet over, on real sockets: packets that pass everywhere, a place that others reach, no word after the last."""

from __future__ import annotations

import contextlib
import json
import logging
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from free_ports import free_port
from gradwire import _joining, _meeting, _meeting_sockets, _rendezvous
from gradwire._meeting import MeetingServer, MeetingStore
from gradwire._rendezvous import Place
from gradwire.errors import AddressError, EngineError, MissingRankError, PortInUseError, RendezvousError
from test_no_descriptors import no_descriptor

# 127.0.0.1, as a name that does not look like it: what Debian makes of a host's own name.
OWN_NAME = "2130706433"


NAME = "rank-0.train"
PATIENCE_S = 60.0


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


Resolver = Callable[..., list[list[str]]]


@pytest.fixture
def known_as(monkeypatch: pytest.MonkeyPatch) -> Resolver:
    """Sets what `NAME` leads to: the answers to one look-up after the other, the last one for good; none: it is not known."""
    monkeypatch.setattr(_meeting_sockets, "LOOK_UP_EVERY_S", 0.0)
    real = socket.getaddrinfo

    def known_as(*answers: list[str]) -> list[list[str]]:
        left = list(answers)

        def getaddrinfo(host: str, port: int, **options: Any) -> Any:
            if host != NAME:
                return real(host, port, **options)
            answer = left.pop(0) if len(left) > 1 else left[0]
            if not answer:
                raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
            return [found for address in answer for found in real(address, port, **options)]

        monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
        return left

    return known_as


def listening() -> list[str]:
    """Where rank 0 listens under `NAME`."""
    listeners = _meeting_sockets.listen(NAME, free_port(), None)
    try:
        return [listener.getsockname()[0] for listener in listeners]
    finally:
        for listener in listeners:
            listener.close()


def test_a_rank_waits_for_the_name_of_rank_0_to_be_known(known_as: Resolver) -> None:
    with board("127.0.0.2") as (_, port):
        known_as([], [], ["127.0.0.2"])
        _meeting_sockets.connect(NAME, port, PATIENCE_S, None).close()


def test_rank_0_waits_for_its_own_name_to_be_known(known_as: Resolver) -> None:
    known_as([], [], ["127.0.0.2"])
    port = free_port()
    server = MeetingServer(NAME, port, 2, timeout_s=PATIENCE_S)
    try:
        MeetingStore("127.0.0.2", port, 1, PATIENCE_S).close()
    finally:
        server.end(None, 0.0)


def test_rank_0_waits_for_its_name_and_for_the_others_no_longer_than_its_timeout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now, left_s = [1000.0], list[float]()

    def listen(*_: Any) -> Any:
        now[0] += 400.0
        return SimpleNamespace(end=lambda *_: None, why_missing=lambda _: [])

    def come_to(_address: Any, _rank: int, timeout_s: float) -> Any:
        left_s.append(timeout_s)
        return SimpleNamespace(close=lambda: None)

    def form_group(_store: Any, place: Place) -> Any:
        left_s.append(place.waits_since() + place.timeout.total_seconds() - now[0])
        raise MissingRankError("rank(s) 1 did not appear", ranks=[1], waited_s=600.0)

    for module in (_joining, _rendezvous):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    for replaced in (listen, form_group):
        monkeypatch.setattr(_joining, replaced.__name__, replaced)
    monkeypatch.setattr(_joining, "_come_to", come_to)
    with pytest.raises(MissingRankError):
        _joining.meet(("127.0.0.1", 1), 0, 2, timedelta(seconds=600))
    assert left_s == [200.0, 200.0]


def test_a_rank_goes_where_the_name_leads_by_now(known_as: Resolver) -> None:
    with board("127.0.0.2") as (_, port):
        left = known_as(["127.0.0.9"], ["127.0.0.9"], ["127.0.0.2"])
        _meeting_sockets.connect(NAME, port, PATIENCE_S, None).close()
        assert left == [["127.0.0.2"]]


def test_a_name_server_that_fails_meanwhile_takes_nothing_from_what_was_known(known_as: Resolver) -> None:
    port = free_port()
    left = known_as(["127.0.0.2"], [])
    name = _meeting_sockets.Name(NAME, port)
    first = name.look_up()
    assert left == [[]]
    assert name.look_up() == first == [(socket.AF_INET, ("127.0.0.2", port))]
    assert "not known" in name.why


def test_ranks_that_know_the_addresses_of_a_name_in_another_order_meet(known_as: Resolver) -> None:
    port = free_port()
    known_as(["127.0.0.2", "127.0.0.3"])
    server = MeetingServer(NAME, port, 2)
    try:
        assert "listens at 127.0.0.2 and 127.0.0.3, which" in server.why_missing([1])[0]
        for order in (["127.0.0.3", "127.0.0.2"], ["127.0.0.9", "127.0.0.3"], ["127.0.0.2"]):
            known_as(order)
            MeetingStore(NAME, port, 1, PATIENCE_S).close()
    finally:
        server.end(None, 0.0)


def test_rank_0_listens_at_those_addresses_of_a_name_that_are_its_own(known_as: Resolver) -> None:
    elsewhere = "203.0.113.1"  # for documentation
    known_as([elsewhere, "127.0.0.2", "127.0.0.2"])
    assert listening() == ["127.0.0.2"]
    known_as([elsewhere])
    with pytest.raises(AddressError, match="must be an address of rank 0's host"):
        listening()


def test_a_port_that_is_in_use_at_one_address_of_a_name_is_told(known_as: Resolver) -> None:
    known_as(["127.0.0.2", "127.0.0.3"])
    with socket.create_server(("127.0.0.3", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(PortInUseError, match=f"{port}"):
            _meeting_sockets.listen(NAME, port, None)
    for listener in _meeting_sockets.listen(NAME, port, None):  # nothing of the first attempt is left
        listener.close()


def test_a_name_that_stays_unknown_is_told_at_the_end_and_before(
    known_as: Resolver, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    known_as([])
    for wait in (
        lambda: _meeting_sockets.connect(NAME, 1, 0.2, None),
        lambda: _meeting_sockets.listen(NAME, 1, None, 0.2),
    ):
        with pytest.raises(AddressError, match=f"{NAME}' has no address.*Name or service not known"):
            wait()
    assert warned(caplog) == []
    monkeypatch.setattr(_meeting_sockets, "TELL_AFTER_S", 0.0)
    with pytest.raises(AddressError):
        _meeting_sockets.connect(NAME, 1, 0.2, None)
    (warning,) = warned(caplog)
    assert f"{NAME!r} has no address yet" in warning


def test_who_does_not_find_rank_0_says_where_it_was_looked_for(known_as: Resolver) -> None:
    known_as(["127.0.0.2", "127.0.0.3"], [])
    with pytest.raises(
        MissingRankError, match=r"which is 127\.0\.0\.2 and 127\.0\.0\.3 here.*refused.*looked up again: Name"
    ):
        _meeting_sockets.connect(NAME, free_port(), 1.0, None)


def test_who_cannot_look_up_a_name_for_lack_of_a_descriptor_says_so_at_once(known_as: Resolver) -> None:
    left = known_as([], ["127.0.0.2"])
    with no_descriptor(), pytest.raises(EngineError, match="Too many open files"):
        _meeting_sockets.connect(NAME, 1, PATIENCE_S, None)
    assert left == [["127.0.0.2"]], "it was looked up again"


def test_a_text_that_can_be_no_name_is_told_at_once() -> None:
    with pytest.raises(AddressError, match="has no address"):
        _meeting_sockets.connect("a" * 64 + ".train", 1, PATIENCE_S, None)
