"""`gradwire bench`: what is verified, counted and concluded. Plain values; no network, no timing."""

import html
import json
import math
import re
import struct
from dataclasses import asdict
from pathlib import Path

import click
import gradwire.torch
import pytest
import torch
from click.testing import CliRunner
from gradwire.bench import machine, plan, report, results, run, training
from gradwire.bench.collectives import COLLECTIVES, RANKS_MAX, Task
from gradwire.bench.display import Display, as_written, make_console
from gradwire.bench.plan import Condition, NetworkPlan, Plan
from gradwire.bench.worker import Worker, _Prepared
from gradwire.cli import main
from gradwire.cli.bench import variants_of
from gradwire.report import Contributions, DeliveryReport

RANKS = 3


def exact_result(name: str, inputs: list[torch.Tensor], rank: int) -> torch.Tensor:
    """What a collective gives by its definition, from what every rank holds."""
    if name in ("all_reduce", "reduce"):
        return torch.stack(inputs).sum(0)
    if name in ("all_gather", "gather"):
        return torch.cat(inputs) if name == "all_gather" or rank == 0 else torch.zeros(0)
    if name == "broadcast":
        return inputs[0]
    if name == "scatter":
        return inputs[0].chunk(RANKS)[rank]
    parts = [each.chunk(RANKS)[rank] for each in inputs]
    return torch.cat(parts) if name == "all_to_all" else torch.stack(parts).sum(0)


@pytest.mark.parametrize(
    ("ratio", "factor", "told"),
    [
        (1.1, 1.25, "1.10"),
        (1.2516, 1.25, "1.252"),
        (1.2496, 1.25, "1.2496"),
        (1.25, 1.25, "1.25"),
        (1.254, 1.253, "1.254"),
        (math.inf, 1, "inf"),
    ],
)
def test_a_ratio_is_told_on_the_side_of_the_factor_where_it_lies(ratio, factor, told):
    assert results.times_told(ratio, factor) == told


@pytest.mark.parametrize("name", COLLECTIVES)
def test_each_collective_is_verified_against_its_definition(name):
    tasks = [Task(name, 500, rank, RANKS) for rank in range(RANKS)]
    inputs = [task.fresh(0)[0] for task in tasks]
    for rank, task in enumerate(tasks):
        right = exact_result(name, inputs, rank)
        assert torch.equal(task.expected(0), right)
        assert task.wrong_bits(right, 0) == 0
        if len(right) and (name != "reduce" or rank == 0):
            nearly = right.clone()
            nearly[7] = torch.nextafter(nearly[7], torch.tensor(float("inf")))
            assert task.wrong_bits(nearly, 0) == 1
            moved = right.roll(1)
            assert task.wrong_bits(moved, 0) > len(right) / 2


def test_a_tolerant_result_must_be_the_mean_of_as_many_ranks_as_were_announced():
    task = Task("all_reduce", 100, 0, RANKS)
    values = [Task("all_reduce", 100, rank, RANKS).fresh(0)[0] for rank in range(RANKS)]
    counts = torch.full((100,), RANKS)
    output = torch.stack(values).sum(0) / RANKS
    output[10:20] = (values[0] + values[2])[10:20] / 2
    counts[10:20] = 2
    output[30:35] = 0
    counts[30:35] = 0
    assert task.wrong_means(output, counts, 0) == 0
    for place, value, count in (
        (0, 0.0, RANKS),
        (10, float(output[10]), 3),
        (11, float(values[1][11]), 2),
        (30, 1.0, 0),
    ):
        broken, announced = output.clone(), counts.clone()
        broken[place], announced[place] = value, count
        assert task.wrong_means(broken, announced, 0) == 1, place
    assert task.wrong_means(output * (1 + 1e-5), counts, 0) == 95


@pytest.mark.parametrize("rank", range(RANKS))
def test_a_tolerant_part_must_be_the_mean_of_as_many_ranks_as_were_announced(rank):
    parts = [Task("reduce_scatter", 300, other, RANKS).fresh(0)[0].chunk(RANKS)[rank] for other in range(RANKS)]
    task, counts = Task("reduce_scatter", 300, rank, RANKS), torch.full((100,), RANKS)
    output = torch.stack(parts).sum(0) / RANKS
    output[10:20] = (parts[0] + parts[2])[10:20] / 2
    counts[10:20] = 2
    assert task.wrong_means(output, counts, 0) == 0
    assert task.wrong_means(output, torch.full((100,), RANKS), 0) == 10
    of_another = torch.stack(parts).sum(0) / RANKS + 1
    assert task.wrong_means(of_another, torch.full((100,), RANKS), 0) > 90


@pytest.mark.parametrize("name", COLLECTIVES)
def test_what_came_of_the_call_before_is_wrong_though_it_is_whole_and_in_its_place(name):
    for rank in range(RANKS):
        task = Task(name, 500, rank, RANKS)
        late = task.expected(41)
        if name != "reduce" or rank == 0:
            assert task.wrong_bits(late, 42) == len(late)
        assert task.wrong_bits(task.expected(42), 42) == 0
    if name in ("all_reduce", "reduce_scatter"):
        counts = torch.full((len(late),), RANKS)
        assert task.wrong_means(late / RANKS, counts, 42) == len(late)
        assert task.wrong_means(late / RANKS, counts, 41) == 0
    if name == "all_reduce":
        assert task.wrong_rotated(late / RANKS, 42) == len(late)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_a_finite_number_is_wrong_by_every_rule(value):
    task = Task("all_reduce", 100, 0, RANKS)
    sums = task.expected(0)
    means = sums / RANKS
    sums[:7] = means[:7] = value
    assert task.wrong_bits(sums, 0) == 7
    assert task.wrong_means(means, torch.full((100,), RANKS), 0) == 7
    assert task.wrong_rotated(means, 0) == 7


def test_every_call_has_data_of_its_own():
    """61 calls in a row differ in every element, and what is added up stays exact."""
    task = Task("all_reduce", 100, 7, 8)
    inputs = torch.stack([task.fresh(call)[0] for call in range(61)])
    assert all(len(column.unique()) == 61 for column in inputs.unbind(1))
    last = RANKS_MAX - 1
    assert float(Task("reduce_scatter", 61 * RANKS_MAX, last, RANKS_MAX).expected(60).max()) < 1 << 24


def test_presets_are_for_the_two_reductions_that_may_lose():
    can = {name: plan.gradwire("auto").can(name) for name in COLLECTIVES}
    assert {name for name, it_can in can.items() if it_can} == {"all_reduce", "reduce_scatter"}
    for odd in (plan.gradwire("auto", "ring"), plan.gradwire("auto", hadamard="on")):
        assert odd.can("all_reduce")
        assert not odd.can("reduce_scatter")
    assert all(plan.gradwire(plan.EXACT).can(name) for name in COLLECTIVES)


def test_bandwidths_are_those_of_the_nccl_tests():
    factors = {name: found.bus_factor(4) for name, found in COLLECTIVES.items()}
    assert factors["all_reduce"] == 1.5
    assert {factors[name] for name in ("all_gather", "reduce_scatter", "all_to_all", "gather", "scatter")} == {0.75}
    assert {factors["broadcast"], factors["reduce"]} == {1.0}
    series = results.Series(plan.Cell("all_reduce", 4, 1_000_000, Condition(), plan.gloo("cubic")))
    for ended, counted in ((9.0, False), (0.001, True), (0.002, True)):
        series.add([answer(0.0, [ended / 2]), answer(0.0, [ended], unjudged=1)], counted=counted)
    row = series.row()
    assert (row["samples_ms"], row["algbw_gb_s"], row["busbw_gb_s"]) == ([1.0, 2.0], 1.0, 1.5)
    assert row["cpu_s_per_gb"] == 2.0 / (2 * 0.001)  # two counted calls, one second of all ranks in each
    assert (row["wrong"], row["lost_share"]) == (6, 0.25)  # a wrong result counts wherever it is
    assert (row["filled_share"], row["resent_share"], row["unjudged"]) == (0.125, 0.5, 3)


def answer(begun: float, ended: list[float], **more) -> dict:
    """What one rank says of a sample."""
    found = {"wrong": 1, "unjudged": 0, "lost": 0.25, "filled": 0.125, "resent": 0.5}
    return {"begun": begun, "ended": ended, "cpu_s": 0.5, **found, **more}


def test_the_time_of_a_small_call_is_its_own_and_a_late_rank_makes_one_call_long():
    """Two ranks and four calls of 1 ms, before which rank 1 was late. In the third rank 0 stands still, and rank 1 waits in the fourth."""
    ranks = [answer(0.0, [0.0060, 0.0070, 0.0120, 0.0130]), answer(0.005, [0.0060, 0.0070, 0.0080, 0.0130])]
    series = results.Series(plan.Cell("all_reduce", 2, 1000, Condition(), plan.gloo("cubic")), block=1)
    for _ in range(2):
        series.add(ranks, counted=True)
    assert series.samples_ms == pytest.approx([1.0, 5.0, 1.0] * 2)
    row = series.row()
    assert (row["samples"], row["block"], row["max_ms"]) == (6, 3, pytest.approx(5.0))
    assert row["cpu_s_per_gb"] == pytest.approx(2.0 / (8 * 1e-6)), (
        "processor time is of the call in which they meet, too"
    )


def test_small_samples_give_the_calls_that_a_percentile_needs():
    variants = (plan.gradwire("auto"),)
    for sizes, samples, times in (((65536,), 5, 100), ((65540,), 5, 5), ((4, 1 << 20), 5, 5)):
        assert Plan(NetworkPlan("loopback"), variants, sizes=sizes, samples=samples).least_times == times
    results.check_samples(["tail"], 100)
    with pytest.raises(ValueError, match="needs 100 samples"):
        results.check_samples(["tail"], 99)


def test_a_percentile_needs_a_sample_above_it():
    both = ["p95_ms", "p99_ms"]
    for count, there in (
        (19, []),
        (20, both[:1]),
        (99, both[:1]),
        (100, both),
        (999, both),
        (1000, [*both, "p999_ms"]),
    ):
        times = [float(value) for value in range(1, count + 1)]
        assert [name for name in results.SAMPLES_OF if results.percent_of(times, name) is not None] == there
    assert results.percent_of([float(value) for value in range(1, 1001)], "p999_ms") == 999.0


def row_of(variant: str, p50: float, p99: float | None = None, **more) -> dict:
    return {
        "variant": variant, "peer": variant.startswith("gloo"), "collective": "all_reduce", "ranks": 4, "bytes": 1 << 20,
        "rtt_ms": 0.0, "loss": 0.0, "scenario": plan.HEALTHY, "samples": 10, "p50_ms": p50, "p95_ms": p50, "p99_ms": p99,
        "p999_ms": None, "max_ms": 3 * p50, "algbw_gb_s": 1 / p50, "busbw_gb_s": 1.5 / p50, "lost_share": 0.0, "wrong": 0,
        "filled_share": 0.0, "unjudged": 0,
        "cpu_s_per_gb": 2 * p50, "samples_ms": [p50] * 10, **more,
    }  # fmt: skip


def test_requirements_are_judged_in_every_place():
    rows = [
        row_of("gloo-cubic", 10.0), row_of("gradwire-auto", 8.0, 9.0, samples_ms=[*[8.0] * 4, 9.0] * 2),
        row_of("gloo-cubic", 30.0, loss=0.01), row_of("gradwire-auto", 10.0, 12.0, loss=0.01),
        row_of("gradwire-auto", 9.0, 18.0, scenario="gray"),
    ]  # fmt: skip
    for name, factor, expected in (
        ("busbw", 1.2, [True, True]), ("busbw", 2.0, [False, True]), ("cpu", 0.5, [False, True]),
        ("speedup", 3.0, [True]), ("speedup", 3.1, [False]), ("tail", 1.2, [True, True, False]),
        ("calm", 1.5, [True]), ("calm", 1.4, [False]), ("healthy", 2.0, [True]), ("healthy", 1.9, [False]),
    ):  # fmt: skip
        assert [verdict.reached for verdict in results.judge(rows, {name: factor})] == expected, (name, factor)
    few = [row_of("gradwire-auto", 8.0), row_of("gradwire-auto", 8.0, loss=0.01)]
    assert not any(verdict.reached for verdict in results.judge(few, {"tail": 9.0, "busbw": 0.1, "calm": 9.0}))


@pytest.mark.parametrize("is_late", [False, True])
def test_a_healthy_network_that_was_disturbed_for_a_while_does_not_demand_less(is_late):
    halves = [[10.0] * 50, [10.0] * 40 + [40.0] * 10]
    disturbed = [*halves[not is_late], *halves[is_late]]
    gray = row_of("gradwire-auto", 10.0, 18.0, scenario="gray")
    for healthy, reached in (([10.0] * 100, False), (disturbed, False), ([10.0, 12.0] * 50, True)):
        row = row_of("gradwire-auto", 10.0, max(healthy), samples_ms=healthy)
        (verdict,) = results.judge([row, gray], {"healthy": 1.5})
        assert verdict.reached is reached, verdict.text
        assert ("that of the other is 4.00 times as long" in verdict.text) is (healthy is disturbed)


def test_a_machine_that_slows_down_between_turns_is_not_taken_for_a_slow_variant():
    """Blocks of three turns: the second and the third at a machine half as fast for both, but the last one for gradwire alone."""
    times = {"gloo-cubic": [2.0, 2.0, 4.0, 4.0, 2.0, 2.0], "gradwire-auto": [1.0, 1.0, 2.0, 2.0, 2.0, 2.0]}
    rows = [
        row_of(name, results.percentile(samples, 50), samples_ms=samples, block=2) for name, samples in times.items()
    ]
    (compared,) = results.comparisons(rows)
    assert (compared["turns"], compared["p50_times"]) == ([2.0, 2.0, 1.0], 2.0)
    assert rows[0]["p50_ms"] == rows[1]["p50_ms"], "the medians of all samples would tell nothing"
    (verdict,) = results.judge(rows, {"busbw": 2.0})
    assert verdict.reached
    assert "2.00 times the bus bandwidth of gloo-cubic (at least 2; 1.00 to 2.00 in 3 turns)" in verdict.line()
    assert report._compared(compared)[6:8] == ["2", "1.00-2.00 (3)"]


def test_a_file_without_blocks_is_compared_by_its_medians():
    rows = [row_of("gloo-cubic", 3.0), row_of("gradwire-auto", 2.0)]
    (compared,) = results.comparisons(rows)
    assert (compared["turns"], compared["p50_times"]) == ([1.5], 1.5)
    assert report._compared(compared)[7] == "-"


@pytest.mark.parametrize(
    "arguments",
    [
        ["--network", "loopback", "--loss", "0.01"], ["--require", "fast=1"], ["--require", "busbw"], ["--require", "cpu=0"],
        ["--require", "tail=1.2", "--samples", "20"], ["--collective", "broadcast", "--preset", "auto", "--tcp", "none"],
        ["--ranks", "9"], ["--scenario", "slow-host", "--ranks", "2", "--ranks", "4"],
        ["--scenario", "incast", "--buffer", "64"], ["--network", "bridge", "--scenario", "gray"],
        ["--training", "--steps", "25"], ["--training", "--rtt", "1", "--rtt", "2"], ["--training", "--require", "busbw=1"],
        ["--training", "--examples", "/nonexistent"], ["--training", "--network", "loopback"],
        ["--training", "--scenario", "gray"], ["--training", "--size", "2"], ["--training", "--samples", "5"],
        ["--training", "--settle", "2"],
        ["--steps", "5"], ["--target", "3"], ["--seed", "2"], ["--examples", "examples"], ["--network", "loopback", "--mtu", "9000"],
        ["--tcp", "none", "--tcp", "cubic"], ["--preset", "exact", "--algorithm", "ring"], ["--preset", "exact", "--rotated"],
        ["--scenario", "gray", "--rails", "1"],
    ],
)  # fmt: skip
def test_what_contradicts_itself_is_refused_before_anything_is_measured(arguments, tmp_path, monkeypatch):
    for name in ("run_collectives", "run_training"):
        monkeypatch.setattr(run, name, lambda *_: pytest.fail("it would be measured"))
    found = CliRunner().invoke(main, ["bench", "--out", str(tmp_path), *arguments])
    assert found.exit_code == 2, found.output
    assert "Error" in found.output


def test_training_says_what_it_has_none_of(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "run_training", lambda *_: pytest.fail("it would report variants that were never run"))
    asked = ["--algorithm", "ring", "--algorithm", "auto", "--rotated"]
    found = CliRunner().invoke(main, ["bench", "--training", "--out", str(tmp_path), *asked])
    assert found.exit_code == 2
    assert "--training has no --algorithm and no --rotated" in found.output


def test_training_is_at_five_rates_of_loss_unless_told(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(run, "run_training", lambda whole, _: asked.append(whole) or run.REACHED)
    for arguments in ([], ["--loss", "0.02"]):
        found = CliRunner().invoke(main, ["bench", "--training", "--out", str(tmp_path), *arguments])
        assert found.exit_code == 0, found.output
    assert [whole.losses for whole in asked] == [(0.0, 0.0001, 0.001, 0.005, 0.01), (0.02,)]


def test_help_teaches_with_examples_and_exit_statuses():
    found = CliRunner().invoke(main, ["bench", "--help"])
    assert all(word in found.output for word in ("gradwire bench --quick", "Exit status", *results.REQUIREMENTS))


def test_variants_are_every_preset_with_every_schedule_beside_the_peers():
    chosen = {"peers": ("cubic", "none"), "presets": ("auto", "exact"), "algorithms": ("auto", "ring"), "rotated": True}
    assert [variant.name for variant in variants_of(chosen)] == [
        "gloo-cubic", "gradwire-auto", "gradwire-auto/rotated", "gradwire-auto/ring", "gradwire-auto/ring/rotated",
        "gradwire-exact",
    ]  # fmt: skip


def test_a_variant_reaches_the_call_with_its_rule_its_schedule_and_its_transform(monkeypatch):
    called = []
    monkeypatch.setattr(gradwire.torch, "all_reduce", lambda tensor, **chosen: called.append((tensor, chosen)))
    task = Task("all_reduce", 10, 0, RANKS)
    buffers, asked = task.fresh(0), plan.gradwire("dlcp", "ring", "on")
    Worker._call(object.__new__(Worker), task, buffers, asdict(asked), "group")  # a whole one would start a group
    ((tensor, chosen),) = called
    assert tensor is buffers[1]
    assert {name: chosen[name] for name in ("preset", "algorithm", "hadamard", "group")} == {
        "preset": "dlcp", "algorithm": "ring", "hadamard": "on", "group": "group",
    }  # fmt: skip


def test_a_rule_reaches_a_reduce_scatter_with_input_and_output(monkeypatch):
    called = []
    monkeypatch.setattr(gradwire.torch, "reduce_scatter", lambda *tensors, **chosen: called.append((tensors, chosen)))
    task = Task("reduce_scatter", 12, 0, RANKS)
    source, into = task.fresh(0)
    Worker._call(object.__new__(Worker), task, (source, into), asdict(plan.gradwire("dlcp")), "group")
    (((output, tensor), chosen),) = called
    assert output is into
    assert tensor is source
    assert (chosen["preset"], chosen["contributions"], chosen["group"]) == ("dlcp", True, "group")


class Work:
    """A call that ended with this report."""

    def __init__(self, **fields) -> None:
        self._report = DeliveryReport(**fields)

    def report(self) -> DeliveryReport:
        return self._report


def counted(*ranks: int) -> Contributions:
    """So many ranks in each block of ten elements."""
    return Contributions(bytearray(struct.pack(f"={len(ranks)}H", *ranks)), len(ranks), 10 * len(ranks), 10)


def judged(name: str, output: torch.Tensor, work: Work) -> dict:
    """What a worker finds in one result."""
    worker = object.__new__(Worker)  # a whole one would start a group
    worker._torch = torch
    return worker._judged(Task(name, 40, 0, RANKS), 0, output, work)


def test_results_that_did_not_come_back_are_counted_beside_what_did_not_count():
    output = Task("all_reduce", 40, 0, RANKS).expected(0) / RANKS
    output[10:20] = 0
    found = judged(
        "all_reduce", output, Work(contributions=counted(3, 0, 3, 3), filled=((10, 20),), uncounted=((0, 2),))
    )
    assert found == {"wrong": 0, "unjudged": 0, "lost": 0.05, "filled": 0.25}
    exact = judged("all_reduce", Task("all_reduce", 40, 0, RANKS).expected(0), None)
    assert exact == {"wrong": 0, "unjudged": 0, "lost": 0, "filled": 0}


def said_of(*works: Work | None) -> dict:
    """What a worker answers of a sample of right results."""
    worker, said, task = object.__new__(Worker), [], Task("all_reduce", 40, 0, RANKS)
    share = 1 if None in works else RANKS
    right = [task.expected(call) / share for call in range(7, 7 + len(works))]
    worker._torch, worker._say = torch, said.append
    worker._prepared = _Prepared(task, None, 7, [(each, each) for each in right], list(works))
    worker._judge({})
    return said[0]


def test_what_was_sent_again_is_known_of_calls_that_were_opted_in_and_of_no_others():
    reports = [Work(bytes_sent=sent, bytes_retransmitted=again) for sent, again in ((300, 100), (100, 0))]
    found = {"wrong": 0, "unjudged": 0, "lost": 0, "filled": 0}
    assert said_of(*reports) == {"judged": True, **found, "resent": 0.25, "warm_up": False}
    assert said_of(None, None)["resent"] is None
    series = results.Series(plan.Cell("all_reduce", 2, 1000, Condition(), plan.gradwire(plan.EXACT)))
    series.add([answer(0.0, [0.001], resent=None)] * 2, counted=True)
    assert series.row()["resent_share"] is None


def test_a_sample_with_a_call_that_was_exact_to_warm_up_says_so():
    assert said_of(Work(warm_up=True), Work())["warm_up"] is True
    assert said_of(None, None)["warm_up"] is False


@pytest.mark.parametrize(
    ("missing", "wrong", "unjudged"),
    [
        ({"contributions": counted(3, 3, 3, 3)}, 1, 0), ({"contributions": None}, 1, 0),
        ({"contributions": counted(3, 3, 2, 3)}, 0, 1), ({"contributions": counted(3, 3, 3, 3), "uncounted": ((0, 4),)}, 0, 1),
        ({"contributions": counted(3, 0, 3, 3), "filled": ((10, 20),)}, 0, 1),
    ],
)  # fmt: skip
def test_a_rotated_result_is_judged_where_nothing_is_missing_on_either_way(missing, wrong, unjudged):
    output = Task("all_reduce", 40, 0, RANKS).expected(0) / RANKS
    output[3] = 0
    found = judged("all_reduce", output, Work(rotated_elems=64, **missing))
    assert (found["wrong"], found["unjudged"]) == (wrong, unjudged)
    assert found["filled"] == (10 / 64 if missing.get("filled") else 0), "of the elements that were sent"


def test_what_could_not_be_judged_is_not_told_as_right():
    rows = [row_of("gradwire-auto/rotated", 1.0, wrong=wrong, unjudged=unjudged, filled_share=0.125)
            for wrong, unjudged in ((0, 0), (0, 7), (2, 7))]  # fmt: skip
    lines = [dict(zip(report._HEADS, report.cells_of(row), strict=True)) for row in rows]
    assert [line["wrong"] for line in lines] == ["0", "-", "2"]
    assert [(line["lost"], line["filled"]) for line in lines] == [("0.000%", "12.500%")] * 3
    page = report.html_table(report._HEADS, [report.cells_of(row) for row in rows])
    assert (page.count("<td class=bad>2</td>"), page.count("class=bad")) == (1, 1)


def test_a_file_of_an_earlier_version_says_nothing_of_what_was_filled_in():
    row = row_of("gradwire-auto", 1.0)
    for name in ("filled_share", "unjudged"):
        del row[name]
    line = dict(zip(report._HEADS, report.cells_of(row), strict=True))
    assert (line["wrong"], line["filled"]) == ("0", "-")


def test_cells_take_turns_and_a_broadcast_has_no_presets():
    variants = (plan.gloo("cubic"), plan.gradwire("auto"), plan.gradwire("exact"))
    whole = Plan(NetworkPlan("nft"), variants, ("all_reduce", "broadcast"), samples=5, block=2)
    cells = whole.cells()
    assert [(cell.collective, cell.variant.name) for cell in cells] == [
        ("all_reduce", "gloo-cubic"), ("all_reduce", "gradwire-auto"), ("all_reduce", "gradwire-exact"),
        ("broadcast", "gloo-cubic"), ("broadcast", "gradwire-exact"),
    ]  # fmt: skip
    turns = list(whole.turns())
    assert len(turns) == 3
    assert turns == [[0, 1, 2, 3, 4], [4, 3, 1, 2, 0], [2, 0, 1, 3, 4]], "variants of one place stay side by side"
    assert all(sorted(turn) == list(range(len(cells))) for turn in turns)


def test_bytes_are_those_that_are_sent_where_there_are_parts():
    few = Plan(
        NetworkPlan("loopback"), (plan.gradwire(plan.EXACT),), ("all_gather", "broadcast"), (3, 8), (4, 8, 1 << 20)
    )
    assert [(cell.collective, cell.ranks, cell.bytes) for cell in few.cells()] == [
        ("all_gather", 3, 12), ("all_gather", 3, (1 << 20) - 4), ("all_gather", 8, 32), ("all_gather", 8, 1 << 20),
        *(("broadcast", ranks, size) for ranks in (3, 8) for size in (4, 8, 1 << 20)),
    ]  # fmt: skip
    for cell in few.cells():
        assert 4 * Task(cell.collective, cell.bytes // 4, 0, cell.ranks).elems == cell.bytes
    assert [plan.size_text(size) for size in (12, (1 << 20) - 4, 1 << 20, 1000 << 10)] == [
        "12 B",
        "1 MB",
        "1 MB",
        "1000 KB",
    ]


def test_what_a_collective_cannot_do_is_named():
    variants = (plan.gloo("cubic"), plan.gradwire("auto"), plan.gradwire("auto", "ring"), plan.gradwire("exact"))
    whole = Plan(NetworkPlan("nft"), variants, ("all_reduce", "reduce_scatter", "broadcast"))
    assert whole.left_out() == [
        "not measured: gradwire-auto/ring, as reduce_scatter has one schedule and is not rotated",
        "not measured: gradwire-auto, gradwire-auto/ring, as broadcast has no presets",
    ]


def test_the_time_left_never_exceeds_what_was_allowed():
    shown = Display(make_console(), minutes=2.0, clock=lambda: 0.0)
    assert shown.whole_s(1, 10, 6.0) == 60.0
    assert shown.whole_s(1, 100, 6.0) == 120.0
    assert shown.whole_s(90, 100, 125.0) == 125.0


def test_examples_in_help_keep_their_lines_and_sentences_are_wrapped():
    @click.command(
        help=as_written("What it does.\n\n    run --quick    # a look\n    run            # all\n\nSome more\nof it.\n")
    )
    def command() -> None: ...

    lines = [line.strip() for line in CliRunner().invoke(command, ["--help"]).output.splitlines()]
    assert {"run --quick    # a look", "run            # all", "Some more of it."} <= set(lines)


def test_time_to_accuracy_is_between_two_validations():
    curve = [(0, 0.0, 5.0), (10, 4.0, 3.0), (20, 8.0, 2.0)]
    assert training.seconds_to(4.0, curve) == 2.0
    assert training.seconds_to(3.0, curve) == 4.0
    assert training.seconds_to(2.5, curve) == 6.0
    assert training.seconds_to(1.9, curve) is None


def test_a_rise_between_two_validations_does_not_move_the_time_to_accuracy():
    calm = [(0, 0.0, 5.0), (10, 10.0, 4.0), (20, 20.0, 3.0), (30, 30.0, 2.0), (40, 40.0, 2.01), (50, 50.0, 1.5)]
    settled = training.settled(calm)
    assert [point[:2] for point in settled] == [point[:2] for point in calm]
    assert [round(loss, 6) for _, _, loss in settled] == [5.0, 4.5, 4.0, 3.0, 2.336667, 1.836667]
    slower = [(step, seconds, loss + 0.02) for step, seconds, loss in calm]
    rows = [{"loss": 0.0, "steps": 50, "curve": calm}, {"loss": 0.01, "steps": 50, "curve": slower}]
    examples = Path(__file__).resolve().parents[2] / "examples"
    chosen = training.TrainingPlan(examples, NetworkPlan("soft"), (plan.Variant("gloo-cubic", "gloo", "cubic"),))
    target = training.target_of(chosen, rows)
    first, second = (row["seconds"] for row in training.with_target(rows, target))
    assert (first, target) == (40.0, settled[4][2])
    assert first < second < first + 0.5, "two hundredths above are not ten steps behind"
    few = [{"loss": 0.0, "steps": 40, "curve": calm[:5]}]
    assert settled[3][2] > training.target_of(chosen, few) > settled[4][2], (
        "others need not be as good as it is in the end"
    )


def test_training_is_judged_by_time_to_accuracy_under_loss():
    times = (
        ("gloo-cubic", 0.0, 10.0),
        ("gradwire-auto", 0.0, 10.0),
        ("gloo-cubic", 0.01, 20.0),
        ("gradwire-auto", 0.01, 11.0),
    )
    rows = [
        {"variant": name, "peer": "gloo" in name, "loss": loss, "seconds": seconds} for name, loss, seconds in times
    ]
    for name, factor, reached in (
        ("calm", 1.1, True),
        ("calm", 1.09, False),
        ("speedup", 1.8, True),
        ("speedup", 1.9, False),
    ):
        (verdict,) = training.judge(rows, {name: factor})
        assert verdict.reached is reached, verdict
    rows[3]["seconds"] = None
    assert not any(verdict.reached for verdict in training.judge(rows, {"calm": 9.0, "speedup": 0.1}))


def test_the_report_is_one_file_that_needs_nothing_beside_it(tmp_path: Path):
    rows = [row_of(name, at + 1.0, loss=loss, bytes=size, scenario=scene) for at, name in enumerate(("gloo-cubic", "gradwire-auto"))
            for loss in (0.0, 0.01) for size in (1024, 1 << 20) for scene in (plan.HEALTHY, "gray")]  # fmt: skip
    rows[-1]["wrong"] = 3
    machine = {
        "at": "now",
        "commit": "c",
        "cores": 2,
        "processor": "p <x>",
        "kernel": "k",
        "packages": {"torch": "t"},
        "load": 0.1,
    }
    network = {"switch": "nft", "rate_mbit": 100.0, "rails": 1, "buffer_bytes": 1 << 18, "counted_rtt_ms_at_0.6": 1.04}
    found = {"machine": machine, "network": network, "settings": {"hosts": 4}, "rows": rows,
             "environment": {"GRADWIRE_PATHS": "4", "GRADWIRE_HOSTS": "a b;c"},
             "command": "gradwire bench --loss 0.01", "targets": [{"text": "a < b", "reached": False}]}  # fmt: skip
    report.write_html(json.loads(json.dumps(found)), tmp_path / "bench.html")
    page = (tmp_path / "bench.html").read_text()
    assert page.count("<svg") == 5
    assert not any(word in page for word in ("<script", "<link", "src=", "url(http"))
    assert "MISSED: a &lt; b" in page
    assert "round trip 1.04 ms with 0.6 ms added" in page
    assert html.escape("GRADWIRE_PATHS=4 \\\nGRADWIRE_HOSTS='a b;c' \\\ngradwire bench --loss 0.01") in page
    (pre,) = re.findall(r"pre\{([^}]*)\}", page)
    assert "white-space:pre-wrap" in pre, "a long command is read whole on paper, too"
    assert page.count("<td class=bad>3</td>") == 1
    assert all((tmp_path / f"bench-{number}.png").stat().st_size > 5_000 for number in range(1, 6))


def test_results_and_the_command_that_repeats_them_hold_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {
        "GRADWIRE_SECRET": "the secret of this job",
        "GRADWIRE_OTLP_ENDPOINT": "http://user:pass@word@collector:4318/",
        "TORCH_SOMETHING": "redis://:password@store/0",
        "OMP_NUM_THREADS": "2",
    }
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    command = machine.command()
    environment = {name: value for name, value in command["environment"].items() if name in given}
    assert environment == {
        "GRADWIRE_SECRET": "...",
        "GRADWIRE_OTLP_ENDPOINT": "http://***@collector:4318/",
        "TORCH_SOMETHING": "redis://***@store/0",
        "OMP_NUM_THREADS": "2",
    }
    assert not re.search("secret of|user|word", report.repeat_text({**command, "command": ""}))
