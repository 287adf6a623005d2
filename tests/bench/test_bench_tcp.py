"""What `gradwire bench` does where the kernel lacks a congestion control of TCP."""

import subprocess
import sys

import pytest
from click.testing import CliRunner
from gradwire.bench import plan, run, tcp
from gradwire.bench.conductor import Crews
from gradwire.bench.plan import Condition, NetworkPlan, Plan
from gradwire.bench.training import TrainingPlan
from gradwire.cli import main
from gradwire.lab import LabError
from gradwire.lab.crew import LoopbackCrew

VARIANTS = (plan.gloo("cubic"), plan.gloo("bbr"), plan.gradwire("auto"))


@pytest.fixture
def without_bbr(tmp_path, monkeypatch):
    """A kernel as that of stock Debian, where bbr is a module that nobody has loaded."""
    file = tmp_path / "available"
    file.write_text("reno cubic\n")
    monkeypatch.setattr(tcp, "AVAILABLE", file)
    return file


def plans(tmp_path, *, is_tcp_chosen: bool) -> list[Plan | TrainingPlan]:
    (tmp_path / "train_gpt.py").touch()
    network, chosen = NetworkPlan("nft"), {"is_tcp_chosen": is_tcp_chosen}
    return [Plan(network, VARIANTS, **chosen), TrainingPlan(tmp_path, network, VARIANTS, **chosen)]


@pytest.mark.usefixtures("without_bbr")
def test_peers_that_nobody_named_and_the_kernel_lacks_are_left_out_with_a_word(tmp_path):
    for whole in plans(tmp_path, is_tcp_chosen=False):
        said: list[str] = []
        assert [variant.name for variant in tcp.fitted(whole, said.append).variants] == ["gloo-cubic", "gradwire-auto"]
        (words,) = said
        assert words.startswith("not measured: gloo-bbr, as this kernel has no TCP congestion control bbr")
        assert "modprobe tcp_bbr" in words
        assert "\n" not in words


@pytest.mark.usefixtures("without_bbr")
def test_a_peer_that_was_named_and_the_kernel_lacks_is_an_error_that_says_what_to_do(tmp_path):
    for whole in plans(tmp_path, is_tcp_chosen=True):
        with pytest.raises(
            LabError, match=r"no TCP congestion control bbr: as root, `modprobe tcp_bbr`.* among cubic, reno"
        ):
            tcp.fitted(whole, pytest.fail)


def test_where_the_kernel_has_all_or_does_not_say_nothing_is_left_out(tmp_path, without_bbr):
    (whole, _) = plans(tmp_path, is_tcp_chosen=False)
    without_bbr.write_text("reno bbr cubic\n")
    assert tcp.fitted(whole, pytest.fail) is whole
    without_bbr.unlink()
    assert tcp.fitted(whole, pytest.fail) is whole


@pytest.mark.usefixtures("without_bbr")
def test_nothing_that_is_left_is_an_error_too():
    only_peers = Plan(NetworkPlan("nft"), (plan.gloo("bbr"),), ("broadcast",), is_tcp_chosen=False)
    with pytest.raises(LabError, match="no variant"):
        tcp.fitted(only_peers, lambda _: None)


def test_the_command_knows_whether_a_peer_was_named(tmp_path, monkeypatch):
    asked = []
    for name in ("run_collectives", "run_training"):
        monkeypatch.setattr(run, name, lambda whole, _: asked.append(whole) or run.REACHED)
    for arguments in ([], ["--quick"], ["--training"], ["--tcp", "cubic"], ["--tcp", "bbr", "--training"]):
        found = CliRunner().invoke(main, ["bench", "--out", str(tmp_path), *arguments])
        assert found.exit_code == 0, found.output
    assert [whole.is_tcp_chosen for whole in asked] == [False, False, False, True, True]


# A command on a kernel without bbr.
WITHOUT_BBR = """
import pathlib, sys
from gradwire.bench import tcp
tcp.AVAILABLE = pathlib.Path(sys.argv.pop())
from gradwire.cli import main
main()
"""


@pytest.mark.usefixtures("kernel_tcp")  # where there are no namespaces it skips
@pytest.mark.parametrize("kind", [[], ["--training"]])
def test_nothing_is_built_for_a_peer_that_the_kernel_lacks(tmp_path, without_bbr, kind):
    few = ["bench", *kind, "--quick", "--network", "nft", "--tcp", "bbr"]
    few += ["--out", tmp_path, "--json", tmp_path / "numbers.json"]
    line = [sys.executable, "-c", WITHOUT_BBR, *few, without_bbr]
    ran = subprocess.run(line, capture_output=True, text=True, timeout=240, check=False)
    assert ran.returncode == run.NOT_RUN, ran.stdout + ran.stderr
    assert "modprobe tcp_bbr" in ran.stdout
    assert "counting" not in ran.stdout, "which is after the network is built"
    assert not (tmp_path / "numbers.json").exists()


class Ground:
    """Remembers which conditions and congestion controls were set."""

    def __init__(self) -> None:
        self.used: list[str | Condition] = []

    def use_tcp(self, algorithm: str) -> None:
        self.used.append(algorithm)

    def set(self, condition: Condition) -> None:
        self.used.append(condition)


def test_only_peers_choose_a_congestion_control_and_ranks_meet_where_nothing_is_lost():
    crews, ground = object.__new__(Crews), Ground()  # a whole one would start processes
    crews._ground, crews._patience_s, crews.order = ground, 120.0, lambda *_: [[{"made": "one", "cipher": None}]]
    crews.ciphers = {}
    for variant in (plan.gloo("reno"), plan.gradwire("auto")):
        crews.form(variant, 2, Condition(0.1, 2.0, "gray"))
    calm = Condition(0.0, 2.0)
    assert ground.used == [calm, "reno", calm]


# A rank that says after each order how long a call of its last group may take.
TELLS = """
import torch
from gradwire.bench.worker import Worker
from gradwire.lab import crew

class Teller(Worker):
    def _group(self, order):
        super()._group(order)
        group = self._groups[order["name"]]
        self._say({"timeout_s": group._get_backend(torch.device("cpu")).options._timeout.total_seconds()})

crew.serve(Teller)
"""


def test_a_call_may_take_as_long_as_the_leader_waits_for_it(tmp_path):
    crews = object.__new__(Crews)
    crews._ground, crews._patience_s = Ground(), 1234.0
    with LoopbackCrew([sys.executable, "-c", TELLS], 1, {}, tmp_path) as crew:
        crews._of = {"": crew}
        said = []
        crews.order = lambda _, order, __: said.append(crew.order(order, "timeout_s"))
        crews.form(plan.gloo("cubic"), 1, Condition())
    assert said[0][0][-1] == {"timeout_s": 1234.0}
