"""The processor time that this process gets: cores, what a container may use, and what other virtual machines take.

A container with a limit stands still, all its threads at once, from the moment that it has used its share of a period until the next
period begins (100 ms by default). The network thread stands still with it, and every other rank waits. Control groups of both versions
count how often that was so.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from gradwire.doctor.findings import PROBLEM, WARNING, Finding

_GROUPS = Path("/sys/fs/cgroup")
_OWN_GROUPS = Path("/proc/self/cgroup")
_STAT = Path("/proc/stat")
_STOPPED_LEAST = 0.01  # of a container's periods: one step of a hundred waits
_STOLEN_LEAST = 0.05
_PERIODS_LEAST = 100  # ten seconds of work: less says little


@dataclass(frozen=True)
class Limit:
    """What a control group allows.

    Attributes:
        cores: processor seconds for each second.
        period_s: after which its share begins anew.
        periods: in which anything ran, since the group was made.
        stopped: of these, the ones in which it had used up its share.
    """

    cores: float
    period_s: float
    periods: int
    stopped: int


@dataclass(frozen=True)
class Processor:
    """What this process gets.

    Attributes:
        cores: that it may run on.
        ranks: of this host that share them, as the launcher says.
        limit: of its container; None: there is none.
        stolen_share: of the host's time since its start, 0 to 1, that went to other virtual machines.
    """

    cores: int
    ranks: int = 1
    limit: Limit | None = None
    stolen_share: float = 0.0


def examine() -> Processor:
    """Looks at this process."""
    local = os.environ.get("LOCAL_WORLD_SIZE", "")
    return Processor(
        cores=len(os.sched_getaffinity(0)),
        ranks=int(local) if local.isdigit() else 1,
        limit=limit_of(_OWN_GROUPS, _GROUPS),
        stolen_share=_stolen_share(_STAT),
    )


def judge(processor: Processor, rank: int) -> list[Finding]:
    """What follows from it."""

    def found(level: str, text: str, fix: str) -> Finding:
        return Finding(level, "processor", text, fix, rank)

    findings = []
    if processor.limit is not None and processor.limit.cores < processor.cores:
        findings.append(found(*_judged(processor.limit, processor.cores)))
    if processor.ranks > processor.cores:
        text = f"{processor.ranks} ranks share {processor.cores} cores, and each has a thread for its packets beside those that compute"
        findings.append(found(WARNING, text, "fewer ranks for each host, or more cores for them (taskset, cpuset)"))
    if processor.stolen_share >= _STOLEN_LEAST:
        text = f"other virtual machines took {processor.stolen_share:.0%} of this one's processor time since it started"
        findings.append(found(WARNING, text, "a machine with cores of its own (dedicated, not burstable)"))
    return findings


def limit_of(own_groups: Path, groups: Path) -> Limit | None:
    """The tightest limit of a process's control groups and those around them.

    Args:
        own_groups: as `/proc/self/cgroup`.
        groups: where the control groups are mounted.
    """
    limits = [limit for folder in _folders(own_groups, groups) if (limit := _read(folder)) is not None]
    return min(limits, key=lambda limit: limit.cores, default=None)


def _judged(limit: Limit, cores: int) -> tuple[str, str, str]:
    """Level, text and fix of a limit that can be reached."""
    text = (
        f"this container may use the time of {limit.cores:g} of {cores} cores; "
        f"once it has, all its threads stand still, for up to {1e3 * limit.period_s:g} ms"
    )
    fix = (
        "no limit of processor time for the job (Kubernetes: a request without a limit, or whole CPUs under the static CPU policy), "
        "or one above what all its threads use"
    )
    share = limit.stopped / limit.periods if limit.periods else 0.0
    if limit.periods >= _PERIODS_LEAST and share >= _STOPPED_LEAST:
        return PROBLEM, f"{text}: so far in {limit.stopped} of {limit.periods} periods ({share:.0%})", fix
    return WARNING, text, fix


def _folders(own_groups: Path, groups: Path) -> Iterator[Path]:
    """Of version 2 and of version 1's controller: this process's group and all around it. In a container its own is the outermost."""
    with suppress(OSError):
        for line in own_groups.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers == "":
                roots = [groups, groups / "unified"]
            elif "cpu" in controllers.split(","):
                roots = [groups / controllers, groups / "cpu"]
            else:
                continue
            inside = [Path(path.lstrip("/")), *Path(path.lstrip("/")).parents]
            yield from dict.fromkeys(root / part for root in roots for part in inside)


def _read(folder: Path) -> Limit | None:
    """The limit of one group, in either version's files."""
    share_us, period_us = 0, 0
    with suppress(OSError, ValueError):
        share, period = (folder / "cpu.max").read_text().split()
        share_us, period_us = 0 if share == "max" else int(share), int(period)
    with suppress(OSError, ValueError):
        share_us = int((folder / "cpu.cfs_quota_us").read_text())
        period_us = int((folder / "cpu.cfs_period_us").read_text())
    if share_us <= 0 or period_us <= 0:
        return None
    counts: dict[str, int] = {}
    with suppress(OSError, ValueError):
        lines = (line.split() for line in (folder / "cpu.stat").read_text().splitlines())
        counts = {name: int(value) for name, value in lines}
    periods, stopped = counts.get("nr_periods", 0), counts.get("nr_throttled", 0)
    return Limit(share_us / period_us, period_us / 1e6, periods, stopped)


def _stolen_share(stat: Path) -> float:
    """The eighth of the times that the kernel counts for all cores, of the first eight; the others are parts of these."""
    with suppress(OSError, ValueError, IndexError):
        times = [int(value) for value in stat.read_text().split("\n", 1)[0].split()[1:9]]
        return times[7] / max(1, sum(times))
    return 0.0
