"""How much gradient loss training tolerates, and what makes it tolerate more: final quality by method and loss.

    python bench/training/loss_tolerance.py --json bench-out/loss_tolerance.json    # some 15 minutes on two quiet cores
    python bench/training/loss_tolerance.py --quick                                 # a smoke test of a minute
    python bench/training/loss_tolerance.py --report bench-out/loss_tolerance.json  # docs/benchmarks.md and its picture

Four ranks over loopback train a small transformer on the standard library's sources and a small convolutional network on
scikit-learn's digits, with the real library. Fault injection loses packets on the receiving side: at random, or the end of
each transfer. Nothing is sent again, so what is lost is what was asked for; the measured share stands in the table.

Methods: zero-fill divided by all ranks (`divide_by="world"`), mean over contributions, error feedback with that mean (the
default) and divided by all ranks, the randomised Hadamard transform with that mean, and the two together. Quality is the
validation loss, lower is better; noise is two standard deviations over the seeds without loss.

Exit code: 0 targets reached, 1 a target is missed, 2 could not run.
"""

from __future__ import annotations

import json
import os
import platform
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
from gradwire.lab.crew import Crew, WorkerFailed, rendezvous_environment
from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench"))

RANKS = 4
PACKET_BYTES = 1500
REACHED, MISSED, NOT_RUN = 0, 1, 2
METHODS: dict[str, dict[str, Any]] = {
    "zero-fill": {"divide_by": "world", "error_feedback": False, "hadamard": "off"},
    "mean": {"error_feedback": False, "hadamard": "off"},
    "feedback": {"error_feedback": True, "hadamard": "off"},
    "feedback / N": {"divide_by": "world", "error_feedback": True, "hadamard": "off"},
    "hadamard": {"error_feedback": False, "hadamard": "on"},
    "feedback + hadamard": {"error_feedback": True, "hadamard": "on"},
}
# ULTIMA's figure 15 is about a convolutional network (VGG-19).
CONVOLUTIONAL = "digits"
# Without loss the methods differ by rounding alone; this one stands for all.
REFERENCE = "mean"
STEPS = {"digits": 110, "transformer": 40}
QUICK_STEPS = {"digits": 20, "transformer": 20}
# Whose digits and words about a difference the picture and the table use.
NOISE_DEVIATIONS = 2.0
# A measured share within this much of the asked one, relative to it, is what was asked for: 1 % of some hundred thousand packets
# scatters by a few hundredths of itself.
SHARE_TOLERANCE = 0.15
# The border of a tail falls within a packet, which is lost as a whole: one of the 64 of the smallest transfer.
BORDER_SHARE = 1 / 64
Row = dict[str, Any]


@dataclass(frozen=True)
class Condition:
    """What the network does: `kind` is none, random or tail."""

    kind: str
    share: float

    def chaos(self) -> str | None:
        """For GRADWIRE_CHAOS."""
        part = {"random": "loss", "tail": "tail"}.get(self.kind)
        return None if part is None else f"{part}={self.share * 100:g}%,seed=1"

    def __str__(self) -> str:
        return "no loss" if self.kind == "none" else f"{self.share:.0%} {self.kind}"


def conditions(shares: Sequence[float]) -> list[Condition]:
    """No loss, and each share at random and as a tail."""
    return [Condition("none", 0.0), *(Condition(kind, share) for kind in ("random", "tail") for share in shares)]


class Ranks:
    """Four processes that lose packets as a condition says."""

    def __init__(self, condition: Condition, logs: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = str(free.getsockname()[1])
        settings = {"MASTER_PORT": port, "GRADWIRE_PORT": "0", "GRADWIRE_MTU": str(PACKET_BYTES)}
        chaos = condition.chaos()
        if chaos is not None:
            settings["GRADWIRE_CHAOS"] = chaos
        self._children: list[subprocess.Popen[bytes]] = []
        environments = [
            {**rendezvous_environment(rank, RANKS, "127.0.0.1", "lo", rank), **settings} for rank in range(RANKS)
        ]
        command = [sys.executable, str(Path(__file__).with_name("loss_tolerance_worker.py"))]
        self._crew = Crew(self._spawn, command, environments, logs)

    def __enter__(self) -> Crew:
        self._crew.collect("ready")
        return self._crew

    def __exit__(self, *_: object) -> None:
        self._crew.close()
        for child in self._children:
            try:
                child.wait(timeout=20)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()

    def _spawn(self, _rank: int, command: Sequence[str], **options: Any) -> subprocess.Popen[bytes]:
        child = subprocess.Popen(command, **options)
        self._children.append(child)
        return child


def train(crew: Crew, condition: Condition, order: Row, method: str) -> Row:
    """One run on all ranks."""
    answers = [answer[-1] for answer in crew.order({"do": "train", "method": METHODS[method], **order}, "loss")]
    expected = sum(answer["expected"] for answer in answers)
    received = sum(answer["received"] for answer in answers)
    return {
        "task": order["task"],
        "method": method,
        "kind": condition.kind,
        "share": condition.share,
        "seed": order["seed"],
        "loss": answers[0]["loss"],
        "accuracy": answers[0]["accuracy"],
        "lost": 1 - received / expected,
        "identical": all(answer["identical"] for answer in answers),
        "seconds": max(answer["seconds"] for answer in answers),
    }


def measure(
    console: Console,
    plan: Sequence[Condition],
    methods: Sequence[str],
    *,
    seeds: int,
    steps: dict[str, int],
    logs: Path,
) -> list[Row]:
    """Every run, condition by condition: fault injection is a setting of a process."""
    rows: list[Row] = []
    total, begun = len(plan) * len(methods) * seeds * len(steps), time.monotonic()
    for condition in plan:
        with Ranks(condition, logs) as crew:
            for task, count in steps.items():
                for seed in range(1, seeds + 1):
                    orders = {"task": task, "seed": seed, "steps": count}
                    rows += [train(crew, condition, orders, method) for method in methods]
        passed = time.monotonic() - begun
        console.print(
            f"{time.strftime('%H:%M:%S')} {condition}: {len(rows)} of {total} runs, {passed / 60:.1f} min of about"
            f" {passed / len(rows) * total / 60:.1f}, lost {lost_share(rows, condition):.2%}",
            highlight=False,
        )
    return rows


def lost_share(rows: Iterable[Row], condition: Condition) -> float:
    """Measured share of the gradient bytes that did not come in time."""
    return statistics.fmean(
        row["lost"] for row in rows if (row["kind"], row["share"]) == (condition.kind, condition.share)
    )


def select(rows: Iterable[Row], **values: Any) -> list[Row]:
    """The rows that have these values."""
    return [row for row in rows if all(row[name] == value for name, value in values.items())]


def quality(rows: Sequence[Row]) -> tuple[float, float]:
    """Mean validation loss over the seeds, and its standard deviation."""
    losses = [row["loss"] for row in rows]
    return statistics.fmean(losses), statistics.stdev(losses) if len(losses) > 1 else 0.0


def excess(rows: Sequence[Row], chosen: Sequence[Row]) -> tuple[float, float]:
    """How much worse than without loss, run by run of the same task and seed: mean and standard deviation.

    Runs of one seed share model and batches, so that this is far less noisy than the quality itself.
    """
    calm = {(row["task"], row["seed"]): row["loss"] for row in select(rows, kind="none", method=REFERENCE)}
    differences = [row["loss"] - calm[row["task"], row["seed"]] for row in chosen]
    return statistics.fmean(differences), statistics.stdev(differences) if len(differences) > 1 else 0.0


@dataclass(frozen=True)
class Verdict:
    """Whether a target is reached, in words."""

    reached: bool
    text: str

    def line(self) -> str:
        """For people."""
        return f"{self.text}: {'reached' if self.reached else 'MISSED'}"


def reference(rows: Sequence[Row], task: str) -> tuple[float, float]:
    """Mean validation loss without loss, and the noise around it."""
    mean, deviation = quality(select(rows, task=task, kind="none", method=REFERENCE))
    return mean, NOISE_DEVIATIONS * deviation


def verdicts(rows: Sequence[Row]) -> list[Verdict]:
    """The targets that these rows can decide."""
    found = []
    for task in dict.fromkeys(row["task"] for row in rows):
        calm, noise = reference(rows, task)
        fed = select(rows, task=task, kind="random", share=0.1, method="feedback")
        if fed:
            got = quality(fed)[0]
            text = f"{task}: error feedback at 10 % random loss ends at {got:.4f}, without loss {calm:.4f}, noise {noise:.4f}"
            found.append(Verdict(got - calm <= noise, text))
        cut = {m: select(rows, task=task, kind="tail", share=0.1, method=m) for m in ("hadamard", "zero-fill")}
        if all(cut.values()) and task == CONVOLUTIONAL:
            rotated, plain = (quality(cut[name])[0] for name in ("hadamard", "zero-fill"))
            text = (
                f"{task}: at 10 % tail drop Hadamard ends at {rotated:.4f} and zero-fill at {plain:.4f}, the target is"
                f" {calm + noise:.4f}, which only Hadamard should reach"
            )
            found.append(Verdict(rotated <= calm + noise < plain, text))
    for condition in dict.fromkeys(Condition(row["kind"], row["share"]) for row in rows):
        lost = lost_share(rows, condition)
        border = BORDER_SHARE if condition.kind == "tail" else 0.0
        if abs(lost - condition.share) > SHARE_TOLERANCE * condition.share + border:
            found.append(Verdict(False, f"{condition}: {lost:.2%} of the gradient bytes were lost"))
    return found


def table_rows(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Heads and lines: for each task and condition the quality of each method."""
    methods = [name for name in METHODS if select(rows, method=name)]
    lines = []
    for task in dict.fromkeys(row["task"] for row in rows):
        for condition in dict.fromkeys(Condition(row["kind"], row["share"]) for row in rows):
            cells = [task, str(condition), f"{lost_share(select(rows, task=task), condition):.2%}"]
            for method in methods:
                chosen = select(rows, task=task, kind=condition.kind, share=condition.share, method=method)
                mean, deviation = quality(chosen)
                worse = excess(rows, chosen)[0]
                accuracy = statistics.fmean(row["accuracy"] for row in chosen)
                cells.append(f"{mean:.4f} ± {deviation:.4f} ({worse:+.4f}, {accuracy:.1%})")
            lines.append(cells)
    return ["task", "asked", "lost", *methods], lines


def markdown(rows: Sequence[Row]) -> str:
    """The table for docs/benchmarks.md."""
    heads, lines = table_rows(rows)
    ruler = ["---", "---", *("---:" for _ in heads[2:])]
    return "\n".join(f"| {' | '.join(line)} |" for line in [heads, ruler, *lines])


def draw(results: dict[str, Any], target: Path) -> None:
    """How much worse than without loss, a panel for each task and kind of loss."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = results["rows"]
    tasks, kinds = list(dict.fromkeys(row["task"] for row in rows)), ("random", "tail")
    figure, axes = pyplot.subplots(len(tasks), 2, figsize=(11, 4 * len(tasks)), squeeze=False, sharey="row")
    for across, task in zip(axes, tasks, strict=True):
        noise = reference(rows, task)[1]
        for axis, kind in zip(across, kinds, strict=True):
            axis.axhline(noise, color="0.5", linestyle=":", label="noise: two standard deviations without loss")
            axis.axhline(0, color="0.8", linewidth=0.8)
            for at, method in enumerate(name for name in METHODS if select(rows, method=name)):
                of_method = select(rows, task=task, method=method)
                shares = sorted({row["share"] for row in of_method if row["kind"] in (kind, "none")})
                shown = [row for row in of_method if row["kind"] in (kind, "none")]
                points = [excess(rows, select(shown, share=share)) for share in shares]
                offset = 0.12 * (at - 2)  # so that error bars do not hide each other
                axis.errorbar(
                    [share * 100 + offset for share in shares], [p[0] for p in points], yerr=[p[1] for p in points],
                    marker="o", markersize=4, capsize=2, linewidth=1.2, label=method,
                )  # fmt: skip
            axis.set_title(f"{task}, {'random loss' if kind == 'random' else 'tail drop'}")
            axis.set_xlabel("gradient bytes lost, %")
            axis.set_ylabel("validation loss above that without loss, nats")
    axes[0][0].legend(fontsize=8)
    label = f"{results['machine']['commit']}, {RANKS} ranks, {results['seeds']} seeds, load before the run {results['machine']['load']:.2f}"
    figure.suptitle(f"Final quality of training under gradient loss ({label})", fontsize=10)
    figure.tight_layout()
    figure.savefig(target, dpi=110)


def machine() -> dict[str, Any]:
    """What the numbers belong to."""
    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False, cwd=ROOT)
    return {
        "commit": git.stdout.strip(),
        "kernel": platform.release(),
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "python": platform.python_version(),
    }


def report(results: dict[str, Any]) -> None:
    """Writes the section of docs/benchmarks.md and its picture."""
    from report import replace_section

    draw(results, ROOT / "docs" / "img" / "loss-tolerance.png")
    facts = results["machine"]
    lines = "\n".join(f"- {verdict.line()}" for verdict in verdicts(results["rows"]))
    measured = (
        f"Measured: commit {facts['commit']}, {facts['cores']} cores, load before the run {facts['load']:.2f}, {RANKS} ranks,"
        f" {results['seeds']} seeds, steps {results['steps']}. Mean and standard deviation of the validation loss in nats (how"
        " much above the same seed's run without loss, and the accuracy)."
    )
    text = "\n\n".join(
        [
            measured,
            markdown(results["rows"]),
            lines,
            "![loss tolerance of training](img/loss-tolerance.png)",
        ]
    )
    document = ROOT / "docs" / "benchmarks.md"
    document.write_text(replace_section(document.read_text(), "loss_tolerance", text))


@click.command(help=__doc__, context_settings={"show_default": True})
@click.option("--task", "tasks", multiple=True, type=click.Choice(list(STEPS)), help="Repeatable; default: both.")
@click.option("--method", "names", multiple=True, type=click.Choice(list(METHODS)), help="Repeatable; default: all.")
@click.option("--loss", "losses", multiple=True, type=click.FloatRange(0.001, 0.5), default=(0.01, 0.05, 0.1, 0.2))
@click.option("--seeds", default=3, type=click.IntRange(1))
@click.option("--steps", default=None, type=click.IntRange(2), help="Of every run; default: each task's own.")
@click.option("--quick", is_flag=True, help="One seed, few steps, one loss: shows that it runs.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write the numbers here.")
@click.option(
    "--report", "report_file", type=click.Path(exists=True, path_type=Path), help="Measure nothing: write the document."
)
@click.option("--out", default=Path("bench-out"), type=click.Path(path_type=Path), help="Folder for picture and logs.")
def main(
    *,
    tasks: tuple[str, ...],
    names: tuple[str, ...],
    losses: tuple[float, ...],
    seeds: int,
    steps: int | None,
    quick: bool,
    json_file: Path | None,
    report_file: Path | None,
    out: Path,
) -> None:
    """Reads the options, measures and reports."""
    console = Console(width=170)
    if report_file is not None:
        results = json.loads(report_file.read_text())
        report(results)
        sys.exit(REACHED if all(verdict.reached for verdict in verdicts(results["rows"])) else MISSED)
    out.mkdir(parents=True, exist_ok=True)
    chosen = {task: steps or (QUICK_STEPS if quick else STEPS)[task] for task in tasks or STEPS}
    methods = [name for name in METHODS if name in (names or METHODS)]
    seeds, losses = (1, (0.1,)) if quick else (seeds, losses)
    facts = machine()
    try:
        rows = measure(console, conditions(losses), methods, seeds=seeds, steps=chosen, logs=out)
    except WorkerFailed as error:
        console.print(f"error: {error}", markup=False)
        sys.exit(NOT_RUN)
    results = {"benchmark": "loss_tolerance", "machine": facts, "seeds": seeds, "steps": chosen, "rows": rows}
    if json_file is not None:
        json_file.write_text(json.dumps(results, indent=1) + "\n")
    sys.exit(show(console, results, out, quick))


def show(console: Console, results: dict[str, Any], out: Path, quick: bool) -> int:
    """Prints the table and the targets, draws the picture; a quick run decides nothing."""
    heads, lines = table_rows(results["rows"])
    table = Table(
        title="validation loss ± deviation over the seeds (above the same seed without loss, accuracy)",
        title_justify="left",
    )
    for at, head in enumerate(heads):
        table.add_column(head, justify="left" if at < 2 else "right")
    for line in lines:
        table.add_row(*line)
    console.print(table)
    draw(results, out / "loss_tolerance.png")
    console.print(f"drawn: {out / 'loss_tolerance.png'}")
    if not all(row["identical"] for row in results["rows"]):
        console.print("replicas differ: their results were to be exact")
        return MISSED
    if quick:
        console.print("a quick run decides nothing about the targets")
        return REACHED
    found = verdicts(results["rows"])
    for verdict in found:
        console.print(verdict.line(), highlight=False)
    return REACHED if all(verdict.reached for verdict in found) else MISSED


if __name__ == "__main__":
    main()
