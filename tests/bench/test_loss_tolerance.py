"""What the training study plans, keeps and concludes, and a few steps of each task over a network that loses tails."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench" / "training"))

import loss_figures
import loss_plan
import loss_tolerance
import loss_verdicts
from loss_plan import CALM, RANDOM, TAIL, Cell, Condition, Run
from loss_store import OtherSettings, Store

STEADY = (0.001, -0.002, 0.002, -0.001)  # differences without a direction
WORSE = (0.030, 0.026, 0.034, 0.029)


def runs(method: str, condition: Condition, above: tuple[float, ...] = (), **other: Any) -> list[dict[str, Any]]:
    """Four seeds, whose losses without loss are far apart; `above` is what was lost to the network."""
    qualities = (1.0, 1.4, 0.8, 1.1)
    rows = []
    for seed, (loss, more) in enumerate(zip(qualities, above or (0.0,) * 4, strict=True)):
        received = round(1_000_000 * (1 - condition.share))
        values = {"loss": loss + more, "accuracy": 0.9, "expected": 1_000_000, "received": received, "steps": 5}
        clean = {"ended_by_time": 0, "overflows": 0, "identical": True}
        rows.append({**Run(Cell("digits", method, condition), seed).key(), **values, **clean, **other})
    return rows


CALM_RUNS = runs("mean", CALM)


def reached(rows: list[dict[str, Any]]) -> list[bool]:
    return [verdict.reached for verdict in loss_verdicts.verdicts(CALM_RUNS + rows)]


@pytest.mark.parametrize(
    ("fed", "zero_filled", "expected"),
    [(STEADY, WORSE, True), (WORSE, WORSE, False), (STEADY, STEADY, False), (WORSE, STEADY, False)],
)
def test_feedback_must_be_within_noise_where_zero_fill_is_worse(fed, zero_filled, expected):
    rows = runs("feedback", RANDOM, fed) + runs("zero-fill / N", RANDOM, zero_filled)
    assert reached(rows) == [expected]


def test_a_difference_far_below_that_between_seeds_is_seen():
    """Seeds differ by 0.6 here and zero-fill by 0.03: unpaired, nothing could ever be missed."""
    calm, worse = Cell("digits", "mean", CALM), Cell("digits", "zero-fill / N", RANDOM)
    rows = CALM_RUNS + runs("zero-fill / N", RANDOM, WORSE)
    found = loss_verdicts.difference(rows, worse, calm)
    assert found is not None
    assert found.is_worse
    assert found.mean == pytest.approx(0.02975)
    # 3.1824 is the quantile 0.975 of Student's t with 3 degrees of freedom, 0.0033040 the differences' deviation.
    assert found.half == pytest.approx(3.1824 * 0.0033040 / 2, rel=1e-4)


def test_too_few_seeds_decide_nothing():
    for count in (1, 2):
        few = loss_verdicts.interval((0.03, 0.031)[:count])
        assert not few.is_worse
        assert not few.is_within_noise


def test_hadamard_must_be_within_noise_where_zero_fill_is_worse():
    for rotated, plain, expected in ((STEADY, WORSE, True), (WORSE, WORSE, False), (STEADY, STEADY, False)):
        assert reached(runs("hadamard", TAIL, rotated) + runs("zero-fill / N", TAIL, plain)) == [expected]


def test_all_else_equal_a_rotated_tail_must_be_like_scattered_losses():
    scattered = runs("zero-fill / N", RANDOM, (0.02,) * 4)
    as_scattered = tuple(0.02 + steady for steady in STEADY)
    much_worse = tuple(0.02 + worse for worse in WORSE)
    for rotated, plain, expected in (
        (as_scattered, much_worse, True), (much_worse, much_worse, False), (as_scattered, as_scattered, False),
    ):  # fmt: skip
        rows = scattered + runs("hadamard / N", TAIL, rotated) + runs("zero-fill / N", TAIL, plain)
        assert reached(rows) == [expected]


def test_a_network_that_lost_something_else_is_no_result():
    for received, complaints in ((900_000, 0), (895_000, 0), (950_000, 1), (850_000, 1)):
        rows = runs("mean", RANDOM, received=received)
        assert len(loss_verdicts.verdicts(CALM_RUNS + rows)) == complaints, received


@pytest.mark.parametrize("other", [{"ended_by_time": 1}, {"overflows": 3}, {"identical": False}])
def test_a_run_that_the_machine_s_load_decided_is_no_result(other):
    (complaint,) = loss_verdicts.verdicts(CALM_RUNS + runs("mean", TAIL, **other))
    assert not complaint.reached


def test_without_a_verdict_no_target_is_reached():
    assert loss_tolerance.code_of([]) == loss_tolerance.MISSED
    for is_reached, code in ((True, loss_tolerance.REACHED), (False, loss_tolerance.MISSED)):
        assert loss_tolerance.code_of([loss_verdicts.Verdict(is_reached, "a target")]) == code


def test_each_condition_asks_for_its_fault():
    asked = [condition.chaos() for condition in loss_plan.conditions((0.01, 0.2))]
    assert asked == [None, "loss=1%,seed=1", "loss=20%,seed=1", "tail=1%,seed=1", "tail=20%,seed=1"]


def test_every_run_is_planned_once_and_those_of_the_targets_first():
    tasks, methods = ("digits", "transformer"), list(loss_plan.METHODS)
    planned = list(loss_plan.plan(loss_plan.Size(tasks, methods, loss_plan.LOSSES, seeds=3, judged_seeds=5)))
    assert len(planned) == len(set(planned)) == 2 * (9 * len(methods) * 3 + 7 * 2)
    judged = [cell for task in tasks for cell in loss_plan.judged(task)]
    first = 5 * len(judged)
    assert {run.cell for run in planned[:first]} == set(judged)
    assert not {run.cell for run in planned[first:]} & set(judged)


def test_an_interrupted_study_goes_on_where_it_was(tmp_path: Path):
    file, settings = tmp_path / "rows.jsonl", {"steps": {"digits": 5}}
    store = Store.go_on(file, settings)
    first, second = CALM_RUNS[:2]
    store.add(first)
    file.write_text(file.read_text() + json.dumps(second)[:40])  # interrupted while it wrote
    again = Store.go_on(file, settings)
    done = [Run(Cell("digits", "mean", CALM), seed) for seed in (0, 1)]
    assert [again.has(run) for run in done] == [True, False]
    again.add(second)
    assert Store.read(file).rows == [first, second]
    with pytest.raises(OtherSettings, match="name another file"):
        Store.go_on(file, {"steps": {"digits": 6}})


def test_the_table_and_the_picture_hold_every_run(tmp_path: Path):
    rows = CALM_RUNS + runs("mean", RANDOM, STEADY) + runs("mean", TAIL, WORSE)
    text = loss_figures.markdown(rows)
    assert "| digits | no loss | 0.00% | 1.0750, 90.0% [4] |" in text
    assert "| digits | 10% random | 10.00% | +0.0000 ± 0.0029, 90.0% [4] |" in text
    assert "| digits | 10% tail | 10.00% | **+0.0297 ± 0.0053, 90.0% [4]** |" in text
    head = {"machine": {"commit": "c", "load": 0.1}, "settings": {"steps": {"digits": 5}}}
    loss_figures.draw(Store(None, head, rows), tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 10_000


def test_runs_lose_what_was_asked_for_and_replicas_stay_identical(tmp_path: Path):
    planned = [Run(Cell(task, loss_plan.HADAMARD, TAIL), seed=1) for task in loss_plan.STEPS]
    rows = list(loss_tolerance.measure(planned, dict.fromkeys(loss_plan.STEPS, 3), tmp_path))
    assert [row["task"] for row in rows] == list(loss_plan.STEPS)
    assert loss_verdicts.complaints(rows) == []
    for row in rows:
        assert row["received"] < row["expected"]
        assert 0 < row["loss"] < 10


def test_the_quick_mode_measures_prints_and_draws_and_the_same_command_goes_on_with_its_file(tmp_path: Path):
    numbers = tmp_path / "rows.jsonl"
    command = [sys.executable, loss_tolerance.__file__, "--quick", "--task", "digits", "--method", "mean"]
    command += ["--json", str(numbers), "--out", str(tmp_path)]
    for there in (0, 3):
        ran = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
        assert ran.returncode == loss_tolerance.REACHED, ran.stdout + ran.stderr
        assert f"{there} of 3 runs are there" in ran.stdout
        assert "decides nothing about the targets" in ran.stdout
    store = Store.read(numbers)
    assert store.head["machine"]["extension_sha256"]
    assert "--method mean" in store.head["command"]
    rows = store.rows
    assert [(row["kind"], row["share"]) for row in rows] == [("none", 0.0), ("tail", 0.1), ("random", 0.1)]
    assert all(row["identical"] for row in rows)
    assert (tmp_path / "loss_tolerance.png").stat().st_size > 10_000
