"""The error hierarchy, and how the engine's errors reach it."""

from __future__ import annotations

import json
import pickle
import signal

import pytest
from gradwire import _native, errors
from gradwire.errors import GradwireError

CLASSES = [c for c in vars(errors).values() if isinstance(c, type) and issubclass(c, GradwireError)]


@pytest.mark.parametrize("kind", CLASSES)
def test_every_error_keeps_its_numbers_over_a_process_border(kind: type[GradwireError]) -> None:
    error = pickle.loads(pickle.dumps(kind("rank 3 is gone", rank=3)))
    assert type(error) is kind
    assert (str(error), error.rank) == ("rank 3 is gone", 3)
    with pytest.raises(AttributeError, match="rank"):
        _ = error.host


def test_errors_can_be_caught_by_what_python_programs_catch() -> None:
    assert issubclass(errors.ConfigError, ValueError)
    assert issubclass(errors.DeadlineError, TimeoutError)
    assert issubclass(errors.UnsupportedError, TypeError)
    assert all(issubclass(kind, RuntimeError) for kind in CLASSES)


def test_a_port_in_use_is_named() -> None:
    first = _native.Engine({"port": 0})
    try:
        with pytest.raises(errors.PortInUseError, match=str(first.port)) as caught:
            _native.Engine({"port": first.port})
        assert caught.value.port == first.port
    finally:
        first.stop()


def test_settings_that_the_engine_refuses_are_named() -> None:
    for settings in ({"dscp": 99}, {"mtu": 10}, {"no_such": 1}, {"peer_timeout_s": -1.0}):
        with pytest.raises(errors.ConfigError) as caught:
            _native.Engine(settings)
        assert caught.value.field == next(iter(settings)).removesuffix("_s") or caught.value.field == next(
            iter(settings)
        )


def test_an_interface_that_does_not_exist_is_named() -> None:
    with pytest.raises(errors.AddressError, match="nosuch0"):
        _native.Engine({"port": 0, "interface": "nosuch0"})


def test_a_record_is_joined_only_once_and_needs_every_rank() -> None:
    engine = _native.Engine({"port": 0})
    try:
        pending = engine.new_group(0, 2, "test")
        with pytest.raises(errors.MissingRankError) as caught:
            pending.join([pending.record()], 1.0)
        assert (caught.value.ranks, caught.value.waited_s) == ([1], None)
        with pytest.raises(errors.InvalidRequestError):
            pending.record()
        with pytest.raises(errors.InvalidRequestError, match="rank 2"):
            engine.new_group(2, 2, "test")
    finally:
        engine.stop()


def test_a_stopped_engine_says_so() -> None:
    engine = _native.Engine({"port": 0})
    pending = engine.new_group(0, 2, "test")
    record = pending.record()
    other = json.loads(record)
    other.update(rank=1, connections=other["connections"][::-1])
    engine.stop()
    assert engine.next_completions() is None
    with pytest.raises(errors.EngineError, match="stopped"):
        pending.join([record, json.dumps(other)], 1.0)


def test_a_signal_ends_the_wait_for_peers_that_do_not_come() -> None:
    def interrupt(_number: int, _frame: object) -> None:
        raise KeyboardInterrupt

    def join() -> None:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        pending.join(records, 60.0)

    engine, absent = _native.Engine({"port": 0}), _native.Engine({"port": 0})
    pending, other = engine.new_group(0, 2, "signals"), absent.new_group(1, 2, "signals")
    records = [pending.record(), other.record()]
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            join()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        engine.stop()
        absent.stop()
