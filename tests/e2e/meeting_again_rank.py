"""One rank of a communicator whose board stays (`on_peer_loss="continue"`); see test_meeting_again.py. Without torch.

The checks run in order. In the middle the last rank is killed, and its next life goes on with the rest.
"""

from __future__ import annotations

import os
import signal
import sys
from datetime import timedelta
from typing import Any

import gradwire
import gradwire._meeting
import numpy as np
from gradwire._boundary import Crossing
from gradwire.errors import ConfigError, InvalidRequestError

RANK, WORLD_SIZE = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
VICTIM = WORLD_SIZE - 1
IS_NEXT_LIFE = os.environ.get("GRADWIRE_TEST_LIFE") == "1"
TIMEOUT = timedelta(seconds=60)
# So few that the splits below, or the communicators, do not fit unless the board forgets them.
KEYS_PER_RANK = 3
SPLITS = 4
COMMUNICATORS = 6


def gathered(communicator: gradwire.Communicator | None) -> list[int]:
    assert communicator is not None
    rows = communicator.all_gather(np.array([RANK], np.int64)).result
    assert rows is not None
    return rows.ravel().tolist()


def split_after_a_look(whole: gradwire.Communicator) -> None:
    """Rank 0 has looked at the board, and meets the others there again."""
    assert not whole.sync(np.zeros(3))
    for number in range(SPLITS):
        with whole.split(number, key=-RANK) as part:
            assert gathered(part) == list(range(WORLD_SIZE))[::-1]
        assert not whole.sync(np.zeros(3))
    print("splits")


def another_at_the_same_address(whole: gradwire.Communicator) -> None:
    try:
        gradwire.Communicator(timeout=TIMEOUT)
    except ConfigError as error:
        print("refused:", error)
    whole.barrier()
    assert gathered(whole) == list(range(WORLD_SIZE)), "the first one goes on"


def a_source_that_cannot_pack(whole: gradwire.Communicator) -> None:
    """As if rank 0 had joined."""

    def pack() -> Any:
        raise ValueError("a state that nobody can send")

    assert whole._boundary is not None
    try:
        whole._boundary.share(Crossing(0, (1, 2)), pack)
    except InvalidRequestError as error:
        print("not packed:", error)
    assert gathered(whole) == list(range(WORLD_SIZE)), "the group goes on"


def wait_for_the_next_life(whole: gradwire.Communicator) -> None:
    if RANK == VICTIM:
        sys.stdout.flush()  # a killed process says nothing more
        os.kill(os.getpid(), signal.SIGKILL)
    while not whole.sync(np.zeros(3)):
        pass


def split_with_the_next_life(whole: gradwire.Communicator) -> None:
    with whole.split(0, key=-RANK) as part:
        assert gathered(part) == list(range(WORLD_SIZE))[::-1]
    print("split again")


def main() -> None:
    gradwire._meeting.KEYS_PER_RANK = KEYS_PER_RANK
    if not IS_NEXT_LIFE:
        gradwire.Communicator(timeout=TIMEOUT).close()
    with gradwire.Communicator(timeout=TIMEOUT) as whole:
        if IS_NEXT_LIFE:
            assert whole.sync(np.zeros(3))
        else:
            split_after_a_look(whole)
            another_at_the_same_address(whole)
            a_source_that_cannot_pack(whole)
            wait_for_the_next_life(whole)
        split_with_the_next_life(whole)
    with gradwire.Communicator(timeout=TIMEOUT) as later:
        assert gathered(later) == list(range(WORLD_SIZE))
        print("another one")
    for _ in range(COMMUNICATORS):
        with gradwire.Communicator(timeout=TIMEOUT) as later:
            assert gathered(later) == list(range(WORLD_SIZE))
    print("many")


if __name__ == "__main__":
    main()
    sys.exit(0)
