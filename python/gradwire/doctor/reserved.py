"""Whether the kernel may give the job's ports to other programs: those of the range from which it chooses, unless they are reserved."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from gradwire._launcher import RANKS_MAX, THREADS_MAX, local_rank
from gradwire.doctor.findings import NOTE, Finding
from gradwire.doctor.threads import PORT_MAX

_SYSCTLS = Path("/proc/sys/net/ipv4")


@dataclass(frozen=True)
class Choice:
    """What the kernel chooses ports from, IPv6's too.

    Attributes:
        range: the least and the greatest; None: it is not known.
        reserved: ranges of those that it leaves out, as the kernel writes them: "4000-4010,5000".
    """

    range: tuple[int, int] | None = None
    reserved: str = ""

    def may_give(self, port: int) -> bool:
        """Whether a program that asks for any port may get this one."""
        is_in_range = self.range is not None and self.range[0] <= port <= self.range[1]
        return is_in_range and not any(first <= port <= last for first, last in self._reserved())

    def _reserved(self) -> list[tuple[int, int]]:
        parts = [part.partition("-") for part in self.reserved.split(",") if part]
        return [(int(first), int(last or first)) for first, _, last in parts]


def examine(folder: Path = _SYSCTLS) -> Choice:
    """What this network namespace has."""
    with suppress(OSError, ValueError):
        least, greatest = map(int, (folder / "ip_local_port_range").read_text().split())
        return Choice((least, greatest), (folder / "ip_local_reserved_ports").read_text().strip())
    return Choice()


def judge(choice: Choice, ports: Sequence[int], rank: int, tried: int | None = None) -> list[Finding]:
    """What follows for a job whose ports are the same at each start.

    Args:
        choice: the kernel's.
        ports: of this rank's network threads that firewalls are told, the first one's first.
        rank: this one.
        tried: the port that the first one asks for before all others; None: it got that.
    """
    wanted = ports[0] if tried is None else tried
    given = [str(port) for port in dict.fromkeys([wanted, *ports]) if choice.may_give(port)]
    if not given:
        return []
    first = wanted - (local_rank() or 0)
    last = min(PORT_MAX, first + RANKS_MAX * max(THREADS_MAX, len(ports)) - 1)
    # What is set takes the place of what was.
    reserved = ",".join(filter(None, [choice.reserved, f"{first}-{last}"]))
    fix = f"sysctl -w net.ipv4.ip_local_reserved_ports={reserved}"
    text = f"UDP port {', '.join(given)} may be gone at the next start: the kernel gives it to programs that ask for any port"
    return [Finding(NOTE, "reserved", f"{text}, until it is reserved: {fix}", fix, rank)]
