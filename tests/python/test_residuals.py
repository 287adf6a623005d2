"""What a step owes, without a network."""

import torch
from gradwire.torch._residuals import Residuals


class Bucket:
    """As DDP hands it over, with one parameter of four elements."""

    def __init__(self, parameter: torch.Tensor) -> None:
        self._parameter, self._buffer = parameter, torch.zeros(4)

    def parameters(self) -> list[torch.Tensor]:
        return [self._parameter]

    def gradients(self) -> list[torch.Tensor]:
        return [self._buffer]

    def buffer(self) -> torch.Tensor:
        return self._buffer


def test_what_is_owed_follows_the_scale_of_the_loss() -> None:
    parameter = torch.zeros(4)
    residuals = Residuals([("known", parameter), ("loaded", torch.zeros(2))])
    residuals.load_state_dict({"loaded": torch.full((2,), 3.0)})
    residuals.feed_back(Bucket(parameter), may_be_unused=False).fill_(8.0)
    residuals.rescale(0.5)
    assert residuals.state_dict()["known"].tolist() == [4.0] * 4
    assert residuals.state_dict()["loaded"].tolist() == [1.5] * 2
    bucket = Bucket(parameter)
    residuals.feed_back(bucket, may_be_unused=False)
    assert bucket.buffer().tolist() == [4.0] * 4, "the next gradient gets it in its own units"


def test_a_scale_of_nothing_forgets_what_is_not_finite_too() -> None:
    residuals = Residuals([])
    residuals.load_state_dict({"loaded": torch.tensor([float("inf"), 1.0])})
    residuals.rescale(0.0)
    assert residuals.state_dict()["loaded"].tolist() == [0.0, 0.0]
