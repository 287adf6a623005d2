"""`gradwire monitor`: a running job, seen from a terminal."""

from __future__ import annotations

import errno
import json
import sys
import time

import click
from rich.console import Console
from rich.live import Live

from gradwire.cli.suspending import suspends
from gradwire.cli.types import FiniteFloat, check_stdout, of_other_hosts
from gradwire.errors import GradwireError
from gradwire.observe.client import EXIT_NOTHING, Sources
from gradwire.observe.view import Board, screen

_WIDTH_OF_A_FILE = 180  # columns; a terminal says its own

_EPILOG = """
\b
Examples:
  gradwire monitor                          all jobs of this user on this host
  gradwire monitor 10.0.0.1:29400           the job that met there; the UDP port or process id of one rank will do as well
  gradwire monitor --host node1 --host node2    with the ranks of other hosts, over ssh
  gradwire monitor --json | jq .rates       one line of JSON for each rank and second: gradwire.stats() and rates

\b
It reads the status socket of each rank, which only the own user can open (docs/observability.md). Leave it with Ctrl-C.

\b
Exit status: 0 interrupted, or the job ended; 2 wrong usage, or output that cannot be written; 3 no job was found, or another
host could not be reached and nobody answered.
"""


@click.command(name="monitor", epilog=_EPILOG, context_settings={"show_default": True})
@click.argument("job", required=False)
@of_other_hosts
@click.option("--every", default=1.0, type=FiniteFloat(0.1, 3600), help="Seconds between two looks.")
@click.option("--seconds", type=FiniteFloat(0), help="End after so long.")
@click.option("--json", "as_json", is_flag=True, help="Stream JSON lines instead of the screen.")
def command(
    *, job: str | None, hosts: tuple[str, ...], ssh: str, every: float, seconds: float | None, as_json: bool
) -> None:
    """Watch a running job: rates, round trips, loss, what ended the waits, and who is waited for.

    JOB is the name of the job or the address where its ranks met, or the beginning of it; or the UDP port or the process id of
    one rank.
    """
    check_stdout()
    sources = Sources(every)
    try:
        sources.watch_sockets(job)
        for host in hosts:
            sources.watch_host(host, job, ssh)
        if not (hosts or sources.is_any):  # a host may have failed already, which is said below
            click.echo(
                f"gradwire monitor: no running job{f' {job}' if job else ''} of this user on this host", err=True
            )
            sys.exit(EXIT_NOTHING)
        end = None if seconds is None else time.monotonic() + seconds
        if as_json:
            _stream(sources, job, end)
        else:
            _show(sources, job, end)
        if sources.failures and not sources.has_answers:
            sys.exit(EXIT_NOTHING)
    except (GradwireError, OSError) as error:
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:  # of a screen that is a file
            raise click.UsageError(f"the output cannot be written: {error.strerror}") from error
        click.echo(f"gradwire monitor: {error}", err=True)
        sys.exit(EXIT_NOTHING)
    except KeyboardInterrupt:
        pass
    finally:
        sources.close()


def _stream(sources: Sources, job: str | None, end: float | None) -> None:
    board, told = Board(), 0
    while _goes_on(sources, job, end):
        told = _tell(sources.failures, told)
        for answer in sources.take(_patience(sources, end)):
            try:
                print(json.dumps(board.take(answer, time.monotonic())), flush=True)
            except BrokenPipeError:  # who reads has gone, as `head` does
                sys.stderr.close()
                return
            except OSError as error:
                raise click.UsageError(f"the output cannot be written: {error.strerror}") from error
    _tell(sources.failures, told)


def _show(sources: Sources, job: str | None, end: float | None) -> None:
    board, console = Board(), Console(width=None if sys.stdout.isatty() else _WIDTH_OF_A_FILE)
    live = Live(console=console, screen=True, auto_refresh=False)
    with suspends(live), live:
        while _goes_on(sources, job, end):
            for answer in sources.take(_patience(sources, end)):
                board.take(answer, time.monotonic())
            picture = screen(board, time.monotonic(), sources.lines_of_hosts(), console.height)
            live.update(picture, refresh=True)
    if not console.is_terminal:  # nothing was drawn in a file or a pipe, which gets what was seen last
        console.print(screen(board, time.monotonic(), sources.lines_of_hosts()))
    _tell(sources.failures, 0)  # the screen is gone, and what stood there


def _tell(failures: list[str], told: int) -> int:
    """Says those that have not been said yet; returns how many have been."""
    for failure in failures[told:]:
        click.echo(f"gradwire monitor: {failure}", err=True)
    return len(failures)


def _goes_on(sources: Sources, job: str | None, end: float | None) -> bool:
    sources.watch_sockets(job)
    sources.ask_hosts_again()
    return sources.is_any and (end is None or time.monotonic() < end)


def _patience(sources: Sources, end: float | None) -> float:
    return sources.every_s if end is None else max(0.0, min(sources.every_s, end - time.monotonic()))
