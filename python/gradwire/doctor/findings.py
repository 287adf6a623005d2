"""What was found, how bad it is, and how to fix it."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

PROBLEM, WARNING, NOTE = "problem", "warning", "note"
LEVELS = (PROBLEM, WARNING, NOTE)


@dataclass(frozen=True)
class Finding:
    """One thing worth knowing.

    Attributes:
        level: `problem`: training would suffer or not start; `warning`: it may; `note`: good to know.
        check: what was looked at, one word.
        text: what is so, with numbers.
        fix: what to do, as commands where there are any; empty where nothing need be done.
        rank: who found it.
        peer: the other rank, where it is about two.
    """

    level: str
    check: str
    text: str
    fix: str = ""
    rank: int = 0
    peer: int | None = None

    def described(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)

    def where(self) -> str:
        """Which ranks it is about, for people."""
        return f"rank {self.rank}" if self.peer is None else f"rank {self.rank} to {self.peer}"


def suffers(findings: list[Finding]) -> bool:
    """Whether training would."""
    return any(finding.level == PROBLEM for finding in findings)


def ordered(findings: list[Finding]) -> list[Finding]:
    """The worst first, then by rank."""
    return sorted(findings, key=lambda f: (LEVELS.index(f.level), f.rank, -1 if f.peer is None else f.peer, f.check))
