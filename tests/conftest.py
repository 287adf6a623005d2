"""For all tests."""

import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

# Files are given out in this order, each to the process that is free: the last one to begin should not be among the longest.
LONGEST = (
    "bench/test_bench_runs.py",
    "e2e/test_restart.py",
    "e2e/test_fault_matrix.py",
    "torch_suite/test_torch_suite.py",
    "demo/test_command.py",
    "bench/test_transport.py",
    "bench/test_topology_error.py",
    "bench/test_loss_tolerance.py",
    "e2e/test_sharded.py",
    "e2e/test_going_on.py",
    "e2e/test_joining_again.py",
    "soak/test_soak.py",
    "bench/test_overhead.py",
    "e2e/test_clusters.py",
    "e2e/test_unprepared_hosts.py",
    "e2e/test_rails.py",
)
HERE = Path(__file__).parent

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell starts what runs in the background so, and children inherit it: those that a test interrupts would not hear it.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files first; the order within a file is its own."""
    places = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(str(item.path.relative_to(HERE)), len(LONGEST)))


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
