"""Runs a command, each thread of which gets a slow core of its own: what many cores would do, shown on few.

    python bench/collective/own_cores.py -- gradwire bench --network bridge --ranks 2 --size 100 --preset exact
    python bench/collective/own_cores.py --share 25 -- gradwire bench --network bridge --ranks 2 --size 25

On two cores gloo's two or three threads of each rank share them with those of the other ranks, and a program that uses one
thread for each rank loses nothing by it. With so little of a core for each thread that all of them fit, the one that has
most to do decides, as it does where cores abound. Compare what stands beside each other in one run; the times themselves are
those of slow cores. A thread that looks for work instead of sleeping spends its share on that, which on a core of its
own costs nothing: such settings cannot be judged here.

Each thread is put into a control group of its own as soon as it is seen (five times in a second), with a quota of the
`cpu` controller (version 1) in periods of 4 ms, of which the kernel gives no less than 1. Needs root. Prints the threads
that used most time; the groups are gone when the command has ended.

Exit code: that of the command; 2 it could not run (a wrong option, no controller, no permission).
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import click

CONTROLLER = Path("/sys/fs/cgroup/cpu")
PERIOD_US = 4_000
LOOKS_EVERY_S = 0.2
TICKS_IN_S = os.sysconf("SC_CLK_TCK")


@dataclass
class Seen:
    """A thread of the command and its control group."""

    name: str
    cpu_s: float
    throttled: int

    @classmethod
    def parsed(cls, name: str, stat: str, cpu_stat: str) -> Seen:
        """From the thread's `comm` and `stat` in /proc, and `cpu.stat` of its group."""
        fields = stat.rpartition(")")[2].split()  # the name, which stands in front, may hold spaces and brackets
        throttled = dict(line.split() for line in cpu_stat.splitlines())["nr_throttled"]
        return cls(name.strip(), (int(fields[11]) + int(fields[12])) / TICKS_IN_S, int(throttled))


class Groups:
    """The control groups of the threads."""

    def __init__(self, quota_us: int) -> None:
        self._root = CONTROLLER / f"gradwire-own-cores-{os.getpid()}"
        self._quota_us = quota_us
        self.seen: dict[int, Seen] = {}

    def __enter__(self) -> Groups:
        self._root.mkdir()
        return self

    def __exit__(self, *_: object) -> None:
        groups = [entry for entry in self._root.iterdir() if entry.is_dir()]
        for group in [*groups, self._root]:
            remove(group)

    def look(self, process: int) -> None:
        """Gives each new thread of the process and of its descendants a group; what each has used so far."""
        for pid in family(process):
            for thread in children_of(Path(f"/proc/{pid}/task")):
                try:
                    self._look_at(pid, thread)
                except (FileNotFoundError, ProcessLookupError):
                    continue  # it has ended meanwhile

    def _look_at(self, pid: int, thread: int) -> None:
        group = self._root / str(thread)
        if thread not in self.seen:
            group.mkdir(exist_ok=True)
            (group / "cpu.cfs_period_us").write_text(str(PERIOD_US))
            (group / "cpu.cfs_quota_us").write_text(str(self._quota_us))
            (group / "tasks").write_text(str(thread))
        task = Path(f"/proc/{pid}/task/{thread}")
        texts = (file.read_text() for file in (task / "comm", task / "stat", group / "cpu.stat"))
        self.seen[thread] = Seen.parsed(*texts)


def remove(group: Path) -> None:
    """Removes a control group whose threads have ended, or are about to."""
    for _ in range(100):
        with contextlib.suppress(OSError):
            group.rmdir()
            return
        time.sleep(0.05)
    group.rmdir()


def children_of(folder: Path) -> list[int]:
    """Numbers of what stands in a folder of processes or threads; none if it is gone."""
    try:
        return [int(entry.name) for entry in folder.iterdir()]
    except OSError:
        return []


def family(process: int) -> Iterator[int]:
    """The process and all that it has started."""
    yield process
    for thread in children_of(Path(f"/proc/{process}/task")):
        try:
            children = Path(f"/proc/{process}/task/{thread}/children").read_text().split()
        except OSError:
            continue
        for child in children:
            yield from family(int(child))


@click.command(help=__doc__, context_settings={"ignore_unknown_options": True})
@click.option(
    "--share", default=30, show_default=True, type=click.IntRange(25, 100), help="Percent of a core for each thread."
)
@click.option("--json", "json_to", type=click.Path(path_type=Path), help="Write what each thread used here.")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def main(share: int, json_to: Path | None, command: tuple[str, ...]) -> None:
    """Runs the command and says what its threads used."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the groups go
    try:
        with Groups(PERIOD_US * share // 100) as groups:
            with subprocess.Popen(command) as running:
                try:
                    while running.poll() is None:
                        groups.look(running.pid)
                        time.sleep(LOOKS_EVERY_S)
                finally:
                    running.terminate()
            if json_to is not None:
                json_to.write_text(json.dumps([asdict(seen) for seen in groups.seen.values()], indent=2) + "\n")
            for seen in sorted(groups.seen.values(), key=lambda seen: -seen.cpu_s)[:12]:
                click.echo(f"{seen.cpu_s:8.2f} s, throttled {seen.throttled:6} times: {seen.name}", err=True)
    except OSError as error:
        click.echo(
            f"{error}: this needs root, the cpu controller of version 1 at {CONTROLLER}, and a command", err=True
        )
        sys.exit(2)
    sys.exit(running.returncode)


if __name__ == "__main__":
    main()
