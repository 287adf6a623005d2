"""Layer sizes from what training scripts save: the model's parameters and nothing else, in the order of `named_parameters`."""

import collections
import itertools
import json
import struct
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner
from gradwire.cli import main
from gradwire.simulation.tensors import read_tensors
from gradwire.switch import SwitchError
from gradwire.switch.layers import class_shares, read_layers
from gradwire.torch._tags import LayerPriority
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

import train_gpt
from gpt import Corpus, ModelSize

SIZE = ModelSize(layers=2, width=16, heads=2, context=16)


class Attention(nn.Module):
    """With the causal mask as nanoGPT has it: a buffer of 32-bit floats that is called `bias`."""

    def __init__(self, width, context):
        super().__init__()
        self.mix = nn.Linear(width, 3 * width)
        self.register_buffer("bias", torch.tril(torch.ones(context, context)).view(1, 1, context, context))


class Model(nn.Module):
    """Every kind of buffer that is no parameter, a module without parameters, and a head that shares the embedding."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))
        self.embed = nn.Embedding(32, 8)
        self.blocks = nn.ModuleList(
            nn.ModuleDict({"attn": Attention(8, 16), "norm": nn.BatchNorm1d(8)}) for _ in range(2)
        )
        self.rotary = nn.Module()
        self.rotary.register_buffer("inv_freq", torch.ones(4))
        self.register_buffer("position_ids", torch.arange(16))
        self.head = nn.Linear(8, 32, bias=False)
        self.head.weight = self.embed.weight


def sizes_of(model):
    """Bytes by layer, as `LayerPriority` tells layers."""
    sizes = {}
    for name, parameter in model.named_parameters():
        layer = name.rpartition(".")[0]
        sizes[layer] = sizes.get(layer, 0) + parameter.numel() * parameter.element_size()
    return list(sizes.values())


def trained():
    """A model and its Adam after a step, so that the optimizer's state has moments."""
    model = Model()
    optimizer = torch.optim.Adam(model.parameters())
    sum(parameter.sum() for parameter in model.parameters()).backward()
    optimizer.step()
    return model, optimizer


@pytest.fixture(scope="module")
def group(tmp_path_factory):
    """A group of one."""
    store = dist.FileStore(str(tmp_path_factory.mktemp("group") / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def example(group):  # noqa: ARG001  it trains in it
    """The trainer of `examples/train_gpt.py` after a step."""
    settings = train_gpt.Settings(backend="gloo", steps=1, batch=2, warmup_steps=1, validation_batches=1, size=SIZE)
    trainer = train_gpt.Trainer(settings, Corpus.of_standard_library())
    trainer.step()
    return trainer


@pytest.mark.parametrize("with_residuals", [False, True])
def test_the_training_examples_own_checkpoint_gives_its_models_layers(example, tmp_path, with_residuals):
    model = example.model.module
    owed = {name: torch.zeros(parameter.numel()) for name, parameter in model.named_parameters()}
    hook = SimpleNamespace(state_dict=lambda: {"rank 0 of 1": owed})
    example.hook_state = hook if with_residuals else None
    train_gpt.save(example, tmp_path)
    (checkpoint,) = tmp_path.glob("step-*/rank-0.pt")
    assert set(torch.load(checkpoint)) == {"step", "settings", "model", "optimizer", "random", "hook"}
    assert read_layers(str(checkpoint)) == sizes_of(model)


@pytest.mark.parametrize("key", ["model", "state_dict", "model_state_dict", "module", "net"])
def test_the_order_of_a_checkpoint_does_not_matter(tmp_path, key):
    model, optimizer = trained()
    parts = {
        "epoch": 3,
        "loss": torch.tensor(2.5),
        "random": torch.get_rng_state(),
        "optimizer": optimizer.state_dict(),
    }
    for number, content in enumerate([{**parts, key: model.state_dict()}, {key: model.state_dict(), **parts}]):
        path = tmp_path / f"{number}.pt"
        torch.save(content, path)
        assert read_layers(str(path)) == sizes_of(model)


def test_a_key_that_holds_no_parameters_is_passed_over_and_one_within_another_is_found(tmp_path):
    model, optimizer = trained()
    path = tmp_path / "checkpoint.pt"
    for content in (
        {"model": {"width": 8}, "optimizer": optimizer.state_dict(), "net": model.state_dict()},
        {"optimizer": optimizer.state_dict(), "model": {"step": 3, "state_dict": model.state_dict()}},
    ):
        torch.save(content, path)
        assert read_layers(str(path)) == sizes_of(model)


@pytest.mark.parametrize("zipped", [True, False])
def test_buffers_are_no_layers_and_a_shared_parameter_counts_once(tmp_path, zipped):
    model = Model()
    state = model.state_dict()
    assert len({name.rpartition(".")[0] for name in state}) > len(sizes_of(model)), "nothing here that is no parameter"
    torch.save({**state, "blocks.0._extra_state": None}, tmp_path / "bare.pt", _use_new_zipfile_serialization=zipped)
    assert read_layers(str(tmp_path / "bare.pt")) == sizes_of(model)


def test_the_bias_of_a_layer_that_is_called_attn_is_a_parameter(tmp_path):
    model = nn.ModuleDict({"attn": nn.Linear(8, 8), "conv": nn.Conv2d(1, 1, 1)})
    torch.save(model.state_dict(), tmp_path / "bare.pt")
    assert read_layers(str(tmp_path / "bare.pt")) == sizes_of(model)


@pytest.mark.usefixtures("group")
@pytest.mark.parametrize("classes", [1, 4, 7])
@pytest.mark.parametrize("bucket_mb", [None, 25, 3, 1])
def test_the_shares_of_the_classes_are_those_that_a_ddp_job_sends(bucket_mb, classes):
    """By the transport's own rule, with the buckets that DDP has after its first step."""
    torch.manual_seed(1)
    widths = [16, 512, 300, 1400, 1400, 8, 2000, 1500, 900, 900, 100, 1000, 1000, 10]
    model = nn.Sequential(*(nn.Linear(few, many) for few, many in itertools.pairwise(widths)))
    ddp = nn.parallel.DistributedDataParallel(model, **({"bucket_cap_mb": bucket_mb} if bucket_mb else {}))
    priority, sent = LayerPriority(model, classes), collections.Counter()

    def hook(_state, bucket):
        sent[priority(bucket)] += bucket.buffer().nbytes
        done = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done

    ddp.register_comm_hook(None, hook)
    for _ in range(2):
        sent.clear()
        ddp(torch.ones(2, widths[0])).sum().backward()
    sizes = sizes_of(model)
    assert sum(sent.values()) == sum(sizes)
    expected = [sent[number] / sum(sizes) for number in range(classes)]
    assert class_shares(sizes, classes, bucket_mb) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ({"epoch": 3, "random": torch.get_rng_state(), "optimizer": trained()[1].state_dict()},
         ["epoch (int)", "random (Tensor)", "optimizer (dict)"]),
        ({"random": torch.get_rng_state()}, ["random (Tensor)"]),
        ({"generator": Model().state_dict(), "discriminator": Model().state_dict()}, ["generator (", "discriminator ("]),
        ({"model": {"width": 8}}, ["model (dict)"]),
        ({0: torch.ones(3)}, ["0 (Tensor)"]),
        ({str(number): number for number in range(20)}, ["7 (int)", "12 more"]),
        (torch.ones(3), ["a Tensor"]),
        ({}, ["nothing"]),
    ],
)  # fmt: skip
def test_without_a_models_state_the_error_names_what_there_is_in_one_line(tmp_path, content, named):
    path = tmp_path / "checkpoint.pt"
    torch.save(content, path)
    with pytest.raises(SwitchError, match="no parameters of a model") as caught:
        read_layers(str(path))
    message = str(caught.value)
    assert "\n" not in message
    for part in [*named, str(path), "model_state_dict"]:
        assert part in message
    result = CliRunner().invoke(
        main, ["switch", "--os", "tc", "--rate", "1000", "--buffer", "256", "--layers", str(path)]
    )
    assert result.exit_code == 2


@pytest.mark.parametrize(
    ("content", "reason"),
    [("[1e400, 3]", "whole numbers"), ("[NaN, 3]", "whole numbers"), ("[" * 100_000, "nested too deeply")],
)
def test_numbers_without_end_and_nesting_without_end_are_one_line(tmp_path, content, reason):
    path = tmp_path / "sizes.json"
    path.write_text(content)
    result = CliRunner().invoke(
        main, ["switch", "--os", "tc", "--rate", "1000", "--buffer", "256", "--layers", str(path)]
    )
    assert (result.exit_code, result.stderr.count("Error:"), reason in result.stderr) == (2, 1, True), result.exception


def test_what_cannot_be_read_is_the_systems_own_error(tmp_path):
    result = CliRunner().invoke(
        main, ["switch", "--os", "tc", "--rate", "1", "--buffer", "256", "--layers", str(tmp_path)]
    )
    assert result.exit_code == 2, result.exception
    assert result.stderr.count("Error:") == 1
    assert "Is a directory" in result.stderr
    assert "checkpoint" not in result.stderr, "it was never read"


def test_the_simulator_reads_the_same_parameters_from_every_kind_of_file(tmp_path):
    model, optimizer = trained()
    shapes = {name: list(value.shape) for name, value in model.state_dict().items() if value.is_floating_point()}
    del shapes["head.weight"]  # safetensors and lists name shared memory once
    torch.save({"optimizer": optimizer.state_dict(), "model": model.state_dict()}, tmp_path / "model.pt")
    (tmp_path / "model.json").write_text(json.dumps(shapes))
    header = json.dumps(
        {name: {"dtype": "F32", "shape": shape, "data_offsets": [0, 0]} for name, shape in shapes.items()}
    )
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header.encode())
    expected = [(name, parameter.numel()) for name, parameter in model.named_parameters()]
    for file in ("model.pt", "model.json", "model.safetensors"):
        assert read_tensors(tmp_path / file) == expected, file
