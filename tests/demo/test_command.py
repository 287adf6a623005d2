"""`gradwire demo` from outside: its usage errors, its results, and that Ctrl-C leaves nothing."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest
from click.testing import CliRunner
from gradwire.cli import main
from gradwire.lab import sandbox

AUTO_BOUND = 0.05  # share of a transfer that the preset `auto` may leave out
COMMAND = [sys.executable, "-c", "from gradwire.cli import main; main()", "demo"]


def test_help_teaches_with_examples_and_exit_statuses():
    result = CliRunner().invoke(main, ["demo", "--help"])
    assert result.exit_code == 0
    assert "gradwire demo --steps" in result.output
    assert "Exit status" in result.output


def test_help_of_the_command_group_names_the_demo():
    assert "demo" in CliRunner().invoke(main, ["--help"]).output


@pytest.mark.parametrize(
    "arguments",
    [
        ["--steps", "13"],
        ["--workers", "1"],
        ["--loss", "2"],
        ["--rate", "0"],
        ["--examples", "/nonexistent"],
        ["--preset", "best"],
        ["--backend", "carrier-pigeon"],
        ["--tcp", "cubic -h"],
        ["--tcp", ""],
        ["--tcp", "-h"],
    ],
)
def test_wrong_usage_has_status_2_and_says_what_is_wrong(arguments, tmp_path):
    result = CliRunner().invoke(main, ["demo", "--out", str(tmp_path), *arguments])
    assert result.exit_code == 2, result.output
    assert "Error" in result.output


@pytest.mark.usefixtures("namespaces")
def test_a_congestion_control_that_the_kernel_lacks_is_said_before_anything_is_built(tmp_path):
    ran = subprocess.run(
        [*COMMAND, "--tcp", "foo", "--out", tmp_path], capture_output=True, text=True, timeout=300, check=False
    )
    assert (ran.returncode, ran.stdout) == (2, "")
    assert ran.stderr.startswith(
        "error: this kernel has no TCP congestion control foo: as root, `modprobe tcp_foo`, or choose among "
    )


@pytest.mark.usefixtures("namespaces")
def test_a_short_demo_gives_table_picture_and_numbers(tmp_path):
    numbers = tmp_path / "numbers.json"
    arguments = ["--workers", "2", "--steps", "8", "--json", numbers, "--out", tmp_path]
    result = subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=540, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "step slowest" in result.stdout, "of seven timed steps there is no p99"
    assert "p99" not in result.stdout
    assert "2 replicas were bit-identical after each of the 32 steps" in result.stdout
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")
    runs = json.loads(numbers.read_text())["runs"]
    assert [(run["backend"], run["loss"], run["steps"]) for run in runs] == [
        ("gloo", 0.0, 8), ("gradwire", 0.0, 8), ("gloo", 0.01, 8), ("gradwire", 0.01, 8),
    ]  # fmt: skip
    assert all(0 < run["comm_ms_p50"] < run["step_ms_p50"] <= run["step_ms_max"] for run in runs)
    assert {run["step_ms_p99"] for run in runs} == {None}
    lost = [run["bytes_lost_share"] for run in runs]
    assert lost[0] == lost[2] == 0  # TCP never
    # That a network which loses nothing costs nothing is proven in virtual time (crates/gradwire-sim/tests/presets.rs):
    # here a machine that is busy elsewhere drops packets itself, and the bound of `auto` is all that is promised.
    assert lost[1] <= AUTO_BOUND
    assert 0 < runs[3]["bytes_lost_share"] < 0.1
    # The same batches and weights: only the gradients that were late make a difference.
    assert [run["val_loss"] for run in runs] == pytest.approx([runs[0]["val_loss"]] * 4, rel=1e-2)
    assert [run["steps_apart"] for run in runs] == [0] * 4
    assert runs[0]["val_loss"] < 5.5  # an untrained model needs ln 256 = 5.55


@pytest.mark.usefixtures("namespaces")
def test_numbers_are_written_without_matplotlib_into_a_folder_that_was_not_there(tmp_path, monkeypatch):
    (tmp_path / "sitecustomize.py").write_text("import sys; sys.modules['matplotlib'] = None")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    numbers = tmp_path / "missing" / "numbers.json"
    few = ["--backend", "gloo", "--loss", "0", "--workers", "2", "--steps", "8"]
    arguments = [*few, "--json", numbers, "--out", tmp_path]
    result = subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=540, check=False)
    assert (result.returncode, result.stderr) == (0, ""), result.stdout + result.stderr
    assert "no picture: matplotlib is not installed (pip install 'gradwire[demo]')" in result.stdout
    assert [run["steps"] for run in json.loads(numbers.read_text())["runs"]] == [8]


@pytest.mark.usefixtures("namespaces")
def test_replicas_may_differ_where_the_preset_may_lose_results(tmp_path):
    numbers = tmp_path / "numbers.json"
    chosen = ["--backend", "gradwire", "--preset", "mlt", "--loss", "0.05"]
    arguments = [*chosen, "--workers", "2", "--steps", "8", "--json", numbers, "--out", tmp_path]
    result = subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=540, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    (run,) = json.loads(numbers.read_text())["runs"]
    assert run["steps_apart"] > 0
    assert f"the replicas differed after {run['steps_apart']} of the 8 steps" in result.stdout
    assert "bit-identical" not in result.stdout


@pytest.mark.usefixtures("namespaces")
def test_a_worker_that_fails_is_named_with_the_end_of_its_log(tmp_path):
    (tmp_path / "train_gpt.py").write_text("")
    (tmp_path / "gpt.py").write_text("raise RuntimeError('this example is broken')")
    arguments = ["--backend", "gloo", "--workers", "2", "--steps", "8", "--out", tmp_path, "--examples", tmp_path]
    result = subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=300, check=False)
    assert result.returncode == 1, result.stdout + result.stderr
    assert "worker" in result.stdout
    assert "this example is broken" in result.stdout


@pytest.mark.usefixtures("namespaces")
@pytest.mark.parametrize("send", [os.kill, os.killpg], ids=["the process", "its group"])
def test_an_interrupt_ends_the_demo_and_all_its_workers(tmp_path, workers_of, send):
    arguments = ["--backend", "gloo", "--workers", "2", "--out", tmp_path]
    with subprocess.Popen([*COMMAND, *arguments], stdout=subprocess.PIPE, text=True, start_new_session=True) as demo:
        for line in demo.stdout:
            if line.startswith("starting"):
                break
        send(demo.pid, signal.SIGINT)
        assert demo.wait(300) == sandbox.EXIT_INTERRUPTED
    deadline = time.monotonic() + 120
    while workers_of(tmp_path) and time.monotonic() < deadline:
        os.sched_yield()
    assert workers_of(tmp_path) == []
