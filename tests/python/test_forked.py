"""A forked child, as a worker that loads data is one: it leaves the ports of its rank to whoever comes after that, and waits for none of
its calls.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from contextlib import closing, suppress
from pathlib import Path

import pytest
from free_ports import free_port
from gradwire._meeting import MeetingStore
from gradwire.errors import RendezvousError

# Of a rank's program: a worker that stays, as soon as it is there.
FORK = """
reader, writer = os.pipe()
child = os.fork()
if child == 0:
    os.write(writer, b"x")
    signal.pause()
os.read(reader, 1)
"""

RANK = f"""
import os, signal
from gradwire import _runtime

engine = _runtime.runtime().engine
{FORK}
engine.stats()
print(child, *engine.thread_ports, *engine.features()["source_ports"], flush=True)
signal.pause()
"""


def test_a_child_that_outlives_its_rank_does_not_hold_the_ports() -> None:
    environment = {**os.environ, "GRADWIRE_PORT": "0", "GRADWIRE_PATHS": "2", "GRADWIRE_NETWORK_THREADS": "2"}
    rank = subprocess.Popen([sys.executable, "-c", RANK], stdout=subprocess.PIPE, text=True, env=environment)
    assert rank.stdout is not None
    said = [int(number) for number in rank.stdout.readline().split()]
    rank.kill()
    rank.wait()
    rank.stdout.close()
    assert said, "the rank did not start"
    child, ports = said[0], set(said[1:])
    try:
        for port in ports:
            with closing(socket.socket(socket.AF_INET, socket.SOCK_DGRAM)) as successor:
                successor.bind(("", port))
    finally:
        os.kill(child, signal.SIGKILL)


# Serves what others of a job and its observers connect to, and forks once somebody has.
SERVERS = f"""
import os, signal, sys
from gradwire._meeting import MeetingServer
from gradwire.observe.export import PrometheusEndpoint
from gradwire.observe.status import StatusServer

server = MeetingServer("127.0.0.1", 0, 2)
port = server._listeners[0].getsockname()[1]
metrics, status = PrometheusEndpoint("127.0.0.1", 0, dict), StatusServer("job", 0, dict())
print(port, metrics.port, status.path, flush=True)
sys.stdin.readline()
{FORK}
print(child, flush=True)
signal.pause()
"""


def test_a_child_that_outlives_its_rank_serves_nobody_in_its_name(short_folder: Path) -> None:
    pytest.importorskip("prometheus_client")
    environment = {**os.environ, "XDG_RUNTIME_DIR": str(short_folder)}
    command, pipe = [sys.executable, "-c", SERVERS], subprocess.PIPE
    child = 0
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, env=environment) as rank:
        assert rank.stdin is not None
        assert rank.stdout is not None
        try:
            board, metrics, status = rank.stdout.readline().split()
            store = MeetingStore("127.0.0.1", int(board), 1, 30.0)
            rank.stdin.write("\n")
            rank.stdin.flush()
            child = int(rank.stdout.readline())
            assert not store.check(["x"]), "the parent serves on"
            rank.kill()
            rank.wait()
            with closing(store), pytest.raises(RendezvousError):
                store.check(["x"])
            for port in (board, metrics):
                with closing(socket.socket()) as successor:
                    successor.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                    successor.bind(("127.0.0.1", int(port)))
                    successor.listen()
            with closing(socket.socket(socket.AF_UNIX)) as observer, pytest.raises(ConnectionRefusedError):
                observer.connect(status)
        finally:
            rank.kill()
            if child:
                os.kill(child, signal.SIGKILL)


# Of a rank's program: a child that asks for the end of a call of its parent, which then goes on.
WAITS = """
child = os.fork()
if child == 0:
    signal.alarm(60)  # ends one that waits
    for name, ask in asks.items():
        try:
            ask()
        except ForkedError as error:
            print(name, error.owner_pid == os.getppid(), error.child_pid == os.getpid(), flush=True)
    os._exit(0)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""

# In flight when it forks.
CALLS = f"""
import os, signal
from gradwire.errors import ForkedError
from pair import pair, receive, send

engines, groups = pair()
op = receive(groups[0])
asks = {{"wait": op.wait, "notify": op.notify}}
{WAITS}
sent = send(groups[1])
print(op.wait(60.0), sent.wait(60.0), op.error(), flush=True)
"""

# Not submitted yet: its memory is still being copied.
COPIED = f"""
import os, signal, threading
from gradwire._outbox import Outbox
from gradwire.errors import ForkedError
from pair import pair, receive, send

engines, groups = pair()
outbox, is_there = Outbox(), threading.Event()
op = outbox.put(0, is_there.wait, lambda failed: receive(groups[0]), timeout_s=600.0, overdue=TimeoutError)
asks = {{"wait": op.wait, "notify": lambda: op.when_known(print)}}
{WAITS}
is_there.set()
sent = send(groups[1])
print(op.wait(60.0), sent.wait(60.0), op.error(), flush=True)
"""


# Has ended, and a thread of the parent's delivers its result while it forks. The child may not wait for that one.
DELIVERED = f"""
import os, signal, threading
from types import SimpleNamespace
from gradwire._outbox import LaterOp
from gradwire.errors import ForkedError
from gradwire.torch._deliveries import Deliveries
from gradwire.torch._work import GradwireWork

begun, may_end, deliveries = threading.Event(), threading.Event(), Deliveries(os.getpid())

def deliver():
    begun.set()
    may_end.wait()

def start(last):
    op = LaterOp()
    work = GradwireWork("all_gather", [op], [], SimpleNamespace(last_error=None, is_current_thread=lambda: False), last=last)
    deliveries.admit(work.ending, is_waited_for=False)
    work.deliveries = deliveries
    return op, work

(one, first), (two, second) = start(deliver), start(None)
one.resolve(None)
two.resolve(None)
thread = threading.Thread(target=first.wait)
thread.start()
begun.wait()
asks = {{"wait": second.wait, "notify": first.wait}}
{WAITS}
may_end.set()
thread.join()
print(second.wait(), first.wait(), first.exception(), flush=True)
"""


@pytest.mark.parametrize("program", [CALLS, COPIED, DELIVERED], ids=["in flight", "being copied", "being delivered"])
def test_a_child_that_waits_for_a_call_of_its_parent_is_refused_and_the_parent_goes_on(program: str) -> None:
    command = [sys.executable, "-W", "ignore", "-c", program]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parent, check=True)
    assert done.stdout.splitlines() == ["wait True True", "notify True True", "0", "True True None"]


# Forks while it delivers, and so does another thread, of which a new one of the child's may have the number.
DELIVERS = """
import os, threading
from types import SimpleNamespace
from gradwire.torch import _ending

begun, may_end, children = threading.Event(), threading.Event(), []

def hold():
    begun.set()
    may_end.wait()

def ending(last):
    return _ending.Ending([], SimpleNamespace(last_error=None), last=last)

thread = threading.Thread(target=ending(hold).settle)
thread.start()
begun.wait()
error = ending(lambda: children.append(os.fork())).settle()
if children != [0]:
    os.waitpid(children[0], 0)
print(error, len(_ending._settling), flush=True)
if children == [0]:
    os._exit(0)
may_end.set()
thread.join()
print(len(_ending._settling), flush=True)
"""


def test_a_child_that_is_forked_in_a_delivery_ends_it_and_knows_of_no_other_threads() -> None:
    command = [sys.executable, "-W", "ignore", "-c", DELIVERS]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    assert done.stdout.splitlines() == ["None 0", "None 1", "0"]


# Rank 0 of a job, whose board stays. Its child is rank 0 of the next job at the same address, when it is told to; it has a copy of the
# parent's communicator, which it closes, and that of its own is open still.
NEXT_JOB = """
import os, signal, sys
from datetime import timedelta
import gradwire
from gradwire.errors import GradwireError

config = gradwire.Config(on_peer_loss="continue")
def form(**more):
    return gradwire.Communicator(sys.argv[1], rank=0, world_size=1, timeout=timedelta(seconds=10), **more)

of_the_parent = form(config=config)
child = os.fork()
if child:
    print(child, flush=True)
    signal.pause()
signal.alarm(120)  # ends one that waits
sys.stdin.readline()
said = []
try:
    own = form()
    said.append("formed")
    of_the_parent.close()
    form()
except GradwireError as error:
    said.append(type(error).__name__)
print(*said, flush=True)
os._exit(0)
"""


@pytest.mark.parametrize(("parent_lives", "expected"), [(True, "PortInUseError"), (False, "formed ConfigError")])
def test_a_child_meets_nobody_on_the_board_of_its_parent(parent_lives: bool, expected: str) -> None:
    environment = {**os.environ, "GRADWIRE_PORT": "0"}
    command = [sys.executable, "-W", "ignore", "-c", NEXT_JOB, f"127.0.0.1:{free_port()}"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment) as parent:
        assert parent.stdin is not None
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        try:
            if not parent_lives:
                parent.kill()
                parent.wait()
            parent.stdin.write("\n")
            parent.stdin.flush()
            said = parent.stdout.readline().strip()
        finally:
            parent.kill()
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
    assert said == expected
