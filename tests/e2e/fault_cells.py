"""Runs cells of the fault matrix: one fault, on one of three ranks, in one phase of a group's life.

All cells run in two lab networks, five at a time in each: a cell has three hosts of its own, and mostly waits. Ranks are forked from
a process that has imported what they need. Times are those of the machine's monotonic clock, which hosts of the lab share.

    python fault_cells.py FOLDER CELLS    # as `run_cells` does: a process without the threads of the tests, which may be forked
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import faulthandler
import json
import os
import queue
import runpy
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import gradwire._joining  # noqa: F401  what ranks need, before they are forked
import numpy as np  # noqa: F401
import pytest
from gradwire import Config
from gradwire._meeting import LINGER_S as LINGER_ANSWERING_S
from gradwire._meeting import TELL_S
from gradwire.lab import NamespacesUnavailable, ToolMissing, iproute, sandbox
from gradwire.lab.network import Layout, Network
from gradwire.lab.switches import Port
from launch import _clean_environment

HERE = Path(__file__).parent
SCRIPT = HERE / "fault_rank.py"
WORLD_SIZE, VICTIM, NETWORKS, LANES = 3, 1, 2, 5
# Long enough for a healthy rank that a busy machine does not let run.
PEER_TIMEOUT_S = 5.0
# Of a rank that was watched for a peer timeout and was punctual.
SILENCE_MIN_S = 3.0
# For hosts that share a busy machine's cores, and less than another peer timeout: a verdict that took two would show.
MARGIN_S = 4.5
LIMIT_S = PEER_TIMEOUT_S + MARGIN_S
# For so long who has lost a majority waits for it (docs/membership.md): half a peer timeout for rank 0's attempt, whose turn is the first,
# and three from its own.
PATIENCE_S = 3.5 * PEER_TIMEOUT_S
# Of a group that is formed: where a rank never comes, where packets are lost, and else; then also of each call.
BOOTSTRAP_S, PATIENT_S, CALL_S = 5.0, 40.0, 60.0
# Where packets are lost the last rank may have read all records just before that time is over; from then on there is this for the answers.
CONNECT_S = Config().connect_timeout_s
# For so long rank 0 answers the others after it has given up.
LINGER_S = LINGER_ANSWERING_S + TELL_S
LEAVE_S = 2.0
# For so long a rank that stops itself until it suffers a fault may wait for that: where it is not to be lost, others must not miss it.
HELD_MAX_S = 2.0
# Of a cell in which a busy machine has let the moment pass that the cell is about.
TRIES = 3
# In all of it nothing may take longer than this; what does is ended and has failed.
CELL_S = 90.0

FAULTS = (
    "kill", "stop", "cut", "mute", "deaf", "loss", "corrupt", "duplicate", "clock step", "disk full", "descriptors",
)  # fmt: skip
# A rank cannot do these to itself.
FROM_OUTSIDE = ("cut", "mute", "deaf", "loss")
# With these no group is formed, when they come before it is.
NO_GROUP = ("kill", "stop", "cut", "mute", "deaf", "descriptors")
PHASES = ("bootstrap", "reduce", "gather", "idle", "shutdown")
# Done to all ranks, from the first datagram to the last: one run has all phases.
CHAOS = {"corrupt": "corrupt=30%,seed=3", "duplicate": "duplicate=50%,seed=4"}


@dataclass(frozen=True)
class Cell:
    fault: str
    phase: str
    # Of the configuration.
    on_peer_loss: str = "raise"

    @property
    def run(self) -> Cell:
        """The cell whose run shows this one."""
        return Cell(self.fault, "all", self.on_peer_loss) if self.fault in CHAOS else self

    @property
    def key(self) -> str:
        goes_on = "-going-on" if self.on_peer_loss == "continue" else ""
        return f"{self.fault.replace(' ', '_')}-{self.phase}{goes_on}"


@dataclass(frozen=True)
class Seen:
    """What became of a cell.

    Attributes:
        fault_at: when the fault was done; None: it never came to that.
        continued_at: when a stopped rank was let run again, which is when all others have ended; None: none was stopped.
        events: of each rank, in order; see fault_rank.py.
        exits: status of each rank; None: it had to be ended.
        outputs: what each rank printed.
    """

    fault_at: float | None
    continued_at: float | None
    events: list[list[dict[str, Any]]]
    exits: list[int | None]
    outputs: list[str]

    def describe(self) -> str:
        lines = [f"fault at {self.fault_at}"]
        for rank, events in enumerate(self.events):
            lines += [f"--- rank {rank}, exit {self.exits[rank]}", *map(str, events), self.outputs[rank]]
        return "\n".join(lines)


def run_cells(cells: Sequence[Cell], folder: Path) -> dict[Cell, Seen]:
    """Runs them. Skips the calling test where the machine has no namespaces or lacks a tool."""
    networks = []
    for number in range(NETWORKS):
        asked = json.dumps([dataclasses.asdict(cell) for cell in cells[number::NETWORKS]])
        networks.append(subprocess.Popen([sys.executable, __file__, folder, asked]))
    assert [network.wait() for network in networks] == [0] * NETWORKS, "the lab failed, see the error above"
    if (folder / "skip").exists():
        pytest.skip((folder / "skip").read_text())
    return {cell: Seen(**json.loads((folder / cell.key / "seen").read_text())) for cell in cells}


def main(folder: Path, asked: str) -> int:
    """All of it, in a process of its own."""
    cells = [Cell(**cell) for cell in json.loads(asked)]
    shim = folder / f"step_clock-{os.getpid()}.so"
    if shutil.which("cc"):
        subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", shim, HERE / "step_clock.c"], check=True)

    def in_lab() -> int:
        try:
            with Network(Layout(hosts=WORLD_SIZE * LANES, switch="nft", port=Port(rate_mbit=50.0))) as network:
                _run_all(network, cells, folder, shim)
        except ToolMissing as error:
            (folder / "skip").write_text(str(error))
        return 0

    try:
        return sandbox.run(in_lab)
    except NamespacesUnavailable as error:
        (folder / "skip").write_text(str(error))
        return 0


def _run_all(network: Network, cells: Sequence[Cell], folder: Path, shim: Path) -> None:
    lanes: queue.Queue[int] = queue.Queue()
    for lane in range(LANES):
        lanes.put(lane)
    lock = threading.Lock()

    def run(cell: Cell) -> None:
        lane = lanes.get()
        try:
            for number in range(TRIES):
                found = _Run(network, lock, lane, cell, folder / cell.key, shim)
                found.run()
                if number + 1 == TRIES or not found.has_missed_its_moment:
                    break
                (folder / cell.key).rename(folder / f"{cell.key}-missed-{number}")
        finally:
            lanes.put(lane)

    with ThreadPoolExecutor(LANES) as pool:
        list(pool.map(run, cells))


class _Rank(Protocol):
    """A process, as `subprocess.Popen` has it."""

    pid: int

    def poll(self) -> int | None: ...

    def send_signal(self, sig: int) -> None: ...

    def kill(self) -> None: ...

    def wait(self) -> int: ...


class _Forked:
    """A copy of this process that runs a script as a program would."""

    def __init__(self, script: Path, environment: dict[str, str], output: Path) -> None:
        self._status: int | None = None
        self.pid = os.fork()
        if self.pid == 0:
            status = 1
            try:
                status = _be_program(script, environment, output)
            finally:
                os._exit(status)

    def poll(self) -> int | None:
        return self._take(os.WNOHANG)

    def wait(self) -> int:
        status = self._take(0)
        assert status is not None, "it was waited for"
        return status

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def send_signal(self, sig: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, sig)

    def _take(self, options: int) -> int | None:
        if self._status is None:
            pid, status = os.waitpid(self.pid, options)
            self._status = os.waitstatus_to_exitcode(status) if pid else None
        return self._status


def _be_program(script: Path, environment: dict[str, str], output: Path) -> int:
    """Runs it; its exit status."""
    atexit._clear()  # what the process that was copied wanted to do at its end
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    os.environ.clear()
    os.environ.update(environment)
    file = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for number in (1, 2):
        os.dup2(file, number)
    os.close(file)
    sys.stdout, sys.stderr = (os.fdopen(number, "w", buffering=1) for number in (1, 2))
    faulthandler.enable(2)
    status = 0
    try:
        runpy.run_path(str(script), run_name="__main__")
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        status = 1
    atexit._run_exitfuncs()
    return status


def _is_stopped(pid: int) -> bool:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


class _Run:
    """One cell in one lane of the network, which is not for several threads: `lock`."""

    def __init__(self, network: Network, lock: threading.Lock, lane: int, cell: Cell, folder: Path, shim: Path) -> None:
        self.network, self.lock, self.cell, self.folder, self.shim = network, lock, cell, folder, shim
        self.hosts = [WORLD_SIZE * lane + rank for rank in range(WORLD_SIZE)]
        self.held_s = 0.0
        folder.mkdir()

    def run(self) -> None:
        end = time.monotonic() + CELL_S
        ranks = [self._start(rank) for rank in range(WORLD_SIZE)]
        survivors = [rank for place, rank in enumerate(ranks) if place != VICTIM]
        while not (self.folder / "ready").exists() and self._any_runs(survivors, end):
            time.sleep(0.005)
        with self._holding(ranks[VICTIM], end):
            self._inflict()
        self._wait_until_ended(survivors, end)
        if self.cell.fault == "stop":
            (self.folder / "continued").write_text(str(time.monotonic()))
            ranks[VICTIM].send_signal(signal.SIGCONT)
        self._wait_until_ended(ranks, end)
        exits = [rank.poll() for rank in ranks]
        for rank in ranks:
            rank.kill()
            rank.wait()
        self._heal()
        self._write(exits)

    @property
    def has_missed_its_moment(self) -> bool:
        """Whether another try shows more."""
        return (self.folder / "missed").exists() or self.held_s > HELD_MAX_S

    @staticmethod
    def _any_runs(ranks: Sequence[_Rank], end: float) -> bool:
        return time.monotonic() < end and any(rank.poll() is None for rank in ranks)

    @staticmethod
    def _wait_until_ended(ranks: Sequence[_Rank], end: float) -> None:
        """Until all have, or the time is up."""
        for rank in ranks:
            if rank.poll() is not None:
                continue
            ended = os.pidfd_open(rank.pid)  # readable when it is over
            try:
                ends = select.poll()
                ends.register(ended, select.POLLIN)
                ends.poll(max(0.0, end - time.monotonic()) * 1e3)
            finally:
                os.close(ended)

    def _start(self, rank: int) -> _Rank:
        cell = self.cell
        timeout_s = CALL_S
        if cell.phase == "bootstrap" and cell.fault in (*NO_GROUP, "loss"):
            timeout_s = PATIENT_S if cell.fault == "loss" else BOOTSTRAP_S
        variables = {
            "RANK": str(rank),
            "WORLD_SIZE": str(WORLD_SIZE),
            "GRADWIRE_RENDEZVOUS": f"{Network.address(self.hosts[0])}:29400",
            "GRADWIRE_PEER_TIMEOUT_S": str(PEER_TIMEOUT_S),
            "GRADWIRE_ON_PEER_LOSS": cell.on_peer_loss,
            "GRADWIRE_TEST_FOLDER": str(self.folder),
            "GRADWIRE_TEST_FAULT": cell.fault,
            "GRADWIRE_TEST_PHASE": cell.phase,
            "GRADWIRE_TEST_LIMIT_S": str(LIMIT_S),
            "GRADWIRE_TEST_TIMEOUT_S": str(timeout_s),
            "OMP_NUM_THREADS": "1",
        }
        if cell.fault in CHAOS:
            variables["GRADWIRE_CHAOS"] = CHAOS[cell.fault]
        environment = {**_clean_environment(), **variables}
        output = self.folder / f"output-{rank}"
        with self.lock:
            if cell.fault != "clock step":
                with self.network.on_host(self.hosts[rank]):  # a child inherits the network namespace of this thread
                    return _Forked(SCRIPT, environment, output)
            with output.open("w") as file:  # what is preloaded takes a program of its own
                return self.network.spawn(
                    self.hosts[rank],
                    [sys.executable, "-X", "faulthandler", str(SCRIPT)],
                    env={**environment, "LD_PRELOAD": str(self.shim)},
                    stdout=file,
                    stderr=subprocess.STDOUT,
                )

    @contextlib.contextmanager
    def _holding(self, victim: _Rank, end: float) -> Iterator[None]:
        """Where it stops itself in the middle of a stage: meanwhile."""
        stops_itself = self.cell.phase in ("reduce", "gather") and self.cell.fault in FROM_OUTSIDE
        while stops_itself and not _is_stopped(victim.pid) and self._any_runs([victim], end):
            time.sleep(0.001)
        yield
        if stops_itself:
            victim.send_signal(signal.SIGCONT)
            self.held_s = time.monotonic() - (self._time("ready") or time.monotonic())

    def _inflict(self) -> None:
        """What a rank cannot do to itself."""
        host = self.hosts[VICTIM]
        with self.lock:
            match self.cell.fault:
                case "cut":
                    self.network.set([host], [0], is_cut=True)
                case "deaf":
                    self.network.set([host], [0], loss=1.0)
                case "loss":
                    self.network.set(self.hosts, [0], loss=0.3)
                case "mute":
                    self._enter_neighbours(host, "02:67:77:ff:ff:ff")  # nobody's
        if not (self.folder / "fault").exists():
            (self.folder / ".f").write_text(str(time.monotonic()))
            os.rename(self.folder / ".f", self.folder / "fault")

    def _heal(self) -> None:
        with self.lock:
            self.network.set(self.hosts, [0], is_cut=False, loss=0.0)
            if self.cell.fault == "mute":
                self._enter_neighbours(self.hosts[VICTIM], None)

    def _enter_neighbours(self, host: int, mac: str | None) -> None:
        with self.network.on_host(host):
            iproute.ip(
                *(
                    f"neigh replace {Network.address(peer)} lladdr {mac or f'02:67:77:00:00:{peer + 1:02x}'} dev eth0 nud permanent"
                    for peer in self.hosts
                    if peer != host
                )
            )

    def _write(self, exits: list[int | None]) -> None:
        events = []
        for rank in range(WORLD_SIZE):
            lines = self.folder / f"events-{rank}"
            events.append([json.loads(line) for line in lines.read_text().splitlines()] if lines.exists() else [])
        outputs = [(self.folder / f"output-{rank}").read_text() for rank in range(WORLD_SIZE)]
        times = {"fault_at": self._time("fault"), "continued_at": self._time("continued")}
        (self.folder / "seen").write_text(json.dumps({**times, "events": events, "exits": exits, "outputs": outputs}))

    def _time(self, name: str) -> float | None:
        at = self.folder / name
        return float(at.read_text()) if at.exists() else None


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]), sys.argv[2]))
