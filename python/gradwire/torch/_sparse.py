"""Sum of sparse tensors, as DDP needs it for `Embedding(sparse=True)`.

Every rank gets every rank's indices and values and adds them itself, as gloo does: the sum of sparse tensors has as many
entries as all ranks together, so nothing would be saved by reducing on the way. Ranks have different numbers of entries;
the numbers are gathered first, with the shapes, which blocks the caller, and entries are sent padded to the largest.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from gradwire.errors import MismatchError, UnsupportedError
from gradwire.torch._reduction import name_of
from gradwire.torch._streams import copy_into
from gradwire.torch._work import GradwireWork

# (rows, tensor) -> work: an all-gather
Gather = Callable[[list[Tensor], Tensor], GradwireWork]

# Room for a shape beside its number of entries: ranks whose tensors have different numbers of dimensions, up to so many, gather equally
# much, and learn the others' shapes. With more the engine finds that what they gather differs.
DIMENSIONS = 8


def has_sparse_gradients(model: nn.Module) -> bool:
    """Whether one of its modules was made with `sparse=True`."""
    return any(map(is_sparse, model.modules()))


def is_sparse(module: nn.Module) -> bool:
    """Whether the gradients of this module's own parameters are sparse."""
    return isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse


def check(tensor: Tensor, op: Any) -> None:
    """Whether this can be summed.

    Raises:
        UnsupportedError: another reduction or layout. Fields: op or layout.
    """
    if tensor.layout is not torch.sparse_coo:
        raise UnsupportedError(f"layout {tensor.layout} is not supported", layout=str(tensor.layout))
    if name_of(op) != "SUM":
        raise UnsupportedError(f"reduction {name_of(op)} of sparse tensors is not supported: only SUM", op=name_of(op))


def start(tensor: Tensor, world_size: int, gather: Gather) -> tuple[list[GradwireWork], Callable[[], None]]:
    """Starts the exchange. Returns its works, and what makes the sum `[*tensor.shape]` in `tensor` when they have ended.

    Raises:
        MismatchError: ranks have tensors of different shapes. Every rank finds it, so the group goes on.
        GradwireError: the numbers of entries could not be gathered.
    """
    own = tensor.detach().coalesce()
    entries = _entries(own, world_size, gather)
    most = max(entries)
    # Entries first, so that padding is one block at the end.
    places = _rows(own.indices().t(), most, world_size)
    values = _rows(own.values(), most, world_size)
    works = [gather(*places), gather(*values)]

    def add() -> None:
        found = torch.cat([rows[:count] for rows, count in zip(places[0], entries, strict=True)])
        parts = torch.cat([rows[:count] for rows, count in zip(values[0], entries, strict=True)])
        total = torch.sparse_coo_tensor(found.t(), parts, tensor.shape, check_invariants=False).coalesce()
        copy_into(tensor, total)

    return works, add


def _entries(own: Tensor, world_size: int, gather: Gather) -> list[int]:
    """How many entries each rank has."""
    row = [own._nnz(), own.sparse_dim(), own.dim(), *own.shape]
    row += [0] * (DIMENSIONS - own.dim())
    rows = [torch.zeros(len(row), dtype=torch.int64, device="cpu") for _ in range(world_size)]
    gather(rows, torch.tensor(row, dtype=torch.int64, device="cpu")).wait()
    found = [row.tolist() for row in rows]
    for rank, theirs in enumerate(found):
        if theirs[1:] != found[0][1:]:
            raise _mismatch(rank, theirs, found[0])
    return [theirs[0] for theirs in found]


def _mismatch(rank: int, theirs: list[int], of_rank_0: list[int]) -> MismatchError:
    a, b = (
        {"collective": "all_reduce", "shape": tuple(row[3 : 3 + row[2]]), "sparse_dim": row[1]}
        for row in (of_rank_0, theirs)
    )
    called = "called all_reduce of a sparse tensor of shape"
    text = (
        f"ranks 0 and {rank} disagree: rank 0 {called} {a['shape']}, sparse_dim {a['sparse_dim']}, "
        f"rank {rank} {called} {b['shape']}, sparse_dim {b['sparse_dim']}"
    )
    return MismatchError(text, rank_a=0, a=a, rank_b=rank, b=b)


def _rows(own: Tensor, most: int, world_size: int) -> tuple[list[Tensor], Tensor]:
    """Room for every rank's entries, and this rank's, padded."""
    padded = own.new_zeros((most, *own.shape[1:]))
    padded[: own.shape[0]] = own
    return [torch.empty_like(padded) for _ in range(world_size)], padded
