"""How a call on NumPy arrays opts in to loss: whether it may, and what that adds to it."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from gradwire import _arrays
from gradwire._arrays import Array
from gradwire._durations import seconds
from gradwire._policy import policy_numbers
from gradwire.config import Config
from gradwire.errors import InvalidRequestError, UnsupportedError


def check_opted_in(array: Array, op: str, asked: dict[str, Any], *, tolerate_loss: bool) -> None:
    """Loss is asked for by one word, not by the way of an argument that only matters with it.

    Raises:
        InvalidRequestError: such an argument without the word.
        UnsupportedError: the reduction, or the dtype, tolerates no loss. Fields: dtype, op.
    """
    if not tolerate_loss:
        without = [name for name, value in asked.items() if value is not None]
        if without:
            raise InvalidRequestError(f"{', '.join(without)} without tolerate_loss=True: this call is exact")
        return
    if array.dtype.name not in _arrays.TOLERANT_DTYPES or op not in _arrays.LINEAR:
        raise UnsupportedError(
            f"a tolerant {op} of {array.dtype} is not supported: {' or '.join(_arrays.LINEAR)} of one of "
            f"{', '.join(_arrays.TOLERANT_DTYPES)}",
            dtype=array.dtype.name,
            op=op,
        )


def tolerant_options(
    config: Config, preset: str | None, loss_bound: float | None, deadline: timedelta | None
) -> dict[str, Any]:
    """Options of a tolerant call: `policy`, and `sample_rate` where importance follows magnitude.

    Raises:
        ConfigError: a value is out of range, or no timedelta.
    """
    milliseconds = None if deadline is None else seconds("deadline", deadline) * 1e3
    options: dict[str, Any] = {
        "policy": policy_numbers(config, preset, loss_bound=loss_bound, deadline_ms=milliseconds)
    }
    if config.marks_importance():
        options["sample_rate"] = config.sample_rate()
    return options
