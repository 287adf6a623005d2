"""What differs between versions of torch.

Decided by looking at the feature and never at the version number, except for the floor below which nothing was tested.
"""

from __future__ import annotations

import os
import re
import types
from collections.abc import Callable, Iterable
from typing import Any

import torch

from gradwire.errors import MissingExtraError, UnsupportedError

TORCH_FLOOR = (2, 9)
# Whether torch enters each work into a registry, for compiled graphs that wait for it
# (`torch.distributed._functional_collectives.allow_inflight_collective_as_graph_input_ctx`).
may_be_graph_input: Callable[[], bool] = getattr(
    torch._C._distributed_c10d, "_allow_inflight_collective_as_graph_input", lambda: False
)


def require_torch(version: str | None = None) -> None:
    """Checks the installed torch.

    Raises:
        UnsupportedError: it is older than the floor. Fields: found, floor.
    """
    found = torch.__version__ if version is None else version
    match = re.match(r"(\d+)\.(\d+)", found)
    floor = ".".join(map(str, TORCH_FLOOR))
    if match is None or tuple(map(int, match.groups())) < TORCH_FLOOR:
        raise UnsupportedError(f"torch {found} is too old: gradwire needs {floor} or newer", found=found, floor=floor)


def require_numpy() -> None:
    """Checks that NumPy is there, which torch does without.

    Raises:
        MissingExtraError: it is not. Fields: extra, package.
    """
    try:
        import numpy  # noqa: F401
    except ImportError as error:
        text = "gradwire.torch needs the package numpy, which is not installed: pip install 'gradwire[torch]'"
        raise MissingExtraError(text, extra="torch", package="numpy") from error


def backend_class() -> type | None:
    """`torch._C._distributed_c10d.Backend` where Python may subclass it (torch >= 2.14), else None."""
    base = getattr(torch._C._distributed_c10d, "Backend", None)
    if base is None:
        return None
    try:
        type("Probe", (base,), {})(0, 1)
    except TypeError:  # "No constructor defined!"
        return None
    return base


def peeled(backend: Any) -> Any:
    """What the debug level DETAIL has wrapped: with torch >= 2.15 the adapter itself, before that an object of C++."""
    while (inner := getattr(backend, "wrapped_pg", None)) is not None:
        backend = inner
    return backend


def records_flights() -> bool:
    """Whether torch enters the calls of backends written in Python into its flight recorder (2.15), by the variables that it reads."""
    if not hasattr(torch._C._distributed_c10d, "FlightRecorderHook"):
        return False
    sizes = (os.environ.get(name) for name in ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_TRACE_BUFFER_SIZE"))
    return int(next(filter(None, sizes), 2000)) > 0


def hide_from_dynamo(members: Iterable[Any]) -> None:
    """Tells torch.compile not to look into these functions and the methods of these classes.

    C++ calls the adapter during a compiled forward; Dynamo would take each method for user code and try to trace it.
    """
    skip = _code_skipper()
    for member in members:
        functions = vars(member).values() if isinstance(member, type) else [member]
        for function in map(_plain, functions):
            if isinstance(function, types.FunctionType):
                for code in _nested(function.__code__):
                    skip(code)


def _plain(member: Any) -> Any:
    if isinstance(member, property):
        return member.fget
    return getattr(member, "__func__", member)


def _nested(code: types.CodeType) -> Iterable[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _nested(constant)


def _code_skipper() -> Any:
    eval_frame = torch._C._dynamo.eval_frame
    strategy = getattr(eval_frame, "_FrameExecStrategy", None)
    action = getattr(eval_frame, "_FrameAction", None)
    setter = getattr(eval_frame, "set_code_exec_strategy", None)
    if strategy and action and setter:
        skipped = strategy(action.SKIP, action.SKIP)
        return lambda code: setter(code, skipped)
    return getattr(eval_frame, "skip_code", lambda _code: None)
