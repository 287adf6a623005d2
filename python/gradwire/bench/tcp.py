"""The congestion controls of TCP that this kernel has, and what becomes of a plan whose peers want others.

A module such as `tcp_bbr` that is not loaded cannot be had in a user namespace, and the benchmark loads none of the host's: so this is
asked before anything is built, inside the sandbox, where it counts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

from gradwire.bench.plan import Plan, Variant
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
    found = available()
    lacking = [variant for variant in plan.variants if found is not None and variant.tcp and variant.tcp not in found]
    if not lacking:
        return plan
    if plan.is_tcp_chosen:
        raise LabError(f"{_words(lacking)}, or choose among {', '.join(sorted(found or ()))}")
    say(f"not measured: {', '.join(variant.name for variant in lacking)}, as {_words(lacking)}")
    try:
        return replace(plan, variants=tuple(variant for variant in plan.variants if variant not in lacking))
    except ValueError as error:
        raise LabError(str(error)) from error


def _words(lacking: list[Variant]) -> str:
    """What is missing, and what to do about it."""
    names = [variant.tcp for variant in lacking]
    modules = " ".join(f"tcp_{name}" for name in names)
    return f"this kernel has no TCP congestion control {' and '.join(names)}: as root, `modprobe {modules}`"
