"""That error feedback counts every gradient exactly once over a run, up to what steps round."""

from __future__ import annotations

import torch
from rank import WORLD_SIZE


def assert_counted_once(
    name: str, sums: tuple[torch.Tensor, torch.Tensor, torch.Tensor], unit: float, most: float
) -> None:
    """Of one parameter.

    Args:
        name: of the parameter.
        sums: over the run and all ranks, in float64: gradients given, N times the means applied, what is owed still.
        unit: of the gradients' dtype.
        most: the steps times the largest gradient.
    """
    given, applied, late = sums
    # Each step rounds, for each rank, what it adds up, the mean (times N) and what it owes, of values that a few
    # steps' gradients of all ranks bound; half a unit each.
    rounding = 3 * WORLD_SIZE * unit / 2 * 4 * WORLD_SIZE * most
    wrong = given - applied - late
    worst = wrong.abs().max()
    assert worst <= rounding, f"{name}[{int(wrong.abs().argmax())}]: {worst} of {rounding} allowed"
    # Roundings go up and down, over many elements they cancel; what counts twice or never goes one way.
    share = ((wrong * given).sum() / given.square().sum()).item()
    assert abs(share) <= unit, f"{name}: {share:.2%} of the gradients too few"
