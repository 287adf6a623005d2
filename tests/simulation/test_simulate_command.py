"""`gradwire simulate` from outside: models from files, the real protocol on a modelled cluster, table, JSON and picture."""

import json
import struct
import subprocess
import sys

import pytest
import torch
from click.testing import CliRunner
from gradwire.cli import main, simulate
from gradwire.simulation.memory import least_bytes
from gradwire.simulation.plan import ClusterPlan, fill_buckets
from gradwire.simulation.tensors import Tensor, read_tensors

SIZES = {"embed.weight": [100, 50], "body.weight": [300, 100], "head.weight": [50, 100]}
WITHOUT_SERVERS = ["--workers", "6", "--hosts-per-leaf", "4", "--warm-up", "0", "--bucket-mb", "0.1"]
SMALL = [*WITHOUT_SERVERS, "--servers", "2"]


def run(*arguments):
    return CliRunner().invoke(main, ["simulate", *map(str, arguments)])


@pytest.fixture
def model(tmp_path):
    path = tmp_path / "sizes.json"
    path.write_text(json.dumps(SIZES))
    return path


def test_every_kind_of_file_names_the_same_tensors_and_leaves_out_what_has_no_gradient(tmp_path, model):
    expected = [Tensor("embed.weight", 5000), Tensor("body.weight", 30_000), Tensor("head.weight", 5000)]
    state = {name: torch.zeros(shape) for name, shape in SIZES.items()}
    extra = {"norm.running_mean": torch.zeros(7), "norm.num_batches_tracked": torch.tensor(3)}
    torch.save({"model": {**state, **extra}, "epoch": 4}, tmp_path / "model.pt")
    header = {name: {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]} for name, shape in SIZES.items()}
    ids = {"dtype": "I64", "shape": [3], "data_offsets": [0, 0]}
    text = json.dumps({"__metadata__": {}, **header, "ids": ids}).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(text)) + text)
    (tmp_path / "model.txt").write_text("\n".join(f"{name} {elems}" for name, elems in expected))
    for file in (model, tmp_path / "model.pt", tmp_path / "model.safetensors", tmp_path / "model.txt"):
        assert read_tensors(file) == expected, file


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.pt", b"no checkpoint"),
        ("a.txt", b"one two three"),
        ("a.txt", b"name \xff"),
        ("a.safetensors", b"\xff" * 16),
        ("a.safetensors", struct.pack("<Q", 9) + b'{"a":"b"}'),
        ("a.json", b"{}"),
        ("a.json", b"{"),
        ("a.json", b"[" * 100_000),
        ("a.json", b'{"a": "x"}'),
        ("a.json", b'{"a": [2, -1]}'),
        ("a.json", b'{"a": 1.5}'),
    ],
)
def test_what_is_no_model_is_refused_with_a_reason(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    result = run(tmp_path / name)
    assert (result.exit_code, name in result.output) == (2, True), result.output


def test_a_model_or_a_size_is_needed_and_not_both(model):
    assert "one of the two" in run().output
    assert "one of the two" in run(model, "--bytes", "400").output


def test_buckets_are_filled_from_the_last_layer_on_and_hold_every_tensor_once():
    tensors = [Tensor(str(layer), 1000) for layer in range(10)]
    buckets = fill_buckets(tensors, 12_000, first_bytes=4000, classes=2, backward_us=100.0)
    names = [tensor.name for bucket in buckets for tensor in bucket.tensors]
    assert names == [str(layer) for layer in reversed(range(10))]
    assert [bucket.elems for bucket in buckets] == [1000, 3000, 3000, 3000]
    assert [bucket.ready_us for bucket in buckets] == pytest.approx([10, 40, 70, 100])
    assert (buckets[0].layer_class, buckets[-1].layer_class) == (1, 0)


def test_a_step_of_a_model_gives_table_json_and_picture(tmp_path, model):
    presets, files = ("--preset", "auto", "--preset", "mlt"), (tmp_path / "out.json", tmp_path / "step.png")
    result = run(model, *SMALL, *presets, "--json", files[0], "--picture", files[1])
    assert result.exit_code == 0, result.output
    assert "auto, parameter_server, 8 hosts" in result.output
    auto, mlt = json.loads(files[0].read_text())
    # Two buckets, pushed by six workers to two servers each.
    assert auto["pushes"]["count"] == auto["pulls"]["count"] == 6 * 2 * 2
    sizes = {layer["name"]: layer["bytes"] for layer in mlt["layers"]}
    assert sizes == {name: 4 * shape[0] * shape[1] for name, shape in SIZES.items()}
    # Each server takes in half of 160 KB from six workers at 12.5 KB for each microsecond, and sends as much.
    assert auto["step_us"] > 2 * 6 * 80 / 12.5
    assert auto["lost_share"] == 0
    assert mlt["lost_share"] <= 0.1
    assert sum(layer["elems"] for layer in mlt["layers"]) == mlt["important"]["elems"] + mlt["unimportant"]["elems"]
    assert files[1].read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("name", ["step.xyz", "step.tar.gz"])
def test_a_picture_of_no_known_format_is_refused_before_the_simulation(tmp_path, monkeypatch, name):
    monkeypatch.setattr(simulate, "simulate", lambda _: pytest.fail("it would be simulated"))
    result = run("--bytes", 4000, "--picture", tmp_path / name)
    assert (result.exit_code, type(result.exception)) == (2, SystemExit)
    assert f"no format '{name.rpartition('.')[2]}': there are " in result.output
    assert not list(tmp_path.iterdir())


def test_a_picture_without_a_suffix_is_a_png(tmp_path):
    result = run("--bytes", 4000, *SMALL, "--picture", tmp_path / "step")
    assert result.exit_code == 0, result.output
    assert (tmp_path / "step.png").read_bytes().startswith(b"\x89PNG")


def test_equal_seeds_give_equal_steps_and_a_slower_network_slower_ones(model):
    def step(*arguments):
        result = run(model, *SMALL, "--json", "-", *arguments)
        assert result.exit_code == 0, result.output
        (found,) = json.loads(result.output)
        del found["core_s"]
        return found

    wide = step()
    assert wide == step()
    assert step("--oversubscription", "16")["step_us"] > wide["step_us"]
    # A tenth of the rate: each server takes in 80 KB of six workers, and sends as much, at 1.25 KB for each microsecond.
    assert step("--rate", "10")["step_us"] > max(2 * 6 * 80 / 1.25, wide["step_us"])


@pytest.mark.parametrize("algorithm", ["transpose", "ring"])
def test_schedules_without_dedicated_servers_run_too(model, algorithm):
    named = run(model, *SMALL, "--algorithm", algorithm)
    assert (named.exit_code, f"--servers 2: the schedule {algorithm} has no servers" in named.output) == (2, True)
    result = run(model, *WITHOUT_SERVERS, "--algorithm", algorithm)
    assert result.exit_code == 0, result.output
    assert f"auto, {algorithm}, 6 hosts" in result.output


def test_packets_that_are_spread_one_by_one_take_other_times_than_flows(model, tmp_path):
    def times(spread):
        file = tmp_path / f"{spread}.json"
        assert run(model, *SMALL, "--oversubscription", 2, "--spread", spread, "--json", file).exit_code == 0
        return json.loads(file.read_text())[0]["flows"]

    assert times("flow") != times("packet")


LARGE = ["--workers", "4000", "--servers", "4000", "--hosts-per-leaf", "1", "--spines", "4000"]
EIGHT_GB = 8 << 30


@pytest.mark.parametrize(
    "arguments",
    [
        ["--bytes", "400000000000000000"],
        ["--bytes", "4000", "--spines", "1000000000000"],
        ["--bytes", "10000000000000"],
        ["--bytes", "4000", *LARGE],
        ["sizes.txt"],
    ],
    ids=lambda words: " ".join(words[:4]),
)
def test_what_no_memory_holds_is_wrong_usage_and_no_abort(tmp_path, arguments):
    """In a process of its own: what it is about would end this one."""
    (tmp_path / "sizes.txt").write_text("a 99999999999999999\n")
    command = [sys.executable, "-c", "from gradwire.cli import main; main()", "simulate", *arguments]
    limited = ["sh", "-c", f'ulimit -v {EIGHT_GB >> 10} && exec "$@"', "sh"]
    done = subprocess.run([*limited, *command], capture_output=True, text=True, check=False, cwd=tmp_path, timeout=120)
    assert (done.returncode, "Error: " in done.stderr, "backtrace" in done.stderr) == (2, True, False), done.stderr


def test_a_plan_of_what_users_simulate_is_not_refused_for_its_memory():
    buckets = fill_buckets([Tensor("all", 12_500_000_000)], 25 << 20)
    plan = ClusterPlan(workers=1000, servers=500, buckets=buckets)
    assert 50e9 < least_bytes(plan) < 51e9
    assert least_bytes(ClusterPlan()) < 10e6
