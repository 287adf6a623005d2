"""A stranger at the TCP port where ranks without torch meet, with real sockets: with a job secret it is no rank, reads and stores nothing;
without one it holds no more bytes, places and lines of the log than there are limits."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
import struct
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from free_ports import free_port
from gradwire import _joining, _meeting, _meeting_limits, _meeting_proof
from gradwire._meeting import MeetingServer, MeetingStore
from gradwire.errors import MissingRankError, RendezvousError, SecretMismatchError

SECRET = b"the secret of this job"
OTHER = b"another secret altogether"
WORLD_SIZE = 2
PATIENCE_S = 60.0


@contextlib.contextmanager
def board(secret: bytes | None, world_size: int = WORLD_SIZE) -> Iterator[tuple[MeetingServer, int]]:
    port = free_port()
    server = MeetingServer("127.0.0.1", port, world_size, secret)
    try:
        yield server, port
    finally:
        server.end(None, 0.0)


def rank(port: int, number: int | None, secret: bytes | None) -> MeetingStore:
    return MeetingStore("127.0.0.1", port, number, PATIENCE_S, secret)


class Stranger:
    """Speaks the protocol, and says what it likes."""

    def __init__(self, port: int) -> None:
        self.socket = socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S)

    def __enter__(self) -> Stranger:
        return self

    def __exit__(self, *_: object) -> None:
        self.socket.close()

    def say(self, **message: object) -> dict[str, object] | None:
        """The answer; None: it was shown out."""
        try:
            self.socket.sendall(_meeting._frame(message))
            return self.heard()
        except OSError:
            return None

    def heard(self) -> dict[str, object] | None:
        content = b""
        while len(content) < 4 or len(content) < 4 + struct.unpack(">I", content[:4])[0]:
            piece = self.socket.recv(4096)
            if not piece:
                return None
            content += piece
        answer: dict[str, object] = json.loads(content[4:])
        return answer

    def is_shown_out(self) -> bool:
        """Waits until the board ends the connection."""
        try:
            while self.socket.recv(4096):
                pass
        except ConnectionError:
            pass
        return True


def nonce_of(answer: dict[str, object] | None) -> str:
    assert answer is not None
    return str(answer["nonce"])


def guess(secret: bytes, number: int | None, ours: str, theirs: str) -> str:
    return _meeting_proof._proof(secret, _meeting_proof.RANK, number, (ours, theirs))


@pytest.mark.parametrize("number", [1, None], ids=["a-rank", "who-looks"])
@pytest.mark.parametrize("how", ["nothing", "no-proof", "other-secret", "the-boards-proof", "text"])
def test_without_the_secret_nobody_is_a_rank_stores_or_reads(number: int | None, how: str) -> None:
    with board(SECRET) as (server, port), contextlib.closing(rank(port, 0, SECRET)) as first:
        first.set("gradwire/1/0", "a record")
        with Stranger(port) as stranger:
            asked = stranger.say(gradwire=1, rank=number, nonce="mine")
            assert set(asked or {}) == {"nonce", "proof"}, "nothing else is said"
            answers = {
                "nothing": {"op": "get", "key": "gradwire/1/0"},
                "no-proof": {"op": "set", "key": "stored", "value": "by a stranger"},
                "other-secret": {"proof": guess(OTHER, number, "mine", nonce_of(asked))},
                "the-boards-proof": {"proof": (asked or {})["proof"]},
                "text": {"proof": "\ud800é"},
            }
            refused = stranger.say(**answers[how])
            assert refused is not None
            assert "another job secret" in str(refused["error"])
            assert stranger.is_shown_out()
        assert not first.check(["stored"])
        with contextlib.closing(rank(port, 1, SECRET)) as second:  # its rank is free
            assert second.get("gradwire/1/0") == "a record"
        # Whoever misses rank 1 is told who said that it was there.
        assert set(server.strangers([0, 1])) == ({1} if number == 1 else set())


def test_what_one_rank_has_shown_is_of_no_use_again_nor_for_another_rank() -> None:
    with board(SECRET) as (_, port):
        with Stranger(port) as honest:
            first = nonce_of(honest.say(gradwire=1, rank=1, nonce="mine"))
            shown = guess(SECRET, 1, "mine", first)
            assert honest.say(proof=shown) == {"value": None}, "the proof is right once"
        with Stranger(port) as again:
            assert nonce_of(again.say(gradwire=1, rank=1, nonce="mine")) != first
            assert "error" in (again.say(proof=shown) or {})
        with Stranger(port) as other:
            second = nonce_of(other.say(gradwire=1, rank=0, nonce="mine"))
            assert "error" in (other.say(proof=guess(SECRET, 1, "mine", second)) or {})


@pytest.mark.parametrize(("boards", "ours"), [(SECRET, OTHER), (SECRET, None)], ids=["another", "none"])
def test_a_rank_with_another_secret_or_none_is_told_at_once(boards: bytes, ours: bytes | None) -> None:
    with board(boards) as (_, port):
        for number in (1, None):
            with pytest.raises(SecretMismatchError, match="GRADWIRE_SECRET") as caught:
                rank(port, number, ours)
            assert caught.value.rank == 0


@pytest.mark.parametrize("number", [1, None], ids=["a-rank", "who-looks"])
def test_who_has_a_secret_trusts_no_board_without(number: int | None, caplog: pytest.LogCaptureFixture) -> None:
    with board(None) as (server, port):
        with (
            caplog.at_level(logging.WARNING, logger="gradwire"),
            pytest.raises(SecretMismatchError, match="has no job secret"),
        ):
            rank(port, number, SECRET)
        with contextlib.closing(rank(port, 1, None)) as again:  # it has left, and whoever misses it is told
            again.check(["key"])
        assert set(server.strangers([0, 1])) == ({1} if number == 1 else set())
        told = "; ".join([*server.why_missing([1]), *caplog.messages])
        assert told.count("has a job secret, and rank 0 has none") == (2 if number == 1 else 0), told


@pytest.mark.parametrize(
    "answer",
    [{"value": None}, {"ended": "it\x1b[2J"}, {"error": "x", "secret": True}, {"missing": [1], "ended": "x"}],
    ids=["welcome", "ended", "refused", "missing"],
)
def test_what_a_board_without_the_secret_says_is_not_believed_nor_is_anything_stored_there(
    answer: dict[str, object],
) -> None:
    heard = b""

    def answer_whoever_comes() -> None:
        nonlocal heard
        with listener.accept()[0] as connection:
            connection.recv(1 << 10)
            connection.sendall(_meeting._frame(answer))
            while piece := connection.recv(1 << 10):
                heard += piece

    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor(1) as pool:
        answering = pool.submit(answer_whoever_comes)
        with pytest.raises(SecretMismatchError, match="has no job secret, and this rank has one: set"):
            rank(listener.getsockname()[1], 1, SECRET)
        answering.result(PATIENCE_S)
    assert heard == _meeting._frame({"op": "distrusts"})


@pytest.mark.parametrize("number", [1, None], ids=["a-rank", "who-looks"])
def test_with_a_secret_nobody_is_told_of_as_if_there_were_none(number: int | None) -> None:
    with board(SECRET) as (server, port), contextlib.closing(rank(port, number, SECRET)) as store:
        with pytest.raises(RendezvousError, match="key is no text"):
            store._ask({"op": "distrusts"})
        assert not server.strangers([1])


CONTROLS = "\nERROR:gradwire:rank 3 lost\x1b[2J"


@pytest.mark.parametrize("hello", [{"rank": CONTROLS}, {"gradwire": CONTROLS}], ids=["rank", "version"])
def test_a_hello_writes_no_line_of_its_own_into_the_log(
    hello: dict[str, object], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="gradwire"), board(None) as (_, port), Stranger(port) as stranger:
        assert "error" in (stranger.say(**{"gradwire": 1, "rank": 1, "nonce": "", **hello}) or {})
    assert "rank 3 lost" in caplog.text
    assert all(message.isprintable() for message in caplog.messages), caplog.messages


@pytest.mark.parametrize(
    "request_", [{"op": "wait", "key": "k", "timeout_s": CONTROLS}, {"op": CONTROLS, "key": "k"}], ids=["wait", "op"]
)
def test_a_request_writes_no_line_of_its_own_into_the_log(
    request_: dict[str, object], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="gradwire"), board(None) as (_, port), Stranger(port) as stranger:
        stranger.say(gradwire=1, rank=None)
        assert "error" in (stranger.say(**request_) or {})
    assert "rank 3 lost" in caplog.text
    assert all(message.isprintable() for message in caplog.messages), caplog.messages


def test_the_keys_are_apart_and_nothing_shows_the_secret() -> None:
    challenge = _meeting_proof.Challenge(SECRET, 1, "mine")
    question = challenge.question()
    answer = _meeting_proof.answer_to(question, SECRET, 1, "mine")
    assert answer is not None
    assert challenge.is_met_by(answer)
    assert answer["proof"] != question["proof"], "a board's proof is no rank's"
    assert _meeting_proof.answer_to(question, OTHER, 1, "mine") is None
    assert _meeting_proof.answer_to(question, SECRET, 0, "mine") is None
    assert _meeting_proof.answer_to(question, SECRET, 1, "other") is None


SILENT = {
    "nothing": b"",
    "a-byte": b"\0",
    "half-a-frame": struct.pack(">I", 100) + b"{",
}


@pytest.mark.parametrize("begun", SILENT.values(), ids=SILENT.keys())
def test_who_does_not_say_who_it_is_is_shown_out(monkeypatch: pytest.MonkeyPatch, begun: bytes) -> None:
    monkeypatch.setattr(_meeting, "HELLO_TIMEOUT_S", 0.05)
    with board(None) as (_, port), Stranger(port) as stranger:
        stranger.socket.sendall(begun)
        assert stranger.is_shown_out()


def test_who_does_not_answer_the_board_is_shown_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_meeting, "HELLO_TIMEOUT_S", 0.05)
    with board(SECRET) as (_, port), Stranger(port) as stranger:
        stranger.say(gradwire=1, rank=1, nonce="mine")
        assert stranger.is_shown_out()


@pytest.mark.parametrize("begun", [SILENT["a-byte"], SILENT["half-a-frame"]], ids=["a-byte", "half-a-frame"])
def test_a_frame_that_does_not_end_ends_the_connection(monkeypatch: pytest.MonkeyPatch, begun: bytes) -> None:
    with board(None) as (server, port), Stranger(port) as stranger:
        assert stranger.say(gradwire=1, rank=None) == {"value": None}
        with monkeypatch.context() as patch:
            patch.setattr(_meeting, "FRAME_TIMEOUT_S", 0.05)
            stranger.socket.sendall(begun)
            assert stranger.is_shown_out()
        with contextlib.closing(rank(port, 1, None)) as store:
            store.set("key", "value")
        assert server._room.held < 1000, "what had come of it is held no more"


def test_a_hello_is_short() -> None:
    with board(SECRET) as (_, port), Stranger(port) as stranger:
        answer = stranger.say(gradwire=1, rank=1, nonce="m" * _meeting.HELLO_BYTES_MAX)
        assert "no message" in str((answer or {})["error"])


def test_the_board_holds_so_many_bytes_and_no_more() -> None:
    value = "v" * (_meeting.FRAME_BYTES_MAX - 200)
    with board(None) as (server, port), contextlib.closing(rank(port, 1, None)) as store:
        most = server._room.bytes_max // len(value)
        assert most < _meeting.KEYS_PER_RANK * WORLD_SIZE, "the number of keys is no limit here"

        def fill() -> None:
            for number in range(most + 1):
                store.set(str(number), value)

        with pytest.raises(RendezvousError, match="bytes in all"):
            fill()
        held = sum(len(key) + len(value) for key, value in server._texts._texts.items())
        assert held <= server._room.bytes_max
        # What is forgotten makes room again.
        server.forget("")
        with contextlib.closing(rank(port, 0, None)) as other:
            other.set("key", "value")
            other.set("key", "longer value")
            other.compare_set("key", "", "it is there already")
            assert other.get("key") == "longer value"
            assert server._room.held < 1000


def unread(ours: int, theirs: int) -> int:
    """Bytes that have come to port `ours` of this host from port `theirs` of it, and lie in the kernel."""
    ends = f"0100007F:{ours:04X}", f"0100007F:{theirs:04X}"
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    (queues,) = (row[4] for row in rows if (row[1], row[2]) == ends)
    return int(queues.partition(":")[2], 16)


def test_what_is_sent_ahead_is_not_held_by_the_board() -> None:
    wait = _meeting._frame({"op": "wait", "key": "never", "timeout_s": 30})
    ahead, end = 200 * wait, time.monotonic() + PATIENCE_S
    with board(None) as (_, port), Stranger(port) as stranger, contextlib.closing(rank(port, 1, None)) as store:
        stranger.say(gradwire=1, rank=None)
        stranger.socket.sendall(wait + ahead)
        while unread(port, stranger.socket.getsockname()[1]) != len(ahead):
            assert time.monotonic() < end, "more was read than the request that is answered"
            store.check(["key"])  # turns of its loop


def test_who_is_refused_reads_why_whatever_it_has_sent_behind() -> None:
    with board(None) as (_, port), Stranger(port) as stranger:
        stranger.socket.sendall(_meeting._frame({"gradwire": 2}) + bytes(_meeting.HELLO_BYTES_MAX))
        assert "version 2" in str((stranger.heard() or {})["error"])
        assert stranger.socket.recv(1) == b"", "it is closed in good order"


def test_bytes_that_are_no_ascii_are_not_stored() -> None:
    with board(None) as (_, port), Stranger(port) as stranger:
        stranger.say(gradwire=1, rank=None)
        assert "error" in (stranger.say(op="set", key="key", value="\U0001f600") or {})


def test_what_is_no_number_is_not_counted() -> None:
    with board(None) as (_, port), Stranger(port) as stranger:
        stranger.say(gradwire=1, rank=None)
        stranger.say(op="set", key="key", value="text")
        assert "no number" in str((stranger.say(op="add", key="key") or {})["error"])


@pytest.mark.parametrize("hello", [None, {"rank": None}, {"rank": 7}], ids=["silent", "looks", "no-rank-of-the-job"])
def test_a_crowd_keeps_no_rank_out(hello: dict[str, object] | None) -> None:
    with board(None) as (server, port), contextlib.ExitStack() as crowd:
        first = crowd.enter_context(contextlib.closing(rank(port, 0, None)))
        strangers = []
        for number in range(3 * WORLD_SIZE + _meeting.SPARE_CLIENTS):
            strangers.append(crowd.enter_context(Stranger(port)))
            if hello is not None:
                rank_told = None if hello["rank"] is None else WORLD_SIZE + number
                assert strangers[-1].say(gradwire=1, rank=rank_told) == {"value": None}
        second = crowd.enter_context(contextlib.closing(rank(port, 1, None)))
        second.set("key", "value")
        assert first.get("key") == "value", "who was there stays"
        assert len(server._places._here) <= 2 * WORLD_SIZE + _meeting.SPARE_CLIENTS
        assert strangers[0].is_shown_out(), "the one that has been silent longest has gone"


def test_who_knows_the_secret_stays_when_strangers_come() -> None:
    with board(SECRET) as (_, port), contextlib.ExitStack() as crowd:
        looks = crowd.enter_context(contextlib.closing(rank(port, None, SECRET)))
        for _ in range(2 * WORLD_SIZE + _meeting.SPARE_CLIENTS):
            crowd.enter_context(Stranger(port)).say(gradwire=1, rank=1, nonce="mine")
        with contextlib.closing(rank(port, 1, SECRET)) as store:
            store.set("key", "value")
        assert looks.get("key") == "value"


@pytest.mark.parametrize("number", [WORLD_SIZE, _meeting.RANKS_MAX - 1])
def test_of_ranks_that_the_job_does_not_have_nothing_is_kept(number: int) -> None:
    with board(None) as (server, port):
        with Stranger(port) as stranger:
            assert stranger.say(gradwire=1, rank=number) == {"value": None}
        with Stranger(port) as stranger:
            assert "there is no rank" in str((stranger.say(gradwire=1, rank=10**900) or {})["error"])
        with contextlib.closing(rank(port, 1, None)) as store:
            while server._ranks.keys() - {1}:
                store.check(["key"])  # turns of its loop
        assert server._left <= set(range(WORLD_SIZE))


def test_a_stranger_that_stays_does_not_keep_the_board_from_ending() -> None:
    with board(None) as (server, port), Stranger(port) as stranger:
        assert stranger.say(gradwire=1, rank=WORLD_SIZE) == {"value": None}
        with contextlib.closing(rank(port, 1, None)) as store:
            store.set("key", "value")
        ending = asyncio.run_coroutine_threadsafe(server._end(None, 2 * PATIENCE_S), server._loop)
        ending.result(PATIENCE_S)


def test_an_answer_that_comes_byte_by_byte_is_not_waited_for_longer_than_one_that_does_not_come() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        pause_s, whole = 0.2, _meeting._frame({"value": True, "more": 100 * " "})

        def trickle() -> None:
            connection, _ = listener.accept()
            with connection, contextlib.suppress(OSError):
                connection.sendall(_meeting._frame({"value": None}))
                for byte in whole:
                    connection.sendall(bytes([byte]))
                    gone.wait(pause_s)

        gone = threading.Event()
        thread = threading.Thread(target=trickle, daemon=True)  # so that a failure here ends the test
        thread.start()
        store = MeetingStore("127.0.0.1", listener.getsockname()[1], None, pause_s * len(whole) / 4)
        with pytest.raises(RendezvousError, match="is gone"):
            store.check(["key"])
        gone.set()
        store.close()
        thread.join()


@pytest.mark.parametrize("secret", [None, SECRET], ids=["clear", "secret"])
def test_who_looks_at_a_board_that_stands_still_waits_no_longer_than_was_asked_for(
    secret: bytes | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As that of a rank 0 that is stopped: the kernel lets in who comes, and nobody answers."""
    monkeypatch.setattr(_meeting, "HELLO_TIMEOUT_S", PATIENCE_S)
    has_left = []

    def stand_still() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.settimeout(PATIENCE_S / 4)
            with contextlib.suppress(TimeoutError, socket.timeout):
                while connection.recv(1 << 10):
                    pass
                has_left.append(True)

    with socket.create_server(("127.0.0.1", 0)) as listener, ThreadPoolExecutor() as pool:
        standing = pool.submit(stand_still)
        with pytest.raises(RendezvousError, match="is gone"):
            MeetingStore("127.0.0.1", listener.getsockname()[1], None, 1.0, secret)
        standing.result()
    assert has_left


def test_who_is_connected_to_itself_has_reached_nobody() -> None:
    """As happens where nobody listens at a port that the kernel also gives to connections."""

    class Itself(socket.socket):
        def connect(self, address: tuple[str, int]) -> None:
            self.bind(address)
            super().connect(address)

    port = free_port()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(socket, "socket", Itself)
        with pytest.raises(MissingRankError):
            MeetingStore("127.0.0.1", port, 1, 0.3)


@pytest.mark.parametrize("secret", [None, SECRET], ids=["clear", "secret"])
def test_a_rank_that_came_again_while_the_board_stood_still_is_let_in(secret: bytes | None) -> None:
    with board(secret) as (server, port):
        stands, goes_on = threading.Event(), threading.Event()

        def stand() -> None:
            stands.set()
            goes_on.wait(PATIENCE_S)

        server._loop.call_soon_threadsafe(stand)
        stands.wait(PATIENCE_S)
        with Stranger(port) as first:
            first.socket.sendall(_meeting._frame({"gradwire": 1, "rank": 1, "nonce": "mine"}))
        with ThreadPoolExecutor(1) as pool:
            again = pool.submit(rank, port, 1, secret)
            goes_on.set()
            with contextlib.closing(again.result(PATIENCE_S)) as store:
                store.set("key", "value")


def test_a_board_that_is_busy_for_a_while_is_come_to_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one whose process stands still for ten seconds, or that shows a rank out in a crowd."""
    later_s, now = [0.0], time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: now() + later_s[0])
    with socket.create_server(("127.0.0.1", 0)) as busy:

        def answer() -> None:
            with busy.accept()[0]:
                later_s[0] = 2 * _meeting.HELLO_TIMEOUT_S
            with busy.accept()[0] as connection:
                connection.recv(1000)
                connection.sendall(_meeting._frame({"value": None}))
                connection.recv(1000)

        thread = threading.Thread(target=answer)
        thread.start()
        _joining._come_to(("127.0.0.1", busy.getsockname()[1]), 1, PATIENCE_S).close()
        thread.join()


def test_the_log_has_few_lines_of_many_strangers(caplog: pytest.LogCaptureFixture) -> None:
    clock = [0.0]
    complaints = _meeting_limits.Complaints(lambda: clock[0])
    with caplog.at_level(logging.WARNING, logger="gradwire"):
        for number in range(1000):
            complaints.add(f"stranger {number}", "it is no message")
        assert len(caplog.records) == _meeting_limits.LINES_MAX
        clock[0] = _meeting_limits.WINDOW_S
        complaints.add("the last one", "it is no message")
    assert f"{1000 - _meeting_limits.LINES_MAX} more" in caplog.records[-1].getMessage()


def test_the_boards_log_is_limited_too(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="gradwire"), board(None) as (_, port):
        for _ in range(3 * _meeting_limits.LINES_MAX):
            with Stranger(port) as stranger:
                assert "error" in (stranger.say(gradwire=2) or {})
    assert len(caplog.records) == _meeting_limits.LINES_MAX
