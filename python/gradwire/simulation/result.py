"""What a simulated step was like, as rows for people and as JSON for programs."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from gradwire import _native

if TYPE_CHECKING:
    from collections.abc import Iterator

    from gradwire.simulation.plan import ClusterPlan

TIMES = ("mean_us", "p50_us", "p99_us", "p999_us", "max_us")
STAGES = ("flows", "pushes", "pulls")


def simulate(plan: ClusterPlan) -> dict[str, Any]:
    """Runs a plan. Equal plans give equal results, `core_s` (how long it took) left out.

    Raises:
        ValueError: the plan cannot be run.
        RuntimeError: a call of the simulated job failed.
    """
    result: dict[str, Any] = json.loads(_native.simulate(json.dumps(plan.to_native())))
    tensors = [tensor for bucket in plan.buckets for tensor in bucket.tensors]
    named = zip(tensors, result["layers"], strict=True)
    result["layers"] = [{"name": tensor.name, "bytes": tensor.elems * 4, **counts} for tensor, counts in named]
    result["algorithm"], result["hosts"] = plan.algorithm, plan.workers + plan.servers
    return result


def lost_share(counts: dict[str, int]) -> float:
    """Share of the elements that did not count."""
    return counts["lost"] / counts["elems"] if counts["elems"] else 0.0


def lines(result: dict[str, Any], layers: int = 10) -> Iterator[str]:
    """The result for people, with the layers that lost most."""
    yield f"{result['transport']}, {result['algorithm']}, {result['hosts']} hosts: completion times in microseconds"
    yield f"{'':8}{'count':>8}" + "".join(f"{name.removesuffix('_us'):>11}" for name in TIMES)
    for stage in STAGES:
        if result[stage]["count"]:
            times = "".join(f"{result[stage][name]:>11.1f}" for name in TIMES)
            yield f"{stage:8}{result[stage]['count']:>8}{times}"
    yield f"step     {result['step_us']:.1f}"
    again = result["bytes_retransmitted"] / max(result["bytes_sent"], 1)
    yield f"sent     {result['bytes_sent'] / 1e9:.3f} GB, {again:.3%} of it again"
    yield (
        f"switches {result['overflowed']} packets found a full buffer, {result['dropped_selectively']} a long queue, "
        f"{result['marked']} were marked"
    )
    yield f"lost     {result['lost_share']:.4%} of what was contributed"
    for name in ("important", "unimportant"):
        if result[name]["elems"]:
            yield f"  {lost_share(result[name]):>9.4%}  of what is in {name} packets ({result[name]['lost'] * 4 / 1e6:.3f} MB)"
    worst = sorted((layer for layer in result["layers"] if layer["lost"]), key=lost_share, reverse=True)
    for layer in worst[:layers]:
        yield f"  {lost_share(layer):>9.4%}  of {layer['name']} ({layer['lost'] * 4 / 1e6:.3f} MB)"
    yield f"cost     {result['events']} events in {result['core_s']:.1f} s"
