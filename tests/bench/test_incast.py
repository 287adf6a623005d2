"""The incast benchmark runs to its end, writes what it promises, and judges it; its quick mode shows no performance."""

import pytest


@pytest.mark.usefixtures("namespaces")
def test_incast_times_each_factor_and_draws(run_quick, tmp_path):
    rows = run_quick("incast.py")["rows"]
    assert [(row["incast"], row["rounds"], len(row["samples_ms"])) for row in rows] == [(1, 6, 3), (3, 2, 3)]
    assert all(0 < row["min_ms"] <= row["p50_ms"] for row in rows)
    assert (tmp_path / "incast.png").stat().st_size > 10_000


def test_incast_is_judged_by_every_step(load_benchmark):
    incast = load_benchmark("incast")
    for times, falls in (((4.0, 3.0, 2.0), True), ((4.0, 3.0, 3.0), False), ((4.0, 5.0, 2.0), False)):
        assert incast.falls([{"p50_ms": time} for time in times]) is falls
