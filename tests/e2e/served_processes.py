"""Dedicated parameter servers of a test, as processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

COMMAND = [sys.executable, "-c", "from gradwire.cli import main; main()", "serve"]


@contextmanager
def servers(folder: Path, count: int, **variables: str) -> Iterator[list[subprocess.Popen[str]]]:
    """`gradwire serve` for each of `count` servers; whoever has not ended by itself is killed."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("GRADWIRE_", "MASTER_"))}
    clean |= {"GRADWIRE_PORT": "0", **variables}
    commands = [
        [
            *COMMAND,
            "--index",
            str(index),
            "--store",
            f"file://{folder / 'store'}",
            "--json",
            str(folder / f"server-{index}"),
        ]
        for index in range(count)
    ]
    running = [subprocess.Popen(c, env=clean, stderr=subprocess.PIPE, text=True) for c in commands]
    try:
        yield running
    finally:
        for process in running:
            process.kill()
            process.communicate()


def settings(count: int) -> dict[str, str]:
    """The workers' environment. Short silences are no deaths there: the machine may be busy."""
    return {
        "GRADWIRE_SERVER_MODE": "dedicated",
        "GRADWIRE_SERVERS": str(count),
        "GRADWIRE_PEER_TIMEOUT_S": "20",
    }
