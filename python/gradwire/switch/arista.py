"""The plan for Arista EOS: a QoS profile and the maps that lead to it.

Transmit queues are called `uc-tx-queue` on the platforms with separate unicast queues (Trident, Tomahawk: 7050X, 7060X) and
`tx-queue` on the others (Jericho: 7280R, 7500R).
"""

from __future__ import annotations

from gradwire.switch.errors import SwitchError
from gradwire.switch.plan import SwitchPlan

NAME = "gradwire"
# Goes to the queue of its number on every platform, and some refuse to be told so.
TOP_CLASS = 7
# Of a threshold, in Arista's own data model (docs/switch.md).
THRESHOLD_BYTES_MAX = 256_000_000


def commands(plan: SwitchPlan, ports: list[str], queue_word: str = "uc-tx-queue") -> list[str]:
    """Lines for configuration mode.

    EOS has the maps, and what it does above a threshold with packets that are not ECN-capable, for the whole switch; only the profile is
    of the ports. A policy map could give traffic classes by port, but the map from these to queues would still be the switch's.

    Raises:
        SwitchError: EOS cannot express a threshold.
    """
    highest = plan.frame_bytes + max(queue.threshold_bytes or 0 for queue in plan.queues)
    if highest > THRESHOLD_BYTES_MAX:
        raise SwitchError(f"a threshold of {highest} bytes is more than EOS can express: {THRESHOLD_BYTES_MAX}")
    table = plan.queue_of_code_points()
    lines = [
        "! the lines before the profile are of the whole switch, whatever --port names: each port that trusts DSCP takes these maps",
        "! what is not ECN-capable is dropped above a threshold, not let through",
        "no qos random-detect ecn allow non-ect",
    ]
    for number, _ in plan.numbered():
        points = " ".join(str(point) for point, of in table.items() if of == number)
        if points:
            lines.append(f"qos map dscp {points} to traffic-class {number}")
        if number != TOP_CLASS:
            lines.append(f"qos map traffic-class {number} to tx-queue {number}")
    lines += ["!", f"qos profile {NAME}", "   qos trust dscp"]
    for number, queue in plan.numbered():
        lines += [f"   {queue_word} {number}", "      priority strict"]
        if queue.threshold_bytes is not None:
            lines.append(
                f"      random-detect ecn minimum-threshold {queue.threshold_bytes} bytes maximum-threshold"
                f" {queue.threshold_bytes + plan.frame_bytes} bytes max-mark-probability 100 weight 0"
            )
    for port in ports:
        lines += ["!", f"interface {port}", f"   service-profile {NAME}"]
    return [*lines, "!"]
