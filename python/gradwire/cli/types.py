"""Types of options that several commands have."""

from __future__ import annotations

import math
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click


def other_hosts(_ctx: click.Context, _option: click.Parameter, names: tuple[str, ...]) -> tuple[str, ...]:
    """Names for `ssh`, which takes one that begins with a hyphen for an option, perhaps with a command in it."""
    for name in names:
        if not name or name.startswith("-"):
            raise click.BadParameter(f"{name!r} is no name of a host.")
    return names


def words_of_a_shell(_ctx: click.Context, _option: click.Parameter, text: str) -> str:
    """A program with its arguments, quoted as a shell has it."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise click.BadParameter(f"{text!r} is no command: {error}.") from error
    if not words:
        raise click.BadParameter("it names no program.")
    return text


class OwnFile(click.Path):
    """A file to write. Not `-`, by which other commands have the standard output: tables are written there."""

    def __init__(self) -> None:
        super().__init__(dir_okay=False, path_type=Path)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """See `click.ParamType`."""
        if str(value) == "-":
            self.fail(
                "the standard output has other things already: name a file (./- is one of that name).", param, ctx
            )
        return super().convert(value, param, ctx)


def check_stdout() -> None:
    """Raises UsageError where the caller has closed the standard output: what is opened next would take its place."""
    if sys.stdout is None:
        raise click.UsageError("the standard output is closed: there is nothing to write results on")


class FiniteFloat(click.FloatRange):
    """A number within bounds. Click's own range takes `nan` for one within any bounds, and `inf` where there is no upper one."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """See `click.ParamType`."""
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return number


def of_other_hosts(command: Callable[..., Any]) -> Callable[..., Any]:
    """Options of what looks at ranks of other hosts: `hosts`, and `ssh`, the command that reaches them."""
    reach = click.option(
        "--ssh",
        default="ssh -o BatchMode=yes",
        callback=words_of_a_shell,
        help="How to reach a host: the command that its name is added to.",
    )
    hosts = click.option(
        "--host",
        "hosts",
        multiple=True,
        callback=other_hosts,
        help="Also the ranks of this host, over ssh. May be repeated.",
    )
    return hosts(reach(command))
