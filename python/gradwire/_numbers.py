"""Numbers as Python has them, of whatever library they are."""

from __future__ import annotations

import contextlib
import numbers
from typing import Any


def plain(kind: type, value: Any) -> Any:
    """A number of NumPy, say, as one of `kind` where that is `int` or `float`; everything else as it is. A bool is no number."""
    if isinstance(value, bool):
        return value
    if kind is int and isinstance(value, numbers.Integral):
        return int(value)
    if kind is float and isinstance(value, numbers.Real):
        with contextlib.suppress(OverflowError):  # a whole number beyond every range
            return float(value)
    return value


def written(value: Any) -> str:
    """As Python writes it, or its type: of whole numbers of thousands of digits."""
    try:
        return repr(value)
    except ValueError:
        return f"(of type {type(value).__name__})"
