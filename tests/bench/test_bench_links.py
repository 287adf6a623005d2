"""Whether `gradwire bench` measures the links: what share of a call's time they need, and the rates of scenarios. Plain values."""

from __future__ import annotations

from typing import Any

import pytest
from click.testing import CliRunner
from gradwire.bench import plan, report, results, run
from gradwire.bench.plan import Condition, NetworkPlan
from gradwire.cli import main

FOUR_RAILS = NetworkPlan("nft", rate_mbit=100.0, rails=4)
FLOOR_MS = 1e3 * 1.5 * plan.MB * 8 / 400e6  # of 1 MB among four ranks: 1.5 MB each way over the links of each


def row_of(p50_ms: float, scenario: str, network: NetworkPlan = FOUR_RAILS) -> dict[str, Any]:
    series = results.Series(
        plan.Cell("all_reduce", 4, plan.MB, Condition(scenario=scenario), plan.gradwire("auto")),
        samples_ms=[p50_ms] * 100, lost=[0.0] * 100, filled=[0.0] * 100, resent=[0.0] * 100, cpu_s=1.0, calls=100,
    )  # fmt: skip
    return results.with_link_share(series.row(), network)


@pytest.mark.parametrize(("times", "share", "is_hidden"), [(4.0, "25%", True), (1.25, "80%", False)])
def test_the_verdict_of_a_scenario_says_how_far_the_healthy_links_were_used(times, share, is_hidden):
    """Four times what the links need, a call takes as long with three of four: the processor's time is all that is seen."""
    rows = [row_of(times * FLOOR_MS, scenario) for scenario in (plan.HEALTHY, "gray")]
    assert rows[0]["link_share"] == pytest.approx(1 / times)
    (verdict,) = results.judge(rows, {"healthy": 1.5})
    assert f"whose median uses the links to {share}" in verdict.text
    assert ("hidden by the processor" in verdict.text) is is_hidden
    assert dict(zip(report._HEADS, report.cells_of(rows[0]), strict=True))["of links"] == share


@pytest.mark.parametrize(
    ("changed", "words"),
    [({}, "hidden by the processor"), ({"rtt_ms": 40.0}, "not the limit"), ({"bytes": 65536}, "not the limit")],
)
def test_links_that_wait_for_round_trips_or_ranks_are_not_said_to_wait_for_the_processor(changed, words):
    rows = [row_of(4 * FLOOR_MS, scenario) | changed for scenario in (plan.HEALTHY, "gray")]
    (verdict,) = results.judge(rows, {"healthy": 1.5})
    assert words in verdict.text


def test_an_incast_has_the_minutes_for_its_samples(monkeypatch, tmp_path):
    planned = []
    monkeypatch.setattr(run, "run_collectives", lambda whole, _: planned.append(whole.minutes) or 0)
    for more in ([], ["--minutes", "3"]):
        asked = ["bench", "--scenario", "incast", "--out", str(tmp_path), *more]
        assert CliRunner().invoke(main, asked).exit_code == 0
    assert planned == [20.0, 3.0]


def test_links_without_a_rate_have_no_share():
    row = row_of(1.0, plan.HEALTHY, NetworkPlan("bridge"))
    assert row["link_share"] is None
    assert dict(zip(report._HEADS, report.cells_of(row), strict=True))["of links"] == "-"
    (verdict,) = results.judge([row, row_of(1.0, "gray", NetworkPlan("bridge"))], {"healthy": 1.5})
    assert "uses the links" not in verdict.text


def test_a_scenario_is_measured_where_links_are_the_limit_unless_told(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(run, "run_collectives", lambda whole, _: asked.append(whole) or run.REACHED)
    few = [[], *(["--scenario", name] for name in plan.SCENARIOS), ["--scenario", "gray", "--rate", "80"]]
    for arguments in few:
        found = CliRunner().invoke(main, ["bench", "--out", str(tmp_path), *arguments])
        assert found.exit_code == 0, found.output
    rates = [whole.network.rate_mbit for whole in asked]
    assert rates == [100.0, 25.0, 50.0, 25.0, 80.0]
    assert plan.GRAY_RAILS * plan.SCENARIO_RATES["gray"] == 100.0, "of each host, which two cores carry"


def test_the_page_says_what_was_not_measured():
    """And not only within the facts that are folded."""
    row = row_of(1.0, plan.HEALTHY)
    assert report.left_html({"ended_by": None, "not_measured": [], "rows": [row]}) == ""
    assert report.left_html({"rows": [{}]}) == "", "of a file of before"
    left = {"ended_by": "--minutes", "not_measured": ["a <cell>"], "rows": [row | {"settled": False}, row]}
    facts = {
        "machine": {
            "at": "",
            "commit": "",
            "cores": 2,
            "processor": "",
            "kernel": "",
            "packages": {"torch": ""},
            "load": 0.0,
        }
    }
    page = report.html_page("", "", "", {**facts, "environment": {}, "command": "", **left})
    shown = page.partition("<details>")[0]
    for words in ("ended early by --minutes", "not measured: a &lt;cell&gt;", "not settled: 1 of 2 cells"):
        assert words in shown
