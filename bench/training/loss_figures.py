"""The training study's table and picture, and its section of docs/benchmarks.md."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from loss_plan import METHODS, RANKS, REFERENCE, Cell, Condition
from loss_store import ROOT, Store
from loss_verdicts import Row, above_calm, lost_share, rows_of, select, verdicts
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(ROOT / "bench"))

TITLE = "validation loss above that of the same seed without loss, nats: mean and 95 % interval; accuracy"


def table_rows(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Heads and lines: for each task and condition what each method costs."""
    methods = [name for name in METHODS if select(rows, method=name)]
    lines = []
    for task in dict.fromkeys(row["task"] for row in rows):
        of_task = select(rows, task=task)
        for condition in sorted_conditions(of_task):
            of_it = select(of_task, kind=condition.kind, share=condition.share)
            cells = [_cell(rows, Cell(task, method, condition)) for method in methods]
            lines.append([task, str(condition), f"{lost_share(of_it):.2%}", *cells])
    return ["task", "asked", "lost", *methods], lines


def sorted_conditions(rows: Sequence[Row]) -> list[Condition]:
    """No loss first, then at random, then tails; small shares first."""
    order = ("none", "random", "tail")
    return sorted({Condition(row["kind"], row["share"]) for row in rows}, key=lambda c: (order.index(c.kind), c.share))


def _cell(rows: Sequence[Row], cell: Cell) -> str:
    """Differences; without loss the quality itself."""
    chosen = rows_of(rows, cell)
    if not chosen:
        return ""
    accuracy = statistics.fmean(row["accuracy"] for row in chosen)
    above = above_calm(rows, cell)
    if cell.condition.kind == "none" or above is None:
        return f"{statistics.fmean(row['loss'] for row in chosen):.4f}, {accuracy:.1%} [{len(chosen)}]"
    text = f"{above}, {accuracy:.1%} [{len(chosen)}]"
    return f"**{text}**" if above.is_worse else text


def markdown(rows: Sequence[Row]) -> str:
    """The table for docs/benchmarks.md."""
    heads, lines = table_rows(rows)
    ruler = ["---", "---", *("---:" for _ in heads[2:])]
    return "\n".join(f"| {' | '.join(line)} |" for line in [heads, ruler, *lines])


def show(console: Console, store: Store) -> None:
    """Prints the table."""
    heads, lines = table_rows(store.rows)
    table = Table(title=TITLE, title_justify="left")
    for at, head in enumerate(heads):
        table.add_column(head, justify="left" if at < 2 else "right")
    for line in lines:
        table.add_row(*(cell.replace("**", "") for cell in line))
    console.print(table)


def draw(store: Store, target: Path) -> None:
    """How much worse than without loss, a panel for each task and kind of loss."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = store.rows
    tasks, kinds = list(dict.fromkeys(row["task"] for row in rows)), ("random", "tail")
    figure, axes = pyplot.subplots(len(tasks), 2, figsize=(12, 4.2 * len(tasks)), squeeze=False, sharey="row")
    for across, task in zip(axes, tasks, strict=True):
        for axis, kind in zip(across, kinds, strict=True):
            _panel(axis, rows, task, kind)
    for axis in axes.flat:
        axis.set_xlim(0, 108 * max(row["share"] for row in rows))
    facts = store.head["machine"]
    seeds = sorted({len(rows_of(rows, Cell(r["task"], r["method"], Condition(r["kind"], r["share"])))) for r in rows})
    label = (
        f"{facts['commit']}, {RANKS} ranks, {seeds[0]} to {seeds[-1]} seeds, bars: 95 % intervals of paired differences"
    )
    figure.suptitle(f"Training under gradient loss ({label})", fontsize=10)
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="lower center", ncols=len(METHODS), fontsize=8)
    figure.tight_layout(rect=(0, 0.04, 1, 1))
    figure.savefig(target, dpi=110)
    pyplot.close(figure)


COLOURS = {
    "zero-fill / N": "#b03a2e", "mean": "#8a8f98", "feedback": "#0b7a75", "feedback / N": "#7fc5bf", "hadamard / N": "#e0a458",
    "hadamard": "#5b6ea6", "feedback + hadamard": "#4a2c6a",
}  # fmt: skip


def _panel(axis: Any, rows: Sequence[Row], task: str, kind: str) -> None:
    axis.axhline(0, color="0.8", linewidth=0.8)
    methods = [name for name in METHODS if select(rows, task=task, method=name, kind=kind)]
    for at, method in enumerate(methods):
        points = []
        for share in sorted({row["share"] for row in select(rows, task=task, method=method, kind=kind)}):
            above = above_calm(rows, Cell(task, method, Condition(kind, share)))
            if above is not None:
                points.append((share * 100 + 0.13 * (at - len(methods) / 2), above))
        dashes = "--" if method.endswith("/ N") else "-"
        axis.errorbar(
            [x for x, _ in points], [p.mean for _, p in points],
            yerr=[p.half if p.seeds > 1 else 0 for _, p in points],
            marker="o", markersize=3.5, capsize=2, linewidth=1.2, linestyle=dashes, color=COLOURS[method], label=method,
        )  # fmt: skip
    axis.set_title(
        f"{task}, {'random loss' if kind == 'random' else 'tail drop, the same parameters each step'}", fontsize=10
    )
    axis.set_xlabel("gradient bytes lost, %")
    axis.set_ylabel("validation loss above that without loss, nats")


def report(store: Store) -> None:
    """Writes the section of docs/benchmarks.md and its picture."""
    from report import replace_section

    draw(store, ROOT / "docs" / "img" / "loss-tolerance.png")
    facts, steps = store.head["machine"], store.settings["steps"]
    length = " and ".join(f"{steps[task]} steps of {task}" for task in dict.fromkeys(r["task"] for r in store.rows))
    measured = (
        f"Measured: commit {facts['commit']}, {facts['cores']} cores, load before the run {facts['load']:.2f} (which decides"
        f" nothing here), {RANKS} ranks, {length}. Each cell: {TITLE}, [number of seeds]. Without loss ({REFERENCE} and the"
        " others differ by rounding): the loss itself. Bold: worse than without loss, the interval lies above zero."
    )
    lines = "\n".join(f"- {verdict.line()}" for verdict in verdicts(store.rows))
    picture = "![loss tolerance of training](img/loss-tolerance.png)"
    document = ROOT / "docs" / "benchmarks.md"
    text = "\n\n".join([measured, markdown(store.rows), lines, picture])
    document.write_text(replace_section(document.read_text(), "loss_tolerance", text))
