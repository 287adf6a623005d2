"""The state that a rank gets which joins: what comes out is what went in, and what would not is refused before anything is sent."""

from __future__ import annotations

import json
from collections import Counter, OrderedDict, UserDict, defaultdict, namedtuple
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from gradwire.errors import InvalidRequestError
from gradwire.torch import _elastic
from gradwire.torch._described import described, rebuilt

Pair = namedtuple("Pair", "first second")


def sent(value: Any) -> Any:
    tensors: list[torch.Tensor] = []
    told = json.loads(json.dumps(described(value, tensors, "value")))
    return rebuilt(told, [_elastic._bytes_of(tensor) for tensor in tensors])


@pytest.mark.parametrize(
    "value",
    [
        {"a": 1, 2: [None, True, 0.1, float("inf")], (3, "b"): ("c", ())},
        OrderedDict(z=1, a=2),
        Counter({30: 1, 80: 2}),
        torch.Size([2, 3]),
        [torch.Size([]), {"nested": Counter("abb")}],
    ],
    ids=["dict", "OrderedDict", "Counter", "Size", "nested"],
)
def test_containers_stay_what_they_are(value: Any) -> None:
    def types(value: Any) -> Any:
        entries = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else []
        return type(value), [types(entry) for entry in entries]

    assert sent(value) == value
    assert types(sent(value)) == types(value)
    assert list(sent(value)) == list(value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.bool, torch.int64, torch.complex64])
@pytest.mark.parametrize("shape", [(), (0, 3), (2, 3)])
def test_tensors_keep_their_bits_shape_and_dtype(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = (torch.arange(6)[: int(np.prod(shape))].reshape(shape) % 2).to(dtype)
    (found,) = sent([tensor])
    assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
    assert torch.equal(found, tensor)


def test_a_modules_state_keeps_the_versions_of_its_layers() -> None:
    state = torch.nn.BatchNorm1d(3).state_dict()
    found = sent(state)
    assert type(found) is OrderedDict
    assert found._metadata == state._metadata  # type: ignore[attr-defined]
    assert found._metadata[""]["version"] == 2


def test_schedulers_go_on_with_what_they_were_told() -> None:
    def made() -> Any:
        optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], 1.0)
        return torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 2, 5])

    schedule = made()
    schedule.load_state_dict(sent(made().state_dict()))
    assert schedule.state_dict() == made().state_dict()
    assert type(schedule.milestones) is Counter


@pytest.mark.parametrize(
    ("value", "found"),
    [
        (Pair(1, 2), "Pair"),
        (defaultdict(list), "defaultdict"),
        (UserDict(), "UserDict"),
        ({1, 2}, "set"),
        (b"bytes", "bytes"),
        (np.zeros(3), "ndarray"),
        (torch.eye(2).to_sparse(), "torch.sparse_coo tensor"),
        (torch.empty(2, device="meta"), "meta tensor"),
    ],
    ids=str,
)
def test_what_would_come_out_as_something_else_is_refused_and_named(value: Any, found: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        sent({"a": [0, value]})
    assert f"value['a'][1] is a {found}," in str(caught.value)


@pytest.mark.parametrize("is_open", [True, False])
def test_the_first_sync_finds_what_cannot_be_sent_on_every_rank(monkeypatch: Any, is_open: bool) -> None:
    crossed: list[int] = []

    def cross() -> Any:
        crossed.append(1)
        return SimpleNamespace(newcomer=None)

    link = SimpleNamespace(boundary=SimpleNamespace(is_open=is_open, cross=cross), is_reconfigured=False, timeout=1.0)
    monkeypatch.setattr(_elastic, "link_of", lambda _: link)
    state = _elastic.ElasticState(model=torch.nn.Linear(2, 2), seen={1, 2})
    if is_open:
        for _ in range(2):  # whoever goes on regardless is told again
            with pytest.raises(InvalidRequestError, match="seen is a set"):
                state.sync()
        assert not crossed, "before any other rank waits for this one"
        state.seen = [1, 2]
    assert [state.sync(), state.sync()] == [True, False]


def test_a_part_that_nobody_named_is_refused_as_no_rank_that_joins_would_get_it(monkeypatch: Any) -> None:
    monkeypatch.setattr(_elastic, "link_of", lambda _: None)
    state = _elastic.ElasticState(step=0)
    state.step = 1
    with pytest.raises(AttributeError, match="no part 'epoch': name it in ElasticState"):
        state.epoch = 3
    assert (state.step, hasattr(state, "epoch")) == (1, False)


def test_a_value_of_another_kind_than_here_is_taken_as_the_others_have_it(monkeypatch: Any) -> None:
    monkeypatch.setattr(_elastic, "link_of", lambda _: SimpleNamespace(monitored_barriers=0))
    theirs = _elastic.ElasticState(step=3, best=torch.tensor(0.5), loss=torch.ones(2))
    ours = _elastic.ElasticState(step=torch.tensor(0), best=None, loss=torch.zeros(2))
    ours._unpack(*theirs._pack())
    assert (ours.step, type(ours.step)) == (3, int)
    assert torch.equal(ours.best, torch.tensor(0.5))
    assert torch.equal(ours.loss, torch.ones(2))
