"""`gradwire doctor`: what would slow a job down or stop it, before it starts."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import click

from gradwire.cli.types import FiniteFloat, check_stdout
from gradwire.config import Config
from gradwire.doctor.book import Report
from gradwire.doctor.check import Options, check_all, check_host
from gradwire.doctor.findings import NOTE
from gradwire.doctor.meeting import Place, open_meeting
from gradwire.doctor.pairs import rate_most
from gradwire.doctor.parting import Terminated
from gradwire.errors import ConfigError, GradwireError

EXIT_SUFFERS, EXIT_NO_CHECK, EXIT_TERMINATED = 1, 3, 143
_ADDRESS_COLUMNS = 18  # of IPv4, and room

_EPILOG = """
\b
Examples:
  gradwire doctor                                                    this host
  torchrun --nnodes 4 --nproc-per-node 1 ... --no-python gradwire doctor    all ranks, as the job would start
  gradwire doctor --rank 1 --world-size 2 --store file:///shared/check      without torch, over a folder that all see
  GRADWIRE_PRESET=mlt gradwire doctor --json                          with the job's own settings

\b
Start it as the job would be started, with the job's GRADWIRE_* variables: it uses the same ports and interfaces, and needs a few
seconds for each rank. It sends a few MB to each peer and changes nothing. docs/doctor.md explains each finding.

\b
Exit status: 0 nothing found that training would suffer from, 1 something was, 2 wrong usage or output that cannot be
written, 3 the ranks did not meet, 143 terminated (rank 0 prints what was measured until then), 130 interrupted.
"""


@click.command(name="doctor", epilog=_EPILOG, context_settings={"show_default": True})
@click.option(
    "--rank", type=click.IntRange(0), envvar="RANK", default=0, help="Of this process.", show_default="$RANK, or 0"
)
@click.option(
    "--world-size", type=click.IntRange(1), envvar="WORLD_SIZE", default=1, help="Ranks in all; 1: this host alone.",
    show_default="$WORLD_SIZE, or 1",
)  # fmt: skip
@click.option(
    "--store",
    default="env://",
    help="Where ranks meet: env:// (MASTER_ADDR, MASTER_PORT), tcp://host:port, file:///folder.",
)
@click.option(
    "--packets", default=Options.packets, type=click.IntRange(100, 1_000_000), help="Of each pair's loss test."
)
@click.option("--loss-max", default=100 * Options.loss_max, type=FiniteFloat(0, 100),
              help="Percent lost beyond which training would suffer.")  # fmt: skip
@click.option(
    "--wait",
    default=120.0,
    type=FiniteFloat(1, 3600),
    help="Seconds to wait for the others at each step.",
)
@click.option("--json", "as_json", is_flag=True, help="Print everything as JSON.")
def command(
    *, rank: int, world_size: int, store: str, packets: int, loss_max: float, wait: float, as_json: bool
) -> None:
    """Check the network and the hosts of a training job, and say what is wrong and how to fix it.

    With several ranks, rank 0 prints what all have found, and all have the same exit status.
    """
    if rank >= world_size:
        raise click.UsageError(f"rank {rank} of {world_size}: ranks are 0 to {world_size - 1}")
    if rank == 0:
        check_stdout()

    sigterm = _Sigterm(is_heard=rank == 0)
    screen = _Screen(sigterm, as_json=as_json)

    try:
        config = Config.from_env()
        if world_size == 1:
            report = check_host(config)
            screen.show(report)
            is_suffering = report.suffers
        else:
            # Always, as everything else is said to a terminal alone: in a log this wait looks like a program that hangs.
            click.echo(f"gradwire doctor: rank {rank} of {world_size} waits up to {wait:g} s for the others", err=True)
            with sigterm:
                place = Place(open_meeting(store, rank, world_size, wait), rank, world_size, wait)
                is_suffering = check_all(config, place, Options(packets, loss_max / 100), _tell, screen.show)
        status = EXIT_SUFFERS if is_suffering else 0
    except ConfigError as error:
        raise click.UsageError(str(error)) from error
    except Terminated as error:
        click.echo(f"gradwire doctor: {error}", err=True)
        status = EXIT_TERMINATED
    except (GradwireError, OSError) as error:
        click.echo(f"gradwire doctor: rank {rank}: {error}", err=True)
        status = EXIT_NO_CHECK
    if screen.error is not None:
        raise screen.error
    sys.exit(status)


class _Sigterm:
    """Within it SIGTERM raises Terminated, once, where it is heard."""

    def __init__(self, *, is_heard: bool) -> None:
        self._is_heard, self._has_come, self._is_held = is_heard, False, False

    def __enter__(self) -> _Sigterm:
        self._before = signal.getsignal(signal.SIGTERM)
        self._is_heard &= self._before not in (None, signal.SIG_IGN)
        if self._is_heard:
            signal.signal(signal.SIGTERM, self._come)
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_heard:
            signal.signal(signal.SIGTERM, self._before)

    def _come(self, *_: object) -> None:
        is_first, self._has_come = not self._has_come, True
        if is_first and not self._is_held:
            raise Terminated

    @contextmanager
    def held(self) -> Iterator[None]:
        """Raises it only at the end of this."""
        had_come, self._is_held = self._has_come, True
        try:
            yield
        finally:
            self._is_held = False
        if self._has_come and not had_come:
            raise Terminated


class _Screen:
    """Where the report is shown. `error`: why it was not."""

    def __init__(self, sigterm: _Sigterm, *, as_json: bool) -> None:
        self._sigterm, self._as_json, self._has_shown = sigterm, as_json, False
        self.error: OSError | None = None

    def show(self, report: Report) -> None:
        """All of the first report, and no other. Where it cannot be written the other ranks end all the same."""
        with self._sigterm.held():
            if self._has_shown:
                return
            self._has_shown = True
            try:
                click.echo(json.dumps(report.described(), indent=2) if self._as_json else "\n".join(_lines(report)))
            except OSError as error:
                self.error = error


def _tell(text: str) -> None:
    if sys.stderr.isatty():
        click.echo(f"gradwire doctor: {text}", err=True)


def _cores(processor: dict[str, Any]) -> str:
    limit = processor["limit"]
    return f"{processor['cores']} cores" + (f" limited to the time of {limit['cores']:g}" if limit else "")


def _rate(pair: dict[str, Any]) -> str:
    rate, most = pair["rate_mbit"], rate_most(pair["ip_bytes"])
    return "-" if rate is None else f"{'> ' if rate >= most else ''}{rate:.0f}"


def _table(pairs: list[dict[str, Any]]) -> list[str]:
    if not pairs:
        return []
    width = max(_ADDRESS_COLUMNS, *(len(pair["address"]) for pair in pairs))
    lines = [
        "",
        f"from   to  {'address':<{width}}  RTT ms: least  median   IP bytes      lost  reordered  paths  Mbit/s",
    ]
    for pair in pairs:
        if not pair["address"]:
            lines.append(f"{pair['rank']:>4} {pair['peer']:>4}  no answer")
            continue
        least, median = pair["rtt_ms"]
        lines.append(
            f"{pair['rank']:>4} {pair['peer']:>4}  {pair['address']:<{width}} {least:>14.3f} {median:>7.3f} {pair['ip_bytes']:>10}"
            f" {pair['lost'] / max(1, pair['sent']):>9.3%} {pair['reordered']:>10} {pair['paths']:>6}"
            f" {_rate(pair):>7}"
        )
    return lines


def _lines(report: Report) -> list[str]:
    lines = []
    for rank, host in enumerate(report.hosts):
        features = host["features"] or {}
        offloads = ", ".join(name.upper() for name in ("gso", "gro") if features.get(name)) or "no offload"
        ports = ", ".join(map(str, host["threads"]["ports"]))
        addresses = " ".join(features.get("addresses", ["no address"])) or "loopback alone"
        clock = {True: "synchronised", False: "not synchronised", None: "unknown"}[host["clock"].get("synchronised")]
        lines.append(
            f"rank {rank}: {host['host']}, Linux {host['kernel']}, {_cores(host['processor'])}, UDP port {ports},"
            f" {offloads}, {addresses}, clock {host['clock'].get('source')} ({clock})"
        )
    lines += _table(report.pairs)
    lines.append("")
    for finding in report.findings:
        lines.append(f"{finding.level}: {finding.where()}: {finding.check}: {finding.text}")
        if finding.fix and finding.level != NOTE:
            lines.append(f"    fix: {finding.fix}")
    lines.append("")
    nothing = "nothing found that training would suffer from"
    if report.missing:
        lines.append(f"the check did not end, so this is not all: {report.missing}")
        nothing = f"{nothing} so far"
    lines.append("training would suffer" if report.suffers else nothing)
    return lines
