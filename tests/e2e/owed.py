"""What is owed, in what the states of loss tolerance save."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor


def owed_in(saved: Mapping[str, dict[str, Tensor]]) -> dict[str, Tensor]:
    """By parameter, of the one rank that has saved it."""
    (residuals,) = saved.values()
    return residuals
