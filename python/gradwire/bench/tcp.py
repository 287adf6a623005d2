"""The congestion controls of TCP that this kernel has, and what becomes of a plan whose peers want others.

A module such as `tcp_bbr` that is not loaded cannot be had in a user namespace, and the benchmark loads none of the host's: so this is
asked before anything is built, inside the sandbox, where it counts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from gradwire.bench.plan import Plan
from gradwire.bench.training import TrainingPlan
from gradwire.lab import LabError

AVAILABLE = Path("/proc/sys/net/ipv4/tcp_available_congestion_control")
_Plan = TypeVar("_Plan", Plan, TrainingPlan)


def available() -> set[str] | None:
    """Those that can be chosen now; None where the kernel does not say in this network namespace."""
    try:
        return set(AVAILABLE.read_text().split())
    except OSError:
        return None


def fitted(plan: _Plan, say: Callable[[str], None]) -> _Plan:
    """The plan with peers that can be had here; `say` is told which others were left out, as nobody had named them.

    Raises:
        LabError: one that was named is not there, or nothing is left to measure.
    """
    not_there = lacking_of(variant.tcp for variant in plan.variants)
    lacking = [variant for variant in plan.variants if variant.tcp in not_there]
    if not lacking:
        return plan
    controls = [variant.tcp for variant in lacking]
    if plan.is_tcp_chosen:
        raise named_in_vain(controls)
    say(f"not measured: {', '.join(variant.name for variant in lacking)}, as {words(controls)}")
    try:
        return replace(plan, variants=tuple(variant for variant in plan.variants if variant not in lacking))
    except ValueError as error:
        raise LabError(str(error)) from error


def lacking_of(names: Iterable[str]) -> set[str]:
    """Those of these congestion controls that cannot be chosen now; an empty name is none."""
    found = available()
    return set() if found is None else {name for name in names if name} - found


def named_in_vain(names: Sequence[str]) -> LabError:
    """For congestion controls that somebody asked for and that are not there."""
    return LabError(f"{words(names)}, or choose among {', '.join(sorted(available() or ()))}")


def words(names: Sequence[str]) -> str:
    """What is missing, and what to do about it."""
    modules = " ".join(f"tcp_{name}" for name in names)
    return f"this kernel has no TCP congestion control {' and '.join(names)}: as root, `modprobe {modules}`"
