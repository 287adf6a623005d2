"""Churn soak: ranks train in a lab network while they are killed, stopped, cut off, healed and started again, at random from a seed.

    make soak MINUTES=15                       # python tests/soak/soak.py --minutes 15
    python tests/soak/soak.py --minutes 30 --seed 7 --json bench-out/soak.json

`on_peer_loss="continue"`: a majority goes on, and whoever comes back joins it. Every result is compared with the reference mean over the
ranks that its report announces, all ranks that took part in a step must have the same state after it, and at the end the whole
training is computed again from what was announced. Rank 0 is killed like any other: its next life serves the rendezvous anew, and until
the members have found it nobody joins.

Exit status: 0 nothing was lost, 1 something was, 2 it could not run.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import click
import numpy as np
from gradwire.lab import LabError, sandbox
from gradwire.lab.network import Layout, Network
from soak_rank import ELEMS, digest, mean_of

HERE = Path(__file__).parent
FAULTS = ("kill", "stop", "cut")
# Twice the peer timeout and a join lie between a fault and the next step of all, on a busy machine some more.
STUCK_S = 180.0
PROGRESS_S = 15.0
POLL_S = 0.1


class Soak:
    """One run.

    Args:
        network: of the lab, a host for each rank.
        folder: for the events of the ranks.
        options: of the command line.
    """

    def __init__(self, network: Network, folder: Path, options: dict[str, Any]) -> None:
        self.network, self.folder, self.options = network, folder, options
        self.ranks = int(options["ranks"])
        self.dice = random.Random(options["seed"])
        self.faults: Counter[str] = Counter()
        self.problems: list[str] = []
        # What is wrong with a rank, and when it ends.
        self.wrong: dict[int, tuple[str, float]] = {}
        # Who is well again, and has made no step since.
        self.returning: dict[int, float] = {}
        self.began = time.monotonic()
        self.read_to = [0] * self.ranks
        self.events: list[list[dict[str, Any]]] = [[] for _ in range(self.ranks)]
        self.latest: dict[int, dict[str, Any]] = {}
        self.processes = [self.start(rank) for rank in range(self.ranks)]

    def start(self, rank: int) -> subprocess.Popen[Any]:
        variables = {
            "RANK": str(rank),
            "WORLD_SIZE": str(self.ranks),
            "GRADWIRE_RENDEZVOUS": f"{Network.address(0)}:29400",
            "GRADWIRE_ON_PEER_LOSS": "continue",
            "GRADWIRE_PEER_TIMEOUT_S": str(self.options["peer_timeout"]),
            "CHURN_FOLDER": str(self.folder),
            "OMP_NUM_THREADS": "1",
        }
        with (self.folder / f"output-{rank}").open("a") as output:
            command = [sys.executable, "-X", "faulthandler", str(HERE / "soak_rank.py")]
            environment = {**os.environ, **variables}
            return self.network.spawn(rank, command, env=environment, stdout=output, stderr=subprocess.STDOUT)

    def run(self) -> None:
        """All of it."""
        began = told = self.began
        end = began + 60.0 * self.options["minutes"]
        next_at = began + 5.0
        while time.monotonic() < end and not self.problems:
            time.sleep(POLL_S)
            now = time.monotonic()
            self.read()
            self.recover(now)
            if now >= next_at:
                self.inflict(now)
                next_at = now + self.dice.uniform(1.0, 2.0 * self.options["pause"])
            if now - told >= PROGRESS_S:
                told = now
                self.tell(now - began)
        self.recover(float("inf"))
        self.finish()

    def inflict(self, now: float) -> None:
        """The next fault, if those who are well would still be a majority of every epoch that there may be."""
        away = {**self.wrong, **self.returning}
        well = [rank for rank in range(self.ranks) if rank not in away]
        members = self.members()
        missing = [rank for rank in range(self.ranks) if rank in away or rank not in members]
        if not well:
            return
        rank, fault = self.dice.choice(well), self.dice.choice(FAULTS)
        pause = self.dice.uniform(0.1, 3.0) * self.options["peer_timeout"]
        if rank not in members or 2 * (self.ranks - len(missing) - 1) <= self.ranks:
            return
        self.faults[f"{fault} of rank 0" if rank == 0 else fault] += 1
        self.wrong[rank] = (fault, now + pause)
        if fault == "kill":
            self.processes[rank].kill()
            self.processes[rank].wait()
        elif fault == "stop":
            self.processes[rank].send_signal(signal.SIGSTOP)
        else:
            self.network.set([rank], [0], is_cut=True)

    def recover(self, now: float) -> None:
        """Ends the faults that have lasted long enough."""
        for rank, (fault, until) in list(self.wrong.items()):
            if now < until:
                continue
            del self.wrong[rank]
            self.returning[rank] = time.monotonic()
            if fault == "kill":
                self.processes[rank] = self.start(rank)
            elif fault == "stop":
                self.processes[rank].send_signal(signal.SIGCONT)
            else:
                self.network.set([rank], [0], is_cut=False)

    def members(self) -> list[int]:
        """Of the latest step that anybody has done."""
        latest = max(self.latest.values(), key=lambda event: event["at"], default={"members": []})
        return list(latest["members"])

    def steps(self) -> list[list[dict[str, Any]]]:
        return [[event for event in events if "epoch" in event] for events in self.events]

    def read(self) -> None:
        """What the ranks have written since."""
        for rank in range(self.ranks):
            file = self.folder / f"events-{rank}"
            if not file.exists():
                continue
            with file.open() as lines:
                lines.seek(self.read_to[rank])
                text = lines.read()
            whole = text[: text.rfind("\n") + 1]
            self.read_to[rank] += len(whole)
            fresh = [json.loads(line) for line in whole.splitlines() if line.endswith("}")]
            self.events[rank] += fresh
            self.problems += [f"rank {rank}: {event}" for event in fresh if "wrong" in event]
            for event in fresh:
                if "step" in event and "epoch" in event:
                    self.latest[rank] = event
                    if event["at"] > self.returning.get(rank, event["at"]):
                        del self.returning[rank]
            if self.processes[rank].poll() not in (None, -signal.SIGKILL) and not (self.folder / "end").exists():
                self.problems.append(f"rank {rank} ended with {self.processes[rank].returncode}")
        latest = max((event["at"] for event in self.latest.values()), default=self.began)
        if time.monotonic() - latest > STUCK_S:
            self.problems.append(f"no step for {STUCK_S:g} s")

    def tell(self, seconds: float) -> None:
        steps = max((event["step"] for event in self.latest.values()), default=0)
        epochs = max((event["epoch"] for event in self.latest.values()), default=0)
        click.echo(
            f"{seconds:5.0f} s: {steps} steps, epoch {epochs}, members {self.members()}, "
            f"faults {dict(self.faults)}, joins {self.joins()}",
        )

    def joins(self) -> int:
        joined = [event for events in self.events for event in events if "joined" in event]
        return len({(event["step"], event["digest"]) for event in joined})

    def finish(self) -> None:
        """All come together again, train on for a while, and end at the same step."""
        end = time.monotonic() + STUCK_S
        while len(self.members()) < self.ranks and time.monotonic() < end and not self.problems:
            time.sleep(POLL_S)
            self.read()
        if len(self.members()) < self.ranks:
            self.problems.append(f"at the end only {self.members()} are members")
        (self.folder / "end").write_text("")
        for rank, process in enumerate(self.processes):
            try:
                process.wait(max(0.1, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                self.problems.append(f"rank {rank} does not end")
                process.kill()
        (self.folder / "ended").write_text("")
        self.read()
        self.problems += judge(self.steps())


def judge(steps: list[list[dict[str, Any]]]) -> list[str]:
    """What is wrong with the steps of the ranks: those of one epoch must agree, and the last one is what all announced steps make."""
    problems = []
    seen: dict[tuple[int, int], dict[str, Any]] = {}
    for events in steps:
        for event in events:
            first = seen.setdefault((event["step"], event["epoch"]), event)
            if (first["members"], first["digest"]) != (event["members"], event["digest"]):
                problems.append(f"two results of one step: {first} and {event}")
    # Of a step that somebody did and whose epoch the others left without it, theirs counts: the later epoch.
    chain: dict[int, dict[str, Any]] = {}
    for (step, epoch), event in seen.items():
        if step not in chain or epoch > chain[step]["epoch"]:
            chain[step] = event
    weights = np.zeros(ELEMS, "float32")
    for step in range(max(chain, default=-1) + 1):
        if step not in chain:
            return [*problems, f"nobody has done step {step}"]
        weights = np.mod(weights + mean_of(chain[step]["members"], step), np.float32(1 << 20))
        if digest(weights) != chain[step]["digest"]:
            return [*problems, f"step {step} is not what the announced steps make: {chain[step]}"]
    return problems


@click.command(help=__doc__, context_settings={"show_default": True})
@click.option("--minutes", default=15.0, type=click.FloatRange(0.1), help="Of churn.")
@click.option("--ranks", default=5, type=click.IntRange(4, 6))
@click.option("--seed", default=1, help="Of the faults.")
@click.option("--peer-timeout", default=4.0, help="Seconds.")
@click.option("--pause", default=8.0, help="Seconds between two faults, on average.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write the outcome here.")
@click.option("--folder", type=click.Path(path_type=Path), help="Keep the events of the ranks here.")
def main(json_file: Path | None, folder: Path | None, **options: Any) -> None:
    """Reads the options and runs the soak."""
    folder = folder or Path(tempfile.mkdtemp(prefix="gradwire-soak-"))
    folder.mkdir(parents=True, exist_ok=True)

    def within() -> int:
        with Network(Layout(hosts=options["ranks"], switch="nft")) as network:
            soak = Soak(network, folder, options)
            soak.run()
            steps = soak.steps()
            outcome = {
                "options": options, "faults": dict(soak.faults), "problems": soak.problems[:20],
                "steps": max((events[-1]["step"] for events in steps if events), default=-1) + 1,
                "epochs": max((events[-1]["epoch"] for events in steps if events), default=0),
                "results_checked": sum(map(len, steps)),
                "left_out": sum("left" in event for events in soak.events for event in events),
            }  # fmt: skip
            (folder / "outcome").write_text(json.dumps(outcome))
        return 0

    try:
        status = sandbox.run(within)
    except LabError as error:
        click.echo(f"soak: {error}", err=True)
        sys.exit(2)
    if status or not (folder / "outcome").exists():
        click.echo(f"soak: the lab failed, see above and {folder}", err=True)
        sys.exit(2)
    outcome = json.loads((folder / "outcome").read_text())
    text = json.dumps(outcome, indent=2)
    click.echo(text)
    if json_file is not None:
        json_file.parent.mkdir(parents=True, exist_ok=True)
        json_file.write_text(text + "\n")
    if outcome["problems"]:
        click.echo(f"soak: events and outputs of the ranks are in {folder}", err=True)
    sys.exit(1 if outcome["problems"] else 0)


if __name__ == "__main__":
    main()
