"""The plan for Linux: `tc` commands for a port of a machine that forwards.

    tbf (rate) > prio (a band for each queue, strict) > red with ecn (selective dropping), or a fifo

RED as Linux has it, read from its sources (net/sched/sch_red.c) and tested in the lab: below `min` it does nothing; from
`max` on every packet is marked if it is ECN-capable and dropped if it is not (without `harddrop`, which would drop it all
the same, and without `nodrop`, which would keep it); between them by chance, so they lie one frame apart. There is no gentle
region. `burst` and `avpkt` together say how fast the average follows the queue: `tc` takes the largest weight with which as many
packets of that size, after an idle time, do not yet bring it to `min`. As many parts of `min` as it has frames, and one more, give
1/2, the largest weight there is, so that the average follows at once. With whole frames as the parts, a `min` of little more than one
would be nearly reached by the last of them, and the weight so small that the kernel refuses it.
"""

from __future__ import annotations

import math

from gradwire.switch.errors import SwitchError
from gradwire.switch.plan import FRAME_BYTES, HEADER_BYTES, MTU_BYTES_MAX, Queue, SwitchPlan

# What `tc` holds of a size in bytes, of a burst, and of RED's rate in bytes per second: 32 bits. The rate of tbf has 64.
_BYTES_MAX = 2**32 - 1
RED_RATE_BITS_MAX = 8 * _BYTES_MAX
_RATE_BITS_MIN = 8  # a byte per second: less is none
# The kernel refuses one that, shifted by the weight's exponent of 1, would need its 32nd bit.
_RED_MAX_BYTES_MAX = 2**30 - 1

_TBF_BURST_FRAMES = 4  # what leaves back to back; smaller would cost a timer interrupt for each packet
_TBF_BURST_SECONDS = 250e-6  # at high rates as much as comes between two wake-ups of a timer
# tbf drops each packet that is longer: a jumbo frame with a tag has room even where the plan is for shorter ones.
_TBF_BURST_BYTES_MIN = MTU_BYTES_MAX + HEADER_BYTES + 4
# Which packets, and how u32 finds the octet with their code point. One order number holds filters of one protocol. Of a frame
# that leaves with a VLAN's tag the protocol is the tag's, while what u32 looks into still begins with the IP header, whose first
# four bits tell the family.
_FAMILIES = (
    ("ip", "prio 1", "match ip dsfield"),
    ("ipv6", "prio 2", "match ip6 priority"),
    ("802.1Q", "prio 3", "match u8 0x40 0xf0 at 0 match ip dsfield"),
    ("802.1Q", "prio 3", "match u8 0x60 0xf0 at 0 match ip6 priority"),
)


# claim: mlt/selective-dropping
def commands(plan: SwitchPlan, device: str) -> list[str]:
    """Lines for a shell; each begins with `tc`. They replace whatever queueing the device has.

    The old one is removed first: the kernel does not replace a handle's discipline by one of another kind, so that a plan of other
    classes, or what somebody else had put there under the same numbers, would end the script half-way.

    Raises:
        SwitchError: `tc` cannot express the rate or the buffer.
    """
    bands = len(plan.queues)
    of_rate = _rate_bits(plan) / 8 * _TBF_BURST_SECONDS
    burst = int(max(_TBF_BURST_FRAMES * plan.frame_bytes, _TBF_BURST_BYTES_MIN, of_rate))
    _check(plan, burst)
    red_rate = f"{min(_rate_bits(plan), RED_RATE_BITS_MAX)}bit"
    # Without a code point of ours: the last band. Linux's own control priority (7) is the first's.
    bands_of_priorities = [0 if priority == 7 else bands - 1 for priority in range(16)]
    priorities = " ".join(map(str, bands_of_priorities))
    lines = [
        f"tc qdisc del dev {device} root 2>/dev/null || true",  # of what the kernel gives a device by itself nothing can be removed
        f"tc qdisc add dev {device} root handle 1: tbf rate {_rate_bits(plan)}bit burst {burst} limit {plan.buffer_bytes}",
        f"tc qdisc add dev {device} parent 1:1 handle 10: prio bands {max(bands, 2)} priomap {priorities}",
    ]
    for band, queue in enumerate(plan.queues, 1):
        lines.append(
            f"tc qdisc add dev {device} parent 10:{band:x} handle {band + 1:x}00: {_discipline(queue, red_rate, plan.frame_bytes)}"
        )
    for band, queue in enumerate(plan.queues, 1):
        lines += [
            f"tc filter add dev {device} parent 10: protocol {protocol} {order} u32 {octet} {point << 2:#04x} 0xfc"
            f" flowid 10:{band:x}"
            for point in queue.code_points
            for protocol, order, octet in _FAMILIES
        ]
    return lines


def script(plan: SwitchPlan, devices: list[str]) -> str:
    """A shell script for these devices.

    Raises:
        SwitchError: as `commands`.
    """
    lines = ["#!/bin/sh", "# Queues and selective dropping for gradwire. Undo: tc qdisc del dev DEVICE root"]
    if _rate_bits(plan) > RED_RATE_BITS_MAX:
        lines += [
            f"# The bandwidth of red is the most that tc holds there, not the port's {_rate_bits(plan)}bit: it only says how fast an",
            "# average falls while its queue is empty, and with the weight 1/2 of these it has fallen at once.",
        ]
    lines.append("set -e")
    for device in devices:
        lines += commands(plan, device)
    return "\n".join(lines) + "\n"


def red(threshold_bytes: int, limit_bytes: int, rate: str, frame_bytes: int = FRAME_BYTES) -> str:
    """RED, as words of `tc`, that drops or marks from this length on, as told above.

    Args:
        threshold_bytes: a frame or more.
        limit_bytes: what the queue holds at most.
        rate: at which it is served, as `tc` writes it; at most `RED_RATE_BITS_MAX`, since `tc` refuses more here.
        frame_bytes: the longest frame.
    """
    parts = threshold_bytes // frame_bytes + 1
    return (
        f"red limit {limit_bytes} min {threshold_bytes} max {threshold_bytes + frame_bytes}"
        f" avpkt {math.ceil(threshold_bytes / parts)} burst {parts} probability 1 bandwidth {rate} ecn"
    )


def _rate_bits(plan: SwitchPlan) -> int:
    return round(plan.rate_mbit * 1e6)


def _check(plan: SwitchPlan, burst_bytes: int) -> None:
    if _rate_bits(plan) < _RATE_BITS_MIN:
        raise SwitchError(f"a rate of {plan.rate_mbit:g} Mbit/s is less than tc can express: {_RATE_BITS_MIN} bit/s")
    if burst_bytes > _BYTES_MAX:
        most = _BYTES_MAX * 8 / _TBF_BURST_SECONDS / 1e6
        raise SwitchError(f"a rate of {plan.rate_mbit:g} Mbit/s is more than tc can express: {most:.0f} Mbit/s")
    if plan.buffer_bytes > _BYTES_MAX:
        raise SwitchError(f"a buffer of {plan.buffer_bytes} bytes is more than tc can express: {_BYTES_MAX}")
    highest = max(queue.threshold_bytes or 0 for queue in plan.queues)
    most = _RED_MAX_BYTES_MAX - plan.frame_bytes  # RED's `max` lies a frame above
    if highest > most:
        raise SwitchError(f"a threshold of {highest} bytes is more than Linux allows: {most}")


def _discipline(queue: Queue, rate: str, frame_bytes: int) -> str:
    if queue.threshold_bytes is None:
        return f"bfifo limit {queue.limit_bytes}"
    return red(queue.threshold_bytes, queue.limit_bytes, rate, frame_bytes)
