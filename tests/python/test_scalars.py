"""What a training step delivered, as scalars: under which number each step is written."""

from __future__ import annotations

from gradwire.torch._scalars import StepScalars
from gradwire.torch._steps import StepMeter


class Writer:
    """Keeps what it gets."""

    def __init__(self) -> None:
        self.steps: dict[str, list[int]] = {}

    def add_scalar(self, tag: str, _value: float, global_step: int) -> None:
        self.steps.setdefault(tag, []).append(global_step)


def train(scalars: StepScalars, steps: int) -> None:
    """So many steps, and the beginning of one more."""
    meter = StepMeter(8)
    for _ in range(steps + 1):
        scalars.before_step(meter)
        meter.begin(0.0)


def test_steps_are_numbered_from_0() -> None:
    writer = Writer()
    scalars = StepScalars(writer)
    train(scalars, 5)
    assert writer.steps["gradwire/lost_share"] == [0, 1, 2, 3, 4]
    assert scalars.step == 5


def test_a_job_that_goes_on_from_a_checkpoint_writes_on_in_the_same_log() -> None:
    writer = Writer()
    before = StepScalars(writer)
    train(before, 5)
    after = StepScalars(writer)
    after.step = before.step
    train(after, 3)
    assert {tuple(steps) for steps in writer.steps.values()} == {tuple(range(8))}
