"""Entry point of `gradwire`: the group of subcommands."""

from __future__ import annotations

import importlib

import click

from gradwire import __version__

_COMMANDS = {
    "bench": "gradwire.cli.bench",
    "demo": "gradwire.cli.demo",
    "doctor": "gradwire.cli.doctor",
    "lab": "gradwire.cli.lab",
    "monitor": "gradwire.cli.monitor",
    "serve": "gradwire.cli.serve",
    "simulate": "gradwire.cli.simulate",
    "switch": "gradwire.cli.switch",
    "trace": "gradwire.cli.trace",
}


class _LazyGroup(click.Group):
    """Imports a subcommand's module only when it is used, so `gradwire --help` answers at once."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return sorted({*_COMMANDS, *super().list_commands(ctx)})

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in _COMMANDS:
            return super().get_command(ctx, cmd_name)
        command: click.Command = importlib.import_module(_COMMANDS[cmd_name]).command
        return command


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="gradwire")
def main() -> None:
    """Gradwire moves gradients between the workers of a training job, and never waits for the slowest packet."""
