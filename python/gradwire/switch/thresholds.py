"""Where each queue of a switch begins to drop: an arithmetic sequence (DLCP 4.2), or the optimum of MLT's appendix B.

A queue is two queues in that model, one for small gradients and one for large ones, each an M/M/1/m queue:

    rate of arrivals   lambda_i = load * share_i           (share of the model's bytes in the queue's layers)
    rate of service    mu_i     = 1 - sum of lambda_k, k < i   (strict priority: what the queues before it leave)
    utilisation        rho_i    = lambda_i / mu_i          (the same for small and large gradients)
    loss               r(m)     = (1 - rho) rho^m / (1 - rho^(m + 1))
    room               small: theta S_i        large: L_i - theta S_i         (packets)

S_i is the threshold above which small gradients are dropped, L_i where everything is. The cost is what is lost, weighed by
how much longer training takes for it, and the sum of all L_i is the port's buffer. The paper's mu_i, a product of
(1 - rho_k), is the difference above. Its formula for r^S has theta at a wrong place; here it is the same M/M/1/m loss.

A switch has one queue for both, in which large gradients have only L_i - S_i packets to themselves. The model does not know that:
its optimum has S_i next to L_i, where a real queue drops both alike. So a threshold is at most `THRESHOLD_SHARE` of its queue.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from gradwire.switch.errors import SwitchError

FULL = 1e9  # utilisation that stands for "never served": everything that comes is lost
HEADROOM_PACKETS = 2.0  # least room between a threshold and the end of its queue: RED's two thresholds, and one packet
THRESHOLD_SHARE = 0.5  # of a queue's limit, which a threshold that nobody has chosen reaches at most: the rest is for important packets


@dataclass(frozen=True)
class Traffic:
    """What comes to the data queues, most urgent first.

    Attributes:
        shares: of the bytes, for each queue; they sum to 1.
        load: arrivals as a share of the link's rate, while gradients are exchanged.
        small_share: theta: share of the packets that are unimportant.
        small_costs: extra rounds of training for a loss of all small gradients of a queue; only their ratios matter.
        large_costs: the same for large ones.
    """

    shares: Sequence[float]
    load: float
    small_share: float
    small_costs: Sequence[float]
    large_costs: Sequence[float]

    def utilisations(self) -> list[float]:
        """Rho of each queue."""
        rest, found = 1.0, []
        for share in self.shares:
            arrivals = self.load * share
            found.append(arrivals / rest if rest > arrivals / FULL else FULL)
            rest -= arrivals
        return found

    def losses(self, small_room: Sequence[float], large_room: Sequence[float]) -> list[tuple[float, float]]:
        """Share of small and of large gradients that each queue loses with so much room (packets)."""
        rooms = zip(self.utilisations(), small_room, large_room, strict=True)
        return [(loss(rho, small), loss(rho, large)) for rho, small, large in rooms]

    def cost(self, losses: Sequence[tuple[float, float]]) -> float:
        """What these losses cost; the unit is that of the costs."""
        weights = zip(losses, self.small_costs, self.large_costs, strict=True)
        return sum(small * small_cost + large * large_cost for (small, large), small_cost, large_cost in weights)

    def log_avoidable_cost(self, small_room: Sequence[float], large_room: Sequence[float]) -> tuple[float, list[float]]:
        """Logarithm of what of the cost more room would save, and by how much each packet of room changes it: small ones', large ones'.

        The room that costs least is the same with and without what is lost in any case.
        """
        rooms = [*zip([*self.utilisations()] * 2, [*small_room, *large_room], strict=True)]
        costs = [*self.small_costs, *self.large_costs]
        logs = [
            math.log(cost) + log_avoidable_loss(rho, room) if cost > 0 else -math.inf
            for cost, (rho, room) in zip(costs, rooms, strict=True)
        ]
        largest = max(logs)
        parts = [math.exp(log - largest) for log in logs]
        total = sum(parts)
        slopes = [part / total * _slope(rho, room) for part, (rho, room) in zip(parts, rooms, strict=True)]
        return largest + math.log(total), slopes


def loss(utilisation: float, room: float) -> float:
    """Share of the arrivals that an M/M/1/m queue with room for `room` packets loses; a real number is interpolated."""
    in_any_case = max(0.0, 1 - 1 / utilisation) if utilisation > 0 else 0.0
    return in_any_case + math.exp(log_avoidable_loss(utilisation, room))


def log_avoidable_loss(utilisation: float, room: float) -> float:
    """Logarithm of the loss less 1 - 1 / rho, which a queue that gets more than it is served loses whatever its room.

    With d = |log rho| it is log(1 - e^-d) - d m - log(1 - e^-(d (m + 1))), or for a rho above 1 the same with m + 1 in place of
    the middle m. Nothing in it becomes too small for a number, as the loss itself does: a millionth of it is still told apart.
    """
    if utilisation <= 0:
        return -math.inf if room > 0 else 0.0
    decay = abs(math.log(utilisation))
    if decay == 0:
        return -math.log(room + 1)
    power = room if utilisation < 1 else room + 1
    return math.log(-math.expm1(-decay)) - decay * power - math.log(-math.expm1(-decay * (room + 1)))


def _slope(utilisation: float, room: float) -> float:
    """By how much the above changes with the room; it rises with the room, so the above is convex, and so is the log of a sum of such."""
    if utilisation <= 0:
        return 0.0
    decay = abs(math.log(utilisation))
    return decay / math.expm1(-decay * (room + 1)) if decay else -1 / (room + 1)


# claim: dlcp/arithmetic-thresholds
def arithmetic(queues: int, first_bytes: float, step: float) -> list[int]:
    """T * (1, 1 + d, 1 + 2d, ...): one threshold for each data queue, the most urgent first, in bytes."""
    return [int(first_bytes * (1 + step * number)) for number in range(queues)]


# claim: mlt/threshold-optimiser
def optimal(traffic: Traffic, room_packets: float) -> tuple[list[float], list[float]]:
    """Room for small and for large gradients in each queue, in packets, that costs least; appendix B of MLT.

    Besides the sum of all room: a threshold lies `HEADROOM_PACKETS` below the end of its queue and is at most `THRESHOLD_SHARE`
    of it, both parts hold a packet, and no queue begins to drop later than a less urgent one (section 4.2.2), which the model
    alone would not ask for.

    Raises:
        SwitchError: scipy is missing, or so little room has no solution.
    """
    try:
        import numpy as np
        from scipy.optimize import LinearConstraint, minimize
    except ImportError:
        raise SwitchError("optimal thresholds need scipy: pip install 'gradwire[switch]'") from None
    count, theta = len(traffic.shares), traffic.small_share
    least = max(1 / theta + HEADROOM_PACKETS, 1 / theta / THRESHOLD_SHARE)
    if room_packets < count * least:
        raise SwitchError(
            f"a buffer for {room_packets:.0f} packets is too small for {count} queues: {count * least:.0f} at least"
        )
    identity, packet = np.eye(count), 1 / room_packets
    constraints = [
        LinearConstraint(np.ones(2 * count), 1, 1),
        LinearConstraint(
            np.hstack([identity * (theta - 1) / theta, identity]), HEADROOM_PACKETS * packet, np.inf
        ),  # L - S
        LinearConstraint(np.hstack([identity * (THRESHOLD_SHARE - 1 / theta), identity * THRESHOLD_SHARE]), 0, np.inf),
    ]
    if count > 1:
        rising = np.hstack([identity[1:] - identity[:-1], np.zeros((count - 1, count))])
        constraints.append(LinearConstraint(rising, 0, np.inf))

    def objective(parts: Any) -> tuple[float, list[float]]:
        """The logarithm: losses of one in a million matter as much in their proportions as those of one in ten.

        Of parts of all room, and as a part of it: so everything that the solver sees is of the order of 1, whatever the buffer.
        """
        value, slopes = traffic.log_avoidable_cost(parts[:count] * room_packets, parts[count:] * room_packets)
        return value / room_packets, slopes

    # Convex, so what is found is the optimum; but from one start alone the solver gives up now and then.
    best = None
    for slope in (0.0, 0.5, 2.0):
        weights = 1 + slope * np.arange(count)
        queue = weights / weights.sum()
        small = queue * theta * THRESHOLD_SHARE * 0.8
        start = np.maximum(np.concatenate([small, queue - small]), packet)
        found = minimize(objective, start, jac=True, method="SLSQP", bounds=[(packet, 1.0)] * (2 * count),
                         constraints=constraints, options={"maxiter": 500, "ftol": 1e-12})  # fmt: skip
        if found.success and (best is None or found.fun < best.fun):
            best = found
    if best is None:
        raise SwitchError("no optimum was found for these numbers; take arithmetic thresholds")
    rooms = [float(part * room_packets) for part in best.x]
    return rooms[:count], rooms[count:]
