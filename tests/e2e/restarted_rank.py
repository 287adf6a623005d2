"""One rank of a group under `on_peer_loss="raise"`, of which a rank is killed and at once started again under its address; see
test_joining_again.py. Without torch, whose import would cost most of the time.

All times are those of the machine's monotonic clock, which the processes share.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import gradwire
import gradwire._runtime
import numpy as np
from gradwire.errors import GradwireError
from lives import wait_for_the_last, wait_for_the_next

FOLDER = Path(os.environ["GRADWIRE_TEST_FOLDER"])
RANK = int(os.environ["RANK"])
LIFE = int(os.environ["GRADWIRE_TEST_LIFE"])
VICTIM, LOST_AT = 2, 5
STEPS_MAX = 100_000
# A step's computation.
PAUSE_S = 0.02
POLL_S = 0.01


def say(event: str, **facts: Any) -> None:
    with (FOLDER / f"events-{RANK}").open("a") as file:
        file.write(json.dumps({"event": event, "life": LIFE, "at": time.monotonic(), **facts}, default=str) + "\n")


def live_again() -> None:
    """At the address of the earlier life, as a rank does whose launcher starts it again alone."""
    gradwire._runtime.runtime()
    say("listens", port=gradwire.stats()["port"])
    while not (FOLDER / "told").exists():
        time.sleep(POLL_S)


def train() -> None:
    with gradwire.Communicator(timeout=timedelta(seconds=60)) as comm:
        for step in range(STEPS_MAX):
            if (RANK, step) == (VICTIM, LOST_AT):
                wait_for_the_next()
                say("lost", port=gradwire.stats()["port"])
                os.kill(os.getpid(), signal.SIGKILL)
            comm.all_reduce(np.ones(1000, "float32"))
            time.sleep(PAUSE_S)


def main() -> None:
    if LIFE:
        wait_for_the_last()
        live_again()
        return
    try:
        train()
    except GradwireError as error:
        say("failed", error=type(error).__name__, fields=error.fields, text=str(error))


if __name__ == "__main__":
    main()
    sys.exit(0)
