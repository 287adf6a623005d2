"""DSCP and ECN: which octets a job sends, and what it means that they arrive changed or not at all."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gradwire.config import Config
from gradwire.doctor.findings import NOTE, PROBLEM, Finding

CAPABLE = 0b10  # ECT(0)

# For each octet sent the one that arrived; None: nothing arrived with it.
Marks = Sequence[tuple[int, int | None]]


def octets_of(config: Config) -> list[int]:
    """Traffic class octets that a job sends: its code points, ECN-capable; without any what `mlt` would send."""
    own = [*(config.code_points() or [config.dscp]), config.control_code_point()]
    points = own if any(own) else [*Config.mlt().code_points(), 40]
    return [point << 2 | CAPABLE for point in dict.fromkeys(points)]


def judge(marks: Marks, config: Config, found: Callable[..., Finding], where: str = "") -> list[Finding]:
    """Marks that arrive changed matter where the job sets them.

    Args:
        marks: of one way.
        config: the job's.
        found: makes a finding of level, check, text and fix.
        where: the beginning of the texts, where it is not the only way.
    """
    tried = [(sent, came) for sent, came in marks if came is not None]
    bleached = sorted({sent >> 2 for sent, came in tried if came >> 2 != sent >> 2})
    cleared = [sent for sent, came in tried if not came & 3]
    silent = sorted({sent >> 2 for sent, came in marks if came is None})
    points, unset = _set_by(config)
    findings = []
    if silent:
        text = f"{where}nothing with DSCP {', '.join(map(str, silent))} arrives"
        fix = f"a filter or policer on the way drops these code points: see docs/switch.md, or set {unset}"
        findings.append(found(PROBLEM if points else NOTE, "dscp", text, fix))
    if bleached:
        came = sorted({came >> 2 for sent, came in tried if came >> 2 != sent >> 2})
        changed = f"DSCP {', '.join(map(str, bleached))} arrives as {', '.join(map(str, came))}"
        text = f"{where}{changed}: switches cannot tell layers apart"
        fix = f"have the network trust DSCP (docs/switch.md), or set {unset}"
        findings.append(found(PROBLEM if points else NOTE, "dscp", text, fix))
    if cleared:
        text = f"{where}the ECN field arrives cleared: switches drop important gradients like any other"
        fix = "have the network leave ECN alone, or set GRADWIRE_IMPORTANCE=off"
        findings.append(found(PROBLEM if config.marks_importance() else NOTE, "ecn", text, fix))
    return findings


def _set_by(config: Config) -> tuple[bool, str]:
    """Whether the job sets code points, and what would have it set none."""
    set_by = [("GRADWIRE_DSCP_CLASSES=off", bool(config.code_points())), ("GRADWIRE_DSCP=0", config.dscp > 0)]
    set_by.append(("GRADWIRE_DSCP_CONTROL=0", bool(config.dscp_control)))
    unset = [setting for setting, is_set in set_by if is_set]
    return bool(unset), " and ".join(unset) or "GRADWIRE_DSCP_CLASSES=off"
