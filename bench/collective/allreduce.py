"""All-reduce beside gloo over TCP, by the names of variants: a short form of `gradwire bench`, which does the work.

    python bench/collective/allreduce.py                                    # 4 ranks, 100 Mbit/s, this kernel as the switch
    python bench/collective/allreduce.py --network uml --size 1             # 1 ms round trip, user-mode-linux switch
    python bench/collective/allreduce.py --network loopback --ranks 2       # bus bandwidth and latency

`gradwire bench --help` has more of everything, and docs/bench.md says what the numbers are. Exit status: 0 done, 1 a result was
wrong, 2 it could not run.
"""

from __future__ import annotations

import sys
from pathlib import Path

import click
from click.core import ParameterSource
from gradwire.bench import plan, run
from gradwire.bench.display import as_written
from gradwire.bench.plan import MB, Condition, NetworkPlan, Plan
from gradwire.lab import LabError

VARIANTS = {
    **{f"gloo-{tcp}": plan.gloo(tcp) for tcp in plan.TCP},
    **{f"gradwire-{preset}": plan.gradwire(preset) for preset in (*plan.PRESETS, plan.EXACT)},
    "gradwire-rotated": plan.gradwire("auto", hadamard="on"),
}
SWITCH_RTT_MS = 0.4  # what the user-mode-linux switch adds by itself


# fmt: off
@click.command(help=as_written(__doc__), context_settings={"show_default": True})
@click.option("--network", default="kernel", type=click.Choice(["kernel", "uml", "loopback"]), help="The switch.")
@click.option("--ranks", default=4, type=click.IntRange(2, 8))
@click.option("--rate", default=100.0, help="Mbit/s of each host's link.")
@click.option("--rtt", default=None, type=float, show_default="uml: 0.6, else 0",
              help="Added round trip in ms; the user-mode-linux switch adds 0.4 besides.")
@click.option("--buffer", default=256, help="KB that the switch holds for each port.")
@click.option("--variant", "names", multiple=True, type=click.Choice(list(VARIANTS)),
              default=("gloo-cubic", "gloo-bbr", "gradwire-auto"), help="Repeatable.")
@click.option("--size", "sizes", multiple=True, type=float, default=(1.0,), help="MB; repeatable.")
@click.option("--loss", "losses", multiple=True, type=click.FloatRange(0, 0.5), default=(0.0, 0.01))
@click.option("--samples", default=100, type=click.IntRange(1), help="Of each variant, size and loss.")
@click.option("--block", default=10, type=click.IntRange(1), help="Samples of one variant in a row.")
@click.option("--minutes", default=9.0, help="Stop early, evenly, after about so long.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write the numbers here.")
@click.option("--out", default=Path("bench-out"), type=click.Path(path_type=Path), help="Folder for report and logs.")
def main(
    *, network: str, ranks: int, rate: float, rtt: float | None, buffer: int, names: tuple[str, ...],
    sizes: tuple[float, ...], losses: tuple[float, ...], samples: int, block: int, minutes: float,
    json_file: Path | None, out: Path,
) -> None:
    """Reads the options and runs the benchmark."""
    source = click.get_current_context().get_parameter_source("names")
    added_ms = rtt if rtt is not None else (1.0 - SWITCH_RTT_MS if network == "uml" else 0.0)
    conditions = [Condition()] if network == "loopback" else [Condition(loss, added_ms) for loss in losses]
    try:
        chosen = Plan(
            NetworkPlan(network, rate, buffer * 1024),
            tuple(VARIANTS[name] for name in names),
            ranks=(ranks,),
            sizes=tuple(max(4, int(size * MB) // 4 * 4) for size in sizes),
            conditions=tuple(conditions),
            samples=samples,
            block=min(block, samples),
            minutes=minutes,
            is_tcp_chosen=source != ParameterSource.DEFAULT,
        )
        sys.exit(run.run_collectives(chosen, run.Outcome(out, json_file)))
    except LabError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(run.NOT_RUN)


# fmt: on
if __name__ == "__main__":
    main()
