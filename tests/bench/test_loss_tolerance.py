"""What the training study concludes from its numbers. Running it is `bench/training/loss_tolerance.py --quick`: a minute."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest

PATH = Path(__file__).resolve().parents[2] / "bench" / "training" / "loss_tolerance.py"


@pytest.fixture(scope="module")
def study() -> Any:
    spec = importlib.util.spec_from_file_location("loss_tolerance", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["loss_tolerance"] = module
    spec.loader.exec_module(module)
    return module


def runs(method: str, kind: str, share: float, losses: tuple[float, ...], lost: float | None = None) -> list[dict]:
    common = {"task": "digits", "method": method, "kind": kind, "share": share, "accuracy": 0.9}
    lost = share if lost is None else lost
    return [{**common, "seed": seed, "loss": loss, "lost": lost} for seed, loss in enumerate(losses)]


CALM = runs("mean", "none", 0.0, (1.0, 1.1, 0.9))  # a standard deviation of 0.1


def test_feedback_must_end_within_the_noise(study: Any) -> None:
    (reached,) = study.verdicts(CALM + runs("feedback", "random", 0.1, (1.1, 1.2, 1.25)))
    assert reached.reached
    (missed,) = study.verdicts(CALM + runs("feedback", "random", 0.1, (1.2, 1.2, 1.25)))
    assert not missed.reached
    assert "MISSED" in missed.line()


def test_hadamard_must_reach_what_zero_fill_misses(study: Any) -> None:
    good, bad = (1.1, 1.1, 1.1), (1.3, 1.3, 1.3)
    for rotated, plain, reached in ((good, bad, True), (bad, bad, False), (good, good, False)):
        rows = CALM + runs("hadamard", "tail", 0.1, rotated) + runs("zero-fill", "tail", 0.1, plain)
        assert [verdict.reached for verdict in study.verdicts(rows)] == [reached]


def test_a_network_that_lost_something_else_is_no_result(study: Any) -> None:
    for lost, complaints in ((0.1, 0), (0.11, 0), (0.12, 1), (0.05, 1)):
        rows = CALM + runs("mean", "random", 0.1, (1.0, 1.0, 1.0), lost)
        assert len(study.verdicts(rows)) == complaints, lost


def test_each_condition_asks_for_its_fault(study: Any) -> None:
    asked = [condition.chaos() for condition in study.conditions((0.01, 0.2))]
    assert asked == [None, "loss=1%,seed=1", "loss=20%,seed=1", "tail=1%,seed=1", "tail=20%,seed=1"]


def test_runs_are_compared_with_the_same_seed_without_loss(study: Any) -> None:
    lossy = runs("mean", "random", 0.1, (1.2, 1.3, 1.1))
    mean, deviation = study.excess(CALM + lossy, lossy)
    assert abs(mean - 0.2) < 1e-12
    assert deviation < 1e-12


def test_the_table_and_the_picture_hold_every_run(study: Any, tmp_path: Path) -> None:
    rows = CALM + runs("mean", "random", 0.1, (1.0, 1.0, 1.0)) + runs("mean", "tail", 0.1, (1.1, 1.2, 1.0))
    text = study.markdown(rows)
    assert "| digits | 10% tail | 10.00% | 1.1000 ± 0.1000 (+0.1000, 90.0%) |" in text
    study.draw({"rows": rows, "seeds": 3, "machine": {"commit": "c", "load": 0.1}}, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 10_000
