"""What `gradwire monitor` and `gradwire trace` see: the status sockets of this user's ranks, here and over ssh."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import shlex
import socket
import stat
import subprocess
import threading
import time
from collections import deque
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from gradwire.observe.status import (
    CONNECT_TIMEOUT_S,
    SUFFIX,
    connect,
    is_alive,
    job_name_of,
    status_folder,
    user_outside,
)

# A rank that is stopped (SIGSTOP) answers nothing; the others must still be seen.
ANSWER_TIMEOUT_S = 10.0
# A connection that ssh shares may outlive it, and keeps its standard error open.
ERRORS_TIMEOUT_S = 2.0
LINE_BYTES_MAX = 256 << 20
UNNAMED_S = 60.0
# A rank that has not answered what it is is not asked again for so long: who watches waits meanwhile, and each question stays with it.
SILENT_S = 600.0


def find_sockets(job: str | None = None, known: Collection[str] = ()) -> list[Path]:
    """Status sockets of this user's ranks, in the order of their names; those that nobody answers at any more are removed.

    Args:
        job: name of the job, as it was given or as its ranks have it, or the address where they met, or the beginning of it; or the
            UDP port or process id of one of its ranks. What is the whole name of one job is not taken for the beginning of another's.
            None: all.
        known: names of sockets of the job that somebody is connected to. They are not tried: what is tried stays with a rank that stands
            still.

    Raises:
        StatusFolderError: the folder is not this user's alone.
    """
    found = [path for folder in _folders() for path in folder.glob(f"*{SUFFIX}")]
    alive = [path for path in sorted(found, key=lambda path: path.name) if path.name in known or is_alive(path)]
    for path in [path for folder in _folders() for path in folder.glob("*.made")]:
        with contextlib.suppress(OSError):
            if time.time() - path.lstat().st_mtime > UNNAMED_S:
                path.unlink()  # of a process that died before its socket had a name
    if job is None:
        return alive
    name = job_name_of(job)
    so_named = [path for path in alive if job_of(path) == name] or [
        path for path in alive if job_of(path).startswith(name)
    ]
    return so_named or _of_jobs_with(alive, job, known)


def _folders() -> list[Path]:
    """Where this user's ranks may have their sockets.

    Who logs in has a runtime directory; what a batch system or cron starts has none, and looks or is looked for all the same. A
    directory that somebody chose is the only one.
    """
    own, usual = status_folder(), _usual_folders()
    if own not in usual:
        return [own]
    return [own, *(folder for folder in usual if folder != own and _is_own(folder))]


def _usual_folders() -> list[Path]:
    """With a runtime directory and without."""
    user = user_outside()
    return [Path(f"/run/user/{user}/gradwire"), Path(f"/tmp/gradwire-{user}")]  # noqa: S108  looked at by `_is_own`


def _is_own(folder: Path) -> bool:
    """Whether it is there, and nobody else can have put something into it."""
    try:
        facts = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(facts.st_mode) and facts.st_uid == os.geteuid() and not facts.st_mode & 0o077


def job_of(path: Path) -> str:
    """Name of the job, by the socket's name: job, rank and process between dots."""
    return path.name.removesuffix(SUFFIX).rsplit(".", 2)[0]


def process_of(path: Path) -> str:
    """Rank and process, by the socket's name."""
    _, rank, process = path.name.removesuffix(SUFFIX).rsplit(".", 2)
    return f"rank {rank} (process {process.partition('-')[0]})"


def _of_jobs_with(paths: list[Path], what: str, known: Collection[str]) -> list[Path]:
    """All sockets of the jobs of which one rank has this UDP port or process id, or met the others at this address, or is known."""
    jobs = {job_of(path) for path in paths if path.name in known}
    for path in paths:
        with contextlib.suppress(OSError, ValueError):
            if job_of(path) not in jobs and _has(_facts_of(path), what):
                jobs.add(job_of(path))
    return [path for path in paths if job_of(path) in jobs]


def _has(facts: dict[str, Any], what: str) -> bool:
    if what.isdigit():
        return int(what) in (facts.get("port"), facts.get("pid"))
    return bool(what) and _without_brackets(str(facts.get("meeting", ""))).startswith(_without_brackets(what))


def _without_brackets(address: str) -> str:
    """MASTER_ADDR of IPv6 has none, and addresses with a port have."""
    return address.replace("[", "").replace("]", "")


def _facts_of(path: Path) -> dict[str, Any]:
    """What a rank says of itself. It stays so while there is its socket: one that is stopped later is not waited for.

    Raises:
        OSError: it does not answer, or did not shortly before.
        ValueError: it answers what no rank does.
    """
    if path not in _facts:
        if time.monotonic() < _silent_until_s.get(path, 0.0):
            raise TimeoutError(f"{path} has not answered")
        try:
            _facts[path] = ask(path, "stats")
        except TimeoutError:
            _silent_until_s[path] = time.monotonic() + SILENT_S
            raise
    return _facts[path]


_facts: dict[Path, dict[str, Any]] = {}
_silent_until_s: dict[Path, float] = {}


def ask(path: Path, what: str, **options: int) -> dict[str, Any]:
    """One answer of one rank.

    Args:
        path: its socket.
        what: `stats` or `timelines`.
        options: of the question. A rank whose version does not know one answers without it.

    Raises:
        OSError: it does not answer.
        ValueError: it answers what no rank does.
    """
    with contextlib.closing(_connect(path)) as connection:
        connection.sendall(json.dumps({"ask": what, **options}).encode() + b"\n")
        with connection.makefile("rb") as lines:
            return read_answer(lines.readline(LINE_BYTES_MAX))


def read_answer(line: bytes) -> dict[str, Any]:
    """One line that a rank wrote, perhaps on another host.

    Raises:
        ValueError: it is no answer.
    """
    try:
        answer = json.loads(line)
    except RecursionError:
        answer = None
    if not isinstance(answer, dict):
        raise ValueError(f"no answer of a rank: {line[:40]!r}")
    return answer


class Sources:
    """Answers of many ranks, as they come: each from a thread of its own, so that nobody waits for one that is stopped.

    Args:
        every_s: pause between two answers of a rank.
    """

    def __init__(self, every_s: float) -> None:
        self.every_s = every_s
        self._answers: queue.Queue[dict[str, Any]] = queue.Queue(maxsize=1024)
        self._known: set[str] = set()
        self._next_look_s = 0.0
        self._processes: list[subprocess.Popen[bytes]] = []
        self._followed: set[subprocess.Popen[bytes]] = set()
        self.has_answers = False
        # A line for each host whose command has failed: what it was and how it ended.
        self.failures: list[str] = []

    def watch_sockets(self, job: str | None) -> None:
        """Follows every socket of the job that is not followed yet. Call it again to find ranks that start later.

        It looks once in a pause, or at once while there are none: sockets of other jobs are tried each time.
        """
        if self._known and time.monotonic() < self._next_look_s:
            return
        self._next_look_s = time.monotonic() + self.every_s
        for path in find_sockets(job, self._known):
            if path.name not in self._known:
                self._known.add(path.name)
                self._start(self._follow_socket, path)

    def watch_host(self, host: str, job: str | None, ssh: str) -> None:
        """Follows the ranks of another host, by `gradwire monitor --json` there.

        Raises:
            OSError: there is no such program as `ssh`.
        """
        remote = ["gradwire", "monitor", "--json", "--every", str(self.every_s), *([] if job is None else [job])]
        command = [*shlex.split(ssh), host, shlex.join(remote)]
        # What it says of errors is kept: the screen would hide it.
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        self._processes.append(process)
        self._followed.add(process)
        self._start(self._follow_host, process, host, command[0])

    @property
    def is_any(self) -> bool:
        """Whether anything is followed, or an answer has not been taken yet."""
        return bool(self._known or self._followed or not self._answers.empty())

    def take(self, timeout_s: float) -> Iterator[dict[str, Any]]:
        """Answers that have come, the first one within the time."""
        try:
            yield self._answers.get(timeout=timeout_s)
            while True:
                yield self._answers.get_nowait()
        except queue.Empty:
            return

    def close(self) -> None:
        """Ends what it started on other hosts."""
        for process in self._processes:
            process.terminate()

    def _start(self, follow: Any, *source: Any) -> threading.Thread:
        thread = threading.Thread(target=follow, args=source, daemon=True)
        thread.start()
        return thread

    def _follow_socket(self, path: Path) -> None:
        with contextlib.suppress(OSError, ValueError), contextlib.closing(self._connect_in_turn(path)) as connection:
            connection.settimeout(None)  # stopped ranks come back
            connection.sendall(json.dumps({"ask": "stats", "every_s": self.every_s}).encode() + b"\n")
            with connection.makefile("rb") as lines:
                self._pass_on(lines)
        self._known.discard(path.name)

    def _connect_in_turn(self, path: Path) -> socket.socket:
        """Connects to a rank, perhaps one that stands still and for which as many wait already as can."""
        while True:
            try:
                return _connect(path)
            except BlockingIOError:
                time.sleep(self.every_s)

    def _follow_host(self, process: subprocess.Popen[bytes], host: str, program: str) -> None:
        assert process.stdout is not None, "it was asked for"
        assert process.stderr is not None, "it was asked for"
        last: deque[bytes] = deque(maxlen=1)
        errors = self._start(last.extend, filter(bytes.strip, process.stderr))
        self._pass_on(process.stdout, is_mixed=True)
        code = process.wait()
        errors.join(ERRORS_TIMEOUT_S)
        if code:
            said = b"".join(last).decode(errors="replace").strip()
            self.failures.append(f"{host}: {program} ended with {code}" + (f": {said}" if said else ""))
        self._followed.discard(process)

    def _pass_on(self, lines: Any, *, is_mixed: bool = False) -> None:
        """Takes answers until there are no more; of mixed lines, which a login shell may print, those that are some."""
        while line := lines.readline(LINE_BYTES_MAX):
            try:
                answer = read_answer(line)
            except ValueError:
                if is_mixed:
                    continue
                raise
            if "error" not in answer:
                self.has_answers = True
                self._answers.put(answer)


def _connect(path: Path) -> socket.socket:
    connection = connect(path, CONNECT_TIMEOUT_S)
    connection.settimeout(ANSWER_TIMEOUT_S)
    return connection
