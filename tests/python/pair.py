"""Two ranks in one process, and what they send each other."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np
from gradwire import _arrays, _native

ELEMS = 1000


def pair() -> tuple[list[_native.Engine], list[_native.Group]]:
    """Connected. The engines have to be stopped."""
    engines = [_native.Engine({"port": 0}) for _ in range(2)]
    pending = [engine.new_group(rank, 2, "pair") for rank, engine in enumerate(engines)]
    records = [one.record() for one in pending]
    with ThreadPoolExecutor(2) as threads:
        return engines, list(threads.map(lambda one: one.join(records, 30.0), pending))


def send(group: _native.Group) -> _native.Op:
    """To the other rank, from rank 1."""
    return _submit(group, "send", input=np.ones(ELEMS, "float32"))


def receive(group: _native.Group, output: np.ndarray | None = None) -> _native.Op:
    """What `send` sends: never ends without it."""
    return _submit(group, "receive", output=np.zeros(ELEMS, "float32") if output is None else output)


def _submit(group: _native.Group, kind: str, **arrays: np.ndarray) -> _native.Op:
    (array,) = arrays.values()
    places = {name: _arrays.address(arrays.get(name)) for name in ("input", "output")}
    peer = 0 if kind == "send" else 1
    return group.submit({
        "kind": kind, "timeout_s": 600.0, "keep": [array], "peer": peer, **places, **_arrays.copy_options(array),
    })  # fmt: skip
