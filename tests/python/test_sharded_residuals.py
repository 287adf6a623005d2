"""What a step of a sharded model owes, without a network."""

from __future__ import annotations

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gradwire.torch._sharded_residuals import ShardedResiduals

RANKS, ELEMS = 2, 3


class Job:
    """A model of two parameters, whose gradients are reduced as FSDP does it."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        self.dtype = dtype
        self.model = torch.nn.Module()
        self.parameters = {name: self._parameter(name) for name in ("a", "b")}
        self.residuals = ShardedResiduals(self.model)

    def _parameter(self, name: str) -> Any:
        self.model.register_parameter(name, torch.nn.Parameter(torch.zeros(RANKS * ELEMS)))
        info = SimpleNamespace(module=self.model, param_name=name)
        return SimpleNamespace(padded_sharded_param_size=torch.Size([ELEMS]), _module_info=info)

    def reduced(self, *names: str) -> tuple[torch.Tensor, torch.Tensor]:
        """What is sent of gradients of zero, and the place for what is owed."""
        gradients = torch.zeros(RANKS * ELEMS * len(names), dtype=self.dtype)
        residual = self._foreach_reduce([self.parameters[name] for name in names], gradients)
        assert residual is not None
        return gradients, residual

    def _foreach_reduce(self, fsdp_params: Sequence[Any], gradients: torch.Tensor) -> torch.Tensor | None:
        """The name of its argument is torch's."""
        assert fsdp_params
        return self.residuals.feed_back(gradients, RANKS)


def test_what_is_owed_follows_the_scale_of_the_loss() -> None:
    job = Job()
    job.reduced("a", "b")[1].fill_(8.0)
    job.reduced("b")  # what a is owed waits
    job.residuals.rescale(0.5)
    assert {part.unique().item() for part in job.residuals.state_dict().values()} == {4.0}
    assert job.reduced("a")[0].unique().tolist() == [4.0], "the next gradient gets it in its own units"
    job.residuals.rescale(0.0)
    assert not any(part.any() for part in job.residuals.state_dict().values())


@pytest.mark.parametrize("how", ["rescale", "load"])
def test_what_halves_owe_stays_finite(how: str) -> None:
    job = Job(torch.float16)
    if how == "rescale":
        job.reduced("a")[1].fill_(40_000.0)
        job.residuals.rescale(2.0)
    else:
        job.residuals.load_state_dict({"a": torch.full((RANKS, ELEMS), -1e5)})
    assert job.reduced("a")[0].abs().unique().tolist() == [65_504.0]
