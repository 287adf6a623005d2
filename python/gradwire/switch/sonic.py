"""The plan for SONiC: the tables of config_db, to be merged with `sonic-cfggen -j FILE --write-to-db` or `config load`.

Written for, and validated against, the YANG models that SONiC's own configuration checks use (`sonic-wred-profile`,
`sonic-scheduler`, `sonic-queue`, `sonic-dscp-tc-map`, `sonic-tc-queue-map`, `sonic-tc-priority-group-map`, `sonic-port-qos-map`;
docs/switch.md).
"""

from __future__ import annotations

import json
from typing import Any

from gradwire.switch.plan import QUEUES_MAX, Queue, SwitchPlan

NAME = "gradwire"
_NO_WRED = f"{NAME}_none"
_WRED_QUEUES = (3, 4)  # in SONiC's templates, where gradients do not go
_LOSSY_GROUP = "0"  # of the priority groups at the ingress: SONiC's templates make 3 and 4 lossless


def config_db(plan: SwitchPlan, ports: list[str]) -> dict[str, Any]:
    """The tables. Values are text, as in config_db itself.

    PFC is off on these ports, and all classes share the lossy priority group: SONiC's usual setting has PFC for the priorities 3 and 4,
    by which a port pauses the hosts, and what else they send there, where two of the queues here are to drop. It must be written, as the
    tables are merged with those that are there. So must a WRED profile be that drops nothing, where a queue that is to drop at its end has
    one in that setting.
    """
    profiles = {name: queue for number, queue in plan.numbered() if (name := _profile_of(number, queue))}
    queues = {
        f"{port}|{number}": {
            "scheduler": f"{NAME}_strict",
            **({"wred_profile": name} if (name := _profile_of(number, queue)) else {}),
        }
        for port in ports
        for number, queue in plan.numbered()
    }
    code_points = {str(point): str(number) for point, number in plan.queue_of_code_points().items()}
    port_maps = {"dscp_to_tc_map": NAME, "tc_to_queue_map": NAME, "tc_to_pg_map": NAME, "pfc_enable": ""}
    return {
        "DSCP_TO_TC_MAP": {NAME: code_points},
        "TC_TO_QUEUE_MAP": {NAME: {str(number): str(number) for number, _ in plan.numbered()}},
        "TC_TO_PRIORITY_GROUP_MAP": {NAME: {str(number): _LOSSY_GROUP for number in range(QUEUES_MAX)}},
        "SCHEDULER": {f"{NAME}_strict": {"type": "STRICT"}},
        "WRED_PROFILE": {name: _profile(queue, plan.frame_bytes) for name, queue in profiles.items()},
        "QUEUE": queues,
        "PORT_QOS_MAP": {port: dict(port_maps) for port in ports},
    }


def document(plan: SwitchPlan, ports: list[str]) -> str:
    """As a file."""
    return json.dumps(config_db(plan, ports), indent=2) + "\n"


def _profile_of(number: int, queue: Queue) -> str | None:
    """Name of the queue's WRED profile; None: it needs none."""
    if queue.threshold_bytes is not None:
        return f"{NAME}_queue{number}"
    return _NO_WRED if number in _WRED_QUEUES else None


def _profile(queue: Queue, frame_bytes: int) -> dict[str, str]:
    """Packets are green unless a policer says otherwise; ECN-capable ones are marked where the others are dropped."""
    if queue.threshold_bytes is None:
        return {
            "wred_green_enable": "false",
            "wred_yellow_enable": "false",
            "wred_red_enable": "false",
            "ecn": "ecn_none",
        }
    return {
        "wred_green_enable": "true",
        "ecn": "ecn_all",
        "green_min_threshold": str(queue.threshold_bytes),
        "green_max_threshold": str(queue.threshold_bytes + frame_bytes),
        "green_drop_probability": "100",
    }
