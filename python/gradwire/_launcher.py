"""What the launcher says of this process, and which UDP port it has for that."""

import os
from collections.abc import Iterable

from gradwire.config import PORT_BASE
from gradwire.errors import ConfigError

# Where the number of a process on its host is, and where how many they are: torchrun's; Open MPI's; MPICH's; Slurm's, which go last.
# What a task of Slurm starts inherits the task's: mpirun below it, and the processes of a batch script or a shell.
_LAUNCHERS = {
    "LOCAL_RANK": "LOCAL_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_RANK": "OMPI_COMM_WORLD_LOCAL_SIZE",
    "MPI_LOCALRANKID": "MPI_LOCALNRANKS",
    "SLURM_LOCALID": "SLURM_STEP_TASKS_PER_NODE",
}
LOCAL_RANK_VARIABLES = tuple(_LAUNCHERS)
# So many ranks of a host have ports of their own, from PORT_BASE on: their further network threads' lie 64, 128 and 192 behind
# (LANE_PORTS_APART of the engine).
RANKS_MAX = 64
THREADS_MAX = 4


def local_rank() -> int | None:
    """Number of this process on its host; `None` where no launcher says so."""
    variable = _variable()
    return None if variable is None else int(os.environ[variable])


def candidate_ports(base: int | None) -> list[int]:
    """UDP ports to try, in order.

    What the user sets is kept to. Else the first one is the rank's own, and the others are for when that is taken: by a process that a
    task of Slurm started too and that has the same number, by a worker that outlives the rank before, or by another job. All keep off
    the ports that other ranks of the host are about to bind, further threads' included.

    Args:
        base: see `Config.port`.

    Raises:
        ConfigError: `base` plus the local rank is no port.
    """
    if base == 0:
        return [0]
    number = local_rank()
    if base is None and number is None:
        return list(range(PORT_BASE, PORT_BASE + RANKS_MAX))
    own = (PORT_BASE if base is None else base) + (number or 0)
    if own > 65535:
        raise ConfigError(
            f"port = {base} is not allowed: with LOCAL_RANK {number} it would be {own}", field="port", value=base
        )
    return [own] if base is not None else [own, *_spare_ports()]


def _spare_ports() -> Iterable[int]:
    """Nobody's ports: first those behind the ranks', which firewalls are likeliest to let through, if it is known how many these are.

    Then those below PORT_BASE: above the last further thread's a second job may have its own, which it set and keeps to (docs/clusters.md).
    """
    size = _local_size()
    if size is not None:
        yield from range(PORT_BASE + size, PORT_BASE + RANKS_MAX)
    lowest = PORT_BASE - THREADS_MAX * RANKS_MAX
    yield from range(lowest, lowest + RANKS_MAX)


def _variable() -> str | None:
    return next((name for name in LOCAL_RANK_VARIABLES if os.environ.get(name, "").isdecimal()), None)


def _local_size() -> int | None:
    """Processes that the launcher starts on this host; None: unknown."""
    variable = _variable()
    if variable is None:
        return None
    # Slurm's names all hosts of the step, "8(x2),4": none has more than the largest.
    words = [word.split("(")[0] for word in os.environ.get(_LAUNCHERS[variable], "").split(",")]
    if not all(word.isdecimal() for word in words):
        return None
    size = max(int(word) for word in words)
    return size if size > int(os.environ[variable]) else None
