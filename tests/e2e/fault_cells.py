"""Runs cells of the fault matrix: one fault, on one of three ranks, in one phase of a group's life.

All cells run in one lab network, five at a time: each has three hosts of its own, and mostly waits. Times are those of the
machine's monotonic clock, which hosts of the lab share.
"""

from __future__ import annotations

import json
import os
import queue
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from gradwire._meeting import LINGER_S as LINGER_ANSWERING_S
from gradwire._meeting import TELL_S
from gradwire.lab import NamespacesUnavailable, ToolMissing, iproute, sandbox
from gradwire.lab.network import Layout, Network
from gradwire.lab.switches import Port
from launch import _clean_environment

HERE = Path(__file__).parent
WORLD_SIZE, VICTIM, LANES = 3, 1, 5
# Long enough for a healthy rank that a busy machine does not let run.
PEER_TIMEOUT_S = 5.0
# Of a rank that was watched for a peer timeout and was punctual.
SILENCE_MIN_S = 3.0
# For hosts that share a busy machine's cores, and less than another peer timeout: a verdict that took two would show.
MARGIN_S = 4.5
LIMIT_S = PEER_TIMEOUT_S + MARGIN_S
# Of a group that is formed.
BOOTSTRAP_S, PATIENT_S = 5.0, 40.0
# For so long rank 0 answers the others after it has given up.
LINGER_S = LINGER_ANSWERING_S + TELL_S
LEAVE_S = 2.0
# In all of it nothing may take longer than this; what does is ended and has failed.
CELL_S = 75.0

FAULTS = (
    "kill", "stop", "cut", "mute", "deaf", "loss", "corrupt", "duplicate", "clock step", "disk full", "descriptors",
)  # fmt: skip
PHASES = ("bootstrap", "reduce", "gather", "idle", "shutdown")
# Done to all ranks, from the first datagram to the last: one run has all phases.
CHAOS = {"corrupt": "corrupt=10%,seed=3", "duplicate": "duplicate=30%,seed=4"}


@dataclass(frozen=True)
class Cell:
    fault: str
    phase: str
    # Of the configuration.
    on_peer_loss: str = "raise"

    @property
    def run(self) -> Cell:
        """The cell whose run shows this one."""
        return Cell(self.fault, "all") if self.fault in CHAOS else self

    @property
    def key(self) -> str:
        goes_on = "-going-on" if self.on_peer_loss == "continue" else ""
        return f"{self.fault.replace(' ', '_')}-{self.phase}{goes_on}"


@dataclass(frozen=True)
class Seen:
    """What became of a cell.

    Attributes:
        fault_at: when the fault was done; None: it never came to that.
        events: of each rank, in order; see fault_rank.py.
        exits: status of each rank; None: it had to be ended.
        outputs: what each rank printed.
    """

    fault_at: float | None
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
    shim = folder / "step_clock.so"
    if shutil.which("cc"):
        subprocess.run(["cc", "-shared", "-fPIC", "-O1", "-o", shim, HERE / "step_clock.c"], check=True)

    def main() -> int:
        try:
            with Network(Layout(hosts=WORLD_SIZE * LANES, switch="nft", port=Port(rate_mbit=50.0))) as network:
                _run_all(network, cells, folder, shim)
        except ToolMissing as error:
            (folder / "skip").write_text(str(error))
        return 0

    try:
        status = sandbox.run(main)
    except NamespacesUnavailable as error:
        pytest.skip(str(error))
    if (folder / "skip").exists():
        pytest.skip((folder / "skip").read_text())
    assert status == 0, "the lab failed, see the error above"
    return {cell: Seen(**json.loads((folder / cell.key / "seen").read_text())) for cell in cells}


def _run_all(network: Network, cells: Sequence[Cell], folder: Path, shim: Path) -> None:
    lanes: queue.Queue[int] = queue.Queue()
    for lane in range(LANES):
        lanes.put(lane)
    lock = threading.Lock()

    def run(cell: Cell) -> None:
        lane = lanes.get()
        try:
            _Run(network, lock, lane, cell, folder / cell.key, shim).run()
        finally:
            lanes.put(lane)

    with ThreadPoolExecutor(LANES) as pool:
        list(pool.map(run, cells))


class _Run:
    """One cell in one lane of the network, which is not for several threads: `lock`."""

    def __init__(self, network: Network, lock: threading.Lock, lane: int, cell: Cell, folder: Path, shim: Path) -> None:
        self.network, self.lock, self.cell, self.folder, self.shim = network, lock, cell, folder, shim
        self.hosts = [WORLD_SIZE * lane + rank for rank in range(WORLD_SIZE)]
        folder.mkdir()

    def run(self) -> None:
        end = time.monotonic() + CELL_S
        ranks = [self._start(rank) for rank in range(WORLD_SIZE)]
        survivors = [rank for place, rank in enumerate(ranks) if place != VICTIM]
        while not (self.folder / "ready").exists() and self._any_runs(survivors, end):
            time.sleep(0.005)
        self._inflict()
        while self._any_runs(survivors, end):
            time.sleep(0.01)
        if self.cell.fault == "stop":
            (self.folder / "continued").write_text(str(time.monotonic()))
            ranks[VICTIM].send_signal(signal.SIGCONT)
        while self._any_runs(ranks, end):
            time.sleep(0.01)
        exits = [rank.poll() for rank in ranks]
        for rank in ranks:
            rank.kill()
            rank.wait()
        self._heal()
        self._write(exits)

    @staticmethod
    def _any_runs(ranks: Sequence[subprocess.Popen[Any]], end: float) -> bool:
        return time.monotonic() < end and any(rank.poll() is None for rank in ranks)

    def _start(self, rank: int) -> subprocess.Popen[Any]:
        cell = self.cell
        is_meeting = cell.phase == "bootstrap" and cell.fault != "loss"
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
            "GRADWIRE_TEST_TIMEOUT_S": str(BOOTSTRAP_S if is_meeting else PATIENT_S),
            "OMP_NUM_THREADS": "1",
        }
        if cell.fault in CHAOS:
            variables["GRADWIRE_CHAOS"] = CHAOS[cell.fault]
        if cell.fault == "clock step":
            variables["LD_PRELOAD"] = str(self.shim)
        environment = {**_clean_environment(), **variables}
        with (self.folder / f"output-{rank}").open("w") as output, self.lock:
            command = [sys.executable, "-X", "faulthandler", str(HERE / "fault_rank.py")]
            return self.network.spawn(
                self.hosts[rank], command, env=environment, stdout=output, stderr=subprocess.STDOUT
            )

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
        at = self.folder / "fault"
        events = []
        for rank in range(WORLD_SIZE):
            lines = self.folder / f"events-{rank}"
            events.append([json.loads(line) for line in lines.read_text().splitlines()] if lines.exists() else [])
        outputs = [(self.folder / f"output-{rank}").read_text() for rank in range(WORLD_SIZE)]
        seen = {"fault_at": float(at.read_text()) if at.exists() else None, "events": events, "exits": exits}
        (self.folder / "seen").write_text(json.dumps({**seen, "outputs": outputs}))
