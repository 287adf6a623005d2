"""Whatever comes to a parser of the Python package from outside is refused by a typed error, or changes nothing: what is right is mutated,
by seeds that stay and by some that nobody has run before. The parsers in Rust have a fuzzer (fuzz/README.md)."""

from __future__ import annotations

import contextlib
import copy
import gc
import json
import logging
import random
import secrets
import socket
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import pytest
from free_ports import free_port
from gradwire import _boundary, _meeting, _meeting_sockets
from gradwire._board import VERSIONS, Board, compare_settings
from gradwire._boundary import Boundary
from gradwire._entrance import LIVES_MAX, Door, Watch
from gradwire._meeting import MeetingServer, MeetingStore
from gradwire._rendezvous import _running_round, first_worker
from gradwire.doctor import probe
from gradwire.errors import GradwireError, InvalidRequestError, PeerLostError
from gradwire.observe import client, status

FIXED = 300
FRESH = 100
ROUND = 1
WORLD_SIZE = 2
# Rank 1 comes again.
AGAIN = 1
LIFE = 3
# Values that are JSON, and that nobody expects.
STRANGE: Sequence[Any] = (
    None,
    True,
    -1,
    0,
    1,
    1 << 40,
    1 << 70,
    10**400,
    0.5,
    1e300,
    float("inf"),
    float("nan"),
    "",
    "1",
    "\ud800",
    "x" * 300,
    [],
    ["x"],
    {},
    {"error": ""},
)
DEEP = "[" * 100_000


@pytest.fixture(params=["fixed", "fresh"])
def chances(request: pytest.FixtureRequest) -> Iterator[random.Random]:
    """One generator for each case."""
    first, count = (0, FIXED) if request.param == "fixed" else (time.time_ns(), FRESH)
    print(f"seeds {first} to {first + count - 1}")
    return (random.Random(seed) for seed in range(first, first + count))


def strange(chance: random.Random) -> Any:
    """A copy of one of them: a later change may be inside it, and put a list into itself."""
    return copy.deepcopy(chance.choice(STRANGE))


def mutated(chance: random.Random, value: Any) -> Any:
    """The same with one or two places that are something else."""
    value = json.loads(json.dumps(value))
    for _ in range(chance.choice((1, 1, 2))):
        if not isinstance(value, (dict, list)) or not value or chance.random() < 0.15:
            value = strange(chance)
            continue
        key = chance.choice(sorted(value) if isinstance(value, dict) else range(len(value)))
        if chance.random() < 0.25:
            del value[key]
        else:
            value[key] = mutated(chance, value[key]) if chance.random() < 0.3 else strange(chance)
    return value


def text(chance: random.Random, value: Any) -> str:
    """As a text, which may be none of JSON."""
    whole = json.dumps(mutated(chance, value))
    at = chance.randrange(len(whole) + 1)
    return chance.choice((whole, whole, whole, whole[:at], whole[:at] + "\x00" + whole[at:], DEEP, ""))


def frames(chance: random.Random, values: Sequence[Any]) -> bytes:
    """As the rendezvous sends them; a length or a byte may be wrong."""
    contents = [text(chance, value).encode(errors="replace") for value in values]
    joined = b"".join(_meeting.LENGTH.pack(len(content)) + content for content in contents)
    if chance.random() < 0.3:
        at = chance.randrange(len(joined))
        joined = joined[:at] + bytes([chance.randrange(256)]) + joined[at + 1 :]
    return joined


class Store:
    """A Store in memory; as torch's it gives bytes."""

    def __init__(self, texts: dict[str, str]) -> None:
        self.texts = texts

    def set(self, key: str, value: str) -> None:
        self.texts[key] = value

    def get(self, key: str) -> bytes:
        return self.texts[key].encode(errors="surrogatepass")

    def check(self, keys: Sequence[str]) -> bool:
        return all(key in self.texts for key in keys)

    def add(self, key: str, amount: int) -> int:
        self.texts[key] = str(int(self.texts.get(key, "0")) + amount)
        return int(self.texts[key])

    def compare_set(self, key: str, _expected: str, value: str) -> None:
        self.texts.setdefault(key, value)

    def wait(self, keys: Sequence[str], _timeout: timedelta) -> None:
        if not self.check(keys):
            raise RuntimeError("timeout")


def entry(rank: int) -> dict[str, Any]:
    settings = {"preset": "auto", "paths": 1}
    return {
        "record": "{}",
        "settings": settings,
        "name": "g",
        "rank": rank,
        "world_size": WORLD_SIZE,
        "host": "a",
        "pid": 1,
        **VERSIONS,
    }


def test_the_record_of_another_rank_is_read_or_refused_by_name(chances: Iterator[random.Random]) -> None:
    for chance in chances:
        ours, prefix = json.dumps(entry(0)), f"gradwire/{ROUND}"
        store = Store({f"{prefix}/0": ours, f"{prefix}/1": text(chance, entry(1))})
        with contextlib.suppress(GradwireError):
            entries = Board(store, prefix, 0, WORLD_SIZE).collect(0.0)
            assert [entries[rank]["world_size"] for rank in range(WORLD_SIZE)] == [WORLD_SIZE] * 2
            assert all(isinstance(each["record"], str) for each in entries.values())
            compare_settings(entries, 0)


def test_how_a_group_was_formed_is_read_or_refused(chances: Iterator[random.Random]) -> None:
    for chance in chances:
        end = f"gradwire/{ROUND}/end"
        store = Store({end: text(chance, {"rank": 1, "error": chance.choice(("", "no"))})})
        with contextlib.suppress(GradwireError):
            Board(store, f"gradwire/{ROUND}", 0, WORLD_SIZE).confirm(0.0)
        with contextlib.suppress(GradwireError):
            assert _running_round(store, 0, 2, ROUND + 1) in (0, ROUND)


def test_a_server_reads_what_worker_0_wants_or_says_that_it_is_nothing(
    chances: Iterator[random.Random], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(secrets, "token_hex", lambda _: "number")
    for chance in chances:
        called = chance.choice(("1", "1", "1", "", "one"))
        below = "gradwire-served/gradwire"
        store = Store({f"{below}/called/number": called, f"{below}/1/0": text(chance, {**entry(0), "workers": 4})})
        with contextlib.suppress(GradwireError):
            number, first = first_worker(store, 0, 0.0)
            assert number == 1
            assert 0 < first["workers"] <= 16_384
            assert isinstance(first["settings"], dict)


def test_a_rank_that_comes_again_may_write_what_it_likes(chances: Iterator[random.Random]) -> None:
    for chance in chances:
        prefix = f"gradwire/{ROUND}"
        texts = {
            f"{prefix}/again/{AGAIN}": text(chance, {"life": LIFE, "record": "{}"}),
            f"{prefix}/answer/{AGAIN}": text(chance, {"life": chance.choice((0, LIFE)), "running": "{}"}),
            f"{prefix}/waiting": "3",
        }
        if chance.random() < 0.5:
            name = chance.choice((f"{prefix}/again/{AGAIN}", f"{prefix}/answer/{AGAIN}"))
            texts[name] = json.dumps({"life": LIFE if "again" in name else 0, "record": "{}", "running": "{}"})
        store = Store(texts)
        code = Watch(lambda store=store: store, ROUND, 0, WORLD_SIZE).newcomer()
        assert code == 0 or (code % WORLD_SIZE == AGAIN and 0 < code // WORLD_SIZE < LIVES_MAX)
        with contextlib.suppress(GradwireError):
            answered = Door(lambda store=store: store, ROUND, AGAIN, WORLD_SIZE).answered(LIFE, 0.001, 0.001)
            assert isinstance(answered, str)


def raised(call: Callable[[], Any]) -> BaseException | None:
    """What a call ends with, of what calls may end with."""
    try:
        call()
    except RuntimeError as error:
        return error
    return None


class Answers:
    """A connection to something that answers, and not always what a board would."""

    def __init__(self, answers: bytes) -> None:
        self.answers = answers

    def settimeout(self, seconds: float) -> None:
        pass

    def sendall(self, content: bytes) -> None:
        pass

    def recv(self, count: int) -> bytes:
        piece, self.answers = self.answers[:count], self.answers[count:]
        return piece

    def close(self) -> None:
        pass


@pytest.mark.parametrize("secret", [None, b"the secret of this job"])
def test_a_rank_reads_what_a_board_answers_or_names_the_board(
    chances: Iterator[random.Random], secret: bytes | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for chance in chances:
        answers: list[dict[str, Any]] = [{"value": "7"}, {"ended": "Error: no", "missing": [1]}, {"error": "no"}]
        said = [
            {"value": None} if secret is None else {"nonce": "a", "proof": "b"},
            *(chance.choice(answers) for _ in range(6)),
        ]
        if chance.random() < 0.7:
            greeting = json.dumps({"value": None}).encode()
            content = _meeting.LENGTH.pack(len(greeting)) + greeting + frames(chance, said[1:])
        else:
            content = frames(chance, said)
        monkeypatch.setattr(_meeting_sockets, "connect", lambda *_, content=content: Answers(content))
        with contextlib.suppress(GradwireError):
            store = MeetingStore("127.0.0.1", 1, 1, 1.0, secret)
            for ask in (
                lambda store=store: store.get("k"),
                lambda store=store: store.add("k", 1),
                lambda store=store: store.check(["k"]),
                lambda store=store: store.set("k", "v"),
                lambda store=store: store.wait(["k"], timedelta(0)),
            ):
                outcome = raised(ask)
                assert outcome is None or isinstance(outcome, GradwireError) or "timeout" in str(outcome), repr(outcome)
                if outcome is not None and "no rendezvous" in str(outcome):
                    break


def test_a_board_serves_its_ranks_whatever_else_comes(
    chances: Iterator[random.Random], caplog: pytest.LogCaptureFixture
) -> None:
    port = free_port()
    server = MeetingServer("127.0.0.1", port, WORLD_SIZE)
    hello = {"gradwire": _meeting.VERSION, "rank": None, "nonce": "a"}
    requests = [
        {"op": op, "key": "k", "keys": ["k", "l"], "value": "v", "timeout_s": 0}
        for op in ("set", "get", "add", "wait", "check", "set_once")
    ]
    try:
        with caplog.at_level(logging.ERROR):
            for chance in chances:
                content = frames(chance, [hello, chance.choice(requests)])
                if chance.random() < 0.5:  # what comes behind a right greeting
                    greeting = json.dumps(hello).encode()
                    content = _meeting.LENGTH.pack(len(greeting)) + greeting + frames(chance, [chance.choice(requests)])
                with (
                    socket.create_connection(("127.0.0.1", port), timeout=60.0) as stranger,
                    contextlib.suppress(OSError),
                ):
                    stranger.sendall(content)
                    stranger.shutdown(socket.SHUT_WR)
                    while stranger.recv(4096):
                        pass
            with contextlib.closing(MeetingStore("127.0.0.1", port, 1, 60.0)) as rank:
                rank.set("own", "value")
                assert rank.get("own") == "value"
    finally:
        server.end(None, 0.0)
    gc.collect()  # tasks that failed say so when they are forgotten
    assert not caplog.records, caplog.text


def test_a_request_to_a_status_socket_is_taken_or_is_none(chances: Iterator[random.Random]) -> None:
    for chance in chances:
        line = text(chance, {"ask": "stats", "every_s": 1.0}).encode(errors="replace")[: status.REQUEST_BYTES_MAX - 1]
        client = status._Client()
        if client.take(line + b"\n", {"stats": dict}):
            assert client.ask == "stats"
            assert client.every_s is None or 0.1 <= client.every_s <= 86_400.0


def state() -> tuple[Any, list[Any]]:
    """What a training loop may have, as `described` says it, and its arrays."""
    import torch
    from gradwire.torch import _elastic
    from gradwire.torch._described import described

    tensors: list[Any] = []
    layer = torch.nn.BatchNorm1d(3).state_dict()
    told = described({"layer": layer, 3: [None, 1.5, ("a", torch.Size([2]))]}, tensors, "state")
    return json.loads(json.dumps(told)), [_elastic._bytes_of(tensor) for tensor in tensors]


def test_the_state_that_another_rank_describes_is_rebuilt_or_refused(chances: Iterator[random.Random]) -> None:
    from gradwire.torch._described import rebuilt

    told, arrays = state()
    assert list(rebuilt(told, arrays)) == ["layer", 3]
    for chance in chances:
        changed = told
        for _ in range(chance.randrange(1, 5)):
            changed = mutated(chance, changed)
        with contextlib.suppress(InvalidRequestError):
            rebuilt(changed, arrays)


@pytest.mark.parametrize(
    "told",
    [
        ["tensor", -1, "float32", [3]],
        ["tensor", 0, "save", [3]],
        ["tensor", 0, "float32", [-1]],
        ["plain", {"a": []}],
        ["dict", [[["list", []], ["plain", 1]]], ["plain", None]],
        ["dict", [], ["plain", 1]],
    ],
    ids=["index", "dtype", "shape", "plain", "key", "metadata"],
)
def test_what_described_never_says_is_refused(told: Any) -> None:
    from gradwire.torch._described import rebuilt

    with pytest.raises(InvalidRequestError):
        rebuilt(told, state()[1])


class Listener(Boundary):
    """Rank 1 at a boundary, and what rank 0 says there."""

    def __init__(self, length: int, head: bytes) -> None:
        self._rank = 1
        self.said = [length.to_bytes(8, "little", signed=True), head]

    def _broadcast(self, array: Any, _root: int) -> None:
        if not self.said:
            raise PeerLostError("it says no more")
        said = self.said.pop(0)[: array.nbytes]
        array.view("u1")[: len(said)] = list(said)


def test_what_a_source_tells_a_newcomer_is_taken_or_refused(chances: Iterator[random.Random]) -> None:
    right = {"header": {"arrays": []}, "bytes": [0, 0]}
    heard = Listener(len(json.dumps(right)), json.dumps(right).encode())._share_from(0, 1, dict)
    assert heard[0] == {"arrays": []}
    for chance in chances:
        head = text(chance, chance.choice((right, {"error": "no"}))).encode(errors="replace")[:4096]
        length = chance.choice((len(head), len(head), len(head), -1, 1 << 62, _boundary.HEADER_BYTES_MAX + 1))
        with contextlib.suppress(GradwireError):
            Listener(length, head)._share_from(0, 1, dict)


def test_a_line_of_a_status_socket_is_an_answer_or_none(chances: Iterator[random.Random]) -> None:
    for chance in chances:
        line = text(chance, {"job": "j", "port": 1, "pid": 2, "meeting": "a:1"}).encode(errors="surrogatepass")
        with contextlib.suppress(ValueError):
            answer = client.read_answer(line)
            assert client._has(answer, "7") in (False, True)
            assert client._has(answer, "a") in (False, True)


def test_a_probe_that_is_none_changes_nothing(chances: Iterator[random.Random]) -> None:
    token = 7
    header = probe._HEADER
    with probe.Prober(0, 0, token, "127.0.0.1") as prober:
        sender = ("127.0.0.1", prober.port)
        for chance in chances:
            kind = chance.choice((probe._COUNT, probe._ECHO, probe._ASK, probe._ANSWER, 200))
            number = chance.choice((chance.randrange(9), chance.randrange(1 << 32)))
            asked = chance.choice((chance.randrange(-5, 5), chance.randrange(-(1 << 63), 1 << 63)))
            packet = header.pack(probe._MAGIC, kind, chance.randrange(3), 1, token, number, 0, asked)
            packet += bytes(chance.randrange(20))
            came_ns = chance.choice((None, 0, chance.randrange(1 << 63)))
            with contextlib.suppress(struct.error):
                prober._handle(
                    packet[: chance.choice((len(packet), chance.randrange(len(packet))))], 0, sender, came_ns
                )
        # What is one is still taken.
        for kind, asked in ((probe._COUNT, 1), (probe._ANSWER, 0)):
            prober._handle(
                header.pack(probe._MAGIC, kind, 1, 1, token, 5, 0, asked) + bytes(probe._COUNTS.size), 0, sender, 9
            )
        with prober._changed:
            answers = list(prober._answers.values())
        counted = [each.counts() for each in prober._counted.values()]
    assert answers
    assert any(arrived for arrived, *_ in counted)
    assert all(len(probe._COUNTS.pack(*counts)) == probe._COUNTS.size for counts in counted)
    assert all(len(content) >= probe._COUNTS.size for _, content in answers)
