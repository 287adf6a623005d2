"""What a switch's port is to do, whoever made the switch: which packets go to which queue, and where each one drops.

    queue 0        control, served before everything else; nothing is dropped in it but for want of its own room
    queue 1 .. C   one for each traffic class of the transport, front layers first; above its threshold S a queue drops what
                   is not ECN-capable (unimportant gradients), and marks the rest; above its limit L it drops everything
    queue C + 1    all other traffic, where there is a queue left; else it shares the last class's

Code points are those that the transport sets, from the same configuration and environment (`gradwire.config`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from gradwire.config import CODE_POINT_CONTROL, CODE_POINTS, Config
from gradwire.switch import thresholds
from gradwire.switch.errors import SwitchError
from gradwire.switch.layers import class_shares

MTU_BYTES = 1500  # of a port that nobody has told otherwise
MTU_BYTES_MIN, MTU_BYTES_MAX = 576, 9216  # what the transport takes at least, and what jumbo frames of switches carry
HEADER_BYTES = 14  # of Ethernet, before the packet
FRAME_BYTES = MTU_BYTES + HEADER_BYTES  # a full frame, which is what a queue holds
QUEUES_MAX = 8  # traffic classes of a port (IEEE 802.1Q)
CONTROL_SHARE = 1 / 8  # of the buffer: control is a few packets of 100 bytes for each data packet's 1500
BEST_EFFORT = 0  # what all traffic has that nobody gave a code point: never before gradients
NETWORK_CONTROL = (48, 56)  # CS6 and CS7, what routers tell each other: never behind gradients
DEFAULT_STEP = 0.5  # d of DLCP 4.2, which names none; thresholds of 7 queues then span a factor of 4


@dataclass(frozen=True)
class Queue:
    """One queue of a port.

    Attributes:
        name: `control`, `class N` or `other`.
        code_points: DSCP values that go here; none: everything that has no other queue.
        threshold_bytes: S: above it a packet that is not ECN-capable is dropped; None: nothing is dropped selectively.
        limit_bytes: L: what the queue holds.
        share: of the model's bytes.
        small_loss: expected loss of unimportant packets by the model of MLT's appendix B.
        large_loss: of important ones.
    """

    name: str
    code_points: tuple[int, ...]
    threshold_bytes: int | None
    limit_bytes: int
    share: float = 0.0
    small_loss: float | None = None
    large_loss: float | None = None


@dataclass(frozen=True)
class SwitchPlan:
    """A port's queues, the first to be served first.

    Attributes:
        rate_mbit: rate of the port.
        buffer_bytes: what it may hold in all.
        frame_bytes: the longest frame that its thresholds leave room for, with the header of Ethernet.
        queues: at most eight.
        environment: what the job needs besides, so that it sets these code points.
        cost: expected cost of the losses, mean of all packets, in lost unimportant packets of the front layers; only comparable
            between plans for the same traffic.
    """

    rate_mbit: float
    buffer_bytes: int
    frame_bytes: int
    queues: tuple[Queue, ...]
    environment: dict[str, str]
    cost: float

    @property
    def default_queue(self) -> int:
        """Number of the queue for everything without a code point of ours: the last."""
        return len(self.queues) - 1

    def numbered(self) -> list[tuple[int, Queue]]:
        """Queues with the number that hardware gives them, where the highest of eight is served first; the lowest may stay unused."""
        return [(QUEUES_MAX - 1 - position, queue) for position, queue in enumerate(self.queues)]

    def queue_of_code_points(self) -> dict[int, int]:
        """For each of the 64 code points the number that hardware gives its queue."""
        table = dict.fromkeys(range(64), QUEUES_MAX - 1 - self.default_queue)
        for number, queue in self.numbered():
            table.update(dict.fromkeys(queue.code_points, number))
        return table

    def wait_ms(self, size_bytes: int) -> float:
        """How long the port takes to send so much."""
        return size_bytes * 8 / (self.rate_mbit * 1e3)

    def described(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Wish:
    """What the traffic is like, and what thresholds are asked for.

    Attributes:
        method: `arithmetic` or `optimal`.
        first_bytes: T of the sequence; None: as large as the buffer allows.
        step: d of the sequence.
        load: see `thresholds.Traffic`.
        small_share: theta.
        large_cost: cost of a lost important packet; a lost unimportant one of the front layers costs 1.
        back_cost: cost of a loss in the last class, in terms of the first's; those between rise evenly.
        mtu_bytes: longest IP packet, 576 to 9216: thresholds, and the room above them, are of such.
        bucket_mb: of the job's buckets, as DDP's `bucket_cap_mb` (of 1,048,576 bytes); None: DDP's own; 0: each layer goes by itself.
    """

    method: str = "arithmetic"
    first_bytes: float | None = None
    step: float = DEFAULT_STEP
    load: float = 0.9
    small_share: float = 0.5
    large_cost: float = 4.0
    back_cost: float = 2.0
    mtu_bytes: int = MTU_BYTES
    bucket_mb: float | None = None

    @property
    def frame_bytes(self) -> int:
        """The longest frame."""
        return self.mtu_bytes + HEADER_BYTES

    @property
    def headroom_bytes(self) -> float:
        """Least room between a threshold and its queue's end."""
        return thresholds.HEADROOM_PACKETS * self.frame_bytes

    def check(self) -> None:
        """Whether there is such traffic.

        Raises:
            SwitchError: there is none.
        """
        if self.load <= 0 or not 0 < self.small_share < 1 or self.step < 0 or min(self.large_cost, self.back_cost) <= 0:
            raise SwitchError(f"load and costs are above 0, the share of small gradients between 0 and 1: {self}")
        if not MTU_BYTES_MIN <= self.mtu_bytes <= MTU_BYTES_MAX:
            raise SwitchError(f"an MTU is {MTU_BYTES_MIN} to {MTU_BYTES_MAX} bytes here, not {self.mtu_bytes}")
        if self.bucket_mb is not None and self.bucket_mb < 0:
            raise SwitchError(f"a bucket holds 0 MB (a layer) or more, not {self.bucket_mb:g}")


# claim: mlt/switch-queues
def make_plan(
    rate_mbit: float,
    buffer_bytes: int,
    config: Config,
    *,
    queues: int = QUEUES_MAX,
    layers: Sequence[int] = (),
    wish: Wish | None = None,
) -> SwitchPlan:
    """Plans a port.

    Args:
        rate_mbit: its rate.
        buffer_bytes: what it may hold.
        config: of the job; its code points are used, and `auto` ones where it sets none.
        queues: to use at most, 2 to 8.
        layers: bytes of the gradients of each, front to back; none: all classes are alike.
        wish: which thresholds, for which traffic.

    Raises:
        SwitchError: they do not fit together.
    """
    wish = wish or Wish()
    points, control = _code_points(config, queues)
    if rate_mbit <= 0:
        raise SwitchError(f"a port needs a rate, not {rate_mbit} Mbit/s")
    wish.check()
    spare = queues - 1 - len(points)
    control_bytes = int(buffer_bytes * CONTROL_SHARE)
    other_bytes = control_bytes if spare > 0 else 0
    data_bytes = buffer_bytes - control_bytes - other_bytes
    least_bytes, what_for = _least_bytes(len(points), wish)
    if data_bytes < least_bytes:
        least = int(least_bytes / (1 - (2 if spare > 0 else 1) * CONTROL_SHARE)) + 1
        raise SwitchError(f"{buffer_bytes} bytes of buffer are too little for {what_for}: {least} at least")
    traffic = _traffic(class_shares(layers, len(points), wish.bucket_mb), wish)
    pairs = _thresholds(traffic, data_bytes, wish)
    losses = traffic.losses(*_rooms(pairs, wish))
    chosen = [Queue("control", (control, *NETWORK_CONTROL), None, control_bytes)]
    chosen += [
        Queue(f"class {number}", (point,), low, high, traffic.shares[number], *losses[number])
        for number, (point, (low, high)) in enumerate(zip(points, pairs, strict=True))
    ]
    if spare > 0:
        chosen.append(Queue("other", (), None, other_bytes))
    environment = _environment(config, points, control)
    return SwitchPlan(rate_mbit, buffer_bytes, wish.frame_bytes, tuple(chosen), environment, traffic.cost(losses))


def _code_points(config: Config, queues: int) -> tuple[list[int], int]:
    """Of the classes and of control, as the transport sets them."""
    points, control = config.code_points(), config.control_code_point()
    if not points:  # a job that sets none would need no such switch: what it sets when it is told to
        tagging = Config(classes=config.classes, dscp_classes="auto", dscp_control=config.dscp_control)
        points, control = tagging.code_points(), tagging.control_code_point()
    if not 2 <= queues <= QUEUES_MAX:
        raise SwitchError(f"a port has 2 to {QUEUES_MAX} queues here, not {queues}")
    if len(points) > queues - 1:
        raise SwitchError(
            f"{len(points)} classes and control need {len(points) + 1} queues, there are {queues}: set classes to {queues - 1}"
        )
    _refuse_shared(points, control)
    return points, control


def _refuse_shared(points: list[int], control: int) -> None:
    """The first queue is served before everything, so that what shares its code point starves all gradients."""
    if control in (BEST_EFFORT, *points, *NETWORK_CONTROL):
        free = next(point for point in (CODE_POINT_CONTROL, *range(47, 0, -1)) if point not in points)
        raise SwitchError(
            f"control has code point {control}, {_whose(control, points)}: it needs one of its own,"
            f" set GRADWIRE_DSCP_CONTROL={free} here and for the job"
        )
    for number, point in enumerate(points):
        if point in (BEST_EFFORT, *points[:number], *NETWORK_CONTROL):
            fitting = [free for free in CODE_POINTS[-1] if free != control][: len(points)]
            raise SwitchError(
                f"class {number} has code point {point}, {_whose(point, points[:number])}: classes need code points of their own,"
                f" such as GRADWIRE_DSCP_CLASSES={','.join(map(str, fitting))}, here and for the job"
            )


def _whose(point: int, points: list[int]) -> str:
    if point == BEST_EFFORT:
        return "which is best effort's (all other traffic)"
    return "which is routing's" if point in NETWORK_CONTROL else f"which is that of class {points.index(point)}"


def _environment(config: Config, points: list[int], control: int) -> dict[str, str]:
    return {
        "GRADWIRE_CLASSES": str(config.classes),
        "GRADWIRE_DSCP_CLASSES": ",".join(map(str, points)),
        "GRADWIRE_DSCP_CONTROL": str(control),
        "GRADWIRE_IMPORTANCE": "magnitude",
    }


def _traffic(shares: list[float], wish: Wish) -> thresholds.Traffic:
    """A packet's costs rise from front to back (MLT 3.3); losing all of a larger part costs more, as it has more packets."""
    last = max(1, len(shares) - 1)
    both = [share * (1 + (wish.back_cost - 1) * number / last) for number, share in enumerate(shares)]
    small = [wish.small_share * cost for cost in both]
    large = [(1 - wish.small_share) * wish.large_cost * cost for cost in both]
    return thresholds.Traffic(shares, wish.load, wish.small_share, small, large)


def _thresholds(traffic: thresholds.Traffic, data_bytes: int, wish: Wish) -> list[tuple[int, int]]:
    """S and L of each data queue, in bytes."""
    frame = wish.frame_bytes
    if wish.method == "optimal":
        small, large = thresholds.optimal(traffic, data_bytes / frame)
        return [
            (int(few * frame / wish.small_share), int((few + many) * frame))
            for few, many in zip(small, large, strict=True)
        ]
    if wish.method != "arithmetic":
        raise SwitchError(f"thresholds are arithmetic or optimal, not {wish.method}")
    return _arithmetic(len(traffic.shares), data_bytes, wish)


def _arithmetic(queues: int, data_bytes: int, wish: Wish) -> list[tuple[int, int]]:
    """Limits in proportion to the thresholds, so the first queue has the least room above its own: that must be enough."""
    first_limit = data_bytes / _steps(queues, wish.step)
    most = first_limit - wish.headroom_bytes
    first, frame = wish.first_bytes, wish.frame_bytes
    if first is None:
        first = max(frame, min(thresholds.THRESHOLD_SHARE * first_limit, most))
    elif not frame <= first <= most:
        raise SwitchError(
            f"the first threshold is {first:.0f} bytes: at least a frame, {frame}, and at most {math.floor(most)}"
            f" (--first {math.floor(most) / 1000:.3f}) with this buffer, or important packets are dropped with the others"
        )
    lows, limits = (thresholds.arithmetic(queues, size, wish.step) for size in (first, first_limit))
    return list(zip(lows, limits, strict=True))


def _steps(queues: int, step: float) -> float:
    """Sum of the sequence 1, 1+d, 1+2d, .."""
    return sum(1 + step * number for number in range(queues))


def _least_bytes(queues: int, wish: Wish) -> tuple[float, str]:
    """For the data queues together, and what needs so much: four frames each, and one below the least headroom."""
    least = 4.0 * wish.frame_bytes * queues
    stepped = (wish.frame_bytes + wish.headroom_bytes) * _steps(queues, wish.step)
    what_for = f"{queues} data queues and an MTU of {wish.mtu_bytes}"
    if wish.method == "arithmetic" and stepped > least:
        return stepped, f"{what_for}, whose thresholds have a step of {wish.step:g}"
    return least, what_for


def _rooms(pairs: list[tuple[int, int]], wish: Wish) -> tuple[list[float], list[float]]:
    """Room of the model's two queues in packets, from S and L."""
    small = [low * wish.small_share / wish.frame_bytes for low, _ in pairs]
    return small, [high / wish.frame_bytes - room for (_, high), room in zip(pairs, small, strict=True)]


__all__ = ["Queue", "SwitchError", "SwitchPlan", "Wish", "make_plan"]
