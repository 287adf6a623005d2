"""The `gradwire` command. Each subcommand is a module of its own, imported when it is called for."""

from gradwire.cli.main import main

__all__ = ["main"]
