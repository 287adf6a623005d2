"""A crew of worker processes, one for each rank, that do what they are told in lines of JSON.

The leader gives every worker the same order on its standard input, and collects answers from their standard outputs until
each has given the last one. A worker that ends or falls silent becomes an error that names it. `serve` is the workers' side.
"""

from __future__ import annotations

import json
import os
import resource
import selectors
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Protocol

from gradwire.lab.namespaces import Program, Start

LEAVE_SECONDS = 20  # a worker that was told to leave closes its process group first
END_SECONDS = 10  # one that has closed a pipe has as a rule ended, and only its status is still to come
# Nobody looks into workers unless asked to: they have a screen or numbers, and are ended too soon to remove their status sockets.
_UNSEEN = {"GRADWIRE_STATUS_SOCKET": "0"}
THREADS = {"OMP_NUM_THREADS": "1"}  # the hosts share one machine's cores
Answer = dict[str, Any]
Spawn = Callable[..., Any]  # (rank, command, **options of Popen)


class WorkerFailed(RuntimeError):
    """A worker ended or fell silent; the message names it and shows the end of its log."""


class Crew:
    """Starts the workers; whoever gave `spawn` ends them.

    Args:
        spawn: starts a command for a rank, for example `Cluster.spawn`.
        command: what each worker runs; it must call `serve`.
        environments: one for each rank, on top of this process's own.
        logs: folder for the workers' standard error, `worker-RANK.log`.
        silence_seconds: how long to wait for a word from a worker that owes an answer.
    """

    def __init__(
        self,
        spawn: Spawn,
        command: Sequence[str],
        environments: Sequence[dict[str, str]],
        logs: Path,
        silence_seconds: float = 90.0,
    ) -> None:
        self._silence_seconds = silence_seconds
        self._workers = [
            _Member(spawn, rank, command, {**_UNSEEN, **os.environ, **environment}, logs / f"worker-{rank}.log")
            for rank, environment in enumerate(environments)
        ]

    def close(self) -> None:
        """Ends the workers' input, which has them leave; does not wait for them."""
        for worker in self._workers:
            worker.close()

    def order(self, order: Answer, last: str) -> list[list[Answer]]:
        """Gives an order to all; returns each worker's answers, the final one of which has the key `last`.

        Raises:
            WorkerFailed: as the class says.
        """
        for worker in self._workers:
            worker.give(order)
        return self.collect(last)

    def collect(self, last: str) -> list[list[Answer]]:
        """Waits for answers without giving an order, as `order` does."""
        answers: list[list[Answer]] = [[] for _ in self._workers]
        with selectors.DefaultSelector() as selector:
            for rank, worker in enumerate(self._workers):
                selector.register(worker.output, selectors.EVENT_READ, rank)
            while selector.get_map():
                # A second look, since Ctrl-Z may have taken all of the time of the first.
                ready = selector.select(self._silence_seconds) or selector.select(self._silence_seconds)
                if not ready:
                    silent = ", ".join(str(key.data) for key in selector.get_map().values())
                    raise WorkerFailed(f"no word from worker {silent} for {self._silence_seconds:.0f} s")
                for key, _ in ready:
                    answers[key.data] += self._workers[key.data].read()
                    if answers[key.data] and last in answers[key.data][-1]:
                        selector.unregister(key.fileobj)
        return answers


class _Member:
    """One worker's process with its pipes and its log."""

    def __init__(self, spawn: Spawn, rank: int, command: Sequence[str], environment: dict[str, str], log: Path) -> None:
        self._rank = rank
        self._log: IO[bytes] = log.open("wb+")
        # A session of its own: Ctrl-C is for the leader, which ends the workers in good order.
        self._process = spawn(
            rank,
            command,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            start_new_session=True,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._input: IO[bytes] = self._process.stdin
        self.output: IO[bytes] = self._process.stdout
        self._partial = b""

    def give(self, order: Answer) -> None:
        try:
            self._input.write(json.dumps(order).encode() + b"\n")
            self._input.flush()
        except BrokenPipeError:
            raise self._failure() from None

    def read(self) -> list[Answer]:
        """The complete answers that have come in; blocks if there is not even a part of one."""
        data = os.read(self.output.fileno(), 1 << 16)
        if not data:
            raise self._failure()
        *lines, self._partial = (self._partial + data).split(b"\n")
        return [json.loads(line) for line in lines]

    def close(self) -> None:
        """Ends the worker's input, which is its order to leave."""
        with suppress(BrokenPipeError):
            self._input.close()
        self._log.close()

    def _failure(self) -> WorkerFailed:
        try:
            what = f"ended with status {self._process.wait(timeout=END_SECONDS)}"
        except subprocess.TimeoutExpired:
            what = "has closed its input or output and is still running"
        self._log.seek(0)
        tail = "\n".join(self._log.read().decode(errors="replace").splitlines()[-15:])
        return WorkerFailed(f"worker {self._rank} {what}; the end of {self._log.name}:\n{tail}")


class LoopbackCrew(Crew):
    """A crew on this machine, over its loopback device, for what needs no network of the lab. A context manager.

    Args:
        command: as `Crew`.
        world_size: how many ranks.
        settings: environment of all ranks, on top of what they need to meet.
        logs, silence_seconds: as `Crew`.
        start: starts each of them, as `subprocess.Popen` does; `Nursery.start` forks them.
    """

    def __init__(
        self,
        command: Sequence[str],
        world_size: int,
        settings: dict[str, str],
        logs: Path,
        silence_seconds: float = 90.0,
        *,
        start: Start = subprocess.Popen,
    ) -> None:
        self._children: list[Program] = []
        self._start = start
        meeting = {"MASTER_PORT": str(_free_port()), "GRADWIRE_PORT": "0", **settings}
        ranks = range(world_size)
        environments = [{**rendezvous_environment(r, world_size, "127.0.0.1", "lo", r), **meeting} for r in ranks]
        super().__init__(self._spawn, command, environments, logs, silence_seconds)

    def __enter__(self) -> LoopbackCrew:
        try:
            self.collect("ready")
        except WorkerFailed:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Ends the workers and waits for them."""
        super().close()
        for child in self._children:
            try:
                child.wait(timeout=LEAVE_SECONDS)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()

    def _spawn(self, _rank: int, command: Sequence[str], **options: Any) -> Program:
        child = self._start(command, **options)
        self._children.append(child)
        return child


def _free_port() -> int:
    """A port that nobody has at this moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def rendezvous_environment(
    rank: int, world_size: int, address: str, device: str, local_rank: int = 0
) -> dict[str, str]:
    """What torchrun would set, and which device gloo shall use (it would resolve the machine's name otherwise)."""
    return {
        "MASTER_ADDR": address,
        "MASTER_PORT": "29400",  # within the lab's own network, where nothing else listens
        "RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(local_rank),
        "GLOO_SOCKET_IFNAME": device,
        **THREADS,
    }


class Worker(Protocol):
    """Who carries out the orders in a worker's process."""

    def obey(self, order: Answer) -> None:
        """Carries one order out and answers it."""

    def close(self) -> None:
        """Ends what orders have begun."""


def serve(make: Callable[[Callable[[Answer], None]], Worker]) -> None:
    """The workers' side: answers with `ready`, then carries out orders until the input ends.

    Args:
        make: is given the function to answer with.
    """
    _allow_descriptors()
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # whatever a library prints belongs into the log, not among the answers

    def say(answer: Answer) -> None:
        print(json.dumps(answer), file=answers)

    worker = make(say)
    say({"ready": True})
    for line in sys.stdin:
        worker.obey(json.loads(line))
    worker.close()


def _allow_descriptors() -> None:
    """Raises the soft limit to the hard one: a worker may have many groups, each with connections to all others."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):  # then there is what there was
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
