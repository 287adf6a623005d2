"""What this kernel has is found out without touching anything of the machine's own, and only inside the sandbox."""

import os
from collections.abc import Callable

import pytest
from click.testing import CliRunner
from gradwire.bench import ground, run
from gradwire.bench.ground import Ground, layout_of
from gradwire.bench.plan import KERNEL, NetworkPlan
from gradwire.lab import LabError, NamespacesUnavailable, iproute, netem, sandbox


def current_network() -> int:
    """Tells the network namespace of this thread from all others."""
    return os.stat("/proc/thread-self/ns/net").st_ino


def test_netem_is_never_tried_in_the_current_network_namespace(monkeypatch):
    here, tried = current_network(), []
    monkeypatch.setattr(iproute, "tc", lambda *_: tried.append(current_network()))
    netem.available()  # outside the sandbox: here is what the machine's other programs use
    assert here not in tried
    assert current_network() == here


def test_netem_is_tried_in_a_namespace_of_its_own_inside_the_sandbox(monkeypatch):
    def look() -> int:
        here, tried = current_network(), []
        monkeypatch.setattr(iproute, "tc", lambda *_: tried.append(current_network()))
        assert netem.available()
        assert len(tried) == 1
        assert here not in tried
        assert current_network() == here
        return 0

    try:
        assert sandbox.run(look) == 0
    except NamespacesUnavailable as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("error", [LabError("tc failed: no such queue"), FileNotFoundError("tc")])
def test_a_kernel_without_netem_has_none(monkeypatch, error):
    def fails(*_: str) -> None:
        raise error

    monkeypatch.setattr(iproute, "tc", fails)
    assert not netem.available()


def test_without_tc_there_is_no_netem(monkeypatch, tmp_path):
    monkeypatch.setattr(iproute, "_PATH", str(tmp_path))
    assert not netem.available()


@pytest.fixture
def outside(monkeypatch) -> Callable[[], None]:
    """Outside the sandbox a user has no rights over a network, and root has the machine's."""
    monkeypatch.setattr(netem, "available", lambda: pytest.fail("asked outside the sandbox"))


@pytest.mark.usefixtures("outside")
def test_the_all_reduce_benchmark_leaves_the_switch_to_the_sandbox(load_benchmark, monkeypatch, tmp_path):
    asked = []
    allreduce = load_benchmark("allreduce")
    monkeypatch.setattr(run, "run_collectives", lambda whole, _: asked.append(whole) or run.REACHED)
    for arguments in ([], ["--variant", "gloo-bbr"]):
        found = CliRunner().invoke(allreduce.main, ["--out", str(tmp_path), *arguments])
        assert found.exit_code == 0, found.output
    assert [(whole.network.kind, whole.is_tcp_chosen) for whole in asked] == [(KERNEL, False), (KERNEL, True)]


@pytest.mark.usefixtures("outside")
def test_the_incast_benchmark_leaves_the_switch_to_the_sandbox(load_benchmark, monkeypatch, tmp_path):
    incast = load_benchmark("incast")
    asked = []
    monkeypatch.setattr(incast.frame, "Engines", lambda network, *_: asked.append(network))
    monkeypatch.setattr(incast.frame, "run", lambda *_: None)
    found = CliRunner().invoke(incast.main, ["--network", "kernel", "--out", str(tmp_path)])
    assert found.exit_code == 0, found.output
    assert [network.kind for network in asked] == [KERNEL]


@pytest.mark.parametrize(("has_netem", "switch"), [(True, "netem"), (False, "nft")])
def test_this_kernel_as_a_switch_is_netem_where_it_is_there(monkeypatch, has_netem, switch):
    monkeypatch.setattr(netem, "available", lambda: has_netem)
    assert layout_of(2, NetworkPlan(KERNEL)).switch == switch


@pytest.mark.parametrize("plan", [NetworkPlan("soft", mtu_bytes=9000), NetworkPlan("lab", mtu_bytes=9000, rails=2)])
def test_a_packet_that_the_switch_does_not_carry_is_refused_before_anything_waits_for_it(monkeypatch, plan):
    monkeypatch.setattr(ground, "choose", lambda *_: "uml")  # with several rails the small program takes its place
    with pytest.raises(LabError, match="1500 bytes at most"):
        Ground(2, plan)
