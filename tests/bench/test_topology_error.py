"""What best effort costs by schedule: the benchmark runs to its end, and its errors follow from what is missing."""

import shutil

import pytest


# test of: ultima/topology-error
def test_topology_error_counts_every_schedule_and_draws(run_quick, tmp_path):
    if shutil.which("cargo") is None:
        pytest.skip("cargo is not installed")
    rows = run_quick("topology_error.py")["rows"]
    assert [row["schedule"] for row in rows] == ["ring", "parameter server", "transpose"]
    assert all(0 < row["lost"] < row["packets"] / 100 for row in rows)
    assert all(row["elems"] == 5 << 14 and row["values"] <= row["values_squared"] for row in rows)
    ring, server, transpose = rows
    # A partial sum of a ring of eight holds four ranks' values on average, and the mean of their squares is five times that of the values.
    assert ring["values_squared"] > 2 * ring["values"]
    assert ring["values"] / ring["lost"] > 2 * transpose["values"] / transpose["lost"]
    assert all(row["values_squared"] < 2 * row["values"] for row in (server, transpose)), "one rank's at a time"
    assert (tmp_path / "topology_error.png").stat().st_size > 10_000


# test of: ultima/topology-error
def test_topology_errors_follow_from_the_missing_values(load_benchmark):
    topology = load_benchmark("topology_error")
    counted = {"ranks": 8, "elems": 1000, "values": 56, "values_squared": 112}
    row = topology.error_of(counted)
    # Of 8 values a 1000th of 56 is missing: 56 / 1000 / 64 of the variance, of which the mean has 1 / 8.
    assert row["relative_error"] == pytest.approx(0.056 / 8)
    assert row["relative_error_equal"] == pytest.approx(0.112 / 64)
    for errors, reached in (((3.0, 2.0, 1.0), True), ((3.0, 1.0, 1.0), False), ((1.0, 2.0, 0.5), False)):
        assert topology.reached([{"relative_error": error} for error in errors]) is reached
