"""For ranks whose next life is there before anybody knows that they are lost: it is started first, as interpreters take their time."""

from __future__ import annotations

import contextlib
import os
import select
import time
from pathlib import Path

# Name of a file that the next life writes once it waits, and the process of the life whose end it waits for.
NEXT_IS_THERE, LAST_LIFE = "GRADWIRE_TEST_NEXT_IS_THERE", "GRADWIRE_TEST_LAST_LIFE"
_WAIT_S, _PAUSE_S = 120.0, 0.02


def wait_for_the_next() -> None:
    """Where one has been started."""
    if NEXT_IS_THERE in os.environ:
        end = time.monotonic() + _WAIT_S
        while not Path(os.environ[NEXT_IS_THERE]).exists() and time.monotonic() < end:
            time.sleep(_PAUSE_S)


def wait_for_the_last() -> None:
    """Until it has ended, where there was one."""
    if LAST_LIFE in os.environ:
        with contextlib.suppress(ProcessLookupError):
            ended = os.pidfd_open(int(os.environ[LAST_LIFE]))
            Path(os.environ[NEXT_IS_THERE]).write_text("")
            select.select([ended], [], [])
            os.close(ended)
