"""`gradwire simulate`: a model's step on a cluster that is not there."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click

from gradwire import _files
from gradwire._extras import require
from gradwire.cli.types import FiniteFloat, OwnFile, check_stdout
from gradwire.errors import MissingExtraError
from gradwire.simulation import memory
from gradwire.simulation import plan as plans
from gradwire.simulation.picture import check_format, draw
from gradwire.simulation.result import lines, simulate
from gradwire.simulation.tensors import Tensor, read_tensors

_STDOUT = "-"
_BYTES_MAX = 10**13  # more than any model has
_SPINES_MAX = 4000  # as workers: each spine more than hosts would carry nothing
_FILE = click.Path(dir_okay=False, path_type=Path)
_PRESETS = click.Choice(["auto", "mlt", "dlcp", "ltp", "ultima", "reliable"])
_EPILOG = """
\b
Examples:
  gradwire simulate checkpoint.pt --workers 27 --servers 9            a torch checkpoint; also .safetensors, .json, .txt
  gradwire simulate --bytes 2700000                                    the papers' burst: one tensor, 144 hosts
  gradwire simulate sizes.txt --preset auto --preset mlt --picture step.png
  gradwire simulate model.pt --servers 0 --workers 16 --algorithm transpose --oversubscription 4 --background 0.3

\b
It runs the real protocol over a modelled leaf-spine network in virtual time, on one core: some ten to forty seconds for each GB that
the cluster sends in a step. Payload is not carried. docs/simulation.md says what is modelled.

\b
Exit status: 0 done, 1 the simulated job failed, 2 wrong usage or a file that cannot be read or written.
"""


# fmt: off
@click.command(name="simulate", epilog=_EPILOG, context_settings={"show_default": True})
@click.argument("model", required=False, type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--bytes", "bytes_", type=click.IntRange(4, _BYTES_MAX), help="One tensor of so many bytes instead of a model.")
@click.option("--preset", "presets", multiple=True, type=_PRESETS, default=("auto",), help="Repeatable.")
@click.option("--algorithm", type=click.Choice(plans.ALGORITHMS), default="parameter_server", help="Schedule of the all-reduce.")
@click.option("--workers", type=click.IntRange(2, 4000), default=108, help="Ranks that train, one on each host.")
@click.option("--servers", type=click.IntRange(0, 4000), show_default="36; 0 with another schedule",
              help="Hosts that are parameter servers; 0: the workers' own.")
@click.option("--hosts-per-leaf", type=click.IntRange(1), default=16)
@click.option("--spines", type=click.IntRange(1, _SPINES_MAX), default=4)
@click.option("--rate", "host_gbit", type=FiniteFloat(0.01), default=100.0, help="Gbit/s of a host's link.")
@click.option("--delay-us", "link_delay_us", type=FiniteFloat(0), default=2.9, help="Of each link, one way.")
@click.option("--oversubscription", type=FiniteFloat(0.1), default=1.0,
              help="A leaf's hosts have so many times what its uplinks carry.")
@click.option("--spread", type=click.Choice(plans.SPREADS), default="flow", help="How leaves choose a spine: by hash or by chance.")
@click.option("--buffer", "buffer_kb", type=click.IntRange(4), default=512, help="KB that a switch holds for each port.")
@click.option("--background", type=FiniteFloat(0, 0.95), default=0.0, help="Share of each host's link that others take.")
@click.option("--jitter-us", type=FiniteFloat(0), default=0.0, help="Workers begin a step so much apart at most.")
@click.option("--backward-ms", type=FiniteFloat(0), default=0.0, help="Over which buckets become ready.")
@click.option("--bucket-mb", type=FiniteFloat(0.001, 1_000_000), default=25.0, help="As DDP's bucket_cap_mb.")
@click.option("--classes", type=click.IntRange(1, 6), default=1, help="Traffic classes of layers.")
@click.option("--paths", type=click.IntRange(1, 16), default=1, help="Between two hosts.")
@click.option("--controller", type=click.Choice(["bottleneck", "timely", "receiving_rate"]), show_default="the preset's")
@click.option("--warm-up", type=click.IntRange(0), default=1, help="Steps before those that count.")
@click.option("--steps", type=click.IntRange(1), default=1, help="That count.")
@click.option("--seed", type=click.IntRange(0, 2**64 - 1), default=1, help="Equal seeds give equal runs.")
@click.option("--json", "json_path", type=_FILE, help="Writes the results as a JSON list; - is standard output.")
@click.option("--picture", type=OwnFile(),
              help="Writes a picture of times and losses, in the format of its suffix (PNG without one); needs matplotlib.")
def command(model: Path | None, **options: Any) -> None:
    """What a step of MODEL's gradients takes on a cluster, and what it loses: completion times, step time, bytes by layer."""
    json_path, picture = options.pop("json_path"), options.pop("picture")
    presets, bucket_bytes = options.pop("presets"), int(options.pop("bucket_mb") * plans.MEGABYTE)
    servers = _servers(options.pop("servers"), options["algorithm"])
    _check(json_path, picture)
    tensors, backward_us = _tensors(model, options.pop("bytes_")), options.pop("backward_ms") * 1e3
    cluster = {"buffer_bytes": options.pop("buffer_kb") << 10, "servers": servers, **options}
    buckets = plans.fill_buckets(tensors, bucket_bytes, classes=cluster["classes"], backward_us=backward_us)
    each = [plans.ClusterPlan(preset=preset, buckets=buckets, **cluster) for preset in presets]
    _check_memory(each[0])  # which does not depend on the preset
    results = []
    for plan in each:
        results.append(_run(plan))
        if str(json_path) != _STDOUT:
            click.echo("\n".join(lines(results[-1])) + "\n")
    _write(results, json_path, picture)


def _servers(asked: int | None, algorithm: str) -> int:
    """Hosts that serve; only one schedule has any."""
    if algorithm == "parameter_server":
        return plans.ClusterPlan.servers if asked is None else asked
    if asked:
        raise click.UsageError(f"--servers {asked}: the schedule {algorithm} has no servers")
    return 0


def _check(json_path: Path | None, picture: Path | None) -> None:
    """Before the simulation, which takes minutes."""
    is_file = json_path is not None and str(json_path) != _STDOUT
    if not is_file:
        check_stdout()
    try:
        _files.check_apart(json=json_path if is_file else None, picture=picture)
        if picture is not None:
            require("matplotlib", "bench", "--picture")
            _files.check(picture)
            check_format(picture)
        if json_path is not None and is_file:
            _files.check(json_path)
    except (MissingExtraError, OSError, ValueError) as error:
        raise click.UsageError(str(error)) from error


def _tensors(model: Path | None, bytes_: int | None) -> list[Tensor]:
    if (model is None) == (bytes_ is None):
        raise click.UsageError("name a model's file or --bytes, one of the two")
    if model is None:
        return [Tensor("all", (bytes_ or 0) // plans.FLOAT_BYTES)]
    try:
        return read_tensors(model)
    except (OSError, ValueError, ImportError) as error:
        raise click.UsageError(str(error)) from error


def _check_memory(plan: plans.ClusterPlan) -> None:
    try:
        memory.check(plan)
    except ValueError as error:
        raise click.UsageError(str(error)) from error


def _run(plan: plans.ClusterPlan) -> dict[str, Any]:
    try:
        return simulate(plan)
    except ValueError as error:
        raise click.UsageError(str(error)) from error
    except RuntimeError as error:
        click.echo(f"the simulated job failed: {error}", err=True)
        sys.exit(1)


def _write(results: list[dict[str, Any]], json_path: Path | None, picture: Path | None) -> None:
    """Both, though one cannot be written."""
    attempts = _files.Attempts()
    text = json.dumps(results, indent=1) + "\n"
    if str(json_path) == _STDOUT:
        click.echo(text, nl=False)
    elif json_path is not None:
        with attempts.one():
            _files.replace(json_path, text)
    try:
        if picture is not None:
            with attempts.one():
                draw(results, picture)
        attempts.end()
    except (OSError, ImportError) as error:
        raise click.UsageError(str(error)) from error
