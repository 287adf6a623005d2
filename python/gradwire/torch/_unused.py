"""Which parameters no rank has used in a step, as DDP knows it.

With `find_unused_parameters` DDP adds up in each step, exactly and after its last bucket, how many ranks have used each
parameter, and throws the mean of a parameter away that none has. Its reducer shows these counts for torch's `Join` (2.9 to
2.15). They are one tensor for the life of the reducer, and hold a step's counts until the last bucket of the next. So they are
asked for once, and read when the next step begins: the reducer may not be called from within the hook, as it holds its lock.
Nothing more is exchanged for it.

They are in the order of the reducer, which took the parameters that had gradients when the model was wrapped. Some may have been frozen
since, and others not be frozen any more, and nobody has kept a list. But its buckets have these parameters and no others, and all of them
have come by the end of the first step.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

logger = logging.getLogger("gradwire")


class Unused:
    """Of one DDP model whose parameters may have no gradient in one step and one in another.

    Args:
        model: with its reducer, before the first backward.
    """

    def __init__(self, model: Any) -> None:
        # Not the model itself: DDP holds who holds this.
        self._has_views = bool(model.gradient_as_bucket_view)
        self._counts = counts_of(model)
        # All that the reducer may have, in its order, and those of them that it has. By their `id`s.
        self._all, trained = _parameters_of(model)
        self._trained, self._seen = frozenset(trained), set[int]()
        self._order: list[int] | None = None
        self._is_told = False
        if self._counts is not None and self._counts.numel() > len(self._all):
            self._counts = None
        self._version = -1
        if self._counts is None:
            logger.warning(
                "torch %s does not say which parameters no rank used: what such a parameter is owed is lost in a step without it",
                torch.__version__,
            )

    def may_be_thrown_away(self, parameter: Tensor) -> bool:
        """Whether DDP throws the mean away if it finds that no rank has used the parameter. Called from within the hook.

        A gradient that the program has left in place and that is a part of its bucket holds whatever the bucket ends with.
        """
        return self._counts is not None and not (self._has_views and parameter.grad is not None)

    def begin(self, parameters: Iterable[Tensor]) -> None:
        """A step is under way, whose counts have not come yet. Called from within the hook, with the parameters of each bucket."""
        if self._counts is not None:
            self._version = self._counts._version
            if self._order is None:
                self._seen.update(map(id, parameters))

    def latest(self) -> frozenset[int]:
        """The `id` of each parameter that no rank used in the step that has ended. None of a step that DDP has not counted.

        Not counted are steps that broke off, and those for which a rank that has joined (`Join`) sends zeros.
        """
        if self._counts is None or self._counts._version == self._version:
            return frozenset()
        if self._order is None:
            self._order = self._order_of(self._counts.numel())
        if self._order is None:
            self._tell(self._counts.numel())
            return frozenset()
        return frozenset(
            parameter for parameter, count in zip(self._order, self._counts.tolist(), strict=True) if not count
        )

    def _order_of(self, count: int) -> list[int] | None:
        """The parameters that are counted; None: which these are is not known yet.

        With `skip_all_reduce_unused_params` a bucket comes only once a rank has used some of its parameters.
        """
        for reduced in (self._seen, self._seen | self._trained):
            if len(reduced) == count:
                return [parameter for parameter in self._all if parameter in reduced]
        return None

    def _tell(self, count: int) -> None:
        if not self._is_told:
            self._is_told = True
            logger.warning(
                "parameters were frozen, or frozen no more, between DDP(...) and tolerate_loss, and of the %d that DDP reduces only %d "
                "have been used: until all have, what a parameter is owed is lost in a step without it. Freeze before DDP(...)",
                count,
                len(self._seen),
            )


def counts_of(model: Any) -> Tensor | None:
    """How many ranks have used each parameter in a step, of a model with `find_unused_parameters`; None: this torch does not show it.

    Its version changes once in each step that DDP has ended, between the step's last bucket and the next one's first.
    """
    ask = getattr(model.reducer, "_get_local_used_map", None)
    counts = None if ask is None else ask()
    return counts if isinstance(counts, Tensor) else None


def _parameters_of(model: Any) -> tuple[list[int], list[int]]:
    """The `id`s of all parameters that a reducer may have, in its order and each once, and of those that are not frozen now."""
    found = {id(parameter): parameter.requires_grad for parameter in _not_ignored(model)}
    return list(found), [parameter for parameter, is_trained in found.items() if is_trained]


def _not_ignored(model: Any) -> Iterator[Tensor]:
    for module_name, module in model.module.named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            if f"{module_name}.{name}" not in model.parameters_to_ignore:
                yield parameter
