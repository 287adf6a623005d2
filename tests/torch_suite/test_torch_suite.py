"""The tests of PyTorch's own suite that pass for gloo on a CPU, at world size 2. `make test-torch` runs all of it for both."""

from __future__ import annotations

import os
from pathlib import Path

import differences
import pytest
import suite

HERE = Path(__file__).parent
NAMES = (HERE / "cpu_tests.txt").read_text().split()


@pytest.fixture(scope="module")
def entries() -> dict[str, suite.Entry]:
    jobs = max(1, (os.cpu_count() or 2) // 2)
    return {entry.test: entry for entry in suite.run(["gradwire"], [2], NAMES, "", jobs)}


@pytest.mark.parametrize("name", NAMES)
def test_what_passes_for_gloo_passes_for_gradwire(entries: dict[str, suite.Entry], name: str) -> None:
    if name not in entries:
        pytest.skip("this torch has no such test")
    entry = entries[name]
    if name in differences.REASONS:
        assert entry.outcome != "passed" or name in differences.SOMETIMES, "it passes: strike its reason"
        pytest.skip(differences.REASONS[name])
    assert entry.outcome == "passed", f"{entry.outcome}: {entry.reason}\n{entry.output}"


def entry(test: str, backend: str, outcome: str) -> suite.Entry:
    return suite.Entry(test=test, backend=backend, world_size=2, outcome=outcome, seconds=1.0)


def test_a_difference_is_found_and_a_failure_of_both_is_not_judged() -> None:
    entries = [
        *(entry("alike", backend, "passed") for backend in suite.BACKENDS),
        *(entry("broken", backend, "failed") for backend in suite.BACKENDS),
        entry("worse", "gloo", "passed"),
        entry("worse", "gradwire", "failed"),
        entry("hidden", "gloo", "passed"),
        entry("hidden", "gradwire", "skipped"),
    ]
    found = suite.compare(entries)
    assert [(item.test, item.reason) for item in found] == [("hidden", None), ("worse", None)]
    assert "not judged: broken" in suite.report(entries, found)


def test_a_reason_that_has_become_wrong_is_a_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(differences.REASONS, "healed", "an old reason")
    found = suite.compare([entry("healed", backend, "passed") for backend in suite.BACKENDS])
    assert [(item.test, item.reason) for item in found] == [("healed", None)]
