"""What loss does to the sum of what is applied, by divisor and feedback: the tables of docs/error-feedback.md. A few seconds.

    python bench/training/feedback_variance.py                   # the owner of an element rotates, as in an all-reduce
    python bench/training/feedback_variance.py --fixed-owner     # and as in a reduce-scatter of shards

A model of the arithmetic alone, without a network: N ranks, gradients of mean 1 that scatter between ranks, one owner for each
element. Prints the mean of what is applied and the variance of ten steps' sum relative to that without loss.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

import click
import numpy as np
from gradwire.bench.display import as_written
from rich.console import Console
from rich.table import Table

SCATTER = 3.0
WINDOW = 10


@dataclass(frozen=True)
class Rule:
    """What a mean divides by (`world` or the contributions), and what of a lost value is fed back.

    Attributes:
        less_the_mean: its sender owes the value less the mean that stood in for it, which it has to be told.
        owner_pays: its sender owes all of it, and the owner of the element the means that stood in.
        most: so where more than half of the ranks contribute; where fewer do, as if divided by `world`.
    """

    name: str
    divides_by_world: bool
    feeds_back: bool
    less_the_mean: bool = False
    owner_pays: bool = False
    most: bool = False


RULES = (
    Rule("no feedback, world", divides_by_world=True, feeds_back=False),
    Rule("no feedback, contributions", divides_by_world=False, feeds_back=False),
    Rule("whole feedback, contributions", divides_by_world=False, feeds_back=True),
    Rule("feedback, world", divides_by_world=True, feeds_back=True),
    Rule("feedback, contributions", divides_by_world=False, feeds_back=True, less_the_mean=True),
    Rule("owner pays", divides_by_world=False, feeds_back=True, owner_pays=True),
    Rule("owner pays where most contribute", divides_by_world=False, feeds_back=True, owner_pays=True, most=True),
)


def measure(
    rule: Rule, ranks: int, loss: float, *, fixed_owner: bool = False, steps: int = 400, elems: int = 4000
) -> tuple[float, float]:
    """Mean of what is applied, and the variance of `WINDOW` steps' sum relative to that without loss."""
    chance = np.random.default_rng(0)
    owed = np.zeros((ranks, elems))
    windows = np.zeros((steps // WINDOW, elems))
    for step in range(steps):
        values = 1 + SCATTER * chance.standard_normal((ranks, elems)) + owed
        counted = chance.random((ranks, elems)) >= loss
        owner = 0 if fixed_owner else step % ranks
        counted[owner] = True
        contributions = counted.sum(0)
        by_world = (2 * contributions <= ranks) if rule.most else np.full(elems, rule.divides_by_world)
        applied = (values * counted).sum(0) / np.where(by_world, ranks, contributions)
        windows[step // WINDOW] += applied
        if rule.feeds_back:
            owed = np.where(counted, 0.0, values - (applied if rule.less_the_mean else 0.0))
        if rule.owner_pays:
            owed[owner] = np.where(by_world, 0.0, (contributions - ranks) * applied)
    settled = windows[len(windows) // 4 :]
    return float(windows.mean() / WINDOW), float(settled.var() / (WINDOW * SCATTER**2 / ranks))


@click.command(help=as_written(__doc__), context_settings={"show_default": True})
@click.option("--ranks", default=4, type=click.IntRange(2, 64))
@click.option("--fixed-owner", is_flag=True, help="Each element has the same owner in every step.")
@click.option("--loss", "losses", multiple=True, type=click.FloatRange(0, 1), default=(0.05, 0.1, 0.2, 0.5, 1.0))
def main(ranks: int, losses: tuple[float, ...], *, fixed_owner: bool) -> None:
    """Prints the table."""
    np.seterr(over="ignore", invalid="ignore")  # one rule grows without bound
    table = Table(title=f"mean of what is applied, variance relative to no loss; {ranks} ranks", title_justify="left")
    for head in ("lost", *(rule.name for rule in RULES)):
        table.add_column(head)
    for loss in losses:
        found = [measure(rule, ranks, loss, fixed_owner=fixed_owner) for rule in RULES]
        table.add_row(f"{loss:.0%}", *(f"{mean:.3g}, {variance:.3g}" for mean, variance in found))
    Console(width=180).print(table)


if __name__ == "__main__":
    sys.exit(main())
