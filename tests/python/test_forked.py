"""A forked child, as a worker that loads data is one, leaves the ports of its rank to whoever comes after that."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from contextlib import closing

RANK = """
import os, signal
from gradwire import _runtime

engine = _runtime.runtime().engine
reader, writer = os.pipe()
child = os.fork()
if child == 0:
    os.write(writer, b"x")
    signal.pause()
os.read(reader, 1)
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
