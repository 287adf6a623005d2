"""Time to accuracy that is reached in no time, and targets that ask for nothing."""

from __future__ import annotations

import math
import subprocess
import sys
from typing import Any

import pytest
from gradwire.bench import kept, training, training_report
from gradwire.bench import run as bench_run
from gradwire.bench.plan import Condition, NetworkPlan, gradwire
from gradwire.lab import LabError
from gradwire.lab.crew import WorkerFailed
from gradwire.lab.nursery import Nursery


def row_of(variant: str, loss: float, seconds: float | None) -> dict[str, Any]:
    return {
        "variant": variant, "peer": "gloo" in variant, "loss": loss, "seconds": seconds, "step_ms_p50": 100.0,
        "comm_share": 0.5, "lost_share": 0.0, "filled_share": 0.0, "steps": 10, "steps_apart": 0, "curve": [(0, 0.0, 5.0), (10, 1.0, 5.5)],
    }  # fmt: skip


def test_what_holds_a_rank_up_counts_once_although_another_waits_for_it_in_the_next_step():
    """Steps of a second; rank 1 is four seconds late at the end of the second one."""
    run = training.Run(gradwire("auto"), Condition())
    times = [
        ((0.0, 1.0), (0.0, 1.0)),
        ((1.25, 2.25), (1.25, 6.25)),
        ((2.5, 7.5), (6.5, 7.5)),
        ((7.75, 8.75), (7.75, 8.75)),
    ]
    for step in times:
        run.add([
            {"begun": begun, "ended": ended, "parameters": "same", "filled": 0.0,
             "record": {"step_ms": 1e3 * (ended - begun), "comm_ms": 500 * (ended - begun), "bytes_lost_share": 0.0}}
            for begun, ended in step
        ])  # fmt: skip
    row = run.row() | {"curve": []}
    assert row["step_ms"] == [1000, 5000, 1000, 1000]
    assert run.comm_ms[2] == 500, "of the rank that the other one waits for"


def answer(parameters: str, filled: float = 0.0) -> dict[str, Any]:
    """Of one rank about a step."""
    record = {"step_ms": 1.0, "comm_ms": 0.5, "bytes_lost_share": 0.01}
    return {"begun": 0.0, "ended": 1e-3, "parameters": parameters, "filled": filled, "record": record}


def test_results_that_did_not_come_back_and_replicas_that_differed_are_in_the_table():
    run = training.Run(gradwire("ultima"), Condition(0.01))
    run.validation.append((0, 5.0))
    for parameters in ("same", "other"):
        run.add([answer("same", 0.04), answer(parameters)])
    (row,) = training.with_target([run.row()], 4.0)
    (line,) = [dict(zip(training_report._HEADS, each, strict=True)) for each in training_report.lines_of([row])]
    assert (line["gradient lost"], line["filled"], line["steps apart"]) == ("1.000%", "2.000%", "1 of 2")
    del row["filled_share"]
    assert training_report.lines_of([row])[0][8] == "-", "a file of an earlier version"


def test_replicas_that_differ_and_must_not_are_a_wrong_result_and_no_failure_of_a_worker():
    run = training.Run(gradwire("auto"), Condition(0.01))
    with pytest.raises(kept.WrongResult, match="the replicas differ after step 1") as found:
        run.add([answer("same"), answer("other")])
    assert kept.ended(found.value, "0 steps", is_whole=False).status == kept.status_of(found.value) == 1
    assert kept.status_of(WorkerFailed("it ended")) == kept.status_of(LabError("no lab")) == 2


def test_a_run_whose_replicas_differ_in_the_first_turn_ends_with_status_1(tmp_path):
    def differ() -> int:
        raise kept.WrongResult("gradwire-auto: the replicas differ after step 1")

    assert bench_run._inside(differ, bench_run.Outcome(tmp_path)) == bench_run.MISSED


def test_a_target_that_was_reached_in_no_time_was_reached():
    rows = [row_of("gloo-cubic", 0.01, 4.0), row_of("gradwire-auto", 0.0, 0.0), row_of("gradwire-auto", 0.01, 0.0)]
    assert training.with_target([{**rows[1], "seconds": None}], 6.0)[0]["seconds"] == 0.0
    for name in ("calm", "speedup"):
        (verdict,) = training.judge(rows, {name: 1.0})
        assert verdict.reached, verdict
        assert "never reached" not in verdict.text
    heads = training_report._HEADS
    _, calm, lossy = [dict(zip(heads, line, strict=True)) for line in training_report.lines_of(rows)]
    assert (calm["s to target"], calm["of its own at 0 %"]) == ("0.0", "1.00")
    assert (lossy["of its own at 0 %"], lossy["peer's time, times"]) == ("1.00", "gloo-cubic inf")
    rows[1]["seconds"] = 2.0
    assert training_report.lines_of(rows)[2][3] == "0.00"


def test_a_multiple_of_no_time_is_missed_and_of_what_never_came_there_is_none():
    never, at_once, later = (row_of("gradwire-auto", 0.01, seconds) for seconds in (None, 0.0, 3.0))
    assert training.ratio_of(later, at_once) == math.inf
    assert training.ratio_of(at_once, later) == 0.0
    assert training.ratio_of(never, later) is training.ratio_of(at_once, never) is None


def test_where_the_sources_are_not_their_folder_is_asked_for(tmp_path):
    with pytest.raises(ValueError, match=r"an installed package has no examples, name their folder .* with --examples"):
        training.TrainingPlan(tmp_path, NetworkPlan("nft"), (gradwire("auto"),))


def test_an_example_that_cannot_read_its_corpus_ends_a_run_with_the_reason(tmp_path):
    (tmp_path / "gpt.py").write_text(
        "class Corpus:\n    def of_standard_library():\n        raise FileNotFoundError('no Python sources')"
    )
    with Nursery(()) as nursery, pytest.raises(LabError, match="no corpus: FileNotFoundError: no Python sources"):
        training.identity_of(tmp_path, nursery.start)


def test_what_tells_the_corpus_imports_no_modules_of_the_current_folder(tmp_path, monkeypatch):
    (tmp_path / "json.py").write_text("raise SystemExit('of the folder')")
    monkeypatch.chdir(tmp_path)
    no_folder = pytest.raises(LabError, match="no corpus: ModuleNotFoundError: No module named 'gpt'")
    with Nursery(()) as nursery, no_folder:
        training.identity_of(tmp_path / "none", nursery.start)


def test_a_target_that_the_untrained_model_is_at_is_refused():
    training.check_target(None, 5.5)
    training.check_target(5.4, 5.5)
    for target in (5.5, 6.0):
        with pytest.raises(LabError, match=r"reached without training: the loss is 5\.5000 before the first step"):
            training.check_target(target, 5.5)


@pytest.mark.usefixtures("namespaces")
def test_a_run_with_such_a_target_ends_before_its_first_step(tmp_path):
    few = ("--training", "--quick", "--loss", "0", "--steps", "1", "--block", "1", "--network", "nft", "--rate", "1000")
    command = [
        sys.executable,
        "-c",
        "from gradwire.cli import main; main()",
        "bench",
        *few,
        "--tcp",
        "none",
        "--target",
        "60",
    ]
    files = ["--json", str(tmp_path / "numbers.json"), "--out", str(tmp_path)]
    ran = subprocess.run([*command, *files], capture_output=True, text=True, timeout=240, check=False)
    assert (ran.returncode, "--target 60 is reached without training" in ran.stdout) == (2, True), (
        ran.stdout + ran.stderr
    )
    assert not (tmp_path / "numbers.json").exists()
