"""The demo's numbers and its plan."""

import json
from pathlib import Path
from typing import Any

import pytest
from gradwire.demo import conductor
from gradwire.demo.plan import Plan, Run
from gradwire.demo.results import RunResults, percentile, report, tail_of

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
FIELDS = [
    "backend", "loss", "steps", "step_ms_p50", "step_ms_p99", "step_ms_max", "comm_ms_p50", "comm_ms_p99", "comm_ms_max",
    "bytes_lost_share", "val_loss", "steps_apart",
]  # fmt: skip


def answer(step_ms: float, comm_ms: float, lost: float = 0.0, *, begun_ms: float = 0.0) -> dict[str, Any]:
    """Of one rank about one step."""
    record = {"step_ms": step_ms, "comm_ms": comm_ms, "bytes_lost_share": lost}
    return {"begun": begun_ms / 1e3, "ended": (begun_ms + step_ms) / 1e3, "record": record}


@pytest.mark.parametrize(
    ("percent", "expected"), [(0, 1), (1, 1), (50, 50), (50.5, 51), (99, 99), (99.1, 100), (100, 100)]
)
def test_a_percentile_is_a_value_that_occurred(percent, expected):
    values = [float(value) for value in range(100, 0, -1)]
    assert percentile(values, percent) == expected


def test_a_percentile_of_nothing_is_an_error():
    with pytest.raises(ValueError, match="no values"):
        percentile([], 50)


def test_a_step_takes_as_long_as_its_slowest_rank_and_loses_the_mean_share():
    results = RunResults(Run("gradwire", 0.01))
    results.add_step([answer(10, 3, 0.02), answer(12, 4, 0.0, begun_ms=1)], timed=True)
    assert (results.step_ms, results.comm_ms, results.lost_shares) == ([pytest.approx(12)], [4], [0.01])


def test_what_a_rank_is_late_is_counted_once():
    results = RunResults(Run("gloo", 0.01))
    results.add_step([answer(100, 50), answer(500, 450)], timed=True)
    results.add_step(
        [answer(500, 450, begun_ms=100), answer(100, 50, begun_ms=500)], timed=True
    )  # the first waits for the other
    assert sum(results.step_ms) == pytest.approx(600)
    assert results.comm_ms[1] == 50


def test_steps_that_are_not_timed_count_as_steps_and_for_the_loss():
    results = RunResults(Run("gloo", 0.0))
    results.add_step([answer(100, 50, 0.5)], timed=False)
    results.add_step([answer(10, 5, 0.0)], timed=True)
    results.validation.append((2, 3.5))
    summary = results.summary()
    assert (summary["steps"], summary["step_ms_max"], summary["bytes_lost_share"]) == (2, 10, 0.25)


@pytest.mark.parametrize("steps", [1, 99, 100])
def test_there_is_no_p99_of_fewer_than_a_hundred_timed_steps(steps):
    results = RunResults(Run("gloo", 0.0))
    for step in range(1, steps + 1):
        results.add_step([answer(step, step / 2)], timed=True)
    results.validation.append((steps, 3.5))
    summary = results.summary()
    is_there = steps == 100
    assert summary["step_ms_p99"] == (pytest.approx(99) if is_there else None)
    assert summary["comm_ms_p99"] == (pytest.approx(49.5) if is_there else None)
    assert (summary["step_ms_max"], summary["comm_ms_max"]) == (pytest.approx(steps), steps / 2)
    assert tail_of(results.step_ms) == (("p99" if is_there else "slowest"), pytest.approx(99 if is_there else steps))


def test_the_report_has_the_fields_that_others_read():
    plan = Plan(EXAMPLES)
    results = [RunResults(run) for run in plan.runs]
    for result in results:
        result.add_step([answer(10, 5)], timed=True)
        result.validation.append((1, 2.5))
    written = json.loads(json.dumps(report(plan, results)))
    assert [list(run) for run in written["runs"]] == [FIELDS] * 4
    assert [(run["backend"], run["loss"]) for run in written["runs"]] == [
        ("gloo", 0), ("gradwire", 0), ("gloo", 0.01), ("gradwire", 0.01),
    ]  # fmt: skip


class Network:
    """Knows the loss that was set last."""

    def __init__(self) -> None:
        self.loss = 0.0

    def set_loss(self, loss: float) -> None:
        self.loss = loss


class Workers:
    """Two that answer at once, and note what each group was used at after it was made."""

    def __init__(self, network: Network) -> None:
        self.network, self.groups, self.seen = network, {}, {}

    def order(self, order: dict[str, Any], last: str) -> list[list[dict[str, Any]]]:
        if order["do"] == "make":
            self.groups[order["run"]] = order["group"]
        elif order["do"] != "group":
            self.seen.setdefault(self.groups[order["run"]], set()).add(self.network.loss)
        one = {last: 2.5, "parameters": "same", **answer(10, 5)}
        return [[one] * order.get("steps", 1)] * 2


def test_the_group_of_a_run_meets_no_loss_but_its_own(tmp_path, monkeypatch):
    network = Network()
    monkeypatch.setattr(conductor, "Cluster", lambda *_: network)
    played = conductor.Conductor(Plan(EXAMPLES, steps=16), tmp_path, conductor.Progress(*[lambda *_: None] * 3))
    workers = played._crew = Workers(network)
    monkeypatch.setattr(played, "_check_losses", lambda: None)
    monkeypatch.setattr(played, "_start_workers", lambda: None)
    assert [result.steps for result in played.play()] == [16] * 4
    assert workers.seen == {str(result.run): {result.run.loss} for result in played.results}


def test_every_run_has_one_turn_in_each_round_and_none_is_always_first():
    rounds = list(Plan(EXAMPLES, steps=32, block=8).rounds())
    assert [sorted(order) for order in rounds] == [[0, 1, 2, 3]] * 4
    assert {order[0] for order in rounds} == {0, 1, 2, 3}


@pytest.mark.parametrize("wrong", [{"steps": 13}, {"steps": 0}, {"block": 1}, {"workers": 1}, {"workers": 9}])
def test_a_plan_that_cannot_be_played_is_refused(wrong):
    with pytest.raises(ValueError, match="not"):
        Plan(EXAMPLES, **wrong)


def test_a_plan_without_the_example_names_the_option(tmp_path):
    with pytest.raises(ValueError, match="--examples"):
        Plan(tmp_path)
