"""Dedicated parameter servers of a test, as processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import warm
from gradwire.lab.namespaces import Program

COMMAND = "from gradwire.cli import main; main()"


@dataclass
class Server:
    """`gradwire serve`, and the file that it writes its errors to."""

    process: Program
    errors: Path

    def words(self) -> str:
        """What it has said when it has ended by itself."""
        self.process.wait(60)
        return self.errors.read_text()

    @property
    def returncode(self) -> int | None:
        """Its exit status, when it has ended."""
        return self.process.poll()


@contextmanager
def servers(folder: Path, count: int, **variables: str) -> Iterator[list[Server]]:
    """`gradwire serve` for each of `count` servers, forked with torch imported; whoever has not ended by itself is killed."""
    script = folder / "serve.py"
    script.write_text(COMMAND)
    env = {**_environment(), **warm.THREADS, **variables}
    running = []
    with warm.starter(elsewhere=False) as start:
        try:
            for index in range(count):
                log = folder / f"server-{index}.errors"
                with log.open("w") as errors:
                    running.append(
                        Server(start([str(script), *_arguments(folder, index)], env=env, stderr=errors), log)
                    )
            yield running
        finally:
            for server in running:
                server.process.kill()
                server.process.wait()


@contextmanager
def cold_server(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """One with an interpreter of its own, as a user starts it; its errors are a pipe."""
    command = [sys.executable, "-c", COMMAND, *_arguments(folder, 0)]
    with subprocess.Popen(command, env=_environment(), stderr=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


def _arguments(folder: Path, index: int) -> list[str]:
    store, numbers = f"file://{folder / 'store'}", str(folder / f"server-{index}")
    return ["serve", "--index", str(index), "--store", store, "--json", numbers]


def _environment() -> dict[str, str]:
    others = {name: value for name, value in os.environ.items() if not name.startswith(("GRADWIRE_", "MASTER_"))}
    return others | {"GRADWIRE_PORT": "0"}


def settings(count: int) -> dict[str, str]:
    """The workers' environment. Short silences are no deaths there: the machine may be busy."""
    return {
        "GRADWIRE_SERVER_MODE": "dedicated",
        "GRADWIRE_SERVERS": str(count),
        "GRADWIRE_PEER_TIMEOUT_S": "20",
    }
