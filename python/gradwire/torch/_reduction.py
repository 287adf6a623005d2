"""Which reductions are possible on which dtypes, in the codes of the binding."""

from __future__ import annotations

import functools
import operator
from typing import Any

import torch

from gradwire.errors import UnsupportedError
from gradwire.torch import _memory

# In the order of torch's RedOpType and of the binding's codes (crates/gradwire-py/src/call.rs).
NAMES = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR", "PREMUL_SUM")
CODES = {name: code for code, name in enumerate(NAMES)}
LINEAR = ("SUM", "AVG", "PREMUL_SUM")
# The parts of a complex number are reduced like two real ones where the reduction is linear.
REAL_CODES = {torch.complex32: 3, torch.complex64: 1, torch.complex128: 2}
BITWISE = ("BAND", "BOR", "BXOR")


def reduction(tensor: torch.Tensor, op: Any) -> dict[str, Any]:
    """Options of a reducing call: dtype, reduce, factor.

    Args:
        tensor: what is reduced.
        op: torch's ReduceOp; None means SUM.

    Raises:
        UnsupportedError: no such reduction on this dtype. Fields: dtype, op.
    """
    _memory.check(tensor)
    name = name_of(op)
    return {"dtype": _dtype_code(tensor.dtype, name), "reduce": CODES[name], "factor": _factor(op, name)}


def name_of(op: Any) -> str:
    """The name that torch gives a reduction: `SUM`, `AVG`, ..."""
    kind = getattr(op, "op", op)
    if kind is None:
        return "SUM"
    try:
        code = operator.index(kind)  # much cheaper than its name
    except TypeError:
        text = f"op = {op!r} is not allowed: torch.distributed.ReduceOp.AVG, or another one of {', '.join(NAMES)}"
        raise UnsupportedError(text, op=str(op)) from None
    if not 0 <= code < len(NAMES):
        raise UnsupportedError(f"reduction {kind} is not supported: one of {', '.join(NAMES)}", op=str(kind))
    return NAMES[code]


@functools.cache
def _dtype_code(dtype: torch.dtype, name: str) -> int:
    if dtype in REAL_CODES and name in LINEAR:
        return REAL_CODES[dtype]
    if dtype not in _memory.DTYPE_CODES or (name in BITWISE and dtype.is_floating_point):
        raise UnsupportedError(f"reduction {name} of {dtype} is not supported", dtype=str(dtype), op=name)
    return _memory.DTYPE_CODES[dtype]


def _factor(op: Any, name: str) -> float:
    if name != "PREMUL_SUM":
        return 1.0
    factor = getattr(op, "factor", None)
    if factor is None:
        raise UnsupportedError(
            f"torch {torch.__version__} does not show the factor of PREMUL_SUM to a backend", op=name
        )
    return float(factor)
