"""Shared by the bodies that coalesce calls."""

import pytest
import torch
import torch.distributed as dist


def leaves_later_calls_alone() -> None:
    """What raises between coalesced calls of the default group leaves nothing behind for those that follow."""

    def broken() -> None:
        with dist._coalescing_manager():
            dist.all_reduce(torch.ones(3))
            raise KeyError

    with pytest.raises(KeyError):
        broken()
    tensor = torch.ones(3)
    dist.all_reduce(tensor)
    assert torch.equal(tensor, torch.full((3,), float(dist.get_world_size())))
