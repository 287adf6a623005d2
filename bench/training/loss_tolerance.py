"""How much gradient loss training tolerates, and what makes it tolerate more: final quality by method and loss.

    python bench/training/loss_tolerance.py --json bench-out/loss_tolerance.jsonl    # some 20 minutes on two quiet cores
    python bench/training/loss_tolerance.py --quick                                  # a smoke test of a minute
    python bench/training/loss_tolerance.py --report bench-out/loss_tolerance.jsonl  # docs/benchmarks.md and its picture

Four ranks over loopback train a small transformer on the standard library's sources and a small convolutional network on
scikit-learn's digits, with the real library. Fault injection loses packets on the receiving side: at random, or the end of
each transfer, the same parameters in every step. Nothing is sent again and no clock ends a transfer, so what is lost is what
was asked for, on a busy machine as on a quiet one; the measured share stands in the table.

Each run is one line of the file, written when it ends: the same command goes on where it was interrupted.

Methods: what is missing counts as zero (`/ N`: divided by all ranks), or the mean is over what arrived; with or without error
feedback; sent as it is or rotated (randomised Hadamard transform).

Targets. Fixed before the runs that they judge; the trials that led to them had other seeds (101 and up). Runs of one seed
share model, batches and validation set; what is judged is the mean difference of their validation losses and its 95 %
t-interval over the seeds. A difference is worse if its interval lies above zero, and within noise if not. Every target has a
control that must be worse, so that too few seeds or too short a training is a miss and not a success:

1. at 10 % random loss error feedback is within noise of no loss, and zero-fill / N is worse;
2. digits, 10 % tail drop (ULTIMA's figure 15): Hadamard is within noise of no loss, and zero-fill / N is worse;
3. the same, all else equal: Hadamard / N is within noise of zero-fill / N under as many losses at random, and zero-fill / N at
   10 % tail drop is worse than that. A rotation does not make up for what is lost; it makes a tail like scattered losses.

Exit code: 0 targets reached, 1 a target is missed, 2 could not run.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from pathlib import Path

import click
from gradwire.bench.display import as_written
from gradwire.lab.crew import THREADS, Crew, LoopbackCrew, WorkerFailed
from gradwire.lab.namespaces import Start
from gradwire.lab.nursery import Nursery
from loss_figures import draw, report, show
from loss_plan import LOSSES, METHODS, PACKET_BYTES, RANKS, STEPS, STEPS_QUICK, Condition, Run, Size, plan
from loss_store import OtherSettings, Store
from loss_verdicts import Row, Verdict, verdicts
from rich.console import Console

REACHED, MISSED, NOT_RUN = 0, 1, 2
IMPORTS = ("torch", "torch.distributed", "torch.nn.parallel")  # of every worker, once
# Nobody is given up because a busy machine let it wait: what is lost must not depend on the load.
SILENCE_SECONDS = 900.0
PATIENCE = {"GRADWIRE_PEER_TIMEOUT_S": "300", "GRADWIRE_CONNECT_TIMEOUT_S": "600"}


def ranks_that_lose(condition: Condition, logs: Path, start: Start) -> LoopbackCrew:
    """Processes that lose packets as a condition says: fault injection is a setting of a process."""
    settings = {"GRADWIRE_MTU": str(PACKET_BYTES), **PATIENCE}
    chaos = condition.chaos()
    if chaos is not None:
        settings["GRADWIRE_CHAOS"] = chaos
    command = [sys.executable, str(Path(__file__).with_name("loss_tolerance_worker.py"))]
    return LoopbackCrew(command, RANKS, settings, logs, SILENCE_SECONDS, start=start)


def train(crew: Crew, run: Run, steps: int) -> Row:
    """One run on all ranks."""
    order = {"do": "train", "task": run.cell.task, "method": METHODS[run.cell.method], "seed": run.seed, "steps": steps}
    answers = [answer[-1] for answer in crew.order(order, "loss")]
    sums = {name: sum(a[name] for a in answers) for name in ("expected", "received", "ended_by_time", "overflows")}
    return {
        **run.key(),
        "steps": steps,
        "loss": answers[0]["loss"],
        "accuracy": answers[0]["accuracy"],
        **sums,
        "identical": all(answer["identical"] for answer in answers),
        "seconds": max(answer["seconds"] for answer in answers),
    }


def measure(runs: Iterable[Run], steps: dict[str, int], logs: Path) -> Iterator[Row]:
    """Every run, with new processes where the condition changes."""
    with Nursery(IMPORTS, THREADS) as nursery:
        for condition, of_it in groupby(runs, key=lambda run: run.cell.condition):
            with ranks_that_lose(condition, logs, nursery.start) as crew:
                for run in of_it:
                    yield train(crew, run, steps[run.cell.task])


def measure_what_is_left(store: Store, runs: list[Run], logs: Path, console: Console) -> None:
    """Runs what the file does not have yet; says how far it is at each change of what the network does."""
    left = [run for run in runs if not store.has(run)]
    console.print(f"{len(runs) - len(left)} of {len(runs)} runs are there", highlight=False)
    begun, said = time.monotonic(), ""
    for done, row in enumerate(measure(left, store.settings["steps"], logs), 1):
        store.add(row)
        at = str(left[min(done, len(left) - 1)].cell.condition)
        if at != said or done == len(left):
            passed = (time.monotonic() - begun) / 60
            console.print(
                f"{time.strftime('%H:%M:%S')} {done} of {len(left)} runs, {passed:.1f} min of about"
                f" {passed / done * len(left):.1f}; now {at}",
                highlight=False,
            )
            said = at


@click.command(help=as_written(__doc__), context_settings={"show_default": True})
@click.option("--task", "tasks", multiple=True, type=click.Choice(list(STEPS)), help="Repeatable; default: all.")
@click.option("--method", "names", multiple=True, type=click.Choice(list(METHODS)), help="Repeatable; default: all.")
@click.option("--loss", "losses", multiple=True, type=click.FloatRange(0.001, 0.5), default=LOSSES)
@click.option("--seeds", default=3, type=click.IntRange(1))
@click.option("--judged-seeds", default=12, type=click.IntRange(1), help="Of the cells that the targets are about.")
@click.option("--quick", is_flag=True, help="One seed, few steps, one loss: shows that it runs.")
@click.option(
    "--json", "json_file", type=click.Path(path_type=Path), help="Lines of JSON, a run each; goes on with it."
)
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
    judged_seeds: int,
    quick: bool,
    json_file: Path | None,
    report_file: Path | None,
    out: Path,
) -> None:
    """Reads the options, measures and reports."""
    console = Console(width=190)
    if report_file is not None:
        store = Store.read(report_file)
        report(store)
        sys.exit(code_of(verdicts(store.rows)))
    out.mkdir(parents=True, exist_ok=True)
    methods = [name for name in METHODS if name in (names or METHODS)]
    size = Size(tasks or tuple(STEPS), methods, losses, seeds, judged_seeds)
    if quick:
        size = Size(size.tasks, methods, (0.1,), 1, 1)
    try:
        store = Store.go_on(json_file, {"steps": STEPS_QUICK if quick else STEPS, "ranks": RANKS})
        measure_what_is_left(store, list(plan(size)), out, console)
    except (WorkerFailed, OtherSettings, OSError) as error:
        console.print(f"error: {error}", markup=False)
        sys.exit(NOT_RUN)
    show(console, store)
    draw(store, out / "loss_tolerance.png")
    console.print(f"drawn: {out / 'loss_tolerance.png'}")
    sys.exit(judge(console, store, quick))


def judge(console: Console, store: Store, quick: bool) -> int:
    """Prints the targets; a quick run decides nothing about them."""
    if quick:
        console.print("a quick run decides nothing about the targets")
        return REACHED if all(row["identical"] for row in store.rows) else MISSED
    found = verdicts(store.rows)
    for verdict in found:
        console.print(verdict.line(), highlight=False)
    return code_of(found)


def code_of(found: Sequence[Verdict]) -> int:
    """What the verdicts mean; too few seeds for any are a miss."""
    return REACHED if found and all(verdict.reached for verdict in found) else MISSED


if __name__ == "__main__":
    main()
