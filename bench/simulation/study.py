"""The papers' large simulations, repeated with the product's own protocol code: one command for each figure.

    python bench/simulation/study.py scale            MLT figure 14, DLCP figure 14: hosts by transport
    python bench/simulation/study.py timeout          MLT figure 19, DLCP figure 16: the peers' least retransmission timeout
    python bench/simulation/study.py pfabric          the timeout that the papers do not tell
    python bench/simulation/study.py compression      MLT figure 2, DLCP figure 2: fewer bytes against the tail
    python bench/simulation/study.py jitter           workers that do not start together
    python bench/simulation/study.py oversubscription narrower cores
    python bench/simulation/study.py shards           who reduces what, and how much is joined
    python bench/simulation/study.py components       bounded loss, dropping, queueing, load balancing: one by one

gradwire runs in its own fabric, the peers in ns-3 (bench/ns3; without it they are left out). Virtual time: a busy machine changes
nothing but how long it takes. Results are kept in bench-out/simulation.jsonl and not run twice; `--fresh` forgets them. Exit status: 0
the targets are reached (only `scale` has some), 1 not, 2 it could not run, or nothing was there to be judged.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import click
import figures
from cases import OURS, PEERS, ROOT, Case, Store, run_all
from figures import MEAN, TAIL, Panel, Series, beside, name_of
from gradwire.bench.display import as_written
from gradwire.bench.machine import machine

REACHED, MISSED, NOT_RUN = 0, 1, 2
QUICK_HOSTS, QUICK_COMPRESSION = 24, 64
TIMEOUTS_US = (10_000.0, 5_000.0, 1_000.0, 500.0, 100.0, 25.0)
COMPRESSIONS = (1, 2, 4, 8, 16, 32)
SCALES = (36, 72, 108, 144)
MODELS = ("resnet50", "googlenet")
# MLT section 6.2.2, DLCP section 5.2.2: "up to" so much lower than each, mean and tail, per cent.
PAPER = {
    ("resnet50", "dctcp"): (43.1, 91.8),
    ("resnet50", "pias"): (44.8, 91.8),
    ("resnet50", "pfabric"): (35.5, 88.6),
    ("resnet50", "ndp"): (6.7, 10.3),
    ("googlenet", "dctcp"): (35.1, 91.7),
    ("googlenet", "pias"): (38.0, 91.9),
    ("googlenet", "pfabric"): (43.5, 91.7),
    ("googlenet", "ndp"): (7.7, 8.7),
}


class Target(NamedTuple):
    """What the papers report, beside ours."""

    text: str
    is_reached: bool


@dataclass(frozen=True)
class Study:
    """What every command has: the options, and the results so far."""

    quick: bool
    store: Store
    ns3: Path
    jobs: int
    out: Path
    json_file: Path | None
    transports: tuple[str, ...]
    models: tuple[str, ...]
    hosts: tuple[int, ...]
    compression: int
    runs: bool

    def case(self, transport: str, **settings: Any) -> Case:
        """A case, small if only its working is to be seen."""
        case = Case(transport=transport, **settings)
        if not self.quick:
            return case
        return replace(case, hosts=min(case.hosts, QUICK_HOSTS), compression=case.compression * QUICK_COMPRESSION)

    def chosen(self, *transports: str) -> list[str]:
        """Of these, what was asked for."""
        return [transport for transport in transports if transport in self.transports]

    def run(self, cases: Sequence[Case]) -> None:
        """Runs what is missing. Ends the program where that cannot be done."""
        if not self.runs:
            return
        try:
            run_all(cases, self.store, self.ns3, self.jobs, lambda text: click.echo(text, err=True))
        except (OSError, RuntimeError) as error:
            click.echo(f"error: {error}", err=True)
            sys.exit(NOT_RUN)

    def flows(self, case: Case, name: str) -> float | None:
        """A figure of all transfers of a case, if it was run."""
        result = self.store.get(case)
        return None if result is None else float(result["flows"][name])

    def series(self, label: str, transport: str, cases: dict[Any, Case], name: str, style: str = "-") -> Series:
        """A line over what was run."""
        points = [(place, value) for place, case in cases.items() if (value := self.flows(case, name)) is not None]
        return Series(label, figures.COLOURS[transport], [place for place, _ in points], [y for _, y in points], style)

    def conclude(
        self,
        name: str,
        text: str,
        panels: Sequence[Panel],
        cases: Sequence[Case],
        targets: Sequence[Target] | None = None,
    ) -> None:
        """Prints and writes everything; ends the program.

        Args:
            name: of the figure.
            text: what is printed.
            panels: what is drawn.
            cases: of which the results are written.
            targets: those that could be judged; None: the figure has none.
        """
        click.echo(text)
        commits = self.store.commits_of(cases)
        if commits:
            click.echo(f"results of commit {' to '.join(dict.fromkeys((commits[0], commits[-1])))}")
        self.out.mkdir(parents=True, exist_ok=True)
        drawn = [panel._replace(series=[one for one in panel.series if one.places]) for panel in panels]
        if any(panel.series for panel in drawn):
            figures.draw(drawn, self.out / f"simulation-{name}.png")
            click.echo(f"drawn: {self.out / f'simulation-{name}.png'}", err=True)
        rows = [
            {
                "case": json.loads(case.key),
                "commit": self.store.commits.get(case.key),
                "result": self.store.get(case),
            }
            for case in cases
        ]
        missed = [target.text for target in targets or () if not target.is_reached]
        if self.json_file is not None:
            self.json_file.parent.mkdir(parents=True, exist_ok=True)
            facts = {
                "benchmark": f"simulation-{name}",
                "machine": machine(),
                # What is kept may be of others than the machine's, which is that of whoever writes.
                "commits": {"oldest": commits[0], "newest": commits[-1]} if commits else {},
                "quick": self.quick,
                "missed": missed,
            }
            self.json_file.write_text(json.dumps({**facts, "rows": rows}, indent=1) + "\n")
        if self.quick:
            click.echo("quick run: no verdict")
            sys.exit(REACHED)
        for line in missed:
            click.echo(f"MISSED: {line}")
        if targets is not None and not targets:
            click.echo(
                "no target was judged: there are no results of a peer beside `auto` or `mlt` at the largest scale"
            )
            sys.exit(NOT_RUN)
        sys.exit(MISSED if missed else REACHED)


def command(function: Callable[[Study], None]) -> click.Command:
    """The options that all commands have."""
    path = click.Path(path_type=Path)
    every = (*PEERS, *OURS)

    @click.option(
        "--quick", is_flag=True, help=f"{QUICK_HOSTS} hosts, a {QUICK_COMPRESSION}th of the bytes: no verdict."
    )
    @click.option("--only", multiple=True, type=click.Choice(every), help="Only these transports; repeatable.")
    @click.option(
        "--model", "models", multiple=True, type=click.Choice(MODELS), default=MODELS, help="Of scale; repeatable."
    )
    @click.option("--hosts", multiple=True, type=click.IntRange(4), default=SCALES, help="Of scale; repeatable.")
    @click.option("--compression", type=click.IntRange(1), default=1, help="Of scale: so many times fewer bytes.")
    @click.option("--store", type=path, default=Path("bench-out/simulation.jsonl"), help="Where results are kept.")
    @click.option("--kept", is_flag=True, help="Runs nothing: tables and pictures of what is kept.")
    @click.option("--fresh", is_flag=True, help="Forgets what is kept.")
    @click.option(
        "--ns3", type=path, default=ROOT / "build-ns3/burst", help="The peers' program (bench/ns3/README.md)."
    )
    @click.option("--jobs", type=click.IntRange(1), default=1, help="Runs at once.")
    @click.option("--json", "json_file", type=path, help="Write the numbers here.")
    @click.option("--out", type=path, default=Path("bench-out"), help="Folder for pictures.")
    def run(
        *, quick: bool, only: tuple[str, ...], store: Path, fresh: bool, ns3: Path, jobs: int, json_file: Path | None,
        out: Path, models: tuple[str, ...], hosts: tuple[int, ...], compression: int,
        kept: bool,
    ) -> None:  # fmt: skip
        if fresh and not quick:
            store.unlink(missing_ok=True)
        store.parent.mkdir(parents=True, exist_ok=True)
        results = Store(None if quick else store)
        function(Study(quick, results, ns3, jobs, out, json_file, only or every, models, hosts, compression, not kept))

    settings = {"show_default": True}
    return click.command(name=function.__name__, help=function.__doc__, context_settings=settings)(run)


@click.group(help=as_written(__doc__))
def main() -> None:
    """Chooses the figure."""


@main.add_command
@command
def scale(study: Study) -> None:
    """Mean and tail completion times of ResNet50's and GoogleNet's traffic by hosts and transport (MLT figure 14)."""
    hosts = (QUICK_HOSTS,) if study.quick else study.hosts
    of_model = partial(study.case, compression=study.compression)
    transports = study.chosen(*PEERS, *OURS)
    of = {
        (model, transport): {count: of_model(transport, hosts=count, traffic=model) for count in hosts}
        for model in reversed(study.models)
        for transport in transports
    }
    cases = sorted((case for row in of.values() for case in row.values()), key=lambda case: case.hosts)
    study.run(cases)
    texts, panels, targets = [], [], []
    for model in study.models:
        base = {count: of_model("dctcp", hosts=count, traffic=model) for count in hosts}
        texts.append(
            f"{model}, {study.compression}x, {len(of_model('auto', traffic=model).buckets())} buckets, microseconds (to DCTCP)\n"
        )
        rows = []
        for count in hosts:
            for transport in transports:
                result = study.store.get(of[model, transport][count])
                if result is not None:
                    bases = [study.flows(base[count], name) for name in (MEAN, TAIL)]
                    rows.append(_scale_row(count, transport, result, bases))
        heads = ("hosts", "transport", "mean", "p99", "most", "step", "dropped in switches", "not counted")
        texts.append(figures.markdown(heads, rows) + "\n")
        for name, title in ((MEAN, "mean"), (TAIL, "p99")):
            lines = [study.series(name_of(each).strip("`"), each, of[model, each], name) for each in transports]
            panels.append(Panel(f"{model}: {title}", "completion time, us", "hosts", lines))
        targets += _scale_targets(study, model, of)
    study.conclude("scale", "\n".join(texts), panels, cases, targets)


def _scale_row(count: int, transport: str, result: dict[str, Any], bases: Sequence[float | None]) -> list[str]:
    flows = result["flows"]
    dropped = result["overflowed"] + result.get("dropped_selectively", 0)
    own = transport == "dctcp"
    return [
        str(count),
        name_of(transport),
        beside(flows[MEAN], None if own else bases[0]),
        beside(flows[TAIL], None if own else bases[1]),
        f"{flows['max_us']:.0f}",
        f"{result['step_us']:.0f}",
        f"{dropped}" + (f", {result['timeouts']} timeouts" if result.get("timeouts") else ""),
        f"{100 * result['lost_share']:.1f} %" if result["lost_share"] else "0",
    ]


def _scale_targets(study: Study, model: str, of: dict[Any, dict[int, Case]]) -> list[Target]:
    """What the papers report at most, at the largest scale, as far as both results are there."""
    targets = []
    for peer in study.chosen(*PEERS):
        for ours in study.chosen("auto", "mlt"):
            for name, percent in zip((MEAN, TAIL), PAPER[model, peer], strict=True):
                theirs, own = (
                    study.flows(max(of[model, each].values(), key=lambda one: one.hosts), name) for each in (peer, ours)
                )
                if theirs is not None and own is not None:
                    lower = 100 * (1 - own / theirs)
                    text = f"{model}, {ours}: {name} {lower:.1f} % below {peer}'s, in the paper {percent} %"
                    targets.append(Target(text, own <= theirs * (1 - percent / 100)))
    return targets


def _curves(
    study: Study, name: str, across: str, lines: dict[str, tuple[str, str, dict[Any, Case]]], heads: Sequence[str]
) -> None:
    """A table and two panels of lines over one quantity."""
    cases = [case for _, _, row in lines.values() for case in row.values()]
    # The short ones first, so that much is there early.
    study.run(sorted(cases, key=lambda case: -case.compression))
    rows = []
    for label, (_, _, row) in lines.items():
        for title, figure in (("mean", MEAN), ("p99", TAIL)):
            values = [study.flows(case, figure) for case in row.values()]
            if any(value is not None for value in values):
                rows.append([label, title, *("" if value is None else f"{value:.0f}" for value in values)])
    panels = [
        Panel(title, "completion time, us", across, [study.series(label.replace("`", ""), each, row, figure, style)
              for label, (each, style, row) in lines.items()])
        for title, figure in (("mean", MEAN), ("p99", TAIL))
    ]  # fmt: skip
    study.conclude(name, figures.markdown(("transport", "us", *heads), rows) + "\n", panels, cases)


def _compressed(study: Study, ratios: Sequence[int], transport: str, **more: Any) -> dict[int, Case]:
    return {n: study.case(transport, traffic="googlenet", compression=n, **more) for n in ratios}


@main.add_command
@command
def timeout(study: Study) -> None:
    """Tails of GoogleNet's traffic by compression and the least retransmission timeout of DCTCP (MLT figure 19); ours has none."""
    ratios = (2, 1) if study.quick else (32, 16, 8, 4)
    of = partial(_compressed, study, ratios)
    lines = {}
    styles = ("-", "--", ":", "-.", (0, (1, 1)), (0, (5, 1)))
    for peer in study.chosen("dctcp"):
        for style, least in zip(styles, TIMEOUTS_US, strict=True):
            lines[f"{name_of(peer)}, {least:g} us"] = (peer, style, of(peer, rto_min_us=least))
    lines |= {name_of(each): (each, "-", of(each)) for each in study.chosen("auto", "mlt")}
    _curves(study, "timeout", "compression", lines, [f"{n}x" for n in ratios])


@main.add_command
@command
def pfabric(study: Study) -> None:
    """GoogleNet's traffic, compressed 32 times, by pFabric's least retransmission timeout, which the papers do not tell; ours has none."""
    traffic = {"traffic": "googlenet", "compression": 32, "hosts": 72}
    of = lambda transport: {least: study.case(transport, rto_min_us=least, **traffic) for least in TIMEOUTS_US}  # noqa: E731
    lines = {name_of(each): (each, "-", of(each)) for each in study.chosen("pfabric", "auto", "mlt")}
    _curves(study, "pfabric", "least timeout, us", lines, [f"{least:g} us" for least in TIMEOUTS_US])


@main.add_command
@command
def compression(study: Study) -> None:
    """Mean and tail by how much gradients are compressed (MLT figure 2, DLCP figure 2): the tail of DCTCP stays."""
    ratios = (2, 1) if study.quick else COMPRESSIONS
    of = partial(_compressed, study, ratios)
    lines = {name_of(each): (each, "-", of(each)) for each in study.chosen("dctcp", "auto", "mlt", "dlcp")}
    _curves(study, "compression", "compression", lines, [f"{n}x" for n in ratios])


def _burst_by(study: Study, option: str, values: tuple[float, ...], label: str, unit: str) -> None:
    """The burst of 2.7 MB by the values of one option."""
    of = lambda transport: {value: study.case(transport, **{option: value}) for value in values}  # noqa: E731
    lines = {name_of(each): (each, "-", of(each)) for each in study.chosen("dctcp", "pfabric", "ndp", "auto", "mlt")}
    _curves(study, option.removesuffix("_us"), label, lines, [f"{value:g}{unit}" for value in values])


@main.add_command
@command
def jitter(study: Study) -> None:
    """The burst of 2.7 MB, of workers that start so many microseconds apart at most."""
    spreads = (0.0, 20.0, 50.0, 100.0, 200.0, 500.0)
    _burst_by(study, "jitter_us", spreads, "starts apart, us", " us")


@main.add_command
@command
def oversubscription(study: Study) -> None:
    """The burst of 2.7 MB, where a leaf's hosts have so many times what its uplinks carry."""
    _burst_by(study, "oversubscription", (1.0, 2.0, 4.0, 8.0), "oversubscription", "")


@main.add_command
@command
def shards(study: Study) -> None:
    """GoogleNet's traffic at 72 hosts, by who reduces it and what is called for at once."""
    hosts = QUICK_HOSTS if study.quick else 72
    rules = {
        "buckets of 25 MB, a quarter of the hosts": {},
        "a twelfth of the hosts": {"servers": hosts // 12},
        "half of the hosts": {"servers": hosts // 2},
        "all hosts, which are workers too": {"servers": 0},
        "buckets of 4 MB": {"bucket_bytes": 4 << 20},
        "each tensor alone": {"bucket_bytes": 0},
    }
    transports = study.chosen("dctcp", "auto", "mlt")
    of = lambda transport, rule: study.case(transport, hosts=hosts, traffic="googlenet", **rule)  # noqa: E731
    # The peers' program knows dedicated servers only.
    cases = {
        (label, each): of(each, rule)
        for label, rule in rules.items()
        for each in transports
        if each not in PEERS or rule.get("servers") != 0
    }
    study.run(list(cases.values()))
    rows = []
    for (label, each), case in cases.items():
        result = study.store.get(case)
        if result is not None:
            flows = result["flows"]
            rows.append([label, name_of(each), str(flows["count"]), *(f"{flows[name]:.0f}" for name in (MEAN, TAIL, "max_us")),
                         f"{result['step_us']:.0f}"])  # fmt: skip
    heads = ("rule", "transport", "transfers", "mean", "p99", "most", "step")
    study.conclude("shards", figures.markdown(heads, rows) + "\n", [], list(cases.values()))


@main.add_command
@command
def components(study: Study) -> None:
    """The parts of `mlt` one by one (MLT section 6.3, settings I and II): GoogleNet an eighth, 72 hosts, a core twice too narrow."""
    nothing = {"tolerates": False, "tells": False}
    loss, drop, queue, spread = {"tolerates": True}, {"tells": True}, {"classes": 4}, {"spread": "packet"}
    chains = {
        "nothing": nothing,
        "I: bounded loss": nothing | loss,
        "I: and selective dropping": nothing | loss | drop,
        "I: and queueing by layer": nothing | loss | drop | queue,
        "I: and load balancing, all": nothing | loss | drop | queue | spread,
        "II: load balancing": nothing | spread,
        "II: and dropping, queueing": nothing | spread | drop | queue,
    }
    of = lambda parts: study.case("mlt", hosts=72, traffic="googlenet", compression=8, oversubscription=2.0, **parts)  # noqa: E731
    cases = {label: of(parts) for label, parts in chains.items()}
    study.run(list(cases.values()))
    rows, base = [], study.flows(cases["nothing"], MEAN)
    for label, case in cases.items():
        result = study.store.get(case)
        if result is not None:
            flows = result["flows"]
            dropped = result["overflowed"] + result["dropped_selectively"]
            again = 100 * result["bytes_retransmitted"] / max(result["bytes_sent"], 1)
            important = result["important"]
            rows.append([label, beside(flows[MEAN], base), f"{flows[TAIL]:.0f}", f"{flows['max_us']:.0f}", f"{result['step_us']:.0f}",
                         str(dropped), f"{again:.1f} %", f"{100 * result['lost_share']:.2f} %",
                         f"{100 * important['lost'] / important['elems']:.2f} %" if important["elems"] else ""])  # fmt: skip
    heads = ("parts", "mean", "p99", "most", "step", "dropped", "sent again", "not counted", "of the important")
    text = figures.markdown(heads, rows) + "\n"
    study.conclude("components", text, [], list(cases.values()))


if __name__ == "__main__":
    main()
