"""What training scripts build on DDP, with gradwire: every result as with gloo."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import gradwire.torch
import pytest
import torch
import torch.distributed as dist
from gradwire.errors import UnsupportedError, WaitTimeoutError
from gradwire.torch import _compat
from gradwire.torch._drift import DriftMeter
from gradwire.torch._ops import Collectives
from gradwire.torch._tolerant import link_of
from rank import RANK, WORLD_SIZE
from torch import nn
from torch._C import _distributed_c10d as c10d
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

GLOO = dist.new_group(backend="gloo")
WORLD = dist.group.WORLD


class Net(nn.Module):
    """Two layers with a batch norm between them."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.norm, self.last = nn.Linear(16, 32), nn.BatchNorm1d(32), nn.Linear(32, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.norm(self.first(x))))


def batch(step: int) -> torch.Tensor:
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(step * 10 + RANK))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 3) -> list[torch.Tensor]:
    for step in range(steps):
        optimizer.zero_grad()
        model(batch(step)).square().mean().backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


def ddp(group: dist.ProcessGroup, **options: Any) -> DistributedDataParallel:
    return DistributedDataParallel(Net(), process_group=group, **options)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def as_with_gloo(run: Callable[[dist.ProcessGroup], list[torch.Tensor]]) -> None:
    """Two ranks add in either order to the same bits; more of them round differently."""
    for ours, reference in zip(run(WORLD), run(GLOO), strict=True):
        torch.testing.assert_close(ours, reference)


class Writer:
    """Keeps what a SummaryWriter would write."""

    def __init__(self) -> None:
        self.values: dict[str, list[tuple[int, float]]] = {}

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        self.values.setdefault(tag, []).append((global_step, scalar_value))


def check_each_step_but_the_last_is_written_as_scalars() -> None:
    writer = Writer()
    model = DistributedDataParallel(Net())
    state = gradwire.torch.tolerate_loss(model, tensorboard=writer)
    train(model, torch.optim.SGD(model.parameters(), lr=0.1), steps=4)
    assert {tag.split("/")[0] for tag in writer.values} == {"gradwire"}
    for tag in ("lost_share", "filled_share", "sent_bytes", "communication_seconds"):
        assert [step for step, _ in writer.values[f"gradwire/{tag}"]] == [0, 1, 2]
    sent = [value for _, value in writer.values["gradwire/sent_bytes"]]
    assert sent == [record.bytes_sent for record in state.steps[:3]]


class FullDisk(Writer):
    """Takes the scalars of one step and no more."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int) -> None:
        if global_step > 0:
            raise OSError("the disk is full")
        super().add_scalar(tag, scalar_value, global_step)


def check_training_goes_on_without_a_writer_that_fails() -> None:
    writer = FullDisk()
    warnings: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warnings.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("gradwire").addHandler(handler)

    def run(group: dist.ProcessGroup) -> list[torch.Tensor]:
        model = ddp(group)
        if group is WORLD:
            gradwire.torch.tolerate_loss(model, tensorboard=writer if RANK == 0 else None, preset="reliable")
        return train(model, sgd(model), steps=4)

    as_with_gloo(run)
    logging.getLogger("gradwire").removeHandler(handler)
    assert len(writer.values) == (7 if RANK == 0 else 0)
    assert sum("the disk is full" in text for text in warnings) == (RANK == 0), "once, where it fails"


def check_bucket_views_static_graphs_and_unused_parameters() -> None:
    for options in (
        {"gradient_as_bucket_view": True},
        {"static_graph": True},
        {"find_unused_parameters": True},
        {"gradient_as_bucket_view": True, "static_graph": True, "bucket_cap_mb": 0.001},
    ):

        def run(group: dist.ProcessGroup, options: dict[str, Any] = options) -> list[torch.Tensor]:
            model = ddp(group, **options)
            return train(model, sgd(model))

        as_with_gloo(run)


def check_gradients_accumulate_without_communication() -> None:
    def run(group: dist.ProcessGroup) -> list[torch.Tensor]:
        model = ddp(group)
        with model.no_sync():
            model(batch(0)).sum().backward()
        model(batch(1)).sum().backward()
        return [p.grad for p in model.parameters()]

    as_with_gloo(run)


def check_ranks_with_more_batches_than_others_join() -> None:
    """By all ranks or by those that still have one: these DDP counts with a work that only C++ keeps."""
    for by_all in (True, False):

        def run(group: dist.ProcessGroup, by_all: bool = by_all) -> list[torch.Tensor]:
            model = ddp(group)
            optimizer = sgd(model)
            with Join([model], divide_by_initial_world_size=by_all):
                for step in range(2 + RANK):
                    optimizer.zero_grad()
                    model(batch(step)).square().mean().backward()
                    optimizer.step()
            return [p.detach().clone() for p in model.parameters()]

        as_with_gloo(run)


def check_optimizer_states_are_sharded() -> None:
    def run(group: dist.ProcessGroup) -> list[torch.Tensor]:
        model = ddp(group)
        optimizer = ZeroRedundancyOptimizer(
            model.parameters(), optimizer_class=torch.optim.Adam, lr=0.01, process_group=group
        )
        parameters = train(model, optimizer)
        optimizer.consolidate_state_dict(to=0)
        return parameters

    as_with_gloo(run)


def check_autocast_and_a_gradient_scaler() -> None:
    for dtype in (torch.bfloat16, torch.float16):

        def run(group: dist.ProcessGroup, dtype: torch.dtype = dtype) -> list[torch.Tensor]:
            model = ddp(group)
            optimizer, scaler = sgd(model), torch.amp.GradScaler("cpu", init_scale=64.0)
            for step in range(3):
                optimizer.zero_grad()
                with torch.autocast("cpu", dtype=dtype):
                    loss = model(batch(step)).float().square().mean()
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
            return [p.detach().clone() for p in model.parameters()]

        as_with_gloo(run)


def check_a_compression_hook_of_torch() -> None:  # PowerSGD nests collectives: see bodies/nested.py
    def compressed(group: dist.ProcessGroup) -> list[torch.Tensor]:
        model = ddp(group)
        model.register_comm_hook(group, default_hooks.bf16_compress_hook)
        return train(model, sgd(model))

    as_with_gloo(compressed)


def check_a_work_tells_the_truth_about_itself() -> None:
    tensor = torch.full((4,), float(RANK + 1))
    work = dist.all_reduce(tensor, async_op=True)
    while not work.is_completed():
        pass  # a poll of a work that never says so would run into the launch's time limit
    assert work.is_success()
    assert work.exception() is None
    assert torch.equal(work.result()[0], tensor)
    assert torch.equal(tensor, torch.full((4,), WORLD_SIZE * (WORLD_SIZE + 1) / 2))
    late = dist.irecv(torch.zeros(1), (RANK + 1) % WORLD_SIZE, tag=5)
    with pytest.raises(WaitTimeoutError):
        late.wait(timedelta(milliseconds=1))
    dist.barrier(GLOO)
    dist.send(torch.ones(1), (RANK - 1) % WORLD_SIZE, tag=5)
    late.wait()
    assert late.is_completed()


def check_collectives_are_in_the_profile_with_group_and_bytes() -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profile:
        dist.all_reduce(torch.ones(25))
        dist.all_reduce(torch.ones(25), async_op=True).wait()
    named = [event for event in profile.events() if event.name == "gradwire:all_reduce"]
    calls = [event for event in profile.events() if event.name.startswith("gradwire.call ")]
    assert [event.input_shapes for event in named] == [[[25]], [[25]]]
    assert all(event.is_async for event in named)
    assert len(calls) == 2
    said = {
        "Collective name": "all_reduce",
        "bytes": 100,
        "dtype": "float32",
        "Process Group Name": WORLD.group_name,
        "Process Group Ranks": str(list(range(WORLD_SIZE))),
        "Group size": WORLD_SIZE,
    }
    assert all(said.items() <= event.kwinputs.items() for event in calls)


def check_a_profile_without_shapes_says_bytes_and_group_too() -> None:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        dist.all_reduce(torch.ones(25))
    names = [event.name for event in profile.events() if event.name.startswith("gradwire.call")]
    assert names == [f"gradwire.call all_reduce bytes=100 dtype=float32 group={WORLD.group_name} ranks={WORLD_SIZE}"]


def check_every_collective_is_in_the_profile_by_its_name_with_what_goes_in_and_comes_out() -> None:
    own, rows = torch.ones(8), [torch.ones(8) for _ in range(WORLD_SIZE)]
    table = torch.ones(8 * WORLD_SIZE)
    at_root = rows if RANK == 0 else None
    row, all_rows = 8, 8 * WORLD_SIZE
    calls: list[tuple[str, int, int, Callable[[], object]]] = [
        ("all_reduce", row, row, lambda: gradwire.torch.all_reduce(own)),
        ("reduce_scatter", all_rows, row, lambda: gradwire.torch.reduce_scatter(own, table)),
        ("all_gather", row, all_rows, lambda: dist.all_gather(rows, own)),
        ("all_gather_into_tensor", row, all_rows, lambda: dist.all_gather_into_tensor(table, own)),
        ("reduce_scatter", all_rows, row, lambda: dist.reduce_scatter(own, rows)),
        ("reduce_scatter_tensor", all_rows, row, lambda: dist.reduce_scatter_tensor(own, table)),
        ("all_to_all", all_rows, all_rows, lambda: dist.all_to_all(rows, [row + 1 for row in rows])),
        ("all_to_all", all_rows, all_rows, lambda: dist.all_to_all_single(table, table + 1)),
        ("barrier", 0, 0, dist.barrier),
        ("broadcast", row, row, lambda: dist.broadcast(own, 0)),
        ("reduce", row, row, lambda: dist.reduce(own, 0)),
        ("gather", row, 0 if RANK else all_rows, lambda: dist.gather(own, at_root, 0)),
        ("scatter", 0 if RANK else all_rows, row, lambda: dist.scatter(own, at_root, 0)),
        ("recv" if RANK else "send", row, row, lambda: (dist.recv if RANK else dist.send)(own, 1 - RANK)),
    ]
    if _compat.backend_class() is not None:  # before 2.14 torch allows it to gloo alone
        calls.append(("monitored_barrier", 0, 0, dist.monitored_barrier))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as profile:
        for *_, call in calls:
            call()
    names = [event.name for event in profile.events() if event.name.startswith("gradwire:")]
    assert names == [f"gradwire:{name}" for name, *_ in calls]
    said = [event.kwinputs for event in profile.events() if event.name.startswith("gradwire.call ")]
    assert [(each["Collective name"], each["In msg nelems"], each["Out msg nelems"]) for each in said] == [
        (name, given, got) for name, given, got, _ in calls
    ]
    assert [each["bytes"] for each in said] == [4 * given for _, given, *_ in calls]
    assert {each["Process Group Name"] for each in said} == {WORLD.group_name}


def check_torchs_flight_recorder_takes_no_call_that_has_ended_for_hung() -> None:
    if not hasattr(dist.distributed_c10d._World, "pg_flight_recorder_hooks"):
        return  # before 2.15 torch records the calls of its own backends
    group = dist.new_group()
    dist.all_reduce(torch.ones(4), group=group)
    dist.all_gather([torch.zeros(4) for _ in range(WORLD_SIZE)], torch.ones(4), group=group)
    dist.barrier(group)
    record = json.loads(c10d._dump_fr_trace_json(True, False, backend="gradwire"))
    entries = [entry for entry in record["entries"] if entry["process_group"][0] == group.group_name]
    assert len(entries) == 3, record
    assert all(entry["retired"] for entry in entries), entries
    dist.destroy_process_group(group)


def check_collectives_are_ranges_of_nvtx_where_cuda_is_in_use() -> None:
    begun: list[str] = []
    ended: list[int] = []

    def start(message: str) -> int:
        begun.append(message)
        return len(begun) - 1

    dist.all_reduce(torch.ones(25))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "is_initialized", lambda: True)
        patch.setattr(torch.cuda.nvtx, "range_start", start)
        patch.setattr(torch.cuda.nvtx, "range_end", ended.append)
        work = dist.all_reduce(torch.ones(25), async_op=True)
        assert (begun, ended) == (
            [f"gradwire:all_reduce bytes=100 dtype=float32 group={WORLD.group_name} ranks={WORLD_SIZE}"], []
        )  # fmt: skip
        work.wait()
        work.wait()
        assert ended == [0], "once"
        gradwire.torch.all_reduce(torch.ones(4, dtype=torch.bfloat16), async_op=True).get_future().wait()
        dist.barrier()
    assert [message.split()[:2] for message in begun[1:]] == [
        ["gradwire:all_reduce", "bytes=8"], ["gradwire:barrier", "bytes=0"]
    ]  # fmt: skip
    assert sorted(ended) == [0, 1, 2]


def check_a_compiled_model_trains() -> None:
    def run(group: dist.ProcessGroup) -> list[torch.Tensor]:
        model = ddp(group)
        return train(torch.compile(model, backend="aot_eager"), sgd(model))

    as_with_gloo(run)


def check_what_the_engine_reads_is_host_memory_whatever_torchs_default_device_is() -> None:
    matrix, values, weights = torch.ones(8, 4), torch.full((8, 4), float(RANK)), torch.ones(100)
    sparse = torch.sparse_coo_tensor([[RANK]], [1.0], (4,))
    net = Net()
    with torch.no_grad():
        net.first.bias[0] = RANK
    with torch.device("meta"):
        dist.all_reduce(matrix.t())
        dist.all_reduce(sparse)
        gradwire.torch.all_reduce(values.t(), preset="reliable")
        gradwire.torch.all_reduce(weights, preset="reliable", important=[True, False])
        assert DriftMeter(net, WORLD).check().ranks == tuple(range(1, WORLD_SIZE))
        if _compat.backend_class() is not None:  # before 2.14 torch allows it to gloo alone
            dist.monitored_barrier()
    assert torch.equal(matrix, torch.full((8, 4), float(WORLD_SIZE)))
    assert torch.equal(sparse.to_dense(), torch.tensor([1.0] * WORLD_SIZE + [0.0] * (4 - WORLD_SIZE)))
    assert torch.equal(values, torch.full((8, 4), (WORLD_SIZE - 1) / 2))
    assert torch.equal(weights, torch.ones(100))


def check_a_group_may_have_another_backend_for_each_device() -> None:
    if _compat.backend_class() is None:
        return  # before torch 2.14 a group of Python's takes all devices
    total = torch.full((4,), WORLD_SIZE * (WORLD_SIZE + 1) / 2)
    for backend, ours, theirs in (("cpu:gradwire,cuda:gloo", "cpu", "cuda"), ("cpu:gloo,cuda:gradwire", "cuda", "cpu")):
        group = dist.new_group(backend=backend)
        adapter = group._get_backend(torch.device(ours))
        assert isinstance(adapter, Collectives)
        assert not isinstance(group._get_backend(torch.device(theirs)), Collectives)
        before = adapter.link.calls
        tensor = torch.full((4,), float(RANK + 1))
        dist.all_reduce(tensor, group=group)
        assert torch.equal(tensor, total)
        assert adapter.link.calls == before + (ours == "cpu")
        dist.destroy_process_group(group)


def check_where_a_group_is_all_gradwires_the_other_backends_tensors_are_refused() -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_compat, "backend_class", lambda: None)  # as before torch 2.14
        group = dist.new_group(backend="cpu:gloo,cuda:gradwire")
        both = dist.new_group(backend="gradwire")
    stood_in: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        link = link_of(group)
        submit = link._submit
        patch.setattr(link, "_submit", lambda call, timeout: stood_in.append(call.kind) or submit(call, timeout))
        for receive_from in (1 - RANK, None):
            with pytest.raises(UnsupportedError, match="gloo"):
                dist.recv(torch.ones(4), receive_from, group=group)
        assert not stood_in, "no other rank has a call in this place"
        with pytest.raises(UnsupportedError, match="gloo"):
            dist.all_reduce(torch.ones(4), group=group)
        assert stood_in == ["barrier"]
    tensor = torch.ones(4)
    dist.all_reduce(tensor, group=both)
    assert torch.equal(tensor, torch.full((4,), float(WORLD_SIZE)))
    dist.destroy_process_group(group)
    dist.destroy_process_group(both)
