"""`gradwire demo`: options, progress on the terminal, the table at the end."""

from __future__ import annotations

import re
import sys
from contextlib import ExitStack
from pathlib import Path

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from gradwire import _files
from gradwire._extras import require
from gradwire.bench import numbers
from gradwire.bench.display import make_console
from gradwire.bench.tcp import lacking_of, named_in_vain
from gradwire.cli.suspending import suspends
from gradwire.cli.types import FiniteFloat, OwnFile, check_stdout
from gradwire.config import PRESETS
from gradwire.demo import conductor, picture
from gradwire.demo.plan import Plan
from gradwire.demo.results import RunResults, percentile, report, tail_of
from gradwire.errors import MissingExtraError
from gradwire.lab import LabError, Link, sandbox
from gradwire.lab.crew import WorkerFailed
from gradwire.lab.probe import LossProbe

EXIT_FAILED, EXIT_USAGE, EXIT_NOT_WRITTEN, EXIT_NO_LAB = 1, 2, 2, 3
_PICTURE = "demo.png"  # in the folder of results
_WIDTH_OF_A_FILE = 120  # columns; a terminal says its own
_SOURCE_TREE = Path(__file__).resolve().parents[3]  # python/gradwire/cli -> the checkout

_EPILOG = """
\b
Examples:
  gradwire demo                                  about six minutes on two cores
  gradwire demo --steps 40 --json results.json   a quicker one, numbers into a file
  gradwire demo --loss 0 --loss 0.05 --rate 200  other networks
  gradwire demo --backend gloo                   one backend alone

\b
Exit status: 0 done, 1 a worker failed or replicas differed that must not, 2 wrong usage, a package that is missing or a file that
cannot be written, 3 no network could be built, 130 interrupted.
"""


def _name_of_tcp(_ctx: click.Context, _option: click.Parameter, name: str) -> str:
    """One that can be a congestion control's: it goes into a line of several words."""
    if not re.fullmatch(r"[A-Za-z0-9_-]+", name) or name.startswith("-"):
        raise click.BadParameter(f"{name!r} is no name of a congestion control.")
    return name


@click.command(name="demo", epilog=_EPILOG, context_settings={"show_default": True})
@click.option("--backend", "backends", multiple=True, type=click.Choice(("gloo", "gradwire")),
              default=("gloo", "gradwire"), help="Compare these; repeatable.")  # fmt: skip
@click.option("--loss", "losses", multiple=True, type=FiniteFloat(0, 0.5), default=(0.0, 0.01),
              help="Share of packets that the network loses; repeatable.")  # fmt: skip
@click.option("--workers", default=4, type=click.IntRange(2, 8), help="Hosts, each with one worker.")
@click.option("--rate", default=100.0, type=FiniteFloat(1, 10_000), help="Mbit/s of each host's link.")
@click.option("--delay", default=0.0, type=FiniteFloat(0, 500), help="Round trip added by the links, ms (netem).")
@click.option("--buffer", default=256, type=click.IntRange(8, 65_536), help="KB that the switch holds for each port.")
@click.option("--tcp", default="cubic", callback=_name_of_tcp, help="TCP's congestion control: cubic, bbr, reno.")
@click.option("--preset", default="auto", type=click.Choice(PRESETS),
              help="gradwire's; replicas may differ with mlt, dlcp and ultima.")  # fmt: skip
@click.option("--steps", default=120, type=click.IntRange(8), help="Training steps of each run, a multiple of 8.")
@click.option("--seed", default=1, help="Decides weights and batches; the same in all runs.")
@click.option("--minutes", default=7.0, type=FiniteFloat(0.5), help="Stop early, evenly, after about so long.")
@click.option("--json", "json_file", type=OwnFile(), help="Write the numbers here.")
@click.option("--out", default=Path("demo-out"), type=click.Path(file_okay=False, path_type=Path),
              help="Folder for the picture and the workers' logs.")  # fmt: skip
@click.option("--examples", default=_SOURCE_TREE / "examples", type=click.Path(file_okay=False, path_type=Path),
              help="Folder with train_gpt.py, which is what is trained; an installed package has none.",
              show_default="of the source tree")  # fmt: skip
def command(
    *,
    backends: tuple[str, ...],
    losses: tuple[float, ...],
    rate: float,
    delay: float,
    buffer: int,
    tcp: str,
    minutes: float,
    json_file: Path | None,
    out: Path,
    examples: Path,
    **chosen: int | str,
) -> None:
    """Train a small GPT over a lossy network: gloo (TCP) against gradwire.

    Builds a cluster of network namespaces on this machine (no root needed where the kernel allows user namespaces), with
    links of a known rate between them, and trains examples/train_gpt.py with each backend on the same batches, without
    and with packet loss. The runs take turns, so all meet the same conditions. It prints one table, draws one picture,
    and leaves nothing behind, however it ends.
    """
    check_stdout()
    try:
        for package in ("torch", "numpy"):
            require(package, "demo", "gradwire demo")
        link = Link(rate, buffer * 1024, delay / 2)
        plan = Plan(examples.resolve(), backends, losses, link=link, congestion_control=tcp,
                    budget_seconds=minutes * 60, **chosen)  # type: ignore[arg-type]  # fmt: skip
        _make_folders(out, json_file)
        click.get_current_context().with_resource(_files.held(out))
        sys.exit(sandbox.run(lambda: _check_tcp(plan) or _play(plan, out, json_file)))
    except LabError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(EXIT_NO_LAB)
    except (ValueError, OSError, MissingExtraError) as error:
        raise click.UsageError(str(error)) from error


def _make_folders(out: Path, json_file: Path | None) -> None:
    """Before the minutes of training: a folder that cannot be written is said at once. Raises OSError, ValueError."""
    _files.check_apart(json=json_file, out=out / _PICTURE)
    out.mkdir(parents=True, exist_ok=True)
    _files.check_folder(out)
    if json_file is not None:
        json_file.parent.mkdir(parents=True, exist_ok=True)
        _files.check(json_file)


def _check_tcp(plan: Plan) -> int:
    """Inside the sandbox, where it counts: says whether this kernel lacks the congestion control; returns an exit status, 0 if not."""
    if not lacking_of([plan.congestion_control]):
        return 0
    click.echo(f"error: {named_in_vain([plan.congestion_control])}", err=True)
    return EXIT_USAGE


def _play(plan: Plan, out: Path, json_file: Path | None) -> int:
    """The demo itself, inside the sandbox; returns the exit status."""
    console = make_console(_WIDTH_OF_A_FILE)
    try:
        with _Display(console, plan) as display, conductor.Conductor(plan, out, display.progress) as leader:
            results = leader.play()
        _conclude(console, plan, results, out / _PICTURE, json_file)
    except BrokenPipeError:  # nobody reads what is printed any more; the numbers of a demo that ended are written
        return EXIT_NOT_WRITTEN
    except LabError as error:
        console.print(f"error: {error}", markup=False)
        return EXIT_NO_LAB
    except WorkerFailed as error:
        console.print(f"error: {error}", markup=False)
        return EXIT_FAILED
    except OSError as error:
        console.print(f"error: {error}", markup=False)
        return EXIT_NOT_WRITTEN
    except KeyboardInterrupt:
        console.print("interrupted; the workers and the network are gone")
        return sandbox.EXIT_INTERRUPTED
    return 0


def _conclude(console: Console, plan: Plan, results: list[RunResults], drawing: Path, json_file: Path | None) -> None:
    """Writes numbers and picture, then says everything: who reads what is printed may go, and what cannot be written is printed.

    Raises:
        OSError: one of both cannot be written; the other is.
    """
    said = []
    attempts = _files.Attempts()
    try:
        if json_file is not None:
            with attempts.one():
                numbers.write(json_file, report(plan, results))
                said.append(f"numbers: {_files.shown(json_file)}")
        try:
            with attempts.one():
                picture.draw(plan, results, drawing)
                said.append(f"picture: {_files.shown(drawing)}")
        except ModuleNotFoundError as error:
            said.append(f"no picture: {error.name} is not installed (pip install 'gradwire[demo]')")
    finally:
        console.print(_table(plan, results))
        for line in (_compared(plan, results), *said):
            console.print(line, highlight=False, markup=False)
    attempts.end()


class _Display:
    """One bar for each run, the current activity above them. On a pipe instead of a terminal: a line for each event."""

    def __init__(self, console: Console, plan: Plan) -> None:
        self._console = console
        columns = (TextColumn("{task.fields[name]:<22}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._bars = Progress(*columns, TextColumn("{task.description}"), console=console)
        self._activity = self._bars.add_task("", name="", total=None, visible=console.is_terminal)
        self._tasks: list[TaskID] = [
            self._bars.add_task("", name=str(run), total=plan.steps, start=False) for run in plan.runs
        ]
        self.progress = conductor.Progress(self._stage, self._loss_checked, self._stepped)
        self._drawn = ExitStack()

    def __enter__(self) -> _Display:
        if self._console.is_terminal:
            self._drawn.enter_context(suspends(self._bars.live))
            self._drawn.enter_context(self._bars)
        return self

    def __exit__(self, *_: object) -> None:
        self._drawn.close()

    def _stage(self, text: str) -> None:
        if self._console.is_terminal:
            self._bars.update(self._activity, description=text)
        else:
            self._console.print(text, highlight=False)

    def _loss_checked(self, loss: float, probe: LossProbe) -> None:
        verdict = "as set" if probe.agrees_with(loss) else "NOT as set; the numbers below are of this network"
        self._console.print(f"network set to lose {loss:.1%}: {probe}: {verdict}", highlight=False)

    def _stepped(self, index: int, result: RunResults) -> None:
        text = (
            f"step {percentile(result.step_ms, 50):.0f} ms, of it communication {percentile(result.comm_ms, 50):.0f} ms"
        )
        self._bars.start_task(self._tasks[index])
        self._bars.update(self._tasks[index], completed=result.steps, description=text)
        if not self._console.is_terminal:
            self._console.print(f"{result.run}: step {result.steps}, {text}", highlight=False)


def _compared(plan: Plan, results: list[RunResults]) -> str:
    """What the replicas' parameters were to each other."""
    steps, apart = sum(result.steps for result in results), sum(result.steps_apart for result in results)
    if apart == 0:
        return f"the {plan.workers} replicas were bit-identical after each of the {steps} steps"
    return f"the replicas differed after {apart} of the {steps} steps: {plan.preset} may lose results on their way back"


def _table(plan: Plan, results: list[RunResults]) -> Table:
    title = (
        f"{plan.workers} workers, {plan.link.rate_mbit:g} Mbit/s for each, {results[0].steps} steps,"
        f" times in ms over {len(results[0].step_ms)} timed steps (slowest rank)"
    )
    table = Table(title=title, title_justify="left", caption_justify="left")
    tail, _ = tail_of(results[0].step_ms)
    for name in (
        "backend",
        "packets lost",
        "step p50",
        f"step {tail}",
        "comm p50",
        f"comm {tail}",
        "gradient lost",
        "val loss",
    ):
        table.add_column(name, justify="left" if name == "backend" else "right")
    for result in results:
        row = result.summary()
        both = ((result.step_ms, row["step_ms_p50"]), (result.comm_ms, row["comm_ms_p50"]))
        times = [f"{time:.0f}" for values, p50 in both for time in (p50, tail_of(values)[1])]
        shares = f"{row['bytes_lost_share']:.3%}", f"{row['val_loss']:.4f}"
        table.add_row(row["backend"], f"{row['loss']:.1%}", *times, *shares)
    return table
