"""Types of options that several commands have."""

from __future__ import annotations

import math
import shlex
from collections.abc import Callable
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
