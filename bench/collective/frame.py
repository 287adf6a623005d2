"""What the benchmarks of this folder share: options, the lab, engines that take turns, results, exit statuses.

    options -> sandbox -> Ground -> engine_worker.py on each rank -> samples by turns -> results (JSON) -> table, picture, verdict

A benchmark says which engines there are and what is concluded; the rest is here.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import click
from gradwire import _files
from gradwire.bench import numbers, report
from gradwire.bench.ground import Ground
from gradwire.bench.machine import machine
from gradwire.bench.plan import Condition, NetworkPlan
from gradwire.lab import LabError, sandbox
from gradwire.lab.crew import Crew, WorkerFailed
from rich.console import Console
from rich.table import Table

REACHED, MISSED, NOT_RUN = 0, 1, 2  # click exits with 2 for a wrong option, too
PATIENCE_S = 180.0
START_AHEAD_S = 0.05  # ranks get the order well before it is time

Command = TypeVar("Command", bound=Callable[..., Any])
Tell = Callable[[str], None]


@dataclass(frozen=True)
class Settings:
    """The options that all of them have."""

    quick: bool
    json_file: Path | None
    out: Path

    def make_folders(self) -> None:
        """Before anything is measured: a folder that cannot be written is said at once. Raises OSError."""
        self.out.mkdir(parents=True, exist_ok=True)
        _files.check_folder(self.out)
        if self.json_file is not None:
            self.json_file.parent.mkdir(parents=True, exist_ok=True)
            _files.check(self.json_file)


def common_options(quick_help: str) -> Callable[[Command], Command]:
    """Click options for the fields of `Settings`."""
    path = click.Path(path_type=Path)
    options = [
        click.option("--quick", is_flag=True, help=f"{quick_help} No verdict."),
        click.option("--json", "json_file", type=path, help="Write the numbers here."),
        click.option("--out", default=Path("bench-out"), type=path, help="Folder for picture and logs."),
    ]

    def decorate(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


@dataclass(frozen=True)
class Engines:
    """One engine of each configuration on each rank, whose all-reduces take turns.

    Attributes:
        configs: settings of the engine by its name.
        elems: float32 elements.
        samples: calls of each that are counted.
        settle: calls of each before them, in which memory, rates and round trips find their size.
        algorithm: schedule, as the binding codes it; None: the engine's choice.
    """

    network: NetworkPlan
    ranks: int
    configs: dict[str, dict[str, Any]]
    elems: int
    samples: int
    settle: int
    rtt_ms: float = 0.0
    algorithm: int | None = None

    def measure(self, out: Path, tell: Tell) -> tuple[dict[str, Any], dict[str, list[float]]]:
        """What is known of the network and of each engine, and the milliseconds of each counted call by the engine's name.

        Raises:
            WorkerFailed: a rank ended, or its result was wrong.
            LabError: the network cannot be built.
        """
        with Ground(self.ranks, self.network) as ground:
            facts = ground.count([Condition(rtt_ms=self.rtt_ms)])
            tell(report.network_text(facts) or ground.kind)
            facts["rtt_ms"] = facts.get(f"counted_rtt_ms_at_{self.rtt_ms:g}")
            ground.set(Condition(rtt_ms=self.rtt_ms))
            environments = [ground.environment(rank) for rank in range(self.ranks)]
            command = [sys.executable, str(Path(__file__).with_name("engine_worker.py"))]
            crew = Crew(ground.spawn, command, environments, out, PATIENCE_S)
            try:
                crew.collect("ready")
                facts["ciphers"] = {name: self._form(crew, name) for name in self.configs}
                return facts, self._by_turns(crew, tell)
            finally:
                crew.close()

    def _form(self, crew: Crew, name: str) -> str | None:
        """Starts the engine of this name on every rank and joins them; returns the group's cipher."""
        order = {"do": "engine", "name": name, "config": self.configs[name], "ranks": self.ranks}
        records = [answer[-1]["record"] for answer in crew.order(order, "record")]
        joined = crew.order({"do": "join", "name": name, "records": records}, "joined")
        cipher: str | None = joined[0][-1]["cipher"]
        return cipher

    def _by_turns(self, crew: Crew, tell: Tell) -> dict[str, list[float]]:
        times: dict[str, list[float]] = {name: [] for name in self.configs}
        begun, turns = time.monotonic(), self.settle + self.samples
        for turn in range(turns):
            for name in self.configs:
                took = self._sample_ms(crew, name)
                if turn >= self.settle:
                    times[name].append(took)
            if turn % 10 == 9:
                left_s = (time.monotonic() - begun) / (turn + 1) * (turns - turn - 1)
                tell(f"{turn + 1} of {turns} turns, {left_s:.0f} s left")
        return times

    def _sample_ms(self, crew: Crew, name: str) -> float:
        """Milliseconds of one all-reduce, from a common start to the end on the slowest rank."""
        order = {"do": "reduce", "name": name, "ranks": self.ranks, "elems": self.elems, "algorithm": self.algorithm}
        answers = [answer[-1] for answer in crew.order({**order, "at": time.monotonic() + START_AHEAD_S}, "ended")]
        if wrong := sum(answer["wrong"] for answer in answers):
            raise WorkerFailed(f"{wrong} elements are wrong with {name}")
        return float(max(answer["ended"] for answer in answers) - min(answer["begun"] for answer in answers)) * 1e3


def run(
    name: str,
    settings: Settings,
    chosen: dict[str, Any],
    measure: Callable[[Tell], dict[str, Any]],
    conclude: Callable[[Console, dict[str, Any]], bool],
    *,
    in_lab: bool = True,
) -> None:
    """Runs a benchmark, prints and writes what came out, and exits with what that means.

    Args:
        name: of the benchmark.
        settings: common options.
        chosen: the other options, which are written with the results.
        measure: takes the samples; what it returns becomes part of the results.
        conclude: prints the table, draws, and says whether the target was reached.
        in_lab: whether it needs a network of its own.
    """
    console = Console(width=130)
    begun = time.monotonic()

    def tell(text: str) -> None:
        passed = time.monotonic() - begun
        console.print(f"{time.strftime('%H:%M:%S')} ({passed:.0f} s) {text}", highlight=False, markup=False)

    facts = machine()  # in the sandbox everybody is root

    def work() -> int:
        try:
            settings.make_folders()
            measured = measure(tell)
            results = {"benchmark": name, "machine": facts, "settings": {**chosen, "quick": settings.quick}, **measured}
            reached = _concluded(console, results, settings.json_file, conclude)
        except (WorkerFailed, LabError, OSError) as error:
            console.print(f"error: {error}", markup=False)
            return NOT_RUN
        if settings.quick:
            console.print("quick run: no verdict")
        return REACHED if settings.quick or reached else MISSED

    try:
        sys.exit(sandbox.run(work) if in_lab else work())
    except LabError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(NOT_RUN)


def _concluded(
    console: Console,
    results: dict[str, Any],
    json_file: Path | None,
    conclude: Callable[[Console, dict[str, Any]], bool],
) -> bool:
    """Writes the numbers and concludes. Raises OSError where a file cannot be written; the others are."""
    attempts, reached = _files.Attempts(), False
    if json_file is not None:
        with attempts.one():
            numbers.write(json_file, results)
    with attempts.one():
        reached = conclude(console, results)
    attempts.end()
    return reached


def table(title: str, heads: Sequence[str], lines: Sequence[Sequence[str]]) -> Table:
    """Right-aligned columns."""
    made = Table(title=title, title_justify="left")
    for head in heads:
        made.add_column(head, justify="right")
    for line in lines:
        made.add_row(*line)
    return made
