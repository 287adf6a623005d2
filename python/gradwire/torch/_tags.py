"""What the network is told about gradients, of a bucket or of a sharded module: traffic class, and which packets a switch should keep.

No `from __future__ import annotations` here: see `_hook.py`.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from gradwire import _native
from gradwire.config import Config
from gradwire.errors import ConfigError, InvalidRequestError

# claim: tags/priority-function
# What a priority function may return: a class, or a class and a mask over the bucket.
Tagged = int | tuple[int, torch.Tensor | Sequence[bool]]


@dataclass(frozen=True)
class ShardedBucket:
    """The gradients of one module of a sharded model, as a priority function gets them: with the methods of DDP's `GradBucket`.

    Attributes:
        name: of the module, as `named_modules` has it.
    """

    name: str
    _index: int
    _is_last: bool
    _parameters: list[nn.Parameter]
    _buffer: torch.Tensor

    def index(self) -> int:
        """0 for the module whose front-most layer is the last one, as for the buckets of DDP."""
        return self._index

    def is_last(self) -> bool:
        """Whether it has the front layers, which the next forward pass needs first."""
        return self._is_last

    def parameters(self) -> list[nn.Parameter]:
        """Those that the module reduces: what is in no sharded module within it."""
        return self._parameters

    def buffer(self) -> torch.Tensor:
        """`[world_size * elems]`: for each rank in turn its part of every gradient, as FSDP lays them out."""
        return self._buffer


# Called with each bucket of DDP, or with each module's gradients of a sharded model.
Priority = Callable[[dist.GradBucket], Tagged] | Callable[[ShardedBucket], Tagged]

# Order among the calls in flight, by class: between the first and the last bucket of a hook without a function.
PRIORITY_OF_CLASS_0 = 96
PRIORITY_STEP = 8


class LayerPriority:
    """Class by layer (MLT section 4.2.2): layer i of L has class floor(i P / L) of P, a bucket that of its first layer.

    A layer is a module with parameters of its own, in the order of `named_parameters`.
    """

    def __init__(self, model: nn.Module, classes: int) -> None:
        order = dict.fromkeys(name.rpartition(".")[0] for name, _ in model.named_parameters())
        self._numbers = numbers = {name: number for number, name in enumerate(order)}
        self.classes = classes
        self.layers = len(order)
        # A parameter that several layers share belongs to the first: `named_parameters` names it once.
        self._layer_of = {id(p): numbers[name.rpartition(".")[0]] for name, p in model.named_parameters()}

    def __call__(self, bucket: dist.GradBucket) -> int:
        """The class of the front-most layer in the bucket."""
        return self._class_of(self._layer_of[id(p)] for p in bucket.parameters())

    def of_parameters(self, names: Iterable[str]) -> int:
        """The class of the front-most layer of the parameters that the model has under these names; 0 of none."""
        return self._class_of(self.layers_of(names))

    def layers_of(self, names: Iterable[str]) -> list[int]:
        """The layers of the parameters that the model has under these names."""
        return [self._numbers[name.rpartition(".")[0]] for name in names]

    def _class_of(self, layers: Iterable[int]) -> int:
        return _native.layer_class(min(layers, default=0), self.layers, self.classes)


def tag_options(config: Config, traffic_class: int | None, important: Any) -> dict[str, Any]:
    """Options of a call: `traffic_class`, `sample_rate`, `important`, where there is something to say.

    Args:
        config: how many classes there are, and whether importance follows magnitude.
        traffic_class: 0 (the most urgent) to `classes` - 1; None means 0.
        important: a mask of any length over the tensor; None means the configuration's rule.

    Raises:
        ConfigError: there is no such class.
        InvalidRequestError: the mask is not one-dimensional.
    """
    _check(config, traffic_class, important)
    options: dict[str, Any] = {}
    if traffic_class is not None:
        options["traffic_class"] = traffic_class
    if important is not None:
        options["important"] = mask_of(important).bool().tolist()
    elif config.marks_importance():
        options["sample_rate"] = config.sample_rate()
    return options


def _check(config: Config, traffic_class: Any, important: Any) -> None:
    allowed = f"0 to {config.classes - 1}"
    if isinstance(traffic_class, bool) or not isinstance(traffic_class, int | None):
        raise ConfigError(f"traffic_class = {traffic_class!r} is not allowed: {allowed}", field="traffic_class")
    if traffic_class is not None and not 0 <= traffic_class < config.classes:
        raise ConfigError(f"traffic_class = {traffic_class} is not allowed: {allowed}", field="traffic_class")
    if important is not None and (dimensions := mask_of(important).dim()) != 1:
        raise InvalidRequestError(f"important has {dimensions} dimensions: a mask over the flat tensor has one")


def mask_of(important: Any) -> torch.Tensor:
    """A mask as a tensor: itself, or in host memory, whatever torch's default device is.

    Raises:
        InvalidRequestError: it is none.
    """
    if isinstance(important, torch.Tensor):
        return important
    try:
        return torch.as_tensor(important, device="cpu")
    except (TypeError, ValueError, RuntimeError) as error:
        text = f"important is a {type(important).__name__}: a mask is a flat tensor, or a sequence of True and False"
        raise InvalidRequestError(text) from error


def split(tagged: Tagged, config: Config) -> tuple[int, Any]:
    """Class and mask (None: none) of what a priority function returned.

    Raises:
        ConfigError, InvalidRequestError: as `tag_options`.
    """
    traffic_class, important = tagged if isinstance(tagged, tuple) else (tagged, None)
    _check(config, traffic_class, important)
    return traffic_class, important
