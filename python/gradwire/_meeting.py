"""Where ranks without torch meet: rank 0 serves a small board of texts over TCP, which every rank reads and writes.

`MeetingStore` has those methods of a torch Store that `_rendezvous.py` uses. The board lives while a group is formed and no
longer: the port is free again before the first collective. With `on_peer_loss="continue"` it lives as long as rank 0's process, so
that lost ranks can join again (`_entrance.py`), and ranks look at it while their groups run.

Where a job secret is configured only who shows that it knows it is a rank, reads or writes (`_meeting_proof.py`), and no rank with one
writes to a board that does not show it; else whoever
reaches the port can, as with torch's own Store (docs/security.md). A client cannot make the server run anything or hold more than the
limits below and those of `_meeting_limits.py`: requests are JSON, and whatever is no request ends its connection.

    frame    4 bytes of length, most significant first, then as much JSON
    first    {"gradwire": 1, "rank": r, "nonce": n}                        -> {"value": null} or {"error": text}
             r is null for who only looks: a rank that meets others is here once, and may look while it does
             with a job secret first                                       -> {"nonce": m, "proof": of the board}
             {"proof": of the rank}                                        -> as above, or {"error": text, "secret": true}
    then     {"op": "set", "key": k, "value": v} and so on, one at a time  -> the same; {"ended": reason} when it is over,
             without a reason when the group was formed
             {"op": "distrusts"}: a rank with a job secret leaves a board that has none
             {"op": "check", "keys": [k, l, ...]}                          -> whether all are there
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import logging
import socket
import struct
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

from gradwire import _accepting, _meeting_limits, _meeting_proof, _meeting_sockets
from gradwire._meeting_limits import Complaints, NoRequestError, Places, Room, Visitor, is_count
from gradwire._meeting_texts import Texts
from gradwire._named import first_named
from gradwire._threads import start_thread
from gradwire.errors import ConfigError, MissingRankError, RendezvousError, SecretMismatchError

logger = logging.getLogger("gradwire")

VERSION = 1
# A record has a few hundred bytes for each peer: enough for thousands of ranks.
FRAME_BYTES_MAX = 1 << 20
# More than any group has; so is whoever was started for a larger one.
RANKS_MAX = 1 << 31
KEY_CHARS_MAX = 256
# In one request: of the longest ones a quarter of a frame.
KEYS_AT_ONCE = 1024
# For its round, its record and the end of groups that are formed one after the other, and for joining again. Parts and earlier
# groups are forgotten.
KEYS_PER_RANK = 128
# Of the values, and of requests and answers under way: each record has 4 KiB, quoted, and 32 bytes for each peer. Room for
# eight groups of all ranks that are formed one after the other, and for small jobs.
BOARD_BYTES = 16 << 20
GROUPS_MAX = 8
# As many keys more: ranks of a job of another size, which learn it.
SPARE_KEYED = 16
# Connections beyond two for each rank, one that meets and one that looks: those ranks, whoever has not said yet who it is, and strangers.
SPARE_CLIENTS = 128
# Within this a client says who it is, in so few bytes.
HELLO_TIMEOUT_S = 5.0
HELLO_BYTES_MAX = 1 << 10
# A frame that has begun is complete within this, and an answer is taken: 1 MiB over 1 Mbit/s takes 8 s.
FRAME_TIMEOUT_S = 30.0
# A rank that is here already and comes again has left within this, or is another one.
AGAIN_S = 1.0
# How long rank 0 answers the others after it has failed, so that each learns the reason in its own words; and then hands them its own.
LINGER_S, TELL_S = 2.0, 0.5
# An answer takes this much longer than the wait that was asked for, before the server counts as gone.
ANSWER_TIMEOUT_S = 30.0
ANSWER_MIN_S = 0.5  # who came in the last moment has an answer all the same
# Of what a client sent, in an error.
TOLD_CHARS = 40
LENGTH = struct.Struct(">I")
# The last request of a rank that has a job secret, to a board that shows none.
DISTRUSTS = "distrusts"
ANOTHER_SECRET, OTHERS_SECRET = "has another job secret than rank 0, or none", "has a job secret, and rank 0 has none"


class MeetingServer:
    """The board, on a thread of rank 0.

    Args:
        host, port: to listen at; a name is looked up here.
        world_size: how many ranks to make room for.
        secret: of the job; None: none is configured, and everybody is served.
        mtu: largest IP packet; None: what passes nearly everywhere.
        timeout_s: longest wait for an address of the host's name.

    Raises:
        PortInUseError: the TCP port is taken.
        AddressError: the host has no such address.
        EngineError: no file descriptor is left, or there are fewer than ranks, or no thread can be started.
    """

    def __init__(
        self,
        host: str,
        port: int,
        world_size: int,
        secret: bytes | None = None,
        *,
        mtu: int | None = None,
        timeout_s: float = 0.0,
    ) -> None:
        self._secret = secret
        self._differs = OTHERS_SECRET if secret is None else ANOTHER_SECRET
        self._world_size = world_size
        self._ranks: dict[int, str] = {}
        self._left: set[int] = set()
        self._visits: set[asyncio.Task[None]] = set()
        self._unproven: dict[int, str] = {}
        self._places = Places(world_size, 2 * world_size + SPARE_CLIENTS)
        self._room = Room(BOARD_BYTES + GROUPS_MAX * world_size * (4096 + 32 * world_size))
        self._texts = Texts(KEYS_PER_RANK * (world_size + SPARE_KEYED), self._room)
        self._complaints = Complaints()
        self._ended: dict[str, Any] | None = None
        self._lacks_descriptors = False
        _meeting_limits.make_room_for_descriptors(2 * world_size + SPARE_CLIENTS)
        with contextlib.ExitStack() as made:
            self._listeners = _meeting_sockets.listen(host, port, mtu, timeout_s)
            for listener in self._listeners:
                made.callback(listener.close)
            self._loop = _meeting_sockets.new_loop()
            made.callback(self._loop.close)
            # Each rank has a connection while the group is formed, rank 0 both ends of its own.
            _meeting_limits.check_descriptors(world_size + 1, world_size)
            self._changed = asyncio.Condition()
            self._only_here = _meeting_sockets.only_here(host, self._listeners)
            if self._only_here and world_size > 1 and not _meeting_sockets.means_this_host(host):
                logger.warning("rank 0 %s", self._only_here)
            self._thread = start_thread(self._run, "gradwire-meeting")
            made.pop_all()

    def forget(self, prefix: str) -> None:
        """Makes room: nobody needs what lies below `prefix` any more."""
        self._loop.call_soon_threadsafe(self._texts.forget, prefix)

    def strangers(self, ranks: Sequence[int]) -> dict[int, str]:
        """Where somebody came from who said it was one of `ranks` and had another job secret than this board; the latest of each."""
        return {rank: self._unproven[rank] for rank in ranks if rank in self._unproven}

    def why_missing(self, ranks: Sequence[int]) -> list[str]:
        """What this board knows of `ranks` whose records have not come, as parts of a sentence."""
        reasons = []
        if self._lacks_descriptors:
            reasons.append("rank 0 had no file descriptor left for who came (ulimit -n)")
        if strangers := self.strangers(ranks):
            came = first_named(f"rank {rank} from {peer}" for rank, peer in strangers.items())
            reasons.append(f"who said it was {came} {self._differs}")
        if here := {rank: peer for rank, peer in dict(self._ranks).items() if rank in ranks}:
            came = first_named(f"rank {rank} from {peer}" for rank, peer in here.items())
            reasons.append(
                f"{came} is connected to rank 0, and its record has not come: it stands still, or large TCP packets are lost on the way"
            )
        return reasons + ([f"rank 0 {self._only_here}"] if self._only_here else [])

    def end(self, error: BaseException | None, timeout_s: float) -> None:
        """Stops listening, once all ranks have gone or after `timeout_s`. Who still waits then is told `error`.

        Who was here before and has come again waits for the next meeting: it is told that this one is over.
        """
        asyncio.run_coroutine_threadsafe(self._end(error, timeout_s), self._loop).result(timeout_s + ANSWER_TIMEOUT_S)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(ANSWER_TIMEOUT_S)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        for listener in self._listeners:
            self._open(listener)
        try:
            self._loop.run_forever()
        finally:
            self._close()
            tasks = asyncio.all_tasks(self._loop)
            for task in tasks:
                task.cancel()
            self._loop.run_until_complete(asyncio.gather(*tasks, return_exceptions=True))
            self._loop.close()

    async def _end(self, error: BaseException | None, timeout_s: float) -> None:
        await self._wait(lambda: all(rank in self._left for rank in self._ranks if rank < self._world_size), timeout_s)
        # Who still waits to be let in is refused by the system.
        self._close()
        async with self._changed:
            self._ended = {
                "ended": "" if error is None else f"{type(error).__name__}: {error}",
                "missing": getattr(error, "ranks", []) if isinstance(error, MissingRankError) else [],
                "waited_s": getattr(error, "waited_s", None),
            }
            self._changed.notify_all()
        self._texts.let_go()
        if self._visits:
            await asyncio.wait(self._visits, timeout=TELL_S)

    async def _wait(self, done: Any, timeout_s: float) -> bool:
        """Whether it came true in time."""
        async with self._changed:
            try:
                await asyncio.wait_for(self._changed.wait_for(done), timeout_s)
            except (asyncio.TimeoutError, TimeoutError):  # one class only from Python 3.11 on
                return False
        return True

    def _open(self, listener: socket.socket) -> None:
        """Lets connections in, until the listener is closed.

        Servers of asyncio forget those that they have accepted just before they are closed (Python 3.11): their clients would wait in vain.
        """
        if listener.fileno() >= 0:
            self._loop.add_reader(listener, self._accept, listener)

    def _close(self) -> None:
        for listener in self._listeners:
            if listener.fileno() >= 0:
                self._loop.remove_reader(listener)
                listener.close()

    def _accept(self, listener: socket.socket) -> None:
        try:
            client = _meeting_sockets.Client(*listener.accept())
        except OSError as error:
            if not _accepting.has_gone(error):
                self._lacks_descriptors |= error.errno in (errno.EMFILE, errno.ENFILE)
                self._complaints.add("outside", error)
                self._loop.remove_reader(listener)
                self._loop.call_later(_accepting.ACCEPT_PAUSE_S, self._open, listener)
            return
        visit = self._loop.create_task(self._serve(client))
        self._visits.add(visit)
        visit.add_done_callback(self._visits.discard)

    async def _serve(self, client: _meeting_sockets.Client) -> None:
        task = asyncio.current_task()
        assert task is not None, "a server's handler runs as a task"
        visitor = Visitor(task.cancel, self._loop.time(), client.peer)
        try:
            self._places.enter(visitor)
            await asyncio.wait_for(self._greet(client, visitor), HELLO_TIMEOUT_S)
            await self._write(client, {"value": None})
            while True:
                await self._write(client, await self._answer_next(client, visitor))
        except NoRequestError as refused:
            self._complaints.add(client.peer, refused)
            with contextlib.suppress(OSError, asyncio.TimeoutError, TimeoutError, NoRequestError):
                await self._write(client, {"error": str(refused), "secret": isinstance(refused, _NoSecretError)})
                client.pass_over()
        except asyncio.CancelledError:
            pass  # the meeting is over, or the place was needed
        except (OSError, EOFError, asyncio.TimeoutError, TimeoutError):
            logger.debug("rendezvous: %s has gone, or was too slow", client.peer)
        finally:
            self._places.left(visitor)
            client.close()
            await self._forget(visitor.rank)

    async def _greet(self, client: _meeting_sockets.Client, visitor: Visitor) -> None:
        hello = await _read(client, await _length(client, HELLO_BYTES_MAX))
        if hello.get("gradwire") != VERSION:
            raise NoRequestError(f"it speaks version {hello.get('gradwire')!r} of the rendezvous, this is {VERSION}")
        rank = hello.get("rank", "")
        if rank is not None and (type(rank) is not int or not 0 <= rank < RANKS_MAX):
            raise NoRequestError(f"there is no rank {str(rank)[:TOLD_CHARS]!r}")
        visitor.has_said = True
        if self._secret is not None:
            challenge = _meeting_proof.Challenge(self._secret, rank, _text(hello, "nonce"))
            await self._write(client, challenge.question())
            visitor.is_known = await self._proves(client, challenge)
            if not visitor.is_known:
                self._note_unproven(rank, visitor.peer)
        if rank is None:
            return
        # Where this process stood still, one that came again meets itself here, whose first connection has ended.
        if rank in self._ranks and not await self._wait(lambda: rank not in self._ranks, AGAIN_S):
            raise NoRequestError(f"rank {rank} is here already, from {self._ranks[rank]}: each rank is started once")
        self._ranks[rank] = visitor.peer
        visitor.rank = rank

    async def _proves(self, client: _meeting_sockets.Client, challenge: _meeting_proof.Challenge) -> bool:
        answer: dict[str, Any] = {}
        # Who has another secret, or none, sees so by the board's proof and leaves.
        with contextlib.suppress(OSError, EOFError, NoRequestError):
            answer = await _read(client, await _length(client, HELLO_BYTES_MAX))
        return challenge.is_met_by(answer)

    def _note_unproven(self, rank: int | None, peer: str) -> None:
        if rank is not None and rank < self._world_size:
            self._unproven[rank] = peer
        who = "who only looks" if rank is None else f"who says it is rank {rank}"
        raise _NoSecretError(f"{who} {self._differs}")

    async def _forget(self, rank: int | None) -> None:
        async with self._changed:
            if rank is not None:
                del self._ranks[rank]
                if rank < self._world_size:
                    self._left.add(rank)
            self._changed.notify_all()

    async def _answer_next(self, client: _meeting_sockets.Client, visitor: Visitor) -> dict[str, Any]:
        count = await _length(client, FRAME_BYTES_MAX)
        visitor.heard_s = self._loop.time()
        with self._room.of(count):
            request = await asyncio.wait_for(_read(client, count), FRAME_TIMEOUT_S)
            if request.get("op") == DISTRUSTS and self._secret is None:
                self._note_unproven(visitor.rank, visitor.peer)
            return await self._answer(request)

    async def _write(self, client: _meeting_sockets.Client, message: dict[str, Any]) -> None:
        frame = _frame(message)
        with self._room.of(len(frame)):
            await asyncio.wait_for(client.write(frame), FRAME_TIMEOUT_S)

    async def _answer(self, request: dict[str, Any]) -> dict[str, Any]:
        op = request.get("op")
        if op == "check":
            are_here = all(key in self._texts for key in _keys(request))
            return self._ended or {"value": are_here}
        key = _text(request, "key")
        if op == "wait":
            seconds = request.get("timeout_s")
            if not isinstance(seconds, (int, float)) or not 0 <= seconds <= ANSWER_TIMEOUT_S:
                raise NoRequestError(f"a wait of {str(seconds)[:TOLD_CHARS]!r} s")
            if self._ended is None:
                await self._texts.wait(key, float(seconds))
        if self._ended is not None:
            return self._ended
        if op == "wait":
            return {"value": key in self._texts}
        if op == "get":
            return {"value": self._texts.get(key)}
        return {"value": self._write_text(str(op), key, request)}

    def _write_text(self, op: str, key: str, request: dict[str, Any]) -> str | None:
        if op == "add":
            return self._texts.add(key)
        if op not in ("set", "set_once"):
            raise NoRequestError(f"there is no request {op[:TOLD_CHARS]!r}")
        write = self._texts.set if op == "set" else self._texts.set_once
        write(key, _text(request, "value"))
        return None


class MeetingStore:
    """This rank's view of the board: the methods of a torch Store that forming a group needs. For one thread.

    Args:
        host, port: where rank 0 serves it.
        rank: of this process; None: it only looks, also while its rank meets others.
        timeout_s: longest wait for rank 0.
        secret: of the job; None: none is configured.
        mtu: largest IP packet; None: what passes nearly everywhere.

    Raises:
        MissingRankError: rank 0 did not answer in time.
        SecretMismatchError: rank 0 has another job secret, or only one of the two has any.
        RendezvousError: what answers there is no rendezvous of gradwire's, or it refuses this rank.
        AddressError: the host has no address.
        EngineError: no file descriptor is left.
    """

    is_of_one_start = True  # rank 0's process has it, and nothing of those before

    def __init__(
        self,
        host: str,
        port: int,
        rank: int | None,
        timeout_s: float,
        secret: bytes | None = None,
        *,
        mtu: int | None = None,
    ) -> None:
        self.address = f"{host}:{port}"
        # The host of rank 0 may be cut off after it has answered once: then too nobody waits longer than was asked for.
        self._answer_s = min(ANSWER_TIMEOUT_S, max(timeout_s, ANSWER_MIN_S))
        self._socket = _meeting_sockets.connect(host, port, timeout_s, mtu)
        try:
            self._greet(rank, secret)
        except BaseException:
            self.close()
            raise

    def set(self, key: str, value: str) -> None:
        """Writes."""
        self._ask({"op": "set", "key": key, "value": value})

    def get(self, key: str) -> str:
        """Reads what is there."""
        value = self._ask({"op": "get", "key": key})
        if not isinstance(value, str):
            raise RendezvousError(f"the rendezvous at {self.address} has no {key}")
        return value

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys are there."""
        parts = (keys[first : first + KEYS_AT_ONCE] for first in range(0, len(keys), KEYS_AT_ONCE))
        return all(self._ask({"op": "check", "keys": list(part)}) for part in parts)

    def add(self, key: str, amount: int) -> int:
        """Counts up by one and returns the sum."""
        assert amount == 1, amount
        sum_as_text = self._ask({"op": "add", "key": key})
        if not isinstance(sum_as_text, str) or not is_count(sum_as_text):
            raise self._stranger()
        return int(sum_as_text)

    def compare_set(self, key: str, expected: str, value: str) -> None:
        """Writes if nothing is there yet."""
        assert not expected, expected
        self._ask({"op": "set_once", "key": key, "value": value})

    def wait(self, keys: Sequence[str], timeout: timedelta) -> None:
        """Waits for one key, for as long as `timeout`.

        Raises:
            RuntimeError: "timeout"; as torch's Stores do.
        """
        (key,) = keys
        seconds = timeout.total_seconds()
        if not self._ask({"op": "wait", "key": key, "timeout_s": seconds}, seconds + self._answer_s):
            raise RuntimeError(f"timeout after {seconds:g} s")

    def close(self) -> None:
        """Leaves the meeting."""
        self._socket.close()

    def _greet(self, rank: int | None, secret: bytes | None) -> None:
        ours, hello_s = _meeting_proof.nonce(), min(HELLO_TIMEOUT_S, self._answer_s)
        answer = self._exchange({"gradwire": VERSION, "rank": rank, "nonce": ours}, hello_s)
        if "nonce" in answer:
            if secret is None:
                raise self._other_secret("asks for the job secret, and this rank has none")
            proof = _meeting_proof.answer_to(answer, secret, rank, ours)
            if proof is None:
                raise self._other_secret("has another job secret than this rank")
            answer = self._exchange(proof, hello_s)
        elif secret is not None:
            if rank is not None:
                self._leave_word()
            # Whatever it says: anybody can say it.
            raise self._other_secret("has no job secret, and this rank has one")
        self._value(answer)

    def _leave_word(self) -> None:
        """This rank leaves, as it has a secret and the board shows none; an honest one tells whoever waits for the rank."""
        with contextlib.suppress(OSError):
            self._socket.sendall(_frame({"op": DISTRUSTS}))

    def _other_secret(self, problem: str) -> SecretMismatchError:
        text = f"the rendezvous at {self.address} {problem}: set the same GRADWIRE_SECRET or secret_file, and security, on all ranks"
        return SecretMismatchError(text, rank=0, problem=problem)

    def _ask(self, request: dict[str, Any], timeout_s: float | None = None) -> Any:
        return self._value(self._exchange(request, timeout_s))

    def _exchange(self, request: dict[str, Any], timeout_s: float | None = None) -> dict[str, Any]:
        try:
            end = time.monotonic() + (self._answer_s if timeout_s is None else timeout_s)
            self._wait_at_most_until(end)
            self._socket.sendall(_frame(request))
            (count,) = LENGTH.unpack(self._receive(LENGTH.size, end))
            answer = json.loads(self._receive(self._length(count), end))
        except (OSError, EOFError) as error:
            # What comes later would be taken for the answer to another request, and who says why it gives up would wait once more.
            self.close()
            text = f"the rendezvous at {self.address} is gone, or no rendezvous of gradwire's: {error}"
            raise RendezvousError(text, rank=0, over=True) from error
        except (ValueError, RecursionError) as error:
            raise self._stranger() from error
        if not isinstance(answer, dict):
            raise self._stranger()
        return answer

    def _value(self, answer: dict[str, Any]) -> Any:
        missing = answer.get("missing")
        if isinstance(missing, list) and missing:
            cause, waited_s = answer.get("ended"), answer.get("waited_s")
            raise MissingRankError(f"rank 0 gave up: {cause}", ranks=missing, waited_s=waited_s, cause=cause)
        if answer.get("ended") == "":
            raise RendezvousError(f"the meeting at {self.address} is over", rank=0, over=True, ended=True)
        if "ended" in answer:
            raise RendezvousError(f"rank 0 gave up: {answer['ended']}", rank=0)
        if answer.get("secret"):
            raise self._other_secret("has another job secret than this rank")
        if "error" in answer:
            raise RendezvousError(f"the rendezvous at {self.address} refuses this rank: {answer['error']}")
        return answer.get("value")

    def _wait_at_most_until(self, end: float) -> None:
        """Bounds the next call of the socket. Of an answer that comes byte by byte each would be in time, but for the whole."""
        left_s = end - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("no answer came in time")
        self._socket.settimeout(left_s)

    def _receive(self, count: int, end: float) -> bytes:
        content = bytearray()
        while len(content) < count:
            self._wait_at_most_until(end)
            piece = self._socket.recv(count - len(content))
            if not piece:
                raise EOFError("it closed the connection")
            content += piece
        return bytes(content)

    def _length(self, count: int) -> int:
        if count > FRAME_BYTES_MAX:
            raise self._stranger()
        return count

    def _stranger(self) -> RendezvousError:
        return RendezvousError(
            f"what answers at {self.address} is no rendezvous of gradwire's: is the port another program's?"
        )


def parse_address(address: str) -> tuple[str, int]:
    """Host and port of `host:port`; an IPv6 address stands in brackets.

    Raises:
        ConfigError: it is none.
    """
    host, _, port = address.rpartition(":") if isinstance(address, str) else ("", "", "")
    host = host.removeprefix("[").removesuffix("]")
    # A slash is in no name and no address: who writes `tcp://`, as for torch, would wait for a host of that name.
    is_port = port.isascii() and port.isdigit() and 0 < int(port) < 1 << 16
    if not host or "/" in host or not is_port:
        allowed = "host:port of a TCP port on the host of rank 0"
        raise ConfigError(
            f"rendezvous = {address!r} is not allowed: {allowed}", field="rendezvous", value=address, allowed=allowed
        )
    return host, int(port)


class _NoSecretError(NoRequestError):
    """A client does not know the job secret."""


def _frame(message: dict[str, Any]) -> bytes:
    content = json.dumps(message).encode()
    return LENGTH.pack(len(content)) + content


async def _length(client: _meeting_sockets.Client, bytes_max: int) -> int:
    """Of the next frame. Its first byte may come at any time, the others are soon there."""
    first = await client.read(1)
    rest = await asyncio.wait_for(client.read(LENGTH.size - 1), FRAME_TIMEOUT_S)
    (count,) = LENGTH.unpack(first + rest)
    if count > bytes_max:
        raise NoRequestError("it is no message of gradwire's")
    return int(count)


async def _read(client: _meeting_sockets.Client, count: int) -> dict[str, Any]:
    try:
        message = json.loads(await client.read(count))
    except (ValueError, RecursionError):
        message = None
    if not isinstance(message, dict):
        raise NoRequestError("it is no message of gradwire's")
    return message


def _text(request: dict[str, Any], name: str) -> str:
    """ASCII, so that as many bytes are held as characters."""
    value = request.get(name)
    if not isinstance(value, str) or not value.isascii() or (name == "key" and len(value) > KEY_CHARS_MAX):
        raise NoRequestError(f"{name} is no text that is allowed")
    return value


def _keys(request: dict[str, Any]) -> list[str]:
    keys = request.get("keys")
    if not isinstance(keys, list) or len(keys) > KEYS_AT_ONCE:
        raise NoRequestError(f"keys are no list of at most {KEYS_AT_ONCE}")
    return [_text({"key": key}, "key") for key in keys]
