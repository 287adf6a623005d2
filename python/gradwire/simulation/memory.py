"""Whether a plan can fit into this host's memory at all: where it does not, the simulator's process would be aborted."""

from __future__ import annotations

import os
import resource
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gradwire.simulation.plan import ClusterPlan

# Measured, and rounded down: what is refused is what could not have been begun. A run takes more, by what is in flight.
_LINK_BYTES, _CONNECTION_BYTES = 350, 400
_GIGABYTE = 1e9


def check(plan: ClusterPlan) -> None:
    """Raises ValueError where the plan needs more memory than this process may ever have."""
    needed, most = least_bytes(plan), _most_bytes()
    if needed > most:
        raise ValueError(
            f"this takes at least {needed / _GIGABYTE:.3g} GB of memory, and here are {most / _GIGABYTE:.3g} GB: simulate a smaller model "
            "(its largest tensor counts), fewer hosts or fewer spines"
        )


def least_bytes(plan: ClusterPlan) -> int:
    """The memory of its largest bucket, which all ranks share, of its links between leaves and spines, and of the ranks' connections."""
    hosts = plan.workers + plan.servers
    links = -(-hosts // min(plan.hosts_per_leaf, hosts)) * plan.spines
    connections = 2 * plan.workers * plan.servers if plan.servers else plan.workers * (plan.workers - 1)
    largest = max((bucket.bytes for bucket in plan.buckets), default=0)
    return largest + links * _LINK_BYTES + connections * _CONNECTION_BYTES


def _most_bytes() -> int:
    """Memory and swap of the host, or what a limit allows (`ulimit -v`)."""
    most = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") + _swap_bytes()
    limits = (resource.getrlimit(number)[0] for number in (resource.RLIMIT_AS, resource.RLIMIT_DATA))
    return min([most, *(limit for limit in limits if limit != resource.RLIM_INFINITY)])


def _swap_bytes() -> int:
    with suppress(OSError, StopIteration, ValueError):
        lines = Path("/proc/meminfo").read_text().splitlines()
        return int(next(line.split()[1] for line in lines if line.startswith("SwapTotal:"))) << 10
    return 0
