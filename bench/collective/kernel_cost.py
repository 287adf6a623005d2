"""What the kernel alone takes to carry a GB between two hosts, by the way in which it is handed over. No gradwire in it.

    python bench/collective/kernel_cost.py --json bench-out/kernel-cost.json    # 1 GB, five samples of each, a minute
    python bench/collective/kernel_cost.py --quick                              # 16 MB: only to see that it works

Two namespaces joined by a bridge, MTU 1500, offloads on. The sender's memory is larger than the caches, as a bucket is, but for one
row. By turns:

    udp             44 datagrams with one system call (segmentation offload), head and payload of each in memory of their own,
                    as gradwire sends in clear; the receiver takes them with one call (receive offload)
    udp, cached     the same from memory that stays in the caches
    udp, one piece  the same datagrams one behind the other, as gradwire sends what it has sealed
    udp, zero copy  the same, lent to the kernel (MSG_ZEROCOPY). Heads of their own do not go that way: a message holds 17 pieces
    tcp             as many bytes with each system call

Seconds are system time of the sending and of the receiving process, for each GB (10^9) of payload. What the program does with the
bytes is not in it, nor time in interrupts. An all-reduce between two ranks carries two GB for each GB of the bucket, so twice the
sum is the least that a transport over it can take. Exit status: 0 measured, 2 it could not run.
"""

from __future__ import annotations

import errno
import multiprocessing
import os
import resource
import select
import socket
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import cycle, islice
from multiprocessing import connection
from pathlib import Path
from statistics import median
from typing import Any

import click
import frame
from gradwire.bench.display import as_written
from gradwire.bench.ground import Ground
from gradwire.bench.plan import NetworkPlan
from gradwire.lab.crew import WorkerFailed
from rich.console import Console

HEAD_BYTES, PAYLOAD_BYTES, SEGMENTS = 24, 1408, 44
MESSAGE_BYTES = SEGMENTS * (HEAD_BYTES + PAYLOAD_BYTES)
MEMORY_BYTES = 64 << 20
CACHED_BYTES = 256 << 10
PORT = 9911
RECEIVE_BUFFER_BYTES = 64 << 20
SILENCE_S = 0.5  # after which what has not come will not
PATIENCE_S = 60.0
SLOWEST_BYTES_PER_S = 10e6
# <linux/udp.h>, <asm-generic/socket.h>, <linux/socket.h>: Python has no names for them
UDP_SEGMENT, UDP_GRO = 103, 104
SO_RCVBUFFORCE, SO_ZEROCOPY = 33, 60
MSG_ZEROCOPY = 0x4000000

Parts = list[memoryview]


class NotPossible(Exception):
    """The kernel does not do it this way here."""


@dataclass(frozen=True)
class Way:
    """How bytes are handed over."""

    name: str
    is_tcp: bool = False
    has_own_heads: bool = False
    zero_copy: bool = False
    memory_bytes: int = MEMORY_BYTES

    @property
    def payload_bytes(self) -> int:
        """Of one system call."""
        return MESSAGE_BYTES if self.is_tcp else SEGMENTS * PAYLOAD_BYTES


WAYS = (
    Way("udp", has_own_heads=True),
    Way("udp, cached", has_own_heads=True, memory_bytes=CACHED_BYTES),
    Way("udp, one piece"),
    Way("udp, zero copy", zero_copy=True),
    Way("tcp", is_tcp=True),
)


@dataclass(frozen=True)
class _Work:
    """What one end did: bytes of payload, and seconds."""

    payload: int
    system_s: float

    def seconds_each_gb(self) -> float:
        return self.system_s / (self.payload / 1e9)


@dataclass(frozen=True)
class Sample:
    """One transfer: system time of both ends for each GB, and the share that arrived."""

    send_s: float
    receive_s: float
    arrived: float


def messages(way: Way) -> list[Parts]:
    """What each system call is given, over all of the memory."""
    memory = memoryview(os.urandom(CACHED_BYTES) * (way.memory_bytes // CACHED_BYTES))
    if not way.has_own_heads:
        return [[memory[at : at + MESSAGE_BYTES]] for at in range(0, len(memory) - MESSAGE_BYTES, MESSAGE_BYTES)]
    heads = memoryview(bytes(SEGMENTS * HEAD_BYTES))
    step = way.payload_bytes
    return [
        [part for place in range(SEGMENTS) for part in _datagram(heads, memory[at : at + step], place)]
        for at in range(0, len(memory) - step, step)
    ]


def _datagram(heads: memoryview, payload: memoryview, place: int) -> Iterator[memoryview]:
    yield heads[place * HEAD_BYTES : (place + 1) * HEAD_BYTES]
    yield payload[place * PAYLOAD_BYTES : (place + 1) * PAYLOAD_BYTES]


def send(way: Way, sender: socket.socket, count: int) -> _Work:
    """Makes so many calls."""
    found, before = messages(way), _system_s()
    control = [] if way.is_tcp else [(socket.SOL_UDP, UDP_SEGMENT, struct.pack("H", HEAD_BYTES + PAYLOAD_BYTES))]
    lent = 0
    for parts in islice(cycle(found), count):
        if way.is_tcp:
            sender.sendall(parts[0])
        elif way.zero_copy:
            lent = _lend(sender, parts, control, lent)
        else:
            sender.sendmsg(parts, control)
    return _Work(count * way.payload_bytes, _system_s() - before)


def _lend(sender: socket.socket, parts: Parts, control: list[Any], lent: int) -> int:
    """Sends what stays in this process's memory; `lent`: messages of which the kernel still reads. Returns how many then.

    Raises:
        NotPossible: the kernel takes not even one.
    """
    while True:
        try:
            sender.sendmsg(parts, control, MSG_ZEROCOPY)
        except OSError as error:
            if error.errno != errno.ENOBUFS:
                raise
            if not lent:
                raise NotPossible("the kernel lends no memory to a message: RLIMIT_MEMLOCK or optmem_max") from None
            select.select([sender], [], [], 0.001)  # an error queue counts as readable
            lent -= _taken_back(sender)
        else:
            return lent + 1 - _taken_back(sender)


def _taken_back(sender: socket.socket) -> int:
    """Messages that the kernel says that it no longer reads."""
    try:
        _, told, _, _ = sender.recvmsg(0, 512, socket.MSG_ERRQUEUE | socket.MSG_DONTWAIT)
    except BlockingIOError:
        return 0
    first, last = struct.unpack_from("8xII", told[0][2])  # struct sock_extended_err
    return int(last - first + 1)


def receive(way: Way, receiver: socket.socket, count: int) -> _Work:
    """Takes what comes, until all has or nothing more does."""
    buffer, before = bytearray(1 << 18 if way.is_tcp else 1 << 16), _system_s()
    whole, got = count * MESSAGE_BYTES, 0
    _wait_at_most(receiver, PATIENCE_S)
    while got < whole:
        try:
            more = receiver.recv_into(buffer)
        except BlockingIOError:
            more = 0
        if not more:
            break
        if not got and not way.is_tcp:
            _wait_at_most(receiver, SILENCE_S)
        got += more
    return _Work(got * way.payload_bytes // MESSAGE_BYTES, _system_s() - before)


def _wait_at_most(receiver: socket.socket, seconds: float) -> None:
    """A timeout of Python's would look for data before each call."""
    micros = int(seconds * 1e6)
    receiver.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", *divmod(micros, 1_000_000)))


def _system_s() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_stime


def ends(way: Way, ground: Ground) -> tuple[socket.socket, socket.socket]:
    """Connected sockets of host 0 and host 1."""
    kind = socket.SOCK_STREAM if way.is_tcp else socket.SOCK_DGRAM
    with ground.on_host(1):
        receiver = socket.socket(socket.AF_INET, kind)
    with ground.on_host(0):
        sender = socket.socket(socket.AF_INET, kind)
    address = (ground.address(1), PORT)
    receiver.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    receiver.bind(address)
    if way.is_tcp:
        receiver.listen(1)
        sender.connect(address)
        with receiver:
            accepted, _ = receiver.accept()
        return sender, accepted
    sender.connect(address)
    receiver.setsockopt(socket.SOL_UDP, UDP_GRO, 1)
    try:
        receiver.setsockopt(socket.SOL_SOCKET, SO_RCVBUFFORCE, RECEIVE_BUFFER_BYTES)
    except PermissionError:  # root of a user namespace only: as much as net.core.rmem_max allows
        receiver.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, RECEIVE_BUFFER_BYTES)
    if way.zero_copy:
        sender.setsockopt(socket.SOL_SOCKET, SO_ZEROCOPY, 1)
    return sender, receiver


def sample(way: Way, ground: Ground, size: int) -> Sample:
    """One transfer of about `size` payload bytes.

    Raises:
        WorkerFailed: an end of it failed.
        NotPossible: the kernel does not do it this way.
    """
    count = max(1, size // way.payload_bytes)
    sender, receiver = ends(way, ground)
    with sender, receiver:
        patience_s = PATIENCE_S + size / SLOWEST_BYTES_PER_S
        works = partial(receive, way, receiver, count), partial(send, way, sender, count)
        taken, given = _in_processes(works, patience_s)
    return Sample(given.seconds_each_gb(), taken.seconds_each_gb(), taken.payload / given.payload)


def _in_processes(works: Sequence[Callable[[], _Work]], patience_s: float) -> list[_Work]:
    """Each in a process of its own, so that the other's system time is not in its."""
    fork, results = multiprocessing.get_context("fork"), {}
    children = []
    try:
        for work in works:
            reader, writer = fork.Pipe(duplex=False)
            child = fork.Process(target=_tell, args=(work, writer), daemon=True)
            child.start()
            writer.close()
            children.append((child, reader))
        end = time.monotonic() + patience_s
        while len(results) < len(children):
            waiting = [reader for _, reader in children if reader not in results]
            ready = connection.wait(waiting, max(0.0, end - time.monotonic()))
            if not ready:
                raise WorkerFailed(f"a transfer was not over after {patience_s:.0f} s")
            results |= {reader: _told(reader) for reader in waiting if reader in ready}
        return [results[reader] for _, reader in children]
    finally:
        for child, reader in children:
            child.kill()
            child.join()
            reader.close()


def _tell(work: Callable[[], _Work], writer: connection.Connection) -> None:
    try:
        writer.send(work())
    except (OSError, NotPossible) as error:
        writer.send(error)


def _told(reader: connection.Connection) -> _Work:
    try:
        told = reader.recv()
    except EOFError:
        raise WorkerFailed("an end of the transfer died") from None
    if isinstance(told, NotPossible):
        raise told
    if not isinstance(told, _Work) or not told.payload:
        raise WorkerFailed(f"an end of the transfer failed: {told}")
    return told


def measure(size: int, samples: int, tell: frame.Tell) -> dict[str, Any]:
    """All samples by turns; a way that is not possible here is left out, and says why."""
    found: dict[Way, list[Sample]] = {way: [] for way in WAYS}
    impossible: dict[Way, str] = {}
    with Ground(2, NetworkPlan("bridge")) as ground:
        for turn in range(samples):
            for way in WAYS:
                if way in impossible:
                    continue
                try:
                    found[way].append(sample(way, ground, size))
                except NotPossible as error:
                    impossible[way] = str(error)
                    tell(f"{way.name}: {error}")
            tell(f"{turn + 1} of {samples} turns")
    rows = [row_of(way.name, taken) for way, taken in found.items() if way not in impossible]
    return {"rows": rows, "not_possible": {way.name: why for way, why in impossible.items()}}


def row_of(name: str, samples: list[Sample]) -> dict[str, Any]:
    """The medians of one way."""
    send_s, receive_s = median(each.send_s for each in samples), median(each.receive_s for each in samples)
    return {
        "way": name,
        "send_s_per_gb": send_s,
        "receive_s_per_gb": receive_s,
        "all_reduce_s_per_gb": 2 * (send_s + receive_s),
        "arrived": min(each.arrived for each in samples),
        "samples": [[each.send_s, each.receive_s] for each in samples],
    }


def draw(rows: list[dict[str, Any]], file: Path) -> None:
    """A bar for each way, the sender's part below the receiver's."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6.4, 3.2), layout="constrained")
    names = [row["way"] for row in rows]
    below = [0.0] * len(rows)
    for label, key, colour in (("send", "send_s_per_gb", "#0b7a75"), ("receive", "receive_s_per_gb", "#b5651d")):
        values = [row[key] for row in rows]
        axes.bar(names, values, bottom=below, label=label, color=colour, width=0.6)
        below = [low + value for low, value in zip(below, values, strict=True)]
    axes.set_ylabel("system time, s for each GB one way")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(file, dpi=110)


def conclude(console: Console, results: dict[str, Any], file: Path) -> bool:
    """Prints the table and draws it."""
    lines = [
        [
            row["way"],
            *(f"{row[key]:.2f}" for key in ("send_s_per_gb", "receive_s_per_gb", "all_reduce_s_per_gb")),
            f"{100 * row['arrived']:.1f}%",
        ]
        for row in results["rows"]
    ]
    heads = ("way", "send s/GB", "receive s/GB", "all-reduce of 2 ranks s/GB", "arrived")
    console.print(frame.table("system time of the kernel, MTU 1500", heads, lines))
    draw(results["rows"], file)
    console.print(f"drawn: {file}", highlight=False)
    return True


@click.command(help=as_written(__doc__), context_settings={"show_default": True})
@click.option("--size", default=1000.0, type=click.FloatRange(1), help="MB (10^6 bytes) of each sample.")
@click.option("--samples", default=5, type=click.IntRange(1), help="Of each way.")
@frame.common_options("16 MB, one sample.")
def main(*, size: float, samples: int, quick: bool, json_file: Path | None, out: Path) -> None:
    """Reads the options and measures in the lab's sandbox."""
    if quick:
        size, samples = 16.0, 1
    chosen = {"size_mb": size, "samples": samples, "mtu": 1500}
    frame.run(
        "kernel-cost",
        frame.Settings(quick, json_file, out),
        chosen,
        lambda tell: measure(int(size * 1e6), samples, tell),
        lambda console, results: conclude(console, results, out / "kernel-cost.png"),
    )


if __name__ == "__main__":
    main()
