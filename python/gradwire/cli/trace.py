"""`gradwire trace`: the latest collectives of all ranks as one timeline."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import click

from gradwire import _files
from gradwire.cli.types import check_stdout, of_other_hosts
from gradwire.errors import GradwireError
from gradwire.observe.client import ask, find_sockets, job_of, process_of, read_answer
from gradwire.observe.timeline import (
    Alignment,
    Process,
    align_answers,
    chrome_trace,
    last_calls,
    needs_more,
    processes_of,
    shown_apart,
)

EXIT_NOTHING = 3
# Collectives that a rank is asked for beyond those that are shown: others may not have ended its latest yet, of which it has 64 in flight.
# Where that is too few, as of ranks that were not asked at about one moment, they are asked again for all.
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
    help="So many of the latest collectives of each group; with --raw all that are kept.",
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
    # Other hosts answer some time later, and what they have in common with this one's ranks is not known before.
    few = None if hosts or raw else calls
    try:
        paths = find_sockets(job)
        name = _only({job_of(path) for path in paths})  # which is the same on other hosts
        with _asked_at_once(name or job, hosts, ssh) as there:
            answers = _answers_here(paths, few)
            for found in there:
                answers += found
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
    _tell(processes, alignments)


def _tell(processes: list[Process], alignments: list[Alignment]) -> None:
    """What a reader of the trace has to know of it."""
    for line in shown_apart(processes):
        click.echo(f"gradwire trace: {line}", err=True)
    for process, alignment in zip(processes, alignments, strict=True) if len(processes) > 1 else ():
        if alignment.is_reference:
            said = "the others are aligned to its clock"
        elif alignment.error_ns is None:
            said = "clock error unknown, by the hosts' clocks"
        else:
            said = f"clock error {alignment.error_ns / 1e3:.0f} us"
        click.echo(f"gradwire trace: {process.title}: {said}", err=True)


def _write(text: str, output: Path | None) -> None:
    if output is None:
        click.echo(text)
        return
    try:
        _files.replace(output, text + "\n")
    except OSError as error:
        raise click.UsageError(f"{output}: {error.strerror}") from error


def _answers_here(paths: list[Path], calls: int | None) -> list[dict[str, Any]]:
    """Of this host's ranks, with enough to show so many collectives that all have ended; None: all that they keep."""
    answers = _answers_of(paths, None if calls is None else calls + BEYOND)
    if calls is not None and needs_more(processes_of(answers.values()), calls, calls + BEYOND):
        answers = _answers_of(list(answers), None)
    return list(answers.values())


def _answers_of(paths: list[Path], asked: int | None) -> dict[Path, dict[str, Any]]:
    """Of those that answer."""
    if not paths:
        return {}
    with ThreadPoolExecutor(max_workers=min(32, len(paths))) as pool:  # ranks answer at about the same time
        answers = pool.map(lambda path: _timelines_of(path, asked), paths)
        return {path: answer for path, answer in zip(paths, answers, strict=True) if answer is not None}


def _only(jobs: set[str]) -> str | None:
    """The job, where there is one.

    Raises:
        UsageError: there are several, whose calls are no steps of each other.
    """
    if len(jobs) > 1:
        raise click.UsageError(f"which job? There are {', '.join(sorted(jobs))}: gradwire trace JOB")
    return next(iter(jobs), None)


def _timelines_of(path: Path, asked: int | None) -> dict[str, Any] | None:
    """What a rank answers; None where it does not, which is said: one that stands still or has just ended hides none of the others."""
    try:
        answer = ask(path, "timelines", **({} if asked is None else {"calls": asked}))
    except (OSError, ValueError) as error:
        answer = {"error": str(error)}
    if "error" not in answer:
        return answer
    click.echo(f"gradwire trace: {process_of(path)} is left out, it does not answer: {answer['error']}", err=True)
    return None


@contextmanager
def _asked_at_once(job: str | None, hosts: tuple[str, ...], ssh: str) -> Iterator[Iterator[list[dict[str, Any]]]]:
    """Has all hosts asked meanwhile, and gives what each has answered: one after the other they would tell of different steps."""
    if not hosts:
        yield iter(())
        return
    with ThreadPoolExecutor(max_workers=len(hosts)) as pool:
        yield pool.map(lambda host: _answers_there(host, job, ssh), hosts)


def _answers_there(host: str, job: str | None, ssh: str) -> list[dict[str, Any]]:
    """Of another host's ranks.

    Raises:
        OSError: it cannot be asked, or has not answered in time.
    """
    remote = shlex.join(["gradwire", "trace", "--raw", *([] if job is None else [job])])
    command = [*shlex.split(ssh), host, remote]
    try:
        ran = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, timeout=SSH_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise OSError(f"{host} has not answered after {SSH_TIMEOUT_S:.0f} s") from error
    if ran.returncode:
        raise OSError(f"{host}: `{remote}` ended with {ran.returncode}")
    answers = []
    for line in ran.stdout.splitlines():
        with suppress(ValueError):  # a login shell may print lines of its own
            answers.append(read_answer(line))
    if not answers:
        click.echo(f"gradwire trace: {host}: no rank of the job has answered there", err=True)
    return answers
