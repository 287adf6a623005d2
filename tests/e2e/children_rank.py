"""Rank 0 of `test_children.py`, whose rank 1 is a child of multiprocessing that ends without closing its communicator."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import sys
import threading
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import util

import gradwire
import numpy as np
from gradwire.errors import PeerLeftError

CALLS = 300
TIMEOUT = timedelta(seconds=60)
# Lives as long as its process, as a default group of torch does.
kept: list[gradwire.Communicator] = []


def call(communicator: gradwire.Communicator, calls: int) -> None:
    for _ in range(calls):
        [result] = communicator.all_reduce(np.ones(1)).result
        assert result == 2.0


def join(address: str) -> gradwire.Communicator:
    kept.append(gradwire.Communicator(address, rank=1, world_size=2, timeout=TIMEOUT))
    return kept[0]


def returns(address: str) -> None:
    """Its last call is that of its last line."""
    call(join(address), CALLS)


def leaves_a_thread(address: str) -> None:
    """A thread calls that begins when the process has nothing else to do any more."""
    communicator = join(address)
    ending = threading.Event()
    util.Finalize(None, ending.set, exitpriority=0)

    def late() -> None:
        assert ending.wait(60.0)
        call(communicator, CALLS)
        print("the thread has ended", flush=True)

    threading.Thread(target=late).start()


def calls_at_its_end(address: str) -> None:
    communicator = join(address)
    atexit.register(call, communicator, CALLS)


def fails_beside_a_thread(address: str) -> None:
    """What ended it is told before its threads have ended: this one waits for rank 0, which hears of the failure first."""
    communicator = join(address)
    threading.Thread(target=call, args=(communicator, CALLS)).start()
    raise KeyError("of the child")


def main(method: str, target: Callable[[str], None]) -> None:
    """Prints what this rank's next call ends with, after all that the child called."""
    address = os.environ["GRADWIRE_RENDEZVOUS"]
    child = multiprocessing.get_context(method).Process(target=target, args=(address,))
    child.start()
    with gradwire.Communicator(address, rank=0, world_size=2, timeout=TIMEOUT) as communicator:
        call(communicator, CALLS)
        try:
            communicator.barrier()
        except PeerLeftError:
            print("left")
    child.join()
    print(child.exitcode)


if __name__ == "__main__":
    main(sys.argv[1], globals()[sys.argv[2]])
