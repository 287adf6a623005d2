"""`gradwire switch`: options, and where the configuration goes."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import click
from click.core import ParameterSource

from gradwire import _files
from gradwire._extras import require
from gradwire.cli.types import FiniteFloat, check_stdout
from gradwire.config import Config
from gradwire.errors import ConfigError
from gradwire.switch import SwitchError, SwitchPlan, arista, linux, make_plan, nvidia, sonic
from gradwire.switch.layers import read_layers
from gradwire.switch.plan import DEFAULT_STEP, MTU_BYTES_MAX, MTU_BYTES_MIN, QUEUES_MAX, Wish

_EPILOG = """
\b
Examples:
  gradwire switch --os sonic --rate 100000 --buffer 512 --port Ethernet0 --port Ethernet4 > gradwire.json
  gradwire switch --os tc --rate 1000 --buffer 256 --port eth1 --layers model.pt --out port.sh
  gradwire switch --os eos --rate 25000 --buffer 512 --thresholds optimal --layers model.pt --bucket-mb 0 --plot plan.png

\b
The job must set the code points that the switch reads: those of this command's environment (GRADWIRE_CLASSES, ...), which
the summary repeats. Nothing is changed by this command: it only writes. docs/switch.md explains each line.

\b
Exit status: 0 written, 2 wrong usage, numbers that do not fit together, or a file that cannot be written.
"""

# Of no system's ports does a name need others, and in a script or a configuration those would be commands.
_PORT = re.compile(r"[A-Za-z0-9_.,:/@][A-Za-z0-9_.,:/@-]*")
_KB = FiniteFloat(1, 1_000_000_000)
_DEFAULT_PORTS = {"tc": "eth0", "sonic": "Ethernet0", "onyx": "1/1", "cumulus": "swp1", "eos": "Ethernet1"}


def _ports(_ctx: click.Context, _option: click.Parameter, names: tuple[str, ...]) -> list[str]:
    """Each once."""
    for name in names:
        if not _PORT.fullmatch(name):
            raise click.BadParameter(f"{name!r} is no name of a port: those have letters, digits and _ . , : / @ -")
    return list(dict.fromkeys(names))


@click.command(name="switch", epilog=_EPILOG, context_settings={"show_default": True})
@click.option(
    "--os", "system", type=click.Choice(sorted(_DEFAULT_PORTS)), required=True, help="What runs on the switch."
)
@click.option("--rate", required=True, type=FiniteFloat(min=0, min_open=True), help="Mbit/s of a port.")
@click.option(
    "--buffer",
    "buffer_kb",
    required=True,
    type=_KB,
    help="KB (1000 bytes; of `gradwire lab` 1024) that a port may hold.",
)
@click.option(
    "--port", "ports", multiple=True, callback=_ports, help="Name of a port; repeatable.", show_default="the first one"
)
@click.option(
    "--queues",
    default=QUEUES_MAX,
    type=click.IntRange(2, QUEUES_MAX),
    help="Queues to use; of a switch, whose ports have 8, those with the highest numbers.",
)
@click.option("--classes", type=click.IntRange(1, QUEUES_MAX - 1), help="Classes of layers.",
              show_default="GRADWIRE_CLASSES, or as GRADWIRE_DSCP_CLASSES, or one for each queue but control's")  # fmt: skip
@click.option("--mtu", "mtu_bytes", default=Wish.mtu_bytes, type=click.IntRange(MTU_BYTES_MIN, MTU_BYTES_MAX),
              help="Longest IP packet, bytes: the thresholds leave room for such.")  # fmt: skip
@click.option("--layers", "layers_text", metavar="SIZES", help="Bytes of the model's layers, front to back: a list with commas, a JSON "
              "file, or a torch checkpoint.", show_default="all classes alike")  # fmt: skip
@click.option("--bucket-mb", type=FiniteFloat(min=0), show_default="DDP's own: 25, the first one 1",
              help="Of --layers: bucket_cap_mb of the job's DDP; 0: each layer goes by itself, as with FSDP.")  # fmt: skip
@click.option("--thresholds", "method", default="arithmetic", type=click.Choice(["arithmetic", "optimal"]),
              help="T (1, 1+d, 1+2d, ..), or the optimum of MLT's appendix B (needs scipy).")  # fmt: skip
@click.option(
    "--first",
    "first_kb",
    type=_KB,
    help="T, in KB (1000 bytes); of arithmetic thresholds.",
    show_default="from the buffer",
)
@click.option("--step", default=DEFAULT_STEP, type=FiniteFloat(min=0), help="d; of arithmetic thresholds.")
@click.option("--load", default=Wish.load, type=FiniteFloat(min=0, min_open=True, max=10),
              help="Arrivals as a share of the rate, for the expected losses.")  # fmt: skip
@click.option("--small", "small_share", default=Wish.small_share, type=FiniteFloat(0, 1, min_open=True, max_open=True),
              help="Share of unimportant packets.")  # fmt: skip
@click.option("--large-cost", default=Wish.large_cost, type=FiniteFloat(min=0, min_open=True),
              help="Cost of losing an important packet; an unimportant one costs 1.")  # fmt: skip
@click.option("--back-cost", default=Wish.back_cost, type=FiniteFloat(min=0, min_open=True),
              help="Cost of losing a packet of the last layers; one of the first costs 1.")  # fmt: skip
@click.option("--tx-queue", "queue_word", default="uc-tx-queue", type=click.Choice(["uc-tx-queue", "tx-queue"]),
              help="EOS: what the platform calls its queues.")  # fmt: skip
@click.option(
    "--plot", type=click.Path(dir_okay=False, path_type=Path), help="Draw thresholds and expected losses here."
)
@click.option("--json", "as_json", is_flag=True, help="Print the plan itself instead of a configuration.")
@click.option("--out", type=click.Path(dir_okay=False, path_type=Path), help="Write the configuration here.",
              show_default="standard output")  # fmt: skip
def command(
    *,
    system: str,
    rate: float,
    buffer_kb: float,
    ports: list[str],
    queues: int,
    classes: int | None,
    layers_text: str | None,
    first_kb: float | None,
    queue_word: str,
    plot: Path | None,
    as_json: bool,
    out: Path | None,
    **wishes: float | str | None,
) -> None:
    """Write the configuration that a switch needs to tell gradients apart.

    Strict-priority queues by code point, control first, then the layers from front to back, and in each data queue a
    threshold above which unimportant gradients are dropped (MLT 5.2, DLCP 4.2).
    """
    if out is None:
        check_stdout()
    _refuse_unused(system, wishes["method"], layers_text)
    try:
        config = Config.from_env(Config(classes=classes or _usual_classes(queues)))
        config = replace(config, classes=classes) if classes else config
        layers = read_layers(layers_text) if layers_text else []
        wish = Wish(first_bytes=first_kb and round(first_kb * 1000), **wishes)  # type: ignore[arg-type]
        plan = make_plan(rate, round(buffer_kb * 1000), config, queues=queues, layers=layers, wish=wish)
        _files.check_apart(out=out, plot=plot)
        if plot is not None:
            require("matplotlib", "switch", "--plot")
            from gradwire.switch import picture

            picture.draw(plan, plot)
        named = ports or [_DEFAULT_PORTS[system]]
        text = json.dumps(plan.described(), indent=2) + "\n" if as_json else _written(system, plan, named, queue_word)
        if out is not None:
            _files.replace(out, text)
    except (SwitchError, ConfigError, ImportError, OSError, ValueError) as error:
        raise click.UsageError(str(error)) from error
    if out is None:
        click.echo(text, nl=False)
    _summarize(plan)


def _refuse_unused(system: str, method: float | str | None, layers_text: str | None) -> None:
    """Options that would change nothing: who gives them believes that they do."""
    context = click.get_current_context()
    arithmetic = "is of --thresholds arithmetic: leave it out, or --thresholds optimal"
    for name, option, is_used, text in (
        ("first_kb", "--first", method == "arithmetic", arithmetic),
        ("step", "--step", method == "arithmetic", arithmetic),
        ("bucket_mb", "--bucket-mb", layers_text, "is of the layers of --layers: give those too, or leave it out"),
        ("queue_word", "--tx-queue", system == "eos", "is of --os eos: leave it out"),
    ):
        if not is_used and context.get_parameter_source(name) == ParameterSource.COMMANDLINE:
            raise click.UsageError(f"{option} {text}")


def _usual_classes(queues: int) -> int:
    """As many as the job's list has code points; without a list one for each queue but control's."""
    listed = os.environ.get("GRADWIRE_DSCP_CLASSES", "").strip()
    return queues - 1 if listed in ("", "auto", "off") else listed.count(",") + 1


def _written(system: str, plan: SwitchPlan, ports: list[str], queue_word: str) -> str:
    writers: dict[str, Callable[[], str]] = {
        "tc": lambda: linux.script(plan, ports),
        "sonic": lambda: sonic.document(plan, ports),
        "onyx": lambda: "\n".join(nvidia.onyx(plan, ports)) + "\n",
        "cumulus": lambda: "\n".join(nvidia.cumulus(plan, ports)) + "\n",
        "eos": lambda: "\n".join(arista.commands(plan, ports, queue_word)) + "\n",
    }
    return writers[system]()


def _summarize(plan: SwitchPlan) -> None:
    """To standard error, so that the configuration can be piped."""
    click.echo(
        f"{'queue':<9} {'DSCP':<11} {'layers':>7} {'S, KB':>8} {'L, KB':>8} {'S, ms':>8}   expected loss, small / large",
        err=True,
    )
    for queue in plan.queues:
        points = ",".join(map(str, queue.code_points)) or "others"
        if queue.threshold_bytes is None:
            click.echo(f"{queue.name:<9} {points:<11} {'':>7} {'':>8} {queue.limit_bytes / 1000:>8.1f}", err=True)
            continue
        click.echo(
            f"{queue.name:<9} {points:<11} {queue.share:>7.1%} {queue.threshold_bytes / 1000:>8.1f} {queue.limit_bytes / 1000:>8.1f}"
            f" {plan.wait_ms(queue.threshold_bytes):>8.3f}   {queue.small_loss:.2e} / {queue.large_loss:.2e}",
            err=True,
        )
    click.echo("for the job: " + " ".join(f"{name}={value}" for name, value in plan.environment.items()), err=True)
