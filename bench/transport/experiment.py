"""What both transport benchmarks share while they measure: options, turns and progress, the lab, the results, the exit code.

    options -> sandbox -> Ground -> turns over the cases -> results (JSON) -> figures.py: table, targets, picture

A benchmark (goodput.py, fairness.py) says what a case is and how one sample of it is taken; the rest is here. What it prints
comes from the results that it would write, so `bench/report.py` prints the same from a file.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

import click
import figures
from click.core import ParameterSource
from gradwire.bench import tcp
from gradwire.bench.machine import command, machine
from gradwire.lab import LabError, Link, NamespacesUnavailable, ToolMissing, sandbox
from network import Ground, build_stream

REACHED, MISSED, NOT_RUN = (
    0,
    1,
    2,
)  # exit codes; click exits with 2 for a wrong option, too, and so does who judged nothing

Case = TypeVar("Case")
Command = TypeVar("Command", bound=Callable[..., Any])
Tell = Callable[[str], None]


@dataclass(frozen=True)
class Turns(Generic[Case]):
    """The order of samples: every case once, then again, until there are enough or the time is up.

    Attributes:
        cases: what takes turns.
        samples: of each case.
        minutes: after about so long no further sample is taken, once every case has one.
    """

    cases: Sequence[Case]
    samples: int
    minutes: float

    def __call__(self, tell: Tell, clock: Callable[[], float] = time.monotonic) -> Iterator[tuple[int, Case]]:
        """(turn, case) of each sample. The first case of a turn moves on, so that no case always follows the same."""
        begun, total = clock(), self.samples * len(self.cases)
        for done in range(total):
            turn, at = divmod(done, len(self.cases))
            passed = clock() - begun
            if turn > 0 and passed > 60 * self.minutes:
                tell(f"time is up after {done} of {total} samples")
                return
            if done > 0:
                tell(f"{done} of {total} samples, {passed / 60:.1f} min of about {self._whole(passed / done) / 60:.1f}")
            yield turn, self.cases[(at + turn) % len(self.cases)]

    def _whole(self, seconds_each: float) -> float:
        """Seconds from the first sample to the last, if all take so long."""
        first_turn = seconds_each * len(self.cases)
        return min(first_turn * self.samples, max(first_turn, 60 * self.minutes))


@dataclass(frozen=True)
class Settings:
    """The options that both benchmarks have."""

    rate_mbit: float
    samples: int
    seconds: float
    minutes: float
    small: bool
    json_file: Path | None
    out: Path


def common_options(
    *, samples: int, seconds: float, seconds_help: str, minutes: float = 7.5
) -> Callable[[Command], Command]:
    """Click options for the fields of `Settings`."""
    path = click.Path(path_type=Path)
    options = [
        click.option("--rate", "rate_mbit", default=200.0, help="Mbit/s of the link, Ethernet headers included."),
        click.option("--samples", default=samples, type=click.IntRange(1), help="Of each case."),
        click.option("--seconds", default=seconds, type=click.FloatRange(1), help=seconds_help),
        click.option("--minutes", default=minutes, help="Stop early, evenly, after about so long."),
        click.option("--small", is_flag=True, help="Seconds, one or two cases: only to see that it works. No verdict."),
        click.option("--json", "json_file", type=path, help="Write the results here; bench/report.py reads them."),
        click.option("--out", default=Path("bench-out"), type=path, help="Folder for the picture."),
    ]

    def decorate(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


def had_here(context: click.Context, option: str, names: Sequence[str], tell: Tell) -> tuple[str, ...]:
    """Those of these that can be measured: without congestion controls of TCP that the kernel lacks and nobody named.

    Args:
        context: of the command, which knows whether somebody did.
        option: of the command, by its parameter's name.
        names: its values; `figures.GRADWIRE` is no congestion control.
        tell: what is left out.

    Raises:
        LabError: one that was named is not there, or none is left.
    """
    lacking = tcp.lacking_of(name for name in names if name != figures.GRADWIRE)
    left = tuple(name for name in names if name not in lacking)
    is_named = context.get_parameter_source(option) is not ParameterSource.DEFAULT
    if lacking and (is_named or not left):
        raise tcp.named_in_vain(sorted(lacking))
    if lacking:
        tell(f"not measured: {', '.join(sorted(lacking))}, as {tcp.words(sorted(lacking))}")
    return left


def run(
    name: str,
    settings: Settings,
    hosts: int,
    first_link: Link,
    measure: Callable[[Ground, Tell], dict[str, Any]],
) -> None:
    """Runs a benchmark in the lab, prints and writes what came out, and exits with what that means.

    Args:
        name: of the benchmark, a key of `figures.FIGURES`.
        settings: common options.
        hosts: in the network.
        first_link: of each host, until `measure` sets another.
        measure: takes the samples; what it returns (`rows` and `settings` at least) becomes part of the results.
    """
    # Before the minutes of measuring: a folder that cannot be written is said at once.
    for folder in (settings.out, *([settings.json_file.parent] if settings.json_file else [])):
        folder.mkdir(parents=True, exist_ok=True)
    try:
        stream = build_stream(settings.small)
        # Outside the sandbox, within which everybody is root.
        facts = {"benchmark": name, "machine": machine(), **command(), "small": settings.small}
        sys.exit(sandbox.run(lambda: _inside(facts, settings, lambda: Ground(hosts, first_link, stream), measure)))
    except (ToolMissing, NamespacesUnavailable) as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(NOT_RUN)


def _inside(
    facts: dict[str, Any], settings: Settings, ground: Ground, measure: Callable[[Ground, Tell], dict[str, Any]]
) -> int:
    load = facts["machine"]["load"]
    if load > figures.QUIET_LOAD:
        _tell(f"the machine is busy (load {load:.2f}): good for a look, not for conclusions")
    try:
        with ground() as network:
            measured = measure(network, _tell)
    except LabError as error:
        print(f"error: {error}", file=sys.stderr)
        return NOT_RUN
    results = {**facts, **measured}
    if settings.json_file is not None:
        settings.json_file.write_text(json.dumps(results, indent=1) + "\n")
    return present(results, settings.out)


def present(results: dict[str, Any], out: Path) -> int:
    """Prints the table and the targets of results, draws their picture; returns the exit code."""
    view = figures.FIGURES[results["benchmark"]]
    print("\n" + view.markdown(results) + "\n")
    verdicts = view.verdicts(results)
    for verdict in verdicts:
        print(verdict.line())
    picture = out / f"{results['benchmark']}.png"
    view.draw(results, picture)
    print(f"drawn: {picture}; {figures.describe_machine(results)}")
    if results["small"]:
        print("small run: no verdict")
        return REACHED
    if not verdicts:
        print("no target was judged: none is of what was measured, or of so few samples")
        return NOT_RUN
    return REACHED if all(verdict.reached for verdict in verdicts) else MISSED


def _tell(text: str) -> None:
    print(f"{time.strftime('%H:%M:%S')} {text}", flush=True)
