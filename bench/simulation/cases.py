"""One run of the study: what is simulated, on which simulator, and where its result is kept.

    Case -> gradwire's presets: gradwire.simulation, in this process
         -> others: bench/ns3, a program of its own; left out where it is not built
         -> Store: a line of JSON for each case, so that a study that was interrupted goes on where it was

Every transport gets the same traffic: the same buckets at the same times, each cut evenly over the servers.
"""

from __future__ import annotations

import fcntl
import json
import math
import subprocess
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from gradwire.bench.machine import machine
from gradwire.simulation.plan import Bucket, ClusterPlan, fill_buckets
from gradwire.simulation.result import simulate
from gradwire.simulation.tensors import Tensor
from models import MODELS

ROOT = Path(__file__).resolve().parents[2]
OURS = ("auto", "mlt", "dlcp")
PEERS = ("dctcp", "pias", "pfabric", "ndp")
# 30 ms of a worker for one iteration with GoogleNet (MLT section 2.2), of which a backward pass takes two thirds; other models by their
# multiplications.
GOOGLENET_BACKWARD_US = 20_000.0
DDP_BUCKET_BYTES = 25 << 20
BURST_BYTES = 2_700_000
HOSTS_PER_LEAF = 16
MICROSECONDS_MAX = 10_000_000
UNKNOWN = "unknown"

Tell = Callable[[str], None]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One run. `traffic`: a model, or "burst": 2.7 MB of each worker at once.

    Attributes:
        compression: gradients have so many times fewer bytes.
        bucket_bytes: tensors are joined until they have so many; 0: each is a call of its own.
        rto_min_us: least retransmission timeout, of those that have one.
        servers: hosts that reduce; None: a quarter; 0: the workers themselves.
    """

    transport: str
    hosts: int = 144
    traffic: str = "burst"
    compression: int = 1
    bucket_bytes: int = DDP_BUCKET_BYTES
    rto_min_us: float = 10_000.0
    jitter_us: float = 0.0
    oversubscription: float = 1.0
    servers: int | None = None
    classes: int = 1
    tolerates: bool = True
    tells: bool = True
    spread: str = "flow"
    warm_up: int = 0
    seed: int = 1

    @property
    def key(self) -> str:
        """What tells it from others. A timeout is none of a transport that has none."""
        has_timeout = self.transport in PEERS and self.transport != "ndp"
        return json.dumps(asdict(self if has_timeout else replace(self, rto_min_us=0.0)), sort_keys=True)

    @property
    def server_hosts(self) -> int:
        """Hosts that are servers and nothing else."""
        return max(self.hosts // 4, 1) if self.servers is None else self.servers

    def buckets(self) -> list[Bucket]:
        """The calls of a step, as DDP makes them."""
        if self.traffic == "burst":
            return [Bucket((Tensor("all", BURST_BYTES // 4 // self.compression),), 0, 0.0)]
        layers = MODELS[self.traffic]()
        tensors = [Tensor(layer.name, layer.elems) for layer in layers]
        ratio = multiplications(self.traffic) / multiplications("googlenet")
        backward_us = GOOGLENET_BACKWARD_US * ratio
        first = min(self.bucket_bytes, 1 << 20)
        filled = fill_buckets(
            tensors, max(self.bucket_bytes, 1), first_bytes=first, classes=self.classes, backward_us=backward_us
        )
        return [replace(bucket, tensors=tuple(map(self._compressed, bucket.tensors))) for bucket in filled]

    def _compressed(self, tensor: Tensor) -> Tensor:
        return tensor._replace(elems=math.ceil(tensor.elems / self.compression))


def multiplications(model: str) -> int:
    """Of a forward pass for one picture."""
    return sum(layer.multiplications for layer in MODELS[model]())


def run(case: Case, ns3: Path) -> dict[str, Any]:
    """Runs a case.

    Raises:
        OSError: its program is not there, or ended with an error.
        RuntimeError: the simulated job failed.
    """
    return _run_ours(case) if case.transport not in PEERS else _run_peer(case, ns3)


def _run_ours(case: Case) -> dict[str, Any]:
    leaves = math.ceil(case.hosts / HOSTS_PER_LEAF)
    plan = ClusterPlan(
        preset=case.transport,
        workers=case.hosts - case.server_hosts,
        servers=case.server_hosts,
        hosts_per_leaf=math.ceil(case.hosts / leaves),
        oversubscription=case.oversubscription,
        jitter_us=case.jitter_us,
        classes=case.classes,
        tolerates=case.tolerates,
        tells=case.tells,
        spread=case.spread,
        warm_up=case.warm_up,
        seed=case.seed,
        buckets=case.buckets(),
    )
    result = simulate(plan)
    layers = result.pop("layers")
    lost = {name: sum(layer[name] for layer in layers) for name in ("elems", "lost")}
    return {**result, "buckets": len(plan.buckets), "contributed": lost}


def _run_peer(case: Case, ns3: Path) -> dict[str, Any]:
    buckets = ",".join(f"{bucket.elems * 4}@{bucket.ready_us:.3f}" for bucket in case.buckets())
    options = {
        "transport": case.transport,
        "hosts": case.hosts,
        "servers": case.server_hosts,
        "buckets": buckets,
        "rto-min-us": case.rto_min_us,
        "jitter-us": case.jitter_us,
        "oversubscription": case.oversubscription,
        "seed": case.seed,
    }
    command = [str(ns3), *(f"--{name}={value}" for name, value in options.items())]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise OSError(f"{' '.join(command)} ended with {done.returncode}: {done.stderr.strip()[-500:]}")
    result: dict[str, Any] = json.loads(done.stdout)
    if result["unfinished"]:
        raise OSError(f"{' '.join(command)}: {result['unfinished']} transfers have not ended")
    return {**result, "core_s": result["wall_s"], "lost_share": 0.0}


class Store:
    """Results by their cases, kept in a file with the commit that each is of.

    A last line that an interruption has cut short is none, and goes when the next one is written. Several studies may keep theirs in one
    file at once.
    """

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.results: dict[str, dict[str, Any]] = {}
        self.commits: dict[str, str] = {}
        written = path.read_bytes() if path is not None and path.exists() else b""
        for line in map(json.loads, written[: _whole_bytes(written)].splitlines()):
            self.results[line["case"]] = line["result"]
            self.commits[line["case"]] = line.get("commit", UNKNOWN)  # older files do not say it

    @cached_property
    def commit(self) -> str:
        """Of what is run now."""
        return str(machine()["commit"]) or UNKNOWN

    def keep(self, case: Case, result: dict[str, Any]) -> None:
        """Adds a result."""
        self.results[case.key], self.commits[case.key] = result, self.commit
        if self.path is not None:
            line = json.dumps({"case": case.key, "commit": self.commit, "result": result}).encode() + b"\n"
            with self.path.open("a+b") as file:
                # Until it is closed: what has no end now is of a study that was interrupted, never of one that is writing.
                fcntl.flock(file, fcntl.LOCK_EX)
                file.seek(0)
                file.truncate(_whole_bytes(file.read()))
                file.write(line)

    def commits_of(self, cases: Iterable[Case]) -> list[str]:
        """Those of the results of these cases, the oldest first."""
        wanted = {case.key for case in cases}
        return list(dict.fromkeys(commit for key, commit in self.commits.items() if key in wanted))

    def get(self, case: Case) -> dict[str, Any] | None:
        """The result of a case; None: it was not run."""
        return self.results.get(case.key)


def _whole_bytes(written: bytes) -> int:
    """Of the lines that have an end."""
    return written.rfind(b"\n") + 1


def run_all(cases: Iterable[Case], store: Store, ns3: Path, jobs: int, tell: Tell) -> None:
    """Runs what the store has not. Cases of ns-3 are left out where it is not built."""
    missing = list(dict.fromkeys(case for case in cases if store.get(case) is None))
    if not ns3.exists():
        told = {case.transport for case in missing if case.transport in PEERS}
        missing = [case for case in missing if case.transport not in PEERS]
        if told:
            tell(f"{ns3} is not there (bench/ns3/README.md): without {', '.join(sorted(told))}")
    begun = time.monotonic()

    def one(case: Case) -> tuple[Case, dict[str, Any]]:
        return case, run(case, ns3)

    with ThreadPoolExecutor(jobs) as pool:
        for number, (case, result) in enumerate(pool.map(one, missing), 1):
            store.keep(case, result)
            passed = time.monotonic() - begun
            left = passed / number * (len(missing) - number)
            tell(
                f"{number} of {len(missing)}: {case.transport}, {case.hosts} hosts, {case.traffic}"
                f" took {result['core_s']:.1f} s; about {left / 60:.1f} min left"
            )
