"""Starts real ranks for the end-to-end tests, and shows what every rank printed when one fails.

A body is a module of `bodies/` whose functions `check_*` run in order on every rank. Importing torch costs seconds, so
one launch runs many checks; each is reported as a test of its own. Ranks meet through a file Store: no port is needed
but gradwire's own, which the kernel chooses.
"""

from __future__ import annotations

import ast
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import warm
from gradwire.lab import NamespacesUnavailable, ToolMissing, sandbox
from gradwire.lab.namespaces import Program

HERE = Path(__file__).parent


@dataclass
class Outcome:
    """What the ranks of one launch did.

    Attributes:
        exit_codes: of each rank; negative is a signal, None means that it had to be killed at the time limit.
        results: for each rank, check name to "ok" or a traceback.
        outputs: what each rank printed.
        seconds: wall clock of the launch.
    """

    exit_codes: list[int | None]
    results: list[dict[str, str]]
    outputs: list[str]
    seconds: float = 0.0
    expected_dead: set[int] = field(default_factory=set)

    def require(self, check: str) -> None:
        """Fails the calling test unless every rank passed the check."""
        wrong = {
            rank: result.get(check, "did not run")
            for rank, result in enumerate(self.results)
            if rank not in self.expected_dead and result.get(check) != "ok"
        }
        assert not wrong, (
            f"{check} failed\n" + "\n".join(f"rank {r}: {text}" for r, text in wrong.items()) + self.transcript()
        )

    def require_clean_exit(self) -> None:
        """Fails the calling test unless every rank ended by itself with status 0."""
        wrong = [rank for rank, code in enumerate(self.exit_codes) if code != 0 and rank not in self.expected_dead]
        assert not wrong, f"ranks {wrong} ended with {self.exit_codes}" + self.transcript()

    def transcript(self) -> str:
        """Everything that every rank printed."""
        parts = [f"\n--- rank {rank}, exit {self.exit_codes[rank]}\n{text}" for rank, text in enumerate(self.outputs)]
        return "".join(parts)


def launch(
    body: str,
    world_size: int,
    folder: Path,
    *,
    env: Mapping[str, str] | None = None,
    env_of_rank: Sequence[Mapping[str, str]] = (),
    timeout_s: float = 400.0,
    backend: str = "gradwire",
    expected_dead: Sequence[int] = (),
    spawn: Callable[..., Program] | None = None,
) -> Outcome:
    """Runs a body on `world_size` ranks.

    Args:
        body: module of `bodies/`.
        folder: for the Store and the results.
        env: variables of every rank.
        env_of_rank: further variables of each rank.
        timeout_s: after which whoever still runs is killed.
        backend: for init_process_group; empty: the body does it.
        expected_dead: ranks that do not end well by design.
        spawn: `spawn(rank, command, start, **options)` starts a rank somewhere else than here, by `start`.
    """
    started = time.monotonic()
    ranks = []
    with warm.starter(elsewhere=spawn is not None) as start_warm:
        for rank in range(world_size):
            own = env_of_rank[rank] if rank < len(env_of_rank) else {}
            variables = (
                _clean_environment() | _rank_variables(rank, world_size, folder, backend) | {**(env or {}), **own}
            )
            output = (folder / f"output-{rank}").open("w+")
            script = [str(HERE / "rank.py"), body]
            options = {"env": variables, "stdout": output, "stderr": subprocess.STDOUT}
            start = start_warm if warm.suits(variables) else warm.start_cold
            ranks.append((spawn(rank, script, start=start, **options) if spawn else start(script, **options), output))
        codes = [_wait(process, started + timeout_s) for process, _ in ranks]
    outputs = []
    for _, output in ranks:
        output.seek(0)
        outputs.append(output.read())
        output.close()
    results = [_results(folder, rank) for rank in range(world_size)]
    return Outcome(codes, results, outputs, time.monotonic() - started, set(expected_dead))


def in_lab(folder: Path, main: Callable[[], Outcome]) -> Outcome:
    """Runs `main` in a sandbox, where it builds the network that its ranks live in, and returns its outcome.

    Skips the calling test where the machine has no namespaces, or where `main` finds a tool missing.
    """

    def wrapped() -> int:
        try:
            outcome = main()
        except ToolMissing as error:
            (folder / "skip").write_text(str(error))
            return 0
        (folder / "outcome").write_text(json.dumps({**vars(outcome), "expected_dead": []}))
        return 0

    try:
        status = sandbox.run(wrapped)
    except NamespacesUnavailable as error:
        pytest.skip(str(error))
    if (folder / "skip").exists():
        pytest.skip((folder / "skip").read_text())
    assert status == 0, "the lab failed, see the error above"
    return Outcome(**{**json.loads((folder / "outcome").read_text()), "expected_dead": set()})


def checks_of(body: str) -> list[str]:
    """Names of a body's checks, without importing it (it imports torch)."""
    tree = ast.parse((HERE / "bodies" / f"{body}.py").read_text())
    return [node.name for node in tree.body if isinstance(node, ast.FunctionDef) and node.name.startswith("check_")]


def _clean_environment() -> dict[str, str]:
    return {
        name: value for name, value in os.environ.items() if not name.startswith(("GRADWIRE_", "TORCH_", "MASTER_"))
    }


def _rank_variables(rank: int, world_size: int, folder: Path, backend: str) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "GRADWIRE_PORT": "0",
        "GRADWIRE_TEST_FOLDER": str(folder),
        "GRADWIRE_TEST_BACKEND": backend,
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }


def _wait(process: Program, end: float) -> int | None:
    try:
        return process.wait(max(0.1, end - time.monotonic()))
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGABRT)  # faulthandler prints where every thread is
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        return None


def _results(folder: Path, rank: int) -> dict[str, str]:
    path = folder / f"results-{rank}"
    if not path.exists():
        return {}
    return dict(json.loads(line) for line in path.read_text().splitlines())
