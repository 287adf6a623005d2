"""The same burst over the same transport in both simulators: ns-3 and gradwire's own fabric.

    programs -> scenarios -> (ns-3's times, the fabric's times) -> differences -> table or JSON

Workers start up to `JITTER_US` late, and each scenario runs with several seeds: a start at the very same moment is one sample of a
process in which a nanosecond decides who is first. What differs by more than `LIMIT` is a target missed: the average over the seeds of
mean, p50, p99 and p99.9 of the completion times, how many transfers completed, and packets dropped, of which less than one in ten
thousand is none.
"""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click

REACHED, MISSED, NOT_RUN = 0, 1, 2
ROOT = Path(__file__).resolve().parents[2]
LIMIT = 0.02
QUANTILES = {"p50_us": 0.5, "p99_us": 0.01, "p999_us": 0.001}  # with the share of times beyond
BEYOND_MIN = 25  # of 5, one transfer that waits for a lost packet moves a quantile by a tenth
DROPS = ("overflowed", "dropped_selectively")
JITTER_US = 20
HEADER_BYTES = 30  # of ns-3's point-to-point links: IPv4 20, UDP 8, PPP 2


@dataclass(frozen=True)
class Scenario:
    """Hosts, of which some are servers, and what each worker pushes and pulls."""

    hosts: int
    servers: int
    bytes: int
    preset: str

    def __str__(self) -> str:
        return f"{self.hosts - self.servers} to {self.servers}, {self.bytes / 1e6:g} MB, {self.preset}"


QUICK = [
    Scenario(2, 1, 2_700_000, "mlt"),
    Scenario(8, 1, 675_000, "mlt"),
    # The papers' burst at its smallest scale.
    Scenario(36, 9, 2_700_000, "mlt"),
]
FULL = [
    *QUICK,
    # Two packets of each are twice the threshold of a port: some are dropped.
    Scenario(64, 1, 75_000, "mlt"),
]


def run(program: list[str]) -> dict[str, Any]:
    """The JSON object that a program prints."""
    done = subprocess.run(program, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        failed = click.ClickException(f"{program[0]} ended with {done.returncode}: {done.stderr.strip()[-500:]}")
        failed.exit_code = NOT_RUN
        raise failed
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def average(results: list[dict[str, Any]]) -> dict[str, float]:
    """Of every figure that is compared.

    A quantile is one where at least `BEYOND_MIN` times of all seeds lie beyond it; mean and count of the transfers that completed always
    are, since those that never end have no times.
    """
    times = sum(one["flows"]["count"] for one in results)
    names = ["count", "mean_us", *(name for name, beyond in QUANTILES.items() if beyond * times >= BEYOND_MIN)]
    of = {name: [one["flows"][name] for one in results] for name in names}
    dropped = [sum(one[name] for name in DROPS) for one in results]
    return {name: statistics.fmean(values) for name, values in (of | {"dropped": dropped}).items()}


def difference(name: str, ours: float, theirs: float, packets: int) -> float:
    """Relative to the larger one; so few drops that they are noise count as none."""
    most = max(abs(ours), abs(theirs))
    is_none = most == 0 or (name == "dropped" and most < packets / 10_000)
    return 0.0 if is_none else abs(ours - theirs) / most


def compare(scenario: Scenario, ns3: Path, fabric: Path, seeds: int) -> dict[str, Any]:
    """Runs a scenario in both, with each seed."""
    sizes = {"hosts": scenario.hosts, "servers": scenario.servers, "bytes": scenario.bytes, "jitter-us": JITTER_US}
    theirs, ours = [], []
    for seed in range(1, seeds + 1):
        options = [f"--{name}={value}" for name, value in (sizes | {"seed": seed, "preset": scenario.preset}).items()]
        theirs.append(run([str(ns3), *options]))
        ours.append(run([str(fabric), "burst", "--json", f"--header-bytes={HEADER_BYTES}", *options]))
    averages = {"ns3": average(theirs), "fabric": average(ours)}
    packets = 2 * (scenario.hosts - scenario.servers) * scenario.bytes // 1408
    differences = {
        name: difference(name, averages["fabric"][name], averages["ns3"][name], packets) for name in averages["ns3"]
    }
    return {"scenario": asdict(scenario), "seeds": seeds, **averages, "differences": differences}


def row(result: dict[str, Any]) -> str:
    """A line of the table: times in microseconds, ns-3's before the fabric's."""
    pair = {name: f"{result['ns3'][name]:.1f} / {result['fabric'][name]:.1f}" for name in result["differences"]}
    pairs = [pair.get(name, "") for name in ("mean_us", *QUANTILES, "dropped", "count")]
    most = max(result["differences"].values())
    return f"| {Scenario(**result['scenario'])} | " + " | ".join(pairs) + f" | {100 * most:.2f} % |"


@click.command()
@click.option("--ns3", type=click.Path(path_type=Path), default=ROOT / "build-ns3/gradwire", show_default=True)
@click.option(
    "--fabric", type=click.Path(path_type=Path), default=ROOT / "target/release/gradwire-sim", show_default=True
)
@click.option("--quick", is_flag=True, help="Nothing in which packets are dropped.")
@click.option("--preset", default=None, help="In place of mlt.")
@click.option("--seeds", type=click.IntRange(min=1), default=24, show_default=True, help="Runs of each scenario.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object in place of the table.")
def main(*, ns3: Path, fabric: Path, quick: bool, preset: str | None, seeds: int, as_json: bool) -> None:
    """Compares gradwire in ns-3 with gradwire in its own fabric. 0: within 2 %, 1: not, 2: could not be run."""
    for program in (ns3, fabric):
        if not program.exists():
            click.echo(f"{program} is not there: bench/ns3/README.md says how it is built", err=True)
            sys.exit(NOT_RUN)
    scenarios = QUICK if quick else FULL
    if preset is not None:
        scenarios = [Scenario(one.hosts, one.servers, one.bytes, preset) for one in scenarios]
    results = []
    for number, scenario in enumerate(scenarios):
        click.echo(f"{number + 1} of {len(scenarios)}: {scenario}", err=True)
        results.append(compare(scenario, ns3, fabric, seeds))
    if as_json:
        click.echo(json.dumps(results))
    else:
        click.echo("| scenario | mean | p50 | p99 | p99.9 | dropped | completed | largest difference |")
        click.echo("| --- | --- | --- | --- | --- | --- | --- | --- |")
        for result in results:
            click.echo(row(result))
    most = max(max(result["differences"].values()) for result in results)
    sys.exit(REACHED if most <= LIMIT else MISSED)


if __name__ == "__main__":
    main()
