"""Conditions that `gradwire bench` measures by turns: whose groups they are, and what becomes of a warm-up that is cut short.

No process is started but where the name says so.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from gradwire.bench import kept, plan, results, run, training
from gradwire.bench.conductor import SETTLED_CALLS, group_of, measure
from gradwire.bench.plan import Condition, NetworkPlan, Plan
from gradwire.bench.training import TrainingPlan
from gradwire.lab import LabError
from gradwire.lab.crew import LoopbackCrew

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
LOSSES = (0.0, 0.01)
CLEAN = {"wrong": 0, "unjudged": 0, "lost": 0.0, "filled": 0.0, "resent": 0.0}


class Ground:
    """Knows the condition that was set last."""

    def __init__(self) -> None:
        self.now = Condition()

    def set(self, condition: Condition) -> None:
        self.now = condition


class Crews:
    """Two ranks that answer at once.

    Args:
        rounds: calls that warm each group of `ultima` up.

    Attributes:
        seen: of each group the conditions under which it was called.
        calls: of each group, that by which it is made included.
        log: what was done to which group, in order.
        wrong: elements of each result of a call to warm up.
    """

    def __init__(self, ground: Ground, rounds: int = 0, wrong: int = 0) -> None:
        self._ground, self._rounds, self._wrong = ground, rounds, wrong
        self.calls: dict[str, int] = {}
        self.log: list[str] = []
        self._prepared = ""
        self.seen: dict[str, list[Condition]] = {}
        self.rehearsed: list[str] = []
        self.trained: list[str] = []
        self._groups: list[str] = []

    def form(self, variant: plan.Variant, ranks: int, condition: Condition) -> None:
        self._groups.append(group_of(variant, ranks, condition))
        self._ground.set(condition.lossless)
        self.seen[self._groups[-1]] = []
        self.calls[self._groups[-1]] = 1
        self.log.append(f"form {self._groups[-1]}")

    def number_calls(self, count: int) -> int:
        return count

    def order(self, variant: plan.Variant, order: dict[str, Any], _last: str) -> list[list[dict[str, Any]]]:
        return [[answer] for answer in getattr(self, f"_{order['do']}")(variant, order)]

    def _called(self, group: str) -> bool:
        """Whether this one was exact to warm up."""
        self.seen[group].append(self._ground.now)
        return "ultima" in group and len(self.seen[group]) <= self._rounds

    def _prepare(self, _: plan.Variant, order: dict[str, Any]) -> list[dict[str, Any]]:
        self._prepared = order["group"]
        self.calls[self._prepared] += order["calls"]
        self.log.append(f"call {self._prepared}")
        self._ends = [0.001 * call for call in range(1, order["calls"] + 1)]
        return [{"prepared": True}] * 2

    def _sample(self, *_: Any) -> list[dict[str, Any]]:
        return [{"sampled": True, "begun": 0.0, "ended": self._ends, "cpu_s": 0.0}] * 2

    def _judge(self, *_: Any) -> list[dict[str, Any]]:
        warm_up = self._called(self._prepared)
        return [{"judged": True, **CLEAN, "warm_up": warm_up, "wrong": self._wrong if warm_up else 0}] * 2

    def clock(self, minutes: float) -> Callable[[], float]:
        """Of which each sample takes so many."""
        return lambda: 60 * minutes * sum(map(len, self.seen.values()))

    def _make(self, _: plan.Variant, order: dict[str, Any]) -> list[dict[str, Any]]:
        assert order["group"] == self._groups[order["run"]]
        assert order["group"].endswith(str(self._ground.now)), "DDP sends the model over the group's own network"
        return [{"made": order["run"]}] * 2

    def _rehearse(self, _: plan.Variant, order: dict[str, Any]) -> list[dict[str, Any]]:
        group = self._groups[order["run"]]
        self.rehearsed.append(group)
        answer = {"rehearsed": order["run"], "warm_ups": int(self._called(group))}
        return [{**answer, "parameters": f"{rank * self._wrong}"} for rank in (0, 1)]

    def _warm(self, _: plan.Variant, order: dict[str, Any]) -> list[dict[str, Any]]:
        return [{"warm": order["group"]}] * 2

    def _validate(self, _: plan.Variant, order: dict[str, Any]) -> list[dict[str, Any]]:
        self._called(self._groups[order["run"]])
        return [{"val_loss": 5.0}] * 2

    def order_of_steps(self, order: dict[str, Any]) -> list[dict[str, Any]]:
        """An answer for each step."""
        group = self._groups[order["run"]]
        assert not self._called(group), "a step to warm up was counted"
        assert self.rehearsed.count(group) >= 2, "DDP cuts its buckets anew in this one"
        self.trained.append(group)
        record = {"step_ms": 1.0, "comm_ms": 0.5, "bytes_lost_share": 0.0}
        one = {"record": record, "filled": 0.0, "parameters": "same", "begun": 0.0, "ended": 0.001}
        return [one] * order["steps"]


class TrainingCrews(Crews):
    """The same of trainings, whose ranks answer once for each step."""

    def order(self, variant: plan.Variant, order: dict[str, Any], last: str) -> list[list[dict[str, Any]]]:
        return [self.order_of_steps(order)] * 2 if order["do"] == "train" else super().order(variant, order, last)


class Fake:
    """Of what needs a sandbox: there is nothing to it."""

    kind, hosts, ciphers = "nothing", 2, None

    def __init__(self, *_: Any, **__: Any) -> None:
        self.start = None

    def __enter__(self) -> Fake:
        return self

    def __exit__(self, *_: object) -> None:
        pass


def ticking(minutes: float) -> Callable[[], float]:
    """A clock that has so many minutes more at each look."""
    looks = iter(range(10**6))
    return lambda: 60 * minutes * next(looks)


def plan_of(*variants: plan.Variant, **more: Any) -> Plan:
    conditions = [Condition(loss, scenario=scene) for loss in LOSSES for scene in (plan.HEALTHY, "gray")]
    return Plan(NetworkPlan("nft"), variants, ranks=(2,), conditions=tuple(conditions), samples=4, block=2, **more)


def measured(whole: Plan, crews: Crews, ground: Ground, clock: Callable[[], float]) -> list[results.Series]:
    *_, found = measure(whole, crews, ground, lambda *_: None, clock)
    return found


def test_a_group_meets_no_condition_but_its_own():
    """Else its ranks would agree on what none of the networks is, and learn limits in one for another."""
    ground = Ground()
    crews = Crews(ground, rounds=3)
    variants = (plan.gloo("cubic"), plan.gradwire("ultima"), plan.gradwire(plan.EXACT))
    whole = plan_of(*variants, sizes=(plan.MB, 2 * plan.MB))
    found = measured(whole, crews, ground, ticking(0.0))
    assert len(crews.seen) == len(variants) * len(whole.conditions)
    for variant in variants:
        for condition in whole.conditions:
            assert set(crews.seen[group_of(variant, 2, condition)]) == {condition}
    assert {len(series.lost) for series in found} == {4}


def test_conditions_and_peers_still_take_turns():
    ground, told = Ground(), []
    whole = plan_of(plan.gloo("cubic"), plan.gradwire("auto"))
    list(measure(whole, Crews(ground), ground, lambda _d, _t, series: told.append(series.cell), ticking(0.0)))
    cells = whole.cells()
    assert told == [cells[at] for turn in whole.turns() for at in turn]


def test_what_a_cut_warm_up_was_of_is_not_measured():
    """`ultima` needs three calls in each group and has the time for two in all; gloo none to settle in."""
    ground = Ground()
    crews = Crews(ground, rounds=3)
    whole = plan_of(plan.gloo("cubic"), plan.gradwire("ultima"), minutes=1.5)
    found = measured(whole, crews, ground, crews.clock(1.0))
    assert {series.row()["settled"] for series in found if series.lost} == {True}, "gloo's ranks agree on nothing"
    assert {(series.cell.variant.name, len(series.lost)) for series in found} == {
        ("gloo-cubic", 2),
        ("gradwire-ultima", 0),
    }
    names = [str(series.cell) for series in found if not series.lost]
    ended = kept.with_unmeasured(kept.ended(None, "2 samples of each cell", is_whole=False), names)
    assert ended.by == "--minutes"
    assert "not measured: gradwire-ultima, all_reduce, 2 ranks, 1 MB: --minutes were over" in "\n".join(ended.lines)
    assert [verdict.reached for verdict in results.unmeasured(names, {"tail": 9.0})] == [False] * 4


def test_where_nothing_has_warmed_up_there_is_nothing_to_measure():
    ground = Ground()
    crews = Crews(ground, rounds=3)
    with pytest.raises(LabError, match=r"--minutes 1\.5 were over before any preset had ended its warm-up"):
        measured(plan_of(plan.gradwire("ultima"), minutes=1.5), crews, ground, crews.clock(1.0))


def test_what_a_cut_warm_up_found_wrong_is_wrong_though_nothing_else_was_measured():
    ground = Ground()
    crews = Crews(ground, rounds=3, wrong=1)
    with pytest.raises(kept.WrongResult, match="elements of results are WRONG") as raised:
        measured(plan_of(plan.gradwire("ultima"), minutes=1.5), crews, ground, crews.clock(1.0))
    assert kept.status_of(raised.value) == kept.MISSED


@pytest.mark.parametrize("trips", [(0.0,), (40.0, 0.0), (0.0, 40.0)])
def test_what_a_cut_warm_up_found_wrong_is_in_what_is_kept(monkeypatch, tmp_path, trips):
    """Of cells that have no row: exit status 1, whatever round trip they have."""
    ground = Ground()
    crews = Crews(ground, rounds=3, wrong=1)
    whole = replace(
        plan_of(plan.gloo("cubic"), plan.gradwire("ultima"), minutes=1.5),
        conditions=tuple(Condition(rtt_ms=trip) for trip in trips),
    )
    found = measured(whole, crews, ground, crews.clock(2.0))
    assert {bool(series.lost) for series in found} == {True, False}
    monkeypatch.setattr(run, "measure", lambda *_, **__: iter([found]))
    for name in ("Ground", "Nursery", "Crews"):
        monkeypatch.setattr(run, name, Fake)
    monkeypatch.setattr(run, "_look_around", lambda *_: {})
    monkeypatch.setattr(run, "_conclude", lambda *_: None)
    assert run._collectives(whole, {"machine": {}}, run.Outcome(tmp_path)) == kept.MISSED


def test_a_group_is_never_called_once_there_are_groups_of_another_round_trip():
    """The ranks of an idle group measure round trips, too, and agree on the least one."""
    ground = Ground()
    crews = Crews(ground)
    trips = (40.0, 0.0, 5.0)
    conditions = tuple(Condition(loss, trip) for loss in LOSSES for trip in trips)
    whole = replace(plan_of(plan.gloo("cubic"), plan.gradwire("auto")), conditions=conditions)
    found = measured(whole, crews, ground, ticking(0.0))
    assert [series.cell for series in found] == whole.cells()
    assert {len(series.lost) for series in found} == {4}
    order = [next(str(trip) for trip in trips if f" {trip:g} ms" in line) for line in crews.log]
    assert [trip for trip, _ in groupby(order)] == ["40.0", "0.0", "5.0"]


def test_round_trips_share_the_minutes():
    """What one leaves is the others'; a first turn is measured of each."""
    ground = Ground()
    crews = Crews(ground)
    conditions = (Condition(rtt_ms=40.0), Condition(rtt_ms=1.0))
    whole = replace(plan_of(plan.gloo("cubic"), settle=41, minutes=100.0), conditions=conditions, samples=200)
    found = measured(whole, crews, ground, crews.clock(1.0))
    first, second = (len(series.lost) for series in found)
    assert 0 < first < 50
    assert 0 < second < 50
    assert abs(first - second) <= whole.block


@pytest.mark.parametrize("size", [plan.MB, 4096])
def test_no_call_counts_before_the_ranks_of_its_group_agree(monkeypatch, size):
    """That is by the 41st; gloo's groups have had as many."""
    ground = Ground()
    crews = Crews(ground, rounds=3)
    before: dict[str, int] = {}
    add = results.Series.add

    def noted(self: results.Series, answers: list[dict[str, Any]], *, counted: bool) -> None:
        if counted:
            group = group_of(self.cell.variant, self.cell.ranks, self.cell.condition)
            before.setdefault(group, crews.calls[group] - len(answers[0]["ended"]))
        add(self, answers, counted=counted)

    monkeypatch.setattr(results.Series, "add", noted)
    variants = (plan.gloo("cubic"), plan.gradwire("ultima"), plan.gradwire("auto"))
    found = measured(plan_of(*variants, sizes=(size,)), crews, ground, ticking(0.0))
    assert set(before) == set(crews.calls)
    assert min(before.values()) >= SETTLED_CALLS
    assert max(calls for name, calls in before.items() if "ultima" not in name) < SETTLED_CALLS + 42
    assert {series.row()["settled"] for series in found} == {True}


def test_settling_takes_a_part_of_the_minutes_at_most():
    ground, said = Ground(), []
    crews = Crews(ground)
    whole = plan_of(plan.gloo("cubic"), plan.gradwire("auto"), minutes=100.0)
    turns = measure(whole, crews, ground, lambda *_: None, crews.clock(1.0), say=said.append)
    found = next(turns)
    taken = sum(map(len, crews.seen.values())) - len(found) * (1 + whole.block)
    assert 20 <= taken <= 20 + len(found)
    assert all(series.settled is series.cell.variant.is_peer for series in found)
    assert sum(line.startswith("not settled: ") for line in said) == len(crews.seen) / 2, "of gradwire's groups"


@pytest.fixture
def training_plan(tmp_path: Path) -> TrainingPlan:
    (tmp_path / "train_gpt.py").touch()
    variants = (plan.gloo("cubic"), plan.gradwire("ultima"))
    return TrainingPlan(tmp_path, NetworkPlan("nft"), variants, LOSSES, 1.0, ranks=2, steps=4, block=2)


def test_a_training_meets_no_loss_but_its_own_and_no_step_of_a_warm_up_is_counted(training_plan):
    ground = Ground()
    crews = TrainingCrews(ground, rounds=5)
    *_, runs = training.train(training_plan, crews, ground, lambda *_: None)
    assert [len(run.step_ms) for run in runs] == [4] * 4
    for variant in training_plan.variants:
        for loss in LOSSES:
            condition = Condition(loss, 1.0)
            assert set(crews.seen[group_of(variant, 2, condition)]) == {condition}


def test_replicas_that_differ_after_a_step_that_is_undone_are_a_wrong_result(training_plan):
    ground = Ground()
    with pytest.raises(kept.WrongResult, match="gloo-cubic: the replicas differ after step 1 that is undone"):
        list(training.train(training_plan, TrainingCrews(ground, wrong=1), ground, lambda *_: None))
    may_differ = replace(training_plan, variants=(plan.gradwire("ultima"),))
    *_, runs = training.train(may_differ, TrainingCrews(ground, wrong=1), ground, lambda *_: None)
    assert [len(run.step_ms) for run in runs] == [4] * 2


def test_what_is_done_before_the_turns_is_said(training_plan):
    ground, said = Ground(), []
    list(training.train(training_plan, TrainingCrews(ground), ground, lambda *_: None, say=said.append))
    assert sum("making the group" in line for line in said) == sum("undone" in line for line in said) == 4


def test_a_training_whose_warm_up_was_cut_is_left_out(training_plan, monkeypatch):
    ground = Ground()
    monkeypatch.setattr(training.time, "monotonic", ticking(61.0))
    *_, runs = training.train(training_plan, TrainingCrews(ground, rounds=5), ground, lambda *_: None)
    assert [(str(run), len(run.step_ms)) for run in runs] == [
        ("gloo-cubic, 0.00% lost", 2), ("gradwire-ultima, 0.00% lost", 0),
        ("gloo-cubic, 1.00% lost", 2), ("gradwire-ultima, 1.00% lost", 0),
    ]  # fmt: skip


OWING = """
import sys
from gradwire.demo.worker import Worker
from gradwire.lab import crew

def tensors(state):
    if hasattr(state, "fill_"):
        return [state]
    return [each for value in state.values() for each in tensors(value)] if isinstance(state, dict) else []

class Owing(Worker):
    def obey(self, order):
        if order["do"] not in ("owe", "owed"):
            return super().obey(order)
        hook = self._trainers[order["run"]].hook_state
        state = hook.state_dict()
        if order["do"] == "owe":
            for each in tensors(state):
                each.fill_(0.001)
            hook.load_state_dict(state)
        floats = [each for each in tensors(state) if each.is_floating_point()]
        self._say({"owed": sum(each.double().abs().sum().item() for each in floats)})

crew.serve(lambda say: Owing(sys.argv[1], say))
"""


@pytest.mark.parametrize("preset", ["reliable", "auto", "ultima"])
def test_a_rehearsed_step_ends_the_warm_up_of_real_ranks_and_is_undone(tmp_path, preset):
    """Of `reliable` in every bit: its steps after it are those of a run that rehearsed nothing."""
    (tmp_path / "owing.py").write_text(OWING)
    command = [sys.executable, str(tmp_path / "owing.py"), str(EXAMPLES)]
    settings = {"backend": "gradwire", "steps": 4, "batch": 1, "seed": 1, "validation_batches": 2, "preset": preset}
    with LoopbackCrew(command, 2, {"GRADWIRE_WARM_UP_ROUNDS": "1"}, tmp_path) as crew:
        crew.order({"do": "group", "name": "both", "backend": "gradwire", "timeout_s": 60}, "made")
        for run_number in (0, 1):
            crew.order({"do": "make", "run": run_number, "settings": settings, "group": "both"}, "made")
        warm_ups: list[int] = []
        while len(warm_ups) < 2 or warm_ups[-1]:
            answers = crew.order({"do": "rehearse", "run": 1}, "rehearsed")
            warm_ups.append(max(answer[-1]["warm_ups"] for answer in answers))
        worth = [crew.order({"do": "validate", "run": at}, "val_loss")[0][-1]["val_loss"] for at in (0, 1)]
        steps = [crew.order({"do": "train", "run": at, "steps": 2}, "trained")[0][:2] for at in (0, 1)]
        owes = [answer[-1]["owed"] for answer in crew.order({"do": "owe", "run": 1}, "owed")]
        crew.order({"do": "rehearse", "run": 1}, "rehearsed")
        owed = [answer[-1]["owed"] for answer in crew.order({"do": "owed", "run": 1}, "owed")]
    assert (max(warm_ups) > 0) is (preset == "ultima")
    assert worth[0] == worth[1], "the weights are those of a run that rehearsed nothing"
    assert [[step["record"]["step"] for step in each] for each in steps] == [[1, 2]] * 2
    assert steps[0][0]["record"]["loss"] == steps[1][0]["record"]["loss"], "of the same batch"
    if preset == "reliable":
        assert [step["parameters"] for step in steps[0]] == [step["parameters"] for step in steps[1]]
    assert owed == owes
    assert min(owes) > 0
    assert all(0 <= step["filled"] < 1 for each in steps for step in each)
