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

from gradwire.doctor.findings import WARNING, Finding

_OWN_GROUPS = Path("/proc/self/cgroup")
_MOUNTS = Path("/proc/self/mountinfo")
_STAT = Path("/proc/stat")
_STOLEN_LEAST = 0.05


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
        host_cores: that there are.
        ranks: of this host, as the launcher says.
        limit: of its container; None: there is none that it reaches.
        stolen_share: of the host's time since its start, 0 to 1, that went to other virtual machines.
    """

    cores: int
    host_cores: int
    ranks: int = 1
    limit: Limit | None = None
    stolen_share: float = 0.0


def examine() -> Processor:
    """Looks at this process."""
    local = os.environ.get("LOCAL_WORLD_SIZE", "")
    cores = len(os.sched_getaffinity(0))
    return Processor(
        cores=cores,
        host_cores=os.cpu_count() or 1,
        ranks=int(local) if local.isdigit() else 1,
        limit=limit_of(_OWN_GROUPS, _MOUNTS, cores),
        stolen_share=_stolen_share(_STAT),
    )


def judge(processor: Processor, rank: int) -> list[Finding]:
    """What follows from it."""

    def found(text: str, fix: str) -> Finding:
        return Finding(WARNING, "processor", text, fix, rank)

    findings = []
    if processor.limit is not None:
        findings.append(found(*_judged(processor.limit, processor.cores)))
    # Ranks may be bound to cores of their own, so those of one say nothing about all.
    if processor.ranks > processor.host_cores:
        text = (
            f"{processor.ranks} ranks share {processor.host_cores} cores, and each has a thread for its packets besides"
        )
        findings.append(found(text, "fewer ranks for each host"))
    if processor.stolen_share >= _STOLEN_LEAST:
        text = f"other virtual machines took {processor.stolen_share:.0%} of this one's processor time since it started"
        findings.append(found(text, "a machine with cores of its own (dedicated, not burstable)"))
    return findings


def limit_of(own_groups: Path, mounts: Path, cores: int) -> Limit | None:
    """Of the limits of a process's control groups and those around them the one that stopped it most often, else the tightest.

    Args:
        own_groups: as `/proc/self/cgroup`.
        mounts: as `/proc/self/mountinfo`.
        cores: that the process may run on, the most that it reaches by itself; a group may hold others.
    """
    found = [limit for folder in dict.fromkeys(_folders(own_groups, mounts)) if (limit := _read(folder)) is not None]
    limits = [limit for limit in found if limit.cores < cores or limit.stopped]
    return min(limits, key=lambda limit: (-round(limit.stopped / max(1, limit.periods), 2), limit.cores), default=None)


def _judged(limit: Limit, cores: int) -> tuple[str, str]:
    """Text and fix of a limit that can be reached. How often it was is of everything that ran in the container."""
    text = (
        f"this container may use the time of {limit.cores:g} of {cores} cores; "
        f"once it has, all its threads stand still, for up to {1e3 * limit.period_s:g} ms"
    )
    if limit.stopped:
        share = limit.stopped / max(1, limit.periods)
        text = f"{text}: so far in {limit.stopped} of {limit.periods} periods ({share:.0%})"
    fix = (
        "no limit of processor time for the job (Kubernetes: a request without a limit, or whole CPUs under the static CPU policy), "
        "or one above what all its threads use"
    )
    return text, fix


def _folders(own_groups: Path, mounts: Path) -> Iterator[Path]:
    """Of version 2 and of version 1's controller: this process's group and all around it, as far as they can be seen from here."""
    of_controller = dict(_groups(own_groups))
    for kind, root, place in _places(mounts):
        path = of_controller.get(kind)
        if path is None:
            continue
        if path.is_relative_to(root):
            inside = path.relative_to(root)
        elif root.is_relative_to("/..") or path == Path("/"):
            inside = Path()  # in a namespace of groups its own is the outermost, and the mount may begin outside of it
        else:
            continue
        yield from (place / part for part in (inside, *inside.parents))


def _groups(own_groups: Path) -> Iterator[tuple[str, Path]]:
    """`number:controllers:path`: of version 2 (no controllers) and of the processor's in version 1."""
    with suppress(OSError, ValueError):
        for line in own_groups.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers or "cpu" in controllers.split(","):
                yield ("cpu" if controllers else ""), Path(path)


def _places(mounts: Path) -> Iterator[tuple[str, Path, Path]]:
    """Where control groups are mounted: of which kind, from which group on, and at which folder."""
    with suppress(OSError, ValueError):
        for line in mounts.read_text().splitlines():
            place, _, kind = line.partition(" - ")
            (_, _, _, root, folder, *_), (fstype, _, options) = place.split(" "), kind.split(" ", 2)
            if fstype == "cgroup2" or (fstype == "cgroup" and "cpu" in options.split(",")):
                yield ("" if fstype == "cgroup2" else "cpu"), Path(root), Path(folder.replace("\\040", " "))


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
