"""What is simulated: a model's buckets on a cluster, as `gradwire._native.simulate` takes it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from gradwire import _native

if TYPE_CHECKING:
    from collections.abc import Sequence

    from gradwire.simulation.tensors import Tensor

FLOAT_BYTES = 4
MEGABYTE = 1 << 20
ALGORITHMS = ("parameter_server", "transpose", "ring")
SPREADS = ("flow", "packet")


@dataclass(frozen=True)
class Bucket:
    """Tensors that are reduced together, last layers first, as DDP does."""

    tensors: tuple[Tensor, ...]
    layer_class: int
    ready_us: float

    @property
    def elems(self) -> int:
        """Elements of all its tensors."""
        return sum(tensor.elems for tensor in self.tensors)

    @property
    def bytes(self) -> int:
        """Of float32 gradients."""
        return self.elems * FLOAT_BYTES


@dataclass(frozen=True, kw_only=True)
class ClusterPlan:
    """A cluster and what happens on it. Rates in Gbit/s, times in microseconds.

    Attributes:
        spread: How leaves choose a spine: by a hash of the flow, or packet by packet by chance.
        tolerates: Whether reductions may lose what the preset lets them lose; without it they are exact.
        tells: Whether the network is told what is important, where the preset tells it.
    """

    preset: str = "auto"
    algorithm: str = "parameter_server"
    workers: int = 108
    servers: int = 36
    hosts_per_leaf: int = 16
    spines: int = 4
    host_gbit: float = 100.0
    link_delay_us: float = 2.9
    oversubscription: float = 1.0
    buffer_bytes: int = 512 << 10
    spread: str = "flow"
    background: float = 0.0
    jitter_us: float = 0.0
    paths: int = 1
    classes: int = 1
    controller: str | None = None
    tolerates: bool = True
    tells: bool = True
    warm_up: int = 1
    steps: int = 1
    seed: int = 1
    buckets: Sequence[Bucket] = field(default=())

    def to_native(self) -> dict[str, Any]:
        """The JSON object that the simulator reads."""
        buckets = [
            {
                "layers": [tensor.elems for tensor in bucket.tensors],
                "class": bucket.layer_class,
                "ready_us": bucket.ready_us,
            }
            for bucket in self.buckets
        ]
        return {**asdict(self), "buckets": buckets}


def fill_buckets(
    tensors: Sequence[Tensor],
    bucket_bytes: int,
    *,
    first_bytes: int = MEGABYTE,
    classes: int = 1,
    backward_us: float = 0.0,
) -> list[Bucket]:
    """Cuts a model into buckets as DDP does: from the last tensor to the first, each full when it holds `bucket_bytes`.

    Args:
        tensors: In the order of the model.
        bucket_bytes: Of float32 gradients; a larger tensor has a bucket of its own.
        first_bytes: Of the first bucket, which is small so that communication begins early.
        classes: Traffic classes: a bucket has that of its first layer (DLCP section 3.1.2).
        backward_us: A bucket is ready when so much of this has gone by as the share of elements that it and those before it hold.
    """
    buckets: list[Bucket] = []
    total, done, held = sum(tensor.elems for tensor in tensors), 0, []
    for layer in reversed(range(len(tensors))):
        held.append(tensors[layer])
        done += tensors[layer].elems
        limit = bucket_bytes if buckets else min(first_bytes, bucket_bytes)
        if layer == 0 or sum(tensor.elems for tensor in held) * FLOAT_BYTES >= limit:
            layer_class = _native.layer_class(layer, len(tensors), classes)
            buckets.append(Bucket(tuple(held), layer_class, backward_us * done / total))
            held = []
    return buckets
