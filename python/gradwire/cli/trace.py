"""`gradwire trace`: the latest collectives of all ranks as one timeline."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import click

from gradwire import _files
from gradwire.cli.types import check_stdout, of_other_hosts
from gradwire.errors import GradwireError
from gradwire.observe.client import ask, find_sockets, job_of, process_of, read_answer
from gradwire.observe.timeline import align_answers, chrome_trace, last_calls

EXIT_NOTHING = 3
# Collectives that a rank is asked for beyond those that are shown: others may not have ended its latest yet, of which it has 64 in flight.
BEYOND = 128
SSH_TIMEOUT_S = 60.0

_EPILOG = """
\b
Examples:
  gradwire trace -o step.json                       the latest 32 collectives of the only job of this user on this host
  gradwire trace 10.0.0.1:29400 --calls 100 -o step.json --host node1 --host node2
Open the file in https://ui.perfetto.dev or chrome://tracing.

\b
Each rank keeps its latest collectives in memory (2048 at most), so the step that has just been slow can still be seen. The oldest
collective that has not ended is shown up to now, with whom it waits for. The ranks' clocks are aligned by what their packets said; the
error is printed and stands beside each rank.

\b
A rank that does not answer, as one that stands still, is named and left out.

\b
Exit status: 0 written, 2 wrong usage, several jobs and no JOB, or a file that cannot be written, 3 no job, none that has called a
collective (with --raw: 0, and nothing), or a host that cannot be asked.
"""


@click.command(name="trace", epilog=_EPILOG, context_settings={"show_default": True})
@click.argument("job", required=False)
@click.option(
    "--output",
    "-o",
    type=click.Path(dir_okay=False, path_type=Path),
    help="File to write; the standard output if not given.",
)
@click.option(
    "--calls",
    default=32,
    type=click.IntRange(1),
    help="So many of the latest collectives of each group; with --raw 128 more.",
)
@of_other_hosts
@click.option("--raw", is_flag=True, help="The ranks' own answers, one line of JSON each, unaligned.")
def command(*, job: str | None, output: Path | None, calls: int, hosts: tuple[str, ...], ssh: str, raw: bool) -> None:
    """Write one step of all ranks as a timeline for Perfetto.

    JOB is the name of the job or the address where its ranks met, or the beginning of it; or the UDP port or the process id of
    one rank.
    """
    if output is None or raw:
        check_stdout()
    try:
        answers, name = _answers_here(job, calls)
        answers += _answers_there(name or job, calls, hosts, ssh)
        _only({answer["job"] for answer in answers})
    except (GradwireError, OSError, ValueError) as error:
        click.echo(f"gradwire trace: {error}", err=True)
        sys.exit(EXIT_NOTHING)
    if raw:
        for answer in answers:
            click.echo(json.dumps(answer))
        return
    processes, alignments = align_answers(answers)
    if not processes:
        if answers:
            text = "no running job of this user has called a collective"
        elif name is not None:
            text = f"no rank of job {name} has answered"
        else:
            text = f"no running job{f' {job}' if job else ''} of this user on {' or '.join(['this host', *hosts])}"
        click.echo(f"gradwire trace: {text}", err=True)
        sys.exit(EXIT_NOTHING)
    text = json.dumps(chrome_trace(last_calls(processes, calls), alignments, answers[0]["job"]))
    _write(text, output)
    for process, alignment in list(zip(processes, alignments, strict=True))[
        1:
    ]:  # the first is what the others are aligned to
        off = "unknown, by the hosts' clocks" if alignment.error_ns is None else f"{alignment.error_ns / 1e3:.0f} us"
        click.echo(f"gradwire trace: {process.title}: clock error {off}", err=True)


def _write(text: str, output: Path | None) -> None:
    if output is None:
        click.echo(text)
        return
    try:
        _files.replace(output, text + "\n")
    except OSError as error:
        raise click.UsageError(f"{output}: {error.strerror}") from error


def _answers_here(job: str | None, calls: int) -> tuple[list[dict[str, Any]], str | None]:
    """Of this host's ranks, and the name of their job, which is the same on other hosts; None: there are none."""
    paths = find_sockets(job)
    name = _only({job_of(path) for path in paths})
    if not paths:
        return [], name
    with ThreadPoolExecutor(max_workers=min(32, len(paths))) as pool:  # ranks answer at about the same time
        answers = list(pool.map(lambda path: _timelines_of(path, calls), paths))
    return [answer for answer in answers if answer is not None], name


def _only(jobs: set[str]) -> str | None:
    """The job, where there is one.

    Raises:
        UsageError: there are several, whose calls are no steps of each other.
    """
    if len(jobs) > 1:
        raise click.UsageError(f"which job? There are {', '.join(sorted(jobs))}: gradwire trace JOB")
    return next(iter(jobs), None)


def _timelines_of(path: Path, calls: int) -> dict[str, Any] | None:
    """What a rank answers; None where it does not, which is said: one that stands still or has just ended hides none of the others."""
    try:
        answer = ask(path, "timelines", calls=calls + BEYOND)
    except (OSError, ValueError) as error:
        answer = {"error": str(error)}
    if "error" not in answer:
        return answer
    click.echo(f"gradwire trace: {process_of(path)} is left out, it does not answer: {answer['error']}", err=True)
    return None


def _answers_there(job: str | None, calls: int, hosts: tuple[str, ...], ssh: str) -> list[dict[str, Any]]:
    remote = shlex.join(["gradwire", "trace", "--raw", "--calls", str(calls), *([] if job is None else [job])])
    answers = []
    for host in hosts:
        command = [*shlex.split(ssh), host, remote]
        try:
            ran = subprocess.run(
                command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, timeout=SSH_TIMEOUT_S, check=False
            )
        except subprocess.TimeoutExpired as error:
            raise OSError(f"{host} has not answered after {SSH_TIMEOUT_S:.0f} s") from error
        if ran.returncode:
            raise OSError(f"{host}: `{remote}` ended with {ran.returncode}")
        found = []
        for line in ran.stdout.splitlines():
            with suppress(ValueError):  # a login shell may print lines of its own
                found.append(read_answer(line))
        if not found:
            click.echo(f"gradwire trace: {host}: no rank of the job has answered there", err=True)
        answers += found
    return answers
