"""Runs a plan inside the lab's sandbox, and prints, writes and judges what came out. What the command line and bench/ call."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from gradwire import _files
from gradwire.bench import display, kept, numbers, report, results, tcp, training, training_report
from gradwire.bench.conductor import IMPORTS, Crews, measure
from gradwire.bench.ground import Ground, time_limit_s
from gradwire.bench.machine import buffers, command, machine
from gradwire.bench.plan import Condition, Plan
from gradwire.bench.training import TrainingPlan
from gradwire.demo.conductor import IMPORTS as OF_TRAINING
from gradwire.lab import LabError, sandbox
from gradwire.lab.crew import THREADS, WorkerFailed
from gradwire.lab.nursery import Nursery

REACHED, MISSED, NOT_RUN = 0, kept.MISSED, kept.NOT_RUN  # exit statuses
_COLLECTIVES_PAGE, _TRAINING_PAGE = "bench.html", "training.html"  # in the folder of results
_QUIET_LOAD = 0.5  # for each core; above it the machine did other things before the run


@dataclass(frozen=True)
class Outcome:
    """Where results go and what they are judged by.

    Attributes:
        out: folder for the report, its pictures and the workers' logs.
        json_file, html_file: None: no numbers; the report in `out`.
        required: factors by name (`results.REQUIREMENTS`).
        quick: noted in the numbers: they show no performance.

    Raises:
        ValueError: numbers and report would be one file.
    """

    out: Path
    json_file: Path | None = None
    html_file: Path | None = None
    required: dict[str, float] = field(default_factory=dict)
    quick: bool = False

    def __post_init__(self) -> None:
        for page in (_COLLECTIVES_PAGE, _TRAINING_PAGE):
            _files.check_apart(json=self.json_file, html=self.html_file or self.out / page)

    def make_folders(self) -> None:
        """Before the minutes of measuring: a folder that cannot be written is said at once. Raises OSError."""
        folders = (
            [self.out] if self.html_file is None else [self.out, self.html_file.parent]
        )  # pictures are beside the page
        for folder in (*folders, *([] if self.json_file is None else [self.json_file.parent])):
            folder.mkdir(parents=True, exist_ok=True)
        for folder in folders:
            _files.check_folder(folder)
        if self.json_file is not None:
            _files.check(self.json_file)


Measured = dict[str, Any]


def run_collectives(plan: Plan, outcome: Outcome) -> int:
    """Measures a plan; returns the exit status.

    Raises:
        LabError: no network can be built here.
    """
    facts = _facts("collectives", outcome)
    return sandbox.run(lambda: _inside(lambda: _collectives(plan, facts, outcome), outcome), terminates_in_order=True)


def run_training(plan: TrainingPlan, outcome: Outcome) -> int:
    """The same with the example's training."""
    facts = _facts("training", outcome)
    return sandbox.run(lambda: _inside(lambda: _training(plan, facts, outcome), outcome), terminates_in_order=True)


def _facts(benchmark: str, outcome: Outcome) -> Measured:
    """What the numbers belong to; outside the sandbox, within which everybody is root."""
    return {"benchmark": benchmark, "machine": machine(), **command(), "quick": outcome.quick}


def _inside(work: Callable[[], int], outcome: Outcome) -> int:
    console = display.make_console()
    try:
        outcome.make_folders()
        return work()
    except BrokenPipeError:  # nobody reads what is printed any more; what was measured to the end is written
        return NOT_RUN
    except (LabError, WorkerFailed, OSError) as error:
        console.print(f"error: {error}", markup=False)
        return kept.status_of(error)
    except KeyboardInterrupt:
        console.print(f"interrupted{kept.GONE}")
        return sandbox.EXIT_INTERRUPTED


def _collectives(plan: Plan, facts: Measured, outcome: Outcome) -> int:
    patience_s = time_limit_s(max(plan.sizes), plan.network)
    console = display.make_console()
    shown = display.Display(console, plan.minutes)
    plan = tcp.fitted(plan, shown.say)
    with shown, Ground(plan.hosts, plan.network) as ground:
        counted = _look_around(shown, ground, plan.conditions, facts["machine"])
        for words in plan.left_out():
            shown.say(words)
        worker = ["gradwire.bench.worker"]
        with (
            Nursery(IMPORTS, THREADS) as nursery,
            Crews(plan.variants, ground, worker, outcome.out, patience_s, start=nursery.start) as crews,
        ):

            def told(done: int, total: int, series: results.Series) -> None:
                shown.advance(done, total, f"{series.cell}: {series.samples_ms[-1]:.4g} ms")

            found, end = kept.whole_turns(measure(plan, crews, ground, told, say=shown.say))
    measured = [series for series in found if series.lost]
    unmeasured = [str(series.cell) for series in found if not series.lost]
    rows = [results.with_link_share(series.row(), plan.network) for series in measured]
    counts = sorted({row["samples"] for row in rows})  # of small sizes there are more
    has_all = all(len(series.lost) >= plan.samples for series in measured) and not unmeasured
    ended = kept.ended(end, f"{' or '.join(map(str, counts))} samples of each cell", is_whole=has_all)
    ended = kept.with_unmeasured(ended, unmeasured)
    verdicts = results.judge(rows, outcome.required) + results.unmeasured(unmeasured, outcome.required)
    whole = {
        **facts,
        "settings": _settings(plan),
        "network": {**plan.network.described(), **counted},
        "ciphers": crews.ciphers,
        "interrupted": isinstance(end, KeyboardInterrupt),
        "ended_by": ended.by,
        "not_measured": unmeasured,
        "targets": [asdict(verdict) for verdict in verdicts],
        "rows": rows,
    }
    shown_as = _Form(_COLLECTIVES_PAGE, report.write_html, lambda: report.print_table(console, rows))
    _conclude(console, whole, outcome, shown_as)
    wrong = sum(series.wrong for series in found)  # of cells without a row, too: what was called to warm up
    if wrong:
        console.print(f"{wrong} elements of results are WRONG", highlight=False)
    return _status(console, ended, is_right=not wrong and all(verdict.reached for verdict in verdicts))


def _training(plan: TrainingPlan, facts: Measured, outcome: Outcome) -> int:
    console = display.make_console()
    shown = display.Display(console, plan.minutes)
    plan = tcp.fitted(plan, shown.say)
    with Nursery(OF_TRAINING, THREADS) as nursery:
        identity = training.identity_of(plan.example, nursery.start)
        with shown, Ground(plan.ranks, plan.network) as ground:
            conditions = tuple(Condition(loss, plan.rtt_ms) for loss in plan.losses)
            counted = _look_around(shown, ground, conditions, facts["machine"])
            worker = ["gradwire.demo.worker", str(plan.example)]
            with Crews(plan.variants, ground, worker, outcome.out, training.PATIENCE_S, start=nursery.start) as crews:
                found, end = kept.whole_turns(training.train(plan, crews, ground, shown.advance, say=shown.say))
    rows = [run.row() for run in found if run.step_ms]
    unmeasured = [str(run) for run in found if not run.step_ms]
    done = rows[0]["steps"]
    ended = kept.ended(end, f"{done} steps of each training", is_whole=done >= plan.steps and not unmeasured)
    ended = kept.with_unmeasured(ended, unmeasured)
    target = training.target_of(plan, rows)
    rows = training.with_target(rows, target)
    verdicts = training.judge(rows, outcome.required) + results.unmeasured(unmeasured, outcome.required)
    settings = {**asdict(plan), "example": plan.example.name, **identity}
    settings.pop("network")
    whole = {
        **facts,
        "settings": settings,
        "network": {**plan.network.described(), **counted},
        "interrupted": isinstance(end, KeyboardInterrupt),
        "ended_by": ended.by,
        "not_measured": unmeasured,
        "target": target,
        "targets": [asdict(verdict) for verdict in verdicts],
        "rows": rows,
    }
    shown_as = _Form(
        _TRAINING_PAGE, training_report.write_html, lambda: training_report.print_table(console, rows, target)
    )
    _conclude(console, whole, outcome, shown_as)
    return _status(console, ended, is_right=all(verdict.reached for verdict in verdicts))


def _status(console: Console, ended: kept.Ended, *, is_right: bool) -> int:
    """Says why there is less than was asked for, and returns the exit status."""
    for line in ended.lines:
        console.print(line, highlight=False, markup=False)
    if ended.status is not None:
        return ended.status
    return REACHED if is_right else MISSED


def _look_around(
    shown: display.Display, ground: Ground, conditions: tuple[Condition, ...], facts: dict[str, Any]
) -> dict[str, Any]:
    """Says how busy the machine is, and counts what the network does before anything is measured."""
    facts["buffers"] |= buffers()  # of gloo's connections: those of the namespaces
    if facts["load"] > _QUIET_LOAD * facts["cores"]:
        shown.say(f"the machine is busy (load {facts['load']:.2f}): good for a look, not for conclusions")
    shown.say(f"counting what the network does ({ground.kind})")
    counted = ground.count(conditions)
    shown.say(report.network_text(counted) or "it is not shaped: it loses and delays nothing")
    shown.say(f"starting {ground.hosts} ranks")
    return counted


@dataclass(frozen=True)
class _Form:
    """How results are shown: the report's name in the folder of results and what writes it, and what prints the table."""

    page: str
    write_html: Callable[[Measured, Path], None]
    print_table: Callable[[], None]


def _conclude(console: Console, whole: Measured, outcome: Outcome, form: _Form) -> None:
    """Writes numbers and report, then says everything: who reads what is printed may go, and what cannot be written is printed.

    Raises:
        OSError: one of both cannot be written; the other is.
    """
    said = []
    attempts = _files.Attempts()
    try:
        if outcome.json_file is not None:
            with attempts.one():
                numbers.write(outcome.json_file, whole)
                said.append(f"numbers: {_files.shown(outcome.json_file)}")
        page = outcome.html_file or outcome.out / form.page
        try:
            with attempts.one():
                form.write_html(whole, page)
                said.append(f"report: {_files.shown(page)}")
        except ModuleNotFoundError as error:
            said.append(f"no report: {error.name} is not installed (pip install 'gradwire[bench]')")
    finally:
        form.print_table()
        for verdict in whole["targets"]:
            console.print(results.Verdict(**verdict).line(), highlight=False, markup=False)
        for line in said:
            console.print(line, highlight=False, markup=False)
    attempts.end()


def _settings(plan: Plan) -> dict[str, Any]:
    """What repeating it needs besides the network. There are no seeds: inputs are fixed, and losses are the switch's own chance."""
    kept = asdict(plan)
    kept.pop("network")
    return {"hosts": plan.hosts, **kept, "seeds": None}
