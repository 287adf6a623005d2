"""For all tests."""

import gc
import logging
import os
import select
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import suppress
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
    "e2e/test_served.py",
    "switch/test_switch_in_kernel.py",
    "e2e/test_going_on.py",
    "e2e/test_joining_again.py",
    "soak/test_soak.py",
    "bench/test_overhead.py",
    "simulation/test_study.py",
    "lab/test_lab_command.py",
    "lab/test_network.py",
    "doctor/test_doctor_in_lab.py",
    "e2e/test_pitfalls.py",
    "e2e/test_clusters.py",
    "e2e/test_unprepared_hosts.py",
    "e2e/test_rails.py",
    "python/test_types.py",
)
HERE = Path(__file__).parent

if "PYTEST_XDIST_WORKER" in os.environ:
    gc.disable()  # until all tests are found: collections meanwhile find nothing

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell starts what runs in the background so, and children inherit it: those that a test interrupts would not hear it.
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files first; the order within a file is its own."""
    places = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: places.get(str(item.path.relative_to(HERE)), len(LONGEST)))


def pytest_collection_finish() -> None:
    """What is there now stays: later collections need not look at it."""
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_exception_interact(call: pytest.CallInfo[object]) -> None:
    """Of a test that the time limit ended, the processes that it waited for are ended too, and Python's say where they were."""
    if call.excinfo is not None and str(call.excinfo.value).startswith("Timeout"):
        for process in reversed(_descendants(os.getpid())):  # the end of one may be that of all below
            with suppress(ProcessLookupError):
                end = os.pidfd_open(process)
                os.kill(process, signal.SIGABRT)  # faulthandler prints the stacks
                select.select([end], [], [], 2.0)
                os.close(end)


def _descendants(process: int) -> list[int]:
    """The processes that it started, each before those that it started in its turn."""
    found: list[int] = []
    with suppress(OSError):  # it has ended
        for thread in Path(f"/proc/{process}/task").iterdir():
            for child in map(int, (thread / "children").read_text().split()):
                found += [child, *_descendants(child)]
    return found


@pytest.fixture(autouse=True)
def own_log_level() -> Iterator[None]:
    """A group whose configuration has a `log_level` sets it for the whole process: other tests keep theirs."""
    logger = logging.getLogger("gradwire")
    level, handlers = logger.level, list(logger.handlers)
    yield
    logger.setLevel(level)
    logger.handlers[:] = handlers


@pytest.fixture(scope="session")
def namespaces() -> None:
    """Skips what needs network namespaces where there are none."""
    from gradwire.lab import NamespacesUnavailable, sandbox

    try:
        sandbox.run(lambda: 0)
    except NamespacesUnavailable as error:
        pytest.skip(str(error))


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
