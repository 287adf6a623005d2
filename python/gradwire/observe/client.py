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
from dataclasses import dataclass
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
# A host whose ranks have ended, or whose command broke off, is asked again after such a pause: a login costs more than a look at a socket.
ASK_AGAIN_S = 10.0
# `gradwire monitor` and `gradwire trace` end with it where they find nothing.
EXIT_NOTHING = 3
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


@dataclass(eq=False)
class _Host:
    """Another host whose ranks are followed.

    Attributes:
        name: as ssh has it.
        command: that asks its ranks.
        process: the one that runs, or ran last.
        has_answered: whether one of its ranks ever has: then it is asked again.
        again_s: when, of a monotonic clock; None: it runs, or is not asked again.
        said: what is wrong with it now; empty: nothing.
    """

    name: str
    command: list[str]
    process: subprocess.Popen[bytes] | None = None
    has_answered: bool = False
    again_s: float | None = None
    said: str = ""


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
        self._hosts: list[_Host] = []
        # Hosts of which an answer may come, as far as is known: not those that are only asked whether there are ranks again.
        self._followed: set[_Host] = set()
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
        known = _Host(host, [*shlex.split(ssh), host, shlex.join(remote)])
        self._hosts.append(known)
        self._followed.add(known)
        self._run(known)

    def ask_hosts_again(self) -> None:
        """Runs the commands of hosts again that have ended after there were answers of their ranks: such may be started anew.

        Only while something else is followed: where every rank has ended the job has.
        """
        for host in self._hosts:
            if host.again_s is not None and time.monotonic() >= host.again_s and self.is_any:
                host.again_s = None
                try:
                    self._run(host)
                except (OSError, RuntimeError) as error:  # no descriptor or thread is left, maybe for a while
                    if host.process is not None:
                        host.process.terminate()
                    host.said, host.again_s = str(error), time.monotonic() + ASK_AGAIN_S

    def lines_of_hosts(self) -> list[str]:
        """One for each host of which nothing is seen now, and why."""
        return [f"{host.name}: {host.said}" for host in self._hosts if host.said]

    def _run(self, host: _Host) -> None:
        # What it says of errors is kept: the screen would hide it.
        host.process = subprocess.Popen(
            host.command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        self._start(self._follow_host, host, host.process)

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
        for host in self._hosts:
            if host.process is not None:
                host.process.terminate()

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

    def _follow_host(self, host: _Host, process: subprocess.Popen[bytes]) -> None:
        assert process.stdout is not None, "it was asked for"
        assert process.stderr is not None, "it was asked for"
        last: deque[bytes] = deque(maxlen=1)
        errors = self._start(last.extend, filter(bytes.strip, process.stderr))
        self._pass_on(process.stdout, host)
        code = process.wait()
        errors.join(ERRORS_TIMEOUT_S)
        self._note_end(host, code, b"".join(last).decode(errors="replace").strip())
        self._followed.discard(host)
        host.again_s = time.monotonic() + ASK_AGAIN_S if host.has_answered else None

    def _note_end(self, host: _Host, code: int, text: str) -> None:
        """What the end of a host's command says of it."""
        if code == 0 or (host.has_answered and code == EXIT_NOTHING):
            host.said = "no rank there"
            return
        host.said = f"{host.command[0]} ended with {code}" + (f": {text}" if text else "")
        failure = f"{host.name}: {host.said}"
        if failure not in self.failures:  # of one that is asked again and again
            self.failures.append(failure)

    def _pass_on(self, lines: Any, host: _Host | None = None) -> None:
        """Takes answers until there are no more; of a host's lines, as a login shell may print others, those that are some."""
        while line := lines.readline(LINE_BYTES_MAX):
            try:
                answer = read_answer(line)
            except ValueError:
                if host is not None:
                    continue
                raise
            if "error" not in answer:
                self.has_answers = True
                if host is not None:
                    host.has_answered, host.said = True, ""
                    self._followed.add(host)
                self._answers.put(answer)


def _connect(path: Path) -> socket.socket:
    connection = connect(path, CONNECT_TIMEOUT_S)
    connection.settimeout(ANSWER_TIMEOUT_S)
    return connection
