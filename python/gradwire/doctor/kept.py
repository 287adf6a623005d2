"""The ports of this rank, kept from the moment that its engine has left them until the probes use them.

Ranks of one host that no launcher numbers each take the first port that is free. One that let go of its port meanwhile would see
another rank of the check take it, which of the job's ranks none can.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType

from gradwire.doctor.findings import PROBLEM, WARNING, Finding
from gradwire.doctor.probe import Prober, bound


@dataclass
class Kept:
    """Sockets at the ports of the network threads, the first one's first. A context manager: what no prober has taken is closed.

    Attributes:
        sockets: up to the first port that somebody else has taken since the engine had it.
        lost: that port, and what the kernel said; None: there is none.
    """

    sockets: list[socket.socket] = field(default_factory=list)
    lost: tuple[int, OSError] | None = None

    def probers(self, further: int, rank: int, token: int) -> tuple[list[Prober], list[Finding]]:
        """Has the first one and so many further ones probe; and what it means that one of these ports is lost.

        Args:
            further: network threads beside the first.
            rank: this one.
            token: of the check.
        """
        wanted, self.sockets = self.sockets[: 1 + further], self.sockets[1 + further :]
        found = [Prober(each, rank, token) for each in wanted]
        if self.lost is None or len(found) > further:
            return found, []
        port, error = self.lost
        text = f"UDP port {port} cannot be had any more: {error}"
        fix = "end the process that has the port (ss -ulpn), or set GRADWIRE_PORT"
        level, check = (WARNING, "threads") if found else (PROBLEM, "engine")
        return found, [Finding(level, check, text, fix, rank)]

    def close(self) -> None:
        """Lets go of all that no prober has taken."""
        for each in self.sockets:
            each.close()

    def __enter__(self) -> Kept:
        return self

    def __exit__(
        self, _kind: type[BaseException] | None, _error: BaseException | None, _at: TracebackType | None
    ) -> None:
        self.close()


def keep(ports: Sequence[int], address: str) -> Kept:
    """Binds these ports.

    Args:
        ports: of the network threads, the first one's first.
        address: a local one, or the one that stands for all of a family.
    """
    kept = Kept()
    for port in ports:
        try:
            kept.sockets.append(bound(port, address))
        except OSError as error:
            kept.lost = port, error
            break
    return kept
