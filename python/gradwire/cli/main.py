"""Entry point of `gradwire`: the group of subcommands."""

from __future__ import annotations

import errno
import importlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import click

# Each is the module of its name, and the first sentence of its help.
_COMMANDS = {
    "bench": "Measure gradwire beside gloo over TCP, on this machine.",
    "demo": "Train a small GPT over a lossy network: gloo (TCP) against gradwire.",
    "doctor": "Check the network and the hosts of a training job, and say what is wrong and how to fix it.",
    "lab": "Build a small network on this machine, run programs on its hosts, and break it on purpose.",
    "monitor": "Watch a running job: rates, round trips, loss, what ended the waits, and who is waited for.",
    "serve": "Sum gradients for a training job: a parameter server that needs no GPU and no model.",
    "simulate": "What a step of MODEL's gradients takes on a cluster, and what it loses: completion times, step time, bytes by layer.",
    "switch": "Write the configuration that a switch needs to tell gradients apart.",
    "trace": "Write one step of all ranks as a timeline for Perfetto.",
}
EXIT_UNLOADABLE, EXIT_UNWRITTEN = 1, 2
EXIT_INTERRUPTED = 130  # the shell's convention for a program ended by Ctrl-C
# Of what is open already; whatever fails to be opened has a name in its error.
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


class _LazyGroup(click.Group):
    """Imports a subcommand's module only when it is used, so `gradwire --help` answers at once."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*_COMMANDS, *super().list_commands(ctx)})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return super().get_command(ctx, cmd_name)
        try:
            command: click.Command = importlib.import_module(f"gradwire.cli.{cmd_name}").command
        except ImportError:
            _check_extension()
            raise
        return command

    def format_commands(self, _ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """By the table above: click would import them all."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, _COMMANDS[name]) for name in sorted(_COMMANDS)])

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        """Within it, `--help` is printed."""
        with _system_errors_told():
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: click.Context) -> Any:
        """Ctrl-C has a status of its own: click's is 1, by which subcommands say that something is wrong."""
        with _system_errors_told():
            try:
                return super().invoke(ctx)
            except KeyboardInterrupt:
                click.echo("gradwire: interrupted", err=True)
                ctx.exit(EXIT_INTERRUPTED)


@contextmanager
def _system_errors_told() -> Iterator[None]:
    """Ends here with one line where the system refuses something that no subcommand expects, as output to a full disk.

    Nothing is said where a reader of the output has gone, as `head` does. Python's status, and click's, is 1 as of Ctrl-C.
    """
    try:
        yield
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError as error:
        if error.errno != errno.EPIPE:
            is_output = error.errno in _FULL and error.filename is None
            text = f"the output cannot be written: {error.strerror}" if is_output else str(error)
            with suppress(OSError):
                click.echo(f"gradwire: {text}", err=True)
        sys.exit(EXIT_UNWRITTEN)
    finally:
        _drop_what_cannot_be_written()


def _drop_what_cannot_be_written() -> None:
    """Python would try to write it once more at its end, complain, and make the status 120."""
    for stream in (sys.stdout, sys.stderr):
        try:
            if stream is not None:
                stream.flush()
        except OSError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream.fileno())
            os.close(nowhere)
        except ValueError:  # it is closed
            pass


def _check_extension() -> None:
    """Ends here with what to do where the extension module does not load, as of a wheel that was built for other hosts."""
    try:
        importlib.import_module("gradwire._native")
    except ImportError as error:
        text = f"gradwire: the extension module cannot be loaded here: {error}. Build the wheel on this host, or for manylinux"
        click.echo(f'{text} (README, "Install it")', err=True)
        sys.exit(EXIT_UNLOADABLE)


def _show_version(ctx: click.Context, _option: click.Parameter, is_asked: bool) -> None:
    if not is_asked or ctx.resilient_parsing:
        return
    _check_extension()
    from gradwire import _native  # only here: the command says what is wrong where it cannot be loaded

    click.echo(f"gradwire {_native.VERSION}")
    ctx.exit()


_EPILOG = """
Each subcommand says what its exit statuses mean. That of a subcommand whose output cannot be written is 2.
"""


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]}, epilog=_EPILOG)
@click.option("--version", is_flag=True, is_eager=True, expose_value=False, callback=_show_version,
              help="Show the version, if gradwire works here, and exit.")  # fmt: skip
def main() -> None:
    """Gradwire moves gradients between the workers of a training job, and never waits for the slowest packet."""
