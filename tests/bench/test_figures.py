"""What the transport benchmarks say about results, and how their samples take turns: nothing here is timed."""

import copy
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from gradwire.bench import tcp
from gradwire.lab import LabError

BENCH = Path(__file__).resolve().parents[2] / "bench"
sys.path[:0] = [str(BENCH), str(BENCH / "transport")]

import experiment  # noqa: E402 - found by the line above
import fairness  # noqa: E402
import figures  # noqa: E402
import goodput  # noqa: E402
import network  # noqa: E402
import report  # noqa: E402

MACHINE = {"commit": "abc1234", "kernel": "6.1", "processor": "Some CPU", "cores": 2, "load": 0.1}


def goodput_results() -> dict:
    shares = {("gradwire", 0.01): 0.97, ("gradwire", 0.05): 0.86, ("bbr", 0.01): 0.98, ("bbr", 0.05): 0.5}
    rows = [
        {"flow": flow, "rtt_ms": 1.0, "loss": loss, "mbit": [190 * share], "median_mbit": 190 * share, "share": share}
        for (flow, loss), share in shares.items()
    ]
    settings = {"rate_mbit": 200.0, "rtts_ms": [1.0], "losses": [0.01, 0.05], "flows": ["gradwire", "bbr"]}
    return {"benchmark": "goodput", "machine": MACHINE, "small": False, "settings": settings, "rows": rows}


def fairness_results() -> dict:
    row = {"rtt_ms": 1.0, "buffer_bdps": 1.0, "samples": 5, "gradwire_mbit": 90.0, "peer_mbit": 100.0}
    row |= {"link_used": 0.99, "overflowed": 0.012, "curve": [[0.5, 1.0], [50.0, 45.0]]}
    rows = [
        {**row, "peer": "bbr", "share": 0.45, "shares": [0.4, 0.5]},
        {**row, "peer": "cubic", "share": 0.8, "shares": [0.8, 0.8]},
    ]
    settings = {"rate_mbit": 200.0, "peers": ["bbr", "cubic"], "rtts_ms": [1.0], "bdps": [1.0]}
    return {"benchmark": "fairness", "machine": MACHINE, "small": False, "settings": settings, "rows": rows}


def with_share(results: dict, at: int, share: float) -> dict:
    changed = copy.deepcopy(results)
    changed["rows"][at]["share"] = share
    return changed


def test_goodput_has_a_target_for_gradwire_at_each_loss_and_none_for_tcp():
    verdicts = figures.goodput_verdicts(goodput_results())
    assert [(verdict.measured, verdict.reached) for verdict in verdicts] == [(0.97, True), (0.86, True)]
    assert ["90%" in verdicts[0].target, "85%" in verdicts[1].target] == [True, True]


@pytest.mark.parametrize(
    ("loss", "target"), [(0, 0.9), (0.001, 0.9), (0.01, 0.9), (0.02, 0.85), (0.05, 0.85), (0.06, None)]
)
def test_the_target_of_goodput_follows_the_loss(loss, target):
    assert figures.goodput_target(loss) == target


def test_goodput_below_its_target_is_missed():
    verdicts = figures.goodput_verdicts(with_share(goodput_results(), 0, 0.899))
    assert [verdict.reached for verdict in verdicts] == [False, True]
    assert "MISSED" in verdicts[0].line()


@pytest.mark.parametrize(("share", "reached"), [(0.34, False), (0.35, True), (0.65, True), (0.66, False)])
def test_fairness_is_judged_beside_bbr_only_and_in_both_directions(share, reached):
    (verdict,) = figures.fairness_verdicts(with_share(fairness_results(), 0, share))
    assert verdict.reached is reached


def test_tables_are_markdown_with_equal_columns_and_show_the_targets():
    for results, words in ((goodput_results(), ["97.0%", "85%"]), (fairness_results(), ["45.0%", "35% to 65%"])):
        table = figures.FIGURES[results["benchmark"]].markdown(results)
        assert len({line.count("|") for line in table.splitlines()}) == 1
        assert all(word in table for word in words)


def test_the_report_says_what_the_network_did_before_anything_was_measured(tmp_path):
    results = goodput_results()
    assert figures.goodput_notes(results) == ""
    results["network"] = {"rtt_ms_at_1.0": 1.07, "lab_share_at_1.0": 0.99, "counted_loss_at_0.01_1.0ms": 0.012}
    files, document = written(tmp_path, results)
    assert run_report(*files, "--document", document).returncode == 0
    expected = "Counted before: at 1 ms: round trip 1.07 ms, lost 1.2 %, plain UDP gets 99.0% of the link."
    assert expected in document.read_text()


def test_a_case_without_a_sample_leaves_its_cell_empty():
    results = goodput_results()
    del results["rows"][3]
    assert figures.goodput_markdown(results).splitlines()[3].endswith("|  |")


@pytest.mark.parametrize("results", [goodput_results(), fairness_results()])
def test_presenting_draws_and_its_exit_code_says_whether_a_target_is_missed(results, tmp_path, capsys):
    assert experiment.present(results, tmp_path) == experiment.REACHED
    assert (tmp_path / f"{results['benchmark']}.png").stat().st_size > 10_000
    missed = with_share(results, 0, 0.1)
    assert experiment.present(missed, tmp_path) == experiment.MISSED
    assert "MISSED" in capsys.readouterr().out
    assert experiment.present({**missed, "small": True}, tmp_path) == experiment.REACHED


def test_where_nothing_was_judged_no_target_is_reached(tmp_path, capsys):
    results = goodput_results()
    results["rows"] = [row for row in results["rows"] if row["flow"] == "bbr"]
    assert experiment.present(results, tmp_path) == experiment.NOT_RUN
    assert "no target was judged" in capsys.readouterr().out
    assert experiment.present({**results, "small": True}, tmp_path) == experiment.REACHED
    files, document = written(tmp_path, results, fairness_results())
    assert run_report(*files, "--document", document).returncode == 1
    text = document.read_text()
    assert "No target was judged." in text
    assert "1 of 1 targets reached." in text


def test_every_case_takes_its_turn_and_the_order_rotates():
    turns = experiment.Turns("abc", samples=3, minutes=1)
    assert "".join(case for _, case in turns(lambda _: None)) == "abcbcacab"


def test_when_the_time_is_up_every_case_has_had_a_turn():
    clock = iter(range(0, 10_000, 50))
    told = []
    taken = list(experiment.Turns("abc", samples=9, minutes=1)(told.append, lambda: next(clock)))
    assert [case for _, case in taken] == ["a", "b", "c"]
    assert told[-1] == "time is up after 3 of 27 samples"


def test_bytes_between_two_points_of_a_timeline_lie_on_a_line():
    flow = network.Flow("bbr", 300, 2.0, [(1.0, 100), (2.0, 300)])
    assert [flow.bytes_at(at) for at in (0.5, 1.0, 1.5, 2.0, 3.0)] == [50, 100, 200, 300, 300]


@pytest.mark.parametrize(
    "told",
    [
        {"sum": (1000, 10.0), "sum_sent": (1000, 0.0), "sum_received": (900, 10.0)},  # of 3.12
        {"sum": (1000, 10.0)},  # of older ones
    ],
)
def test_of_plain_udp_what_arrived_counts_and_its_loss_is_taken_off_once(told):
    end = {name: {"bytes": size, "seconds": 2.0, "lost_percent": lost} for name, (size, lost) in told.items()}
    flow = network._flow_of(network.UDP, 0.0, {}, {"end": end})
    assert (flow.bytes, flow.seconds) == (900, 2.0)


def test_each_flow_is_measured_by_what_a_link_carries_of_its_own_frames():
    assert network.payload_mbit("gradwire", 1474.0) == 1408
    assert network.payload_mbit("cubic", 1514.0) == 1448
    assert network.payload_mbit(network.UDP, 1490.0) == 1448


def test_only_the_time_in_which_both_flows_ran_counts_for_their_shares():
    # gradwire from 10 to 14 s with 100 bytes a second; TCP from 11 to 15 s: alone first with nothing, then with three times as much.
    ours = network.Flow("gradwire", 400, 4.0, [(float(s), 100 * s) for s in range(1, 5)], begun=10.0)
    theirs = network.Flow("bbr", 700, 4.0, [(1.0, 100), (2.0, 200), (3.0, 300), (4.0, 700)], begun=11.0)
    pair = fairness.Together(ours, theirs)
    assert pair.seconds == pytest.approx(3.0)
    assert pair.share == pytest.approx(0.5)
    times, shares = pair.curve()
    assert times[-1] == 3.0
    assert shares == [50.0] * 6


def run_report(*arguments: object) -> subprocess.CompletedProcess:
    command = [sys.executable, str(BENCH / "report.py"), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)


def written(tmp_path: Path, *everything: dict) -> tuple[list[Path], Path]:
    files = []
    for results in everything:
        files.append(tmp_path / f"{results['benchmark']}.json")
        files[-1].write_text(json.dumps(results))
    document = tmp_path / "benchmarks.md"
    shutil.copy(BENCH.parent / "docs" / "benchmarks.md", document)
    return files, document


def test_the_report_replaces_its_sections_of_the_document_and_nothing_else(tmp_path):
    files, document = written(tmp_path, goodput_results(), fairness_results())
    before = document.read_text()
    assert run_report(*files, "--document", document).returncode == 0
    first = document.read_text()
    assert figures.goodput_markdown(goodput_results()) in first
    assert "2 of 2 targets reached." in first
    assert "Development run" not in first
    assert (tmp_path / "img" / "fairness.png").exists()
    outside = [line for line in before.splitlines() if line.startswith("#")]
    assert all(line in first for line in outside)
    # Once more changes nothing: the old section goes.
    assert run_report(*files, "--document", document).returncode == 0
    assert document.read_text() == first


def test_the_report_labels_the_results_of_a_busy_machine_and_says_what_was_missed(tmp_path):
    busy = {**with_share(goodput_results(), 0, 0.2), "machine": {**MACHINE, "load": 3.0}}
    files, document = written(tmp_path, busy)
    assert run_report(*files, "--document", document).returncode == 1
    text = document.read_text()
    assert report.DEVELOPMENT in text
    assert "1 of 2 targets reached:\n- goodput at 1 ms, 1 % lost: 20.0%" in text


@pytest.mark.parametrize("content", ["{", "[]", '{"benchmark": "goodput"}', '{"benchmark": "tea"}'])
def test_a_file_that_holds_no_results_changes_nothing(content, tmp_path):
    (good, bad), document = written(tmp_path, goodput_results(), fairness_results())
    bad.write_text(content)
    before = document.read_text()
    result = run_report(good, bad, "--document", document)
    assert result.returncode == 2
    assert bad.name in result.stderr
    assert document.read_text() == before


def test_a_document_without_the_markers_is_named_as_the_problem(tmp_path):
    files, document = written(tmp_path, goodput_results())
    document.write_text("# Benchmarks\n")
    result = run_report(*files, "--document", document)
    assert result.returncode == 2
    assert "goodput: begin" in result.stderr


@pytest.mark.parametrize("name", ["goodput.py", "fairness.py"])
def test_the_help_of_a_benchmark_says_how_to_call_it_and_what_its_exit_code_means(name):
    command = [sys.executable, str(BENCH / "transport" / name)]
    text = subprocess.run([*command, "--help"], capture_output=True, text=True, timeout=60, check=True).stdout
    assert f"    python bench/transport/{name} --small  " in text
    assert "Exit code: 0 all targets reached, 1 one missed" in text
    assert "--json PATH" in text
    wrong = subprocess.run([*command, "--rtt", "fast"], capture_output=True, text=True, timeout=60, check=False)
    assert wrong.returncode == experiment.NOT_RUN
    assert "--rtt" in wrong.stderr


def test_what_the_kernel_lacks_is_left_out_with_a_word_unless_somebody_named_it(tmp_path, monkeypatch):
    file = tmp_path / "available"
    file.write_text("reno cubic\n")
    monkeypatch.setattr(tcp, "AVAILABLE", file)
    said: list[str] = []
    nobody = goodput.main.make_context("goodput", [])
    assert experiment.had_here(nobody, "flows", goodput.FLOWS, said.append) == ("gradwire", "cubic", "reno")
    assert said == ["not measured: bbr, as this kernel has no TCP congestion control bbr: as root, `modprobe tcp_bbr`"]
    named = fairness.main.make_context("fairness", ["--peer", "bbr", "--peer", "cubic"])
    with pytest.raises(LabError, match=r"`modprobe tcp_bbr`, or choose among cubic, reno"):
        experiment.had_here(named, "peers", named.params["peers"], pytest.fail)
    with pytest.raises(LabError, match="modprobe tcp_bbr"):
        experiment.had_here(nobody, "flows", ["bbr"], pytest.fail)
    file.write_text("reno cubic bbr\n")
    assert experiment.had_here(named, "peers", ("bbr", "cubic"), pytest.fail) == ("bbr", "cubic")
