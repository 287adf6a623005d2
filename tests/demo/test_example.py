"""The training example's parts that do not need a network: data, checkpoints, the stop watch."""

import gc
import os
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from gradwire.lab.crew import THREADS
from gradwire.lab.nursery import Nursery

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))

import train_gpt
from comm_meter import CommMeter
from gpt import Corpus, ModelSize, batch_at

SIZE = ModelSize(layers=1, width=16, heads=2, context=16)
SETTINGS = train_gpt.Settings(backend="gloo", steps=8, batch=2, warmup_steps=2, validation_batches=2, size=SIZE)


@pytest.fixture(scope="module")
def corpus():
    return Corpus.of_standard_library()


@pytest.fixture(scope="module", autouse=True)
def _one_rank(tmp_path_factory):
    store = dist.FileStore(str(tmp_path_factory.mktemp("store") / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()
    gc.collect()  # models have reference cycles, and their groups threads


def test_the_corpus_is_the_same_each_time_and_its_parts_are_real(corpus):
    again = Corpus.of_standard_library()
    assert torch.equal(corpus.train, again.train)
    assert torch.equal(corpus.validation, again.validation)
    assert b"import" in bytes(corpus.train.numpy()[:100_000])
    assert 0.02 < len(corpus.validation) / len(corpus.train) < 0.4


def test_a_batch_depends_on_its_key_and_on_nothing_else(corpus):
    torch.manual_seed(1)
    first, _ = batch_at(corpus.train, SIZE, 4, 1, 2, 3)
    torch.manual_seed(2)
    same, _ = batch_at(corpus.train, SIZE, 4, 1, 2, 3)
    other_rank, _ = batch_at(corpus.train, SIZE, 4, 1, 2, 4)
    assert torch.equal(first, same)
    assert not torch.equal(first, other_rank)


def test_targets_are_the_inputs_moved_by_one_byte(corpus):
    inputs, targets = batch_at(corpus.train, SIZE, 2, 0)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])


RESUMES = """
import os
import sys
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
import torch.distributed as dist
sys.path.insert(0, sys.argv[1])
import train_gpt
store, rank = dist.FileStore(sys.argv[2] + "/store", 2), int(sys.argv[3])
dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
found = []
train_gpt.resume(SimpleNamespace(rank=rank, group=None, load_state_dict=found.append), Path(sys.argv[2], f"host{rank}"))
print(found)
dist.destroy_process_group()
"""


def test_hosts_with_folders_of_their_own_go_on_from_the_step_that_rank_0_names(tmp_path):
    (tmp_path / "resumes.py").write_text(RESUMES)
    for rank in range(2):
        for step in (4, 8):
            part = tmp_path / f"host{rank}" / f"step-{step:06d}" / f"rank-{rank}.pt"
            part.parent.mkdir(parents=True)
            torch.save({"step": step}, part)
    (tmp_path / "host0" / "latest").write_text("step-000004")  # the one of step 8 was not complete
    environ = {**os.environ, "GLOO_SOCKET_IFNAME": "lo"}
    with Nursery(["torch", "torch.distributed"], THREADS) as nursery:
        command = [sys.executable, str(tmp_path / "resumes.py"), str(Path(train_gpt.__file__).parent), str(tmp_path)]
        with (tmp_path / "said").open("w+") as said:
            ranks = [nursery.start([*command, str(rank)], env=environ, stdout=said) for rank in range(2)]
            statuses = [rank.wait(120) for rank in ranks]
            said.seek(0)
            assert (statuses, said.read()) == ([0, 0], "[{'step': 4}]\n" * 2)


def test_a_resumed_run_is_the_uninterrupted_one_bit_by_bit(corpus, tmp_path):
    whole = train_gpt.Trainer(SETTINGS, corpus)
    for _ in range(4):
        whole.step()
    train_gpt.save(whole, tmp_path)
    resumed = train_gpt.Trainer(SETTINGS, corpus)
    train_gpt.resume(resumed, tmp_path)
    assert resumed.step_index == 4
    for _ in range(4):
        assert whole.step().loss == resumed.step().loss
    for ours, theirs in zip(whole.model.parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


def test_an_interrupted_save_leaves_the_older_checkpoint_in_force(corpus, tmp_path):
    trainer = train_gpt.Trainer(SETTINGS, corpus)
    trainer.step()
    train_gpt.save(trainer, tmp_path)
    (tmp_path / "step-000099").mkdir()  # a folder that no rank completed
    resumed = train_gpt.Trainer(SETTINGS, corpus)
    train_gpt.resume(resumed, tmp_path)
    assert resumed.step_index == 1


def test_a_checkpoint_of_another_model_is_refused(corpus, tmp_path):
    trainer = train_gpt.Trainer(SETTINGS, corpus)
    train_gpt.save(trainer, tmp_path)
    other = train_gpt.Settings(backend="gloo", size=ModelSize(1, 32, 2, 16))
    with pytest.raises(ValueError, match="checkpoint of a model"):
        train_gpt.resume(train_gpt.Trainer(other, corpus), tmp_path)


def test_training_learns(corpus):
    trainer = train_gpt.Trainer(train_gpt.Settings(backend="gloo", steps=30, batch=8, size=SIZE), corpus)
    before = trainer.validation_loss()
    for _ in range(30):
        trainer.step()
    assert trainer.validation_loss() < before - 0.3


def test_validation_changes_nothing(corpus):
    trainer = train_gpt.Trainer(SETTINGS, corpus)
    assert trainer.validation_loss() == trainer.validation_loss()
    assert trainer.model.training


def test_communication_is_part_of_the_step_and_blocking_is_part_of_communication(corpus):
    record = train_gpt.Trainer(SETTINGS, corpus).step()
    assert 0 < record.blocked_ms <= record.comm_ms <= record.step_ms


def test_a_meter_that_saw_no_bucket_says_how_to_use_it():
    with pytest.raises(RuntimeError, match="call watch"):
        CommMeter().backward_returned()
