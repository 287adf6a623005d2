"""Starts ranks that reduce until the test has seen enough, for the tests of what is to be seen."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from free_ports import free_port
from launch import _clean_environment

SCRIPT = Path(__file__).parent / "observed_rank.py"
LONGEST_S = 300.0


class Job:
    """Ranks in processes of their own; leaving the block ends them all."""

    def __init__(
        self,
        folder: Path,
        ranks: int = 2,
        *,
        elems: int = 50_000,
        slow: tuple[int, float] = (-1, 0.0),
        spawn: Callable[..., Any] | None = None,
        rendezvous: str | None = None,
        **env: str,
    ) -> None:
        self.folder, self.ranks = folder, ranks
        (folder / "runtime").mkdir(mode=0o700, exist_ok=True)
        port = free_port() if rendezvous is None else 0
        self.variables = {
            "GRADWIRE_PORT": "0",
            "GRADWIRE_RENDEZVOUS": rendezvous or f"127.0.0.1:{port}",
            "GRADWIRE_LOG_LEVEL": "info",
            "GRADWIRE_JOB": "seen",
            "XDG_RUNTIME_DIR": str(folder / "runtime"),
            **env,
        }
        self.processes = [self._start(rank, elems, slow, spawn) for rank in range(ranks)]

    def _start(self, rank: int, elems: int, slow: tuple[int, float], spawn: Callable[..., Any] | None) -> Any:
        own = {"RANK": str(rank), "WORLD_SIZE": str(self.ranks), "LOCAL_RANK": str(rank)}
        command = [sys.executable, "-u", str(SCRIPT), str(self.folder), str(elems), *map(str, slow)]
        with (self.folder / f"output-{rank}").open("w") as output:
            options: dict[str, Any] = {
                "env": {**_clean_environment(), **self.variables, **own},
                "stdout": output,
                "stderr": subprocess.STDOUT,
            }
            return spawn(rank, command, **options) if spawn else subprocess.Popen(command, **options)

    def output(self, rank: int) -> str:
        """What a rank has printed so far."""
        return (self.folder / f"output-{rank}").read_text()

    def wait_for(self, what: Callable[[], Any], text: str) -> Any:
        """The first true answer."""
        end = time.monotonic() + LONGEST_S
        while not (found := what()):
            dead = [rank for rank, process in enumerate(self.processes) if process.poll() not in (None, 0)]
            if time.monotonic() > end or dead:
                raise AssertionError(f"{text}: not seen, dead ranks {dead}\n" + self.transcript())
            time.sleep(0.05)
        return found

    def until_it_reduces(self) -> None:
        """Every rank has reduced a few times."""
        self.wait_for(
            lambda: all((self.folder / f"reduces-{rank}").exists() for rank in range(self.ranks)), "reductions"
        )

    def transcript(self) -> str:
        """What all ranks have printed."""
        return "\n".join(f"--- rank {rank}\n{self.output(rank)}" for rank in range(self.ranks))

    def command(self, *arguments: str, runtime: Path | None = None) -> subprocess.CompletedProcess[str]:
        """Runs `gradwire` as the user of the job, or of another runtime folder."""
        with self.started(*arguments, runtime=runtime) as process:
            try:
                output, errors = process.communicate(timeout=LONGEST_S)
            finally:
                process.kill()
        return subprocess.CompletedProcess(process.args, process.returncode, output, errors)

    def started(
        self, *arguments: str, runtime: Path | None = None, stdout: Any = subprocess.PIPE
    ) -> subprocess.Popen[str]:
        """The same, which then runs."""
        return subprocess.Popen(
            [sys.executable, "-c", "from gradwire.cli import main; main()", *arguments],
            env={**_clean_environment(), "XDG_RUNTIME_DIR": str(runtime or self.variables["XDG_RUNTIME_DIR"])},
            stdout=stdout, stderr=subprocess.PIPE, text=True,
        )  # fmt: skip

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *_: object) -> None:
        (self.folder / "end").touch()
        for process in self.processes:  # none ends well while another one stands still
            process.send_signal(signal.SIGCONT)
        for process in self.processes:
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def require_clean_exit(self) -> None:
        """Fails the calling test unless all ranks ended well."""
        assert [process.returncode for process in self.processes] == [0] * self.ranks, self.transcript()
