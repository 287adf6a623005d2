"""Which reductions are possible on which dtypes, in the codes of the binding."""

from __future__ import annotations

from typing import Any

import torch

from gradwire.errors import UnsupportedError
from gradwire.torch import _memory

# Codes of the binding (crates/gradwire-py/src/call.rs) by torch's names.
CODES = {"SUM": 0, "AVG": 1, "PRODUCT": 2, "MIN": 3, "MAX": 4, "BAND": 5, "BOR": 6, "BXOR": 7, "PREMUL_SUM": 8}
AVG = CODES["AVG"]
LINEAR = ("SUM", "AVG", "PREMUL_SUM")
# The parts of a complex number are reduced like two real ones where the reduction is linear.
REAL_CODES = {torch.complex32: 3, torch.complex64: 1, torch.complex128: 2}
# Reductions whose bits do not depend on the sign.
SIGNLESS = ("SUM", "PRODUCT", "BAND", "BOR", "BXOR")
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
    name = "SUM" if kind is None else getattr(kind, "name", str(kind).rpartition(".")[2])
    if name not in CODES:
        raise UnsupportedError(f"reduction {name} is not supported: one of {', '.join(CODES)}", op=name)
    return name


def _dtype_code(dtype: torch.dtype, name: str) -> int:
    if dtype in REAL_CODES and name in LINEAR:
        return REAL_CODES[dtype]
    if dtype in _memory.UNSIGNED_CODES and name in SIGNLESS:
        return _memory.UNSIGNED_CODES[dtype]
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


def is_average(op: Any) -> bool:
    """Whether `op` is `ReduceOp.AVG`."""
    return name_of(op) == "AVG"
