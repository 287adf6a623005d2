"""What `gradwire bench` says of its network: a network that is not shaped has no rate, no buffers and no rails."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from gradwire.bench import report, run, training_report
from gradwire.bench.plan import NetworkPlan
from gradwire.cli import main

MACHINE = {
    "at": "now", "commit": "c", "cores": 2, "processor": "p", "kernel": "k", "packages": {"torch": "t"}, "load": 0.1,
}  # fmt: skip


def collective() -> dict[str, Any]:
    return {
        "variant": "gradwire-auto", "peer": False, "collective": "all_reduce", "ranks": 4, "bytes": 1 << 20, "rtt_ms": 0.0,
        "loss": 0.0, "scenario": "healthy", "samples": 2, "p50_ms": 1.0, "p95_ms": None, "p99_ms": None, "p999_ms": None,
        "max_ms": 1.0, "algbw_gb_s": 1.0, "busbw_gb_s": 1.5, "lost_share": 0.0, "filled_share": 0.0, "wrong": 0,
        "unjudged": 0, "cpu_s_per_gb": 2.0, "samples_ms": [1.0, 1.0],
    }  # fmt: skip


def trained() -> dict[str, Any]:
    curve = [(0, 0.0, 5.0), (10, 1.0, 3.0)]
    return {
        "variant": "gradwire-auto", "peer": False, "loss": 0.0, "seconds": 1.0, "step_ms_p50": 100.0, "comm_share": 0.5,
        "lost_share": 0.0, "filled_share": 0.0, "steps": 10, "steps_apart": 0, "curve": curve, "settled": curve,
    }  # fmt: skip


def page_of(network: NetworkPlan, folder: Path, *, training: bool) -> str:
    """The report over this network, as it is written."""
    whole = {
        "machine": MACHINE, "network": {**network.described(), "switch": network.kind}, "environment": {}, "command": "",
        "settings": {"hosts": 4, "ranks": 4}, "targets": [], "target": 3.5, "rows": [trained() if training else collective()],
    }  # fmt: skip
    page = folder / "page.html"
    (training_report if training else report).write_html(whole, page)
    return page.read_text()


@pytest.mark.parametrize("training", [False, True])
def test_the_page_claims_links_only_where_there_are_some(tmp_path, training):
    pytest.importorskip("matplotlib")
    for kind in ("loopback", "bridge"):
        page = page_of(NetworkPlan(kind), tmp_path, training=training)
        assert "Mbit/s" not in page
        assert "buffers of" not in page
    assert "100 Mbit/s each" in page_of(NetworkPlan("nft"), tmp_path, training=training)


def test_the_numbers_have_null_for_what_the_links_have_not():
    assert NetworkPlan("nft").described() == {
        "kind": "nft", "rate_mbit": 100.0, "buffer_bytes": 1 << 18, "mtu_bytes": 1500, "rails": 1, "bucket_bytes": None,
    }  # fmt: skip
    lacks = {name for name, value in NetworkPlan("bridge", bucket_bytes=6000).described().items() if value is None}
    assert lacks == {"rate_mbit", "buffer_bytes", "bucket_bytes"}
    assert NetworkPlan("loopback").described()["mtu_bytes"] is None


@pytest.mark.parametrize("kind", ["loopback", "bridge"])
@pytest.mark.parametrize("option", ["--rate", "--buffer", "--bucket", "--rails"])
def test_options_of_shaped_links_are_refused_where_there_are_none(tmp_path, monkeypatch, kind, option):
    monkeypatch.setattr(run, "run_collectives", lambda *_: pytest.fail("it would be measured"))
    asked = ["--network", kind, option, "100" if option != "--rails" else "1", "--out", str(tmp_path)]
    found = CliRunner().invoke(main, ["bench", *asked])
    assert found.exit_code == 2
    assert f"{option}: of shaped links, which --network {kind} has not" in found.output


def test_an_unshaped_network_needs_no_such_option(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(run, "run_collectives", lambda whole, _: asked.append(whole.network) or run.REACHED)
    assert CliRunner().invoke(main, ["bench", "--network", "bridge", "--out", str(tmp_path)]).exit_code == 0
    assert asked == [NetworkPlan("bridge")]
