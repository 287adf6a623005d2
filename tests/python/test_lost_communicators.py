"""Communicators that a program loses without closing them: nothing of them stays, so that the next one forms at their address."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from free_ports import free_port

HEAD = """
import sys, threading
from datetime import timedelta
import gradwire
from gradwire import _joining
from gradwire.errors import ConfigError, RendezvousError

def form():
    config = gradwire.Config(on_peer_loss="continue")
    return gradwire.Communicator(sys.argv[1], rank=0, world_size=1, config=config, timeout=timedelta(seconds=60))
"""

DROPPED = """
def cell():
    communicator = form()
    raise ValueError

try:
    cell()
except ValueError:
    pass
form().close()
print("formed")
"""

# Only a collection finds it, and none has been.
IN_A_CYCLE = """
import gc
gc.disable()
communicator = form()
cycle = [communicator]
communicator.cycle = cycle
del communicator, cycle
form().close()
print("formed")
"""

# What raises after the ranks have met is kept, and with it the frame that has the communicator.
FAILS = """
watch = _joining.watch
def interrupted(*arguments):
    raise KeyboardInterrupt
_joining.watch = interrupted
try:
    form()
except KeyboardInterrupt as error:
    kept = error
_joining.watch = watch
form().close()
print("formed")
"""

IS_OPEN = """
communicator = form()
try:
    form()
except ConfigError as error:
    print(error.fields["field"])
communicator.close()
again = form()
communicator.close()
try:
    form()
except ConfigError as error:
    print(error.fields["field"])
"""

CONNECTED = """
communicator = form()
watch = communicator._boundary._watch
while watch._store is None:
    communicator.sync()
connection = watch._store._socket
del watch, communicator
print(connection.fileno())
"""

# The thread that looks for the board, which is gone.
LOOKS = """
communicator = form()
come_to = _joining._come_to
def gone(*_):
    raise RendezvousError("the board is gone")
_joining._come_to = gone
communicator.sync()
(thread,) = [thread for thread in threading.enumerate() if thread.name == "gradwire-reopen"]
del communicator
thread.join()
_joining._come_to = come_to
form().close()
print("formed")
"""

PROGRAMS = {
    "dropped": (DROPPED, ["formed"]),
    "in a cycle": (IN_A_CYCLE, ["formed"]),
    "fails after the meeting": (FAILS, ["formed"]),
    "its connection": (CONNECTED, ["-1"]),
    "its thread": (LOOKS, ["formed"]),
}


def said_by(program: str) -> list[str]:
    command = [sys.executable, "-W", "error", "-c", HEAD + program, f"127.0.0.1:{free_port()}"]
    environment = {**os.environ, "GRADWIRE_PORT": "0"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=300, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.splitlines()


@pytest.mark.parametrize("name", PROGRAMS)
def test_nothing_of_a_communicator_that_is_lost_stays(name: str) -> None:
    program, expected = PROGRAMS[name]
    assert said_by(program) == expected


def test_the_address_of_one_that_is_open_is_its_own_also_when_an_earlier_one_is_closed_again() -> None:
    assert said_by(IS_OPEN) == ["rendezvous", "rendezvous"]
