"""The plan for NVIDIA's switches: commands of NVUE (Cumulus Linux) and of Onyx, the system of MLT's testbed.

In both a code point gives a switch priority, that a traffic class, which is a queue; the highest is served first. ECN alone
would only mark: RED is switched on beside it, and drops what may not be marked.
"""

from __future__ import annotations

import math

from gradwire.switch.plan import SwitchPlan

NAME = "gradwire"
_KB = 1000  # Onyx counts thresholds in KB


def cumulus(plan: SwitchPlan, ports: list[str]) -> list[str]:
    """Commands of Cumulus Linux 5.4 and newer; `nv config apply` is the last."""
    lines = [f"nv set qos mapping {NAME} trust l3"]
    lines += [
        f"nv set qos mapping {NAME} dscp {point} switch-priority {number}"
        for point, number in plan.queue_of_code_points().items()
    ]
    for number, queue in plan.numbered():
        lines.append(f"nv set qos egress-queue-mapping default-global switch-priority {number} traffic-class {number}")
        lines.append(f"nv set qos egress-scheduler {NAME} traffic-class {number} mode strict")
        if queue.threshold_bytes is None:
            continue
        control = f"nv set qos congestion-control {NAME} traffic-class {number}"
        lines += [
            f"{control} min-threshold {queue.threshold_bytes}",
            f"{control} max-threshold {queue.threshold_bytes + plan.frame_bytes}",
            f"{control} probability 100",
            f"{control} ecn enable",
            f"{control} red enable",
        ]
    for port in ports:
        lines += [
            f"nv set interface {port} qos {part} profile {NAME}"
            for part in ("mapping", "egress-scheduler", "congestion-control")
        ]
    return [*lines, "nv config apply"]


def onyx(plan: SwitchPlan, ports: list[str]) -> list[str]:
    """Commands of Onyx 3.7 and newer, for its configuration mode."""
    lines: list[str] = []
    for port in ports:
        interface = f"interface ethernet {port}"
        lines.append(f"{interface} qos trust L3")
        for number, queue in plan.numbered():
            points = [point for point, of in plan.queue_of_code_points().items() if of == number]
            lines += [f"{interface} qos map dscp {point} to switch-priority {number}" for point in points]
            lines.append(f"{interface} traffic-class {number} bind switch-priority {number}")
            lines.append(f"{interface} traffic-class {number} dcb ets strict")
            if queue.threshold_bytes is not None:
                low = max(1, round(queue.threshold_bytes / _KB))
                high = low + math.ceil(plan.frame_bytes / _KB)
                lines.append(
                    f"{interface} traffic-class {number} congestion-control both"
                    f" minimum-absolute {low} maximum-absolute {high}"
                )
    return lines
