"""Tensors of a device on their way to the engine and back, over streams that do nothing before they have to.

The order of events is tested here; `tests/gpu` has the same with a GPU's own streams.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import create_autospec

import pytest
import torch
from gradwire.errors import UnsupportedError
from gradwire.torch import _memory, _streams
from gradwire.torch._pinned import Fence, Lease, PinnedPool
from gradwire.torch._staging import Staging
from launch import Outcome, checks_of, launch
from lazy_streams import LazyStreams
from torch._subclasses.fake_tensor import FakeTensorMode

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def outcome(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return launch("staged", 2, tmp_path_factory.mktemp("staged"))


@pytest.mark.parametrize("check", checks_of("staged"))
def test_staged(outcome: Outcome, check: str) -> None:
    outcome.require(check)


def test_every_rank_ends_cleanly(outcome: Outcome) -> None:
    outcome.require_clean_exit()


def test_a_process_may_end_while_a_copy_has_not(tmp_path: Path) -> None:
    launch("staged_at_exit", 2, tmp_path).require_clean_exit()


@pytest.fixture
def streams(monkeypatch: pytest.MonkeyPatch) -> LazyStreams:
    lazy = LazyStreams()
    monkeypatch.setitem(_streams._of_type, "cpu", lazy)
    return lazy


def test_the_order_of_one_call(streams: LazyStreams) -> None:
    staging, tensor = Staging(), torch.ones(4)
    buffer = staging.buffer(tensor.shape, tensor)
    staging.fetch(tensor, buffer)
    staging.deliver(buffer, tensor)
    staging.finish()
    assert streams.log == [
        "record caller", "out waits for caller", "copy on out", "record out",  # fetched
        "record caller",  # what the result may not overtake
        "back waits for caller", "copy on back", "record back",
    ]  # fmt: skip
    assert [fence.event.stream.name for fence in (*staging.fetched, *staging.arrived)] == ["out", "back"]


def test_a_result_does_not_overtake_who_still_reads_its_memory(streams: LazyStreams) -> None:
    staging, tensor, read_before = Staging(), torch.zeros(4), torch.empty(4)
    streams.compute(lambda: read_before.copy_(tensor))
    buffer = staging.buffer(tensor.shape, tensor)
    staging.deliver(buffer, tensor)
    buffer.fill_(9.0)
    staging.finish()
    staging.arrived[0].synchronize()
    assert torch.equal(read_before, torch.zeros(4))
    assert torch.equal(tensor, torch.full((4,), 9.0))


def test_a_buffer_is_not_used_again_before_its_copy_has_ended(streams: LazyStreams) -> None:
    pool = PinnedPool(streams, 1 << 20)
    side = streams.side(CPU, "back")
    first = pool.lease(5000)
    assert first is not None
    streams.copy(side, torch.empty(1), torch.zeros(1))
    fence = Fence(streams, CPU, streams.record(side))
    first.give_back([fence])
    second = pool.lease(5000)
    assert second is not None
    assert second.memory.data_ptr() != first.memory.data_ptr()
    fence.synchronize()
    third = pool.lease(5000)
    assert third is not None
    assert third.memory.data_ptr() == first.memory.data_ptr()
    assert pool.held_bytes == 2 * 8192


def test_a_signal_handler_gets_another_buffer_than_the_thread_that_it_interrupts(
    streams: LazyStreams, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool, handled = PinnedPool(streams, 1 << 20), list[Lease | None]()
    fence = Fence(streams, CPU, streams.record(streams.side(CPU, "back")))
    for lease in [pool.lease(5000) for _ in range(3)]:
        assert lease is not None
        lease.give_back([fence])
    passed = streams.passed

    def interrupted(event: Any) -> bool:
        if not handled:
            handled.append(None)
            signal.raise_signal(signal.SIGUSR1)
        return passed(event)

    monkeypatch.setattr(streams, "passed", interrupted)
    before = signal.signal(signal.SIGUSR1, lambda *_: handled.append(pool.lease(5000)))
    try:
        leases = [pool.lease(5000), *handled[1:], pool.lease(5000)]
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert len({lease.memory.data_ptr() for lease in leases if lease is not None}) == 3
    assert pool.held_bytes == 3 * 8192, "none was lost"


@pytest.mark.usefixtures("streams")
def test_a_calls_buffer_is_free_when_its_result_has_arrived_and_not_when_the_call_ends() -> None:
    def buffer_of(staging: Staging) -> torch.Tensor:
        return staging.buffer([100], torch.ones(100))

    ended, tensor = Staging(), torch.zeros(100)
    first = buffer_of(ended)
    ended.deliver(first, tensor)
    ended.finish()
    during = buffer_of(Staging())
    assert during.data_ptr() != first.data_ptr()
    ended.arrived[0].synchronize()
    assert buffer_of(Staging()).data_ptr() == first.data_ptr()
    failed = Staging()
    second = buffer_of(failed)
    failed.fetch(tensor, second)
    failed.abandon()
    assert buffer_of(Staging()).data_ptr() != second.data_ptr(), "the copy out still writes there"


def test_a_call_in_a_captured_graph_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeTensorMode():
        tensor = torch.empty(4, device="cuda")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.raises(UnsupportedError, match="captured in a CUDA graph"):
        _memory.check(tensor)


def test_a_gpus_own_streams_are_told_what_the_lazy_ones_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only what would wait, or for nothing, where no GPU can show it: every call is checked against torch's own signature."""
    inside: list[Any] = []
    event, stream = create_autospec(torch.cuda.Event, instance=True), create_autospec(torch.cuda.Stream, instance=True)
    made = create_autospec(torch.cuda.Event, return_value=event)
    tensor = create_autospec(torch.Tensor, instance=True)
    tensor.is_inference.return_value = False
    tensor.copy_.side_effect = lambda *_, **__: inside.append("copied")

    def enters(kind: str) -> Callable[[Any], Any]:
        @contextmanager
        def entered(given: Any) -> Iterator[None]:
            inside.append((kind, given))
            yield
            inside.append(f"left the {kind}")

        return entered

    monkeypatch.setattr(torch.cuda, "Event", made)
    monkeypatch.setattr(torch.cuda, "stream", enters("stream"))
    monkeypatch.setattr(torch.cuda, "device", enters("device"))
    streams = _streams.CudaStreams()
    assert streams.record(stream) is event
    made.assert_called_once_with(blocking=True)
    event.record.assert_called_once_with(stream)
    streams.wait(stream, event)
    stream.wait_event.assert_called_once_with(event)
    streams.copy(stream, tensor, torch.ones(1))
    # `torch.cuda.stream` alone returns to the thread's current device, 0 on gradwire's own threads, with a context on it.
    on_stream = [("device", stream.device), ("stream", stream)]
    left = ["left the stream", "left the device"]
    assert inside == [*on_stream, "copied", *left]
    inside.clear()
    with streams.entered(stream):
        inside.append("within")
    assert inside == [*on_stream, "within", *left]
    assert tensor.copy_.call_args.kwargs == {"non_blocking": True}
    streams.hold(tensor, stream)
    tensor.record_stream.assert_called_once_with(stream)
    event.synchronize.assert_not_called()
    stream.synchronize.assert_not_called()
    inside.clear()
    event.synchronize.side_effect = lambda: inside.append("waited")
    event.query.side_effect = lambda: inside.append("asked") or True
    streams.synchronize(event)
    assert streams.passed(event)
    on_device, left_it = ("device", event.device), "left the device"
    assert inside == [on_device, "waited", left_it, on_device, "asked", left_it]


def test_memory_of_a_device_is_nothing_that_the_engine_may_read() -> None:
    with pytest.raises(UnsupportedError, match="meta"):
        _memory.address(torch.ones(4, device="meta"))
    assert _memory.address(torch.ones(0, device="meta")) == _memory.EMPTY


@pytest.mark.parametrize("flat", [_memory.joined, _memory.parted])
def test_every_tensor_of_a_list_is_checked(flat: Callable[..., torch.Tensor]) -> None:
    for wrong in (torch.ones(4).to_sparse(), torch.ones(4, device="meta")):
        with pytest.raises(UnsupportedError):
            flat([torch.ones(4), wrong], Staging())


def test_the_pool_is_bounded_and_makes_room_of_what_is_idle(streams: LazyStreams) -> None:
    pool = PinnedPool(streams, 3 * 8192)
    small = [pool.lease(8000) for _ in range(3)]
    assert all(small)
    assert pool.lease(1) is None, "beyond the bound there is ordinary memory"
    small.pop().give_back([])
    small.pop().give_back([])
    large = pool.lease(16000)
    assert large is not None
    assert pool.held_bytes == 3 * 8192
    assert "unpin" in streams.log
    del large, small
    assert pool.held_bytes == 0, "what nobody gave back is forgotten"


def test_what_does_not_fit_is_staged_in_ordinary_memory(streams: LazyStreams, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADWIRE_PINNED_MB", "0")
    staging, tensor = Staging(), torch.ones(4)
    buffer = staging.buffer(tensor.shape, tensor)
    staging.fetch(tensor, buffer)
    staging.fetched[0].synchronize()
    assert torch.equal(buffer, tensor)
    assert streams.pinned_bytes == 0
