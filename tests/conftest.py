"""For all tests."""

import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell starts what runs in the background so, and children inherit it: those that a test interrupts would not hear it.
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def short_folder() -> Iterator[Path]:
    """For sockets, whose names must not be longer than 107 bytes."""
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


@pytest.fixture
def workers_of() -> Callable[[Path], list[str]]:
    """Tells which processes are there of a command that writes into a folder."""

    def found_in(out: Path) -> list[str]:
        """Processes that have a log in this folder open."""
        found = []
        for process in Path("/proc").glob("[0-9]*"):
            try:
                if str(out) in os.readlink(process / "fd" / "2"):
                    found.append(process.name)
            except OSError:
                continue  # ended meanwhile, or somebody else's
        return found

    return found_in
