"""Hyperparameters of an optimizer as they were when a backward pass ended, for a step that comes later.

In a script that steps after `backward`, whoever changes hyperparameters after that (`scheduler.step()`) changes those of the next
step. A step inside the next forward pass comes after that change, and takes what it would have found before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch


class Hyperparameters:
    """All that the groups of an optimizer hold beside parameters, as it is now.

    Args:
        optimizer: that will step with them.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._values = [_value(group, key) for group in optimizer.param_groups for key in group if key != "params"]

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Within, the groups hold these. What they held before comes back, except where somebody has written them within."""
        undos = [value.apply() for value in self._values]
        try:
            yield
        finally:
            for undo in undos:
                undo()


class _Value:
    """One hyperparameter."""

    def __init__(self, group: dict[str, Any], key: str) -> None:
        self._group, self._key, self._value = group, key, group[key]

    def apply(self) -> Callable[[], None]:
        """Puts it in its place. Returns what puts back what was there."""
        latest = self._group[self._key]
        self._group[self._key] = self._value

        def undo() -> None:
            if self._group[self._key] is self._value:
                self._group[self._key] = latest

        return undo


class _TensorValue(_Value):
    """One that schedulers may write in place, as captured and compiled steps hold on to the tensor."""

    def __init__(self, group: dict[str, Any], key: str) -> None:
        super().__init__(group, key)
        self._tensor: torch.Tensor = self._value.detach()
        self._copy, self._version = self._tensor.clone(), self._tensor._version

    def apply(self) -> Callable[[], None]:
        undo = super().apply()
        if self._tensor._version == self._version:  # says without a look at a GPU that nobody has written it
            return undo
        latest = self._tensor.clone()
        self._tensor.copy_(self._copy)
        version = self._tensor._version

        def undo_both() -> None:
            if self._tensor._version == version:
                self._tensor.copy_(latest)
            undo()

        return undo_both


def _value(group: dict[str, Any], key: str) -> _Value:
    return (_TensorValue if isinstance(group[key], torch.Tensor) else _Value)(group, key)
