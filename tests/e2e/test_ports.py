"""Which UDP port a process of a host takes, by what the launcher says of it and what is free."""

from __future__ import annotations

import contextlib
import logging
import socket
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import pytest
from gradwire import Config, _launcher, _runtime
from gradwire._launcher import candidate_ports, local_rank
from gradwire.doctor.host import port_of
from gradwire.errors import ConfigError, PortInUseError
from gradwire.lab import LabError, iproute
from gradwire.lab.namespaces import Namespaces

BASE = 47400
# Those of 64 ranks, of four network threads each.
OF_RANKS = set(range(BASE, BASE + 4 * 64))


@pytest.fixture(autouse=True)
def _alone() -> Iterator[None]:
    """In a network of its own, where this process may make one: the ports are fixed ones, and others may have got them from the kernel."""
    with contextlib.ExitStack() as stack:
        with contextlib.suppress(LabError, OSError):
            own = stack.enter_context(contextlib.closing(Namespaces()))
            stack.enter_context(own.on_host(own.add()))
            iproute.ip("link set lo up")
        yield


@pytest.fixture(autouse=True)
def launched(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """By nobody, until a test says otherwise."""
    for rank, size in _launcher._LAUNCHERS.items():
        monkeypatch.delenv(rank, raising=False)
        monkeypatch.delenv(size, raising=False)
    monkeypatch.delenv("GRADWIRE_PORT", raising=False)
    return monkeypatch


@contextlib.contextmanager
def taken(ports: Sequence[int]) -> Iterator[None]:
    """By another process, if not by one of this machine's already."""
    with contextlib.ExitStack() as stack:
        for port in ports:
            other = stack.enter_context(socket.socket(socket.AF_INET, socket.SOCK_DGRAM))
            with contextlib.suppress(OSError):
                other.bind(("", port))
        yield


def started(count: int, config: Config) -> list[int]:
    """The ports of so many engines that start at once."""
    with ThreadPoolExecutor(count) as threads:
        engines = list(threads.map(lambda _: _runtime._start_engine(config), range(count)))
    try:
        return [port for engine in engines for port in engine.thread_ports]
    finally:
        for engine in engines:
            engine.stop()


def test_without_a_launcher_it_is_one_of_those_behind_the_base() -> None:
    assert candidate_ports(None) == list(range(BASE, BASE + 64))
    ports = started(2, Config(network_threads=1))
    assert len(set(ports)) == 2
    assert set(ports) <= set(range(BASE, BASE + 64))


def test_it_is_the_base_plus_the_local_rank_for_the_doctor_too(launched: pytest.MonkeyPatch) -> None:
    launched.setenv("SLURM_LOCALID", "5")
    assert candidate_ports(None)[0] == BASE + 5
    launched.setenv("LOCAL_RANK", "3")
    assert candidate_ports(None)[0] == BASE + 3
    assert (candidate_ports(5000), port_of(Config(port=5000))) == ([5003], 5003)
    assert (candidate_ports(0), port_of(Config(port=0))) == ([0], 0)
    with pytest.raises(ConfigError, match="65538"):
        candidate_ports(65535)


def test_what_a_task_of_slurm_started_has_the_number_that_mpirun_gives_it(launched: pytest.MonkeyPatch) -> None:
    launched.setenv("SLURM_LOCALID", "0")
    launched.setenv("OMPI_COMM_WORLD_LOCAL_RANK", "2")
    assert local_rank() == 2


@pytest.mark.parametrize(
    ("variables", "after"),
    [
        ({"LOCAL_RANK": "2"}, None),
        ({"LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "8"}, 8),
        ({"LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "2"}, None),
        ({"LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "64"}, None),
        ({"LOCAL_RANK": "100", "LOCAL_WORLD_SIZE": "128"}, None),
        ({"LOCAL_RANK": "0", "SLURM_STEP_TASKS_PER_NODE": "1"}, None),
        ({"SLURM_LOCALID": "0"}, None),
        ({"SLURM_LOCALID": "0", "SLURM_STEP_TASKS_PER_NODE": "1(x4)"}, 1),
        ({"SLURM_LOCALID": "0", "SLURM_STEP_TASKS_PER_NODE": "1,8(x2),4"}, 8),
        ({"SLURM_LOCALID": "0", "SLURM_STEP_TASKS_PER_NODE": "many"}, None),
        ({"OMPI_COMM_WORLD_LOCAL_RANK": "1", "OMPI_COMM_WORLD_LOCAL_SIZE": "2"}, 2),
    ],
)
def test_a_spare_port_is_none_that_another_rank_is_about_to_bind(
    launched: pytest.MonkeyPatch, variables: dict[str, str], after: int | None
) -> None:
    for name, value in variables.items():
        launched.setenv(name, value)
    _own, *spare = candidate_ports(None)
    behind = [] if after is None else list(range(BASE + after, BASE + 64))
    below = [port for port in spare if port < BASE]
    assert spare == behind + below
    assert len(below) == 64
    # Nor do their own further threads' ports, nor what the kernel chooses for them: it keeps 512 off (`bind_away`).
    assert not {port + 64 * thread for port in below for thread in range(4)} & OF_RANKS
    assert all(abs(port - other) < 512 for port in spare for other in OF_RANKS)


@pytest.mark.parametrize("tasks", ["", "1(x2)"])
def test_processes_of_one_task_of_slurm_start_at_once_beside_each_other(
    launched: pytest.MonkeyPatch, tasks: str
) -> None:
    launched.setenv("SLURM_LOCALID", "0")
    launched.setenv("SLURM_STEP_TASKS_PER_NODE", tasks)
    ports = started(4, Config(network_threads=2))
    firsts, further = ports[::2], ports[1::2]
    assert len(set(ports)) == 8
    assert set(firsts) <= set(candidate_ports(None))
    kept = set(range(BASE + 1, BASE + 64)) if not tasks else set()  # other tasks may be about to bind them
    assert not kept & set(ports)
    assert set(further) <= {port + 64 for port in firsts}


def test_the_warning_names_the_port_that_a_rank_has_instead_of_its_own(
    launched: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    launched.setenv("LOCAL_RANK", "7")
    launched.setenv("LOCAL_WORLD_SIZE", "8")
    with taken([BASE + 7, BASE + 8]):
        expected = port_of(Config())
        assert expected > BASE + 8
        runtime = _runtime.Runtime(Config())
        runtime.stop()
        assert runtime.engine.port == expected
    (warning,) = [record for record in caplog.records if "local rank" in record.message]
    assert warning.levelno == logging.WARNING
    assert f"UDP port {BASE + 7}, that of local rank 7, is taken" in warning.message
    assert f"listens on {expected} instead" in warning.message


def test_a_port_that_the_user_set_is_kept_to(launched: pytest.MonkeyPatch) -> None:
    launched.setenv("LOCAL_RANK", "7")
    with taken([BASE + 7]), pytest.raises(PortInUseError, match=str(BASE + 7)) as caught:
        _runtime._start_engine(Config(port=BASE))
    assert caught.value.port == BASE + 7


def test_where_every_port_is_taken_the_error_names_the_ranks_own(launched: pytest.MonkeyPatch) -> None:
    launched.setenv("LOCAL_RANK", "7")
    with taken(candidate_ports(None)):
        assert port_of(Config()) == BASE + 7
        with pytest.raises(PortInUseError, match=str(BASE + 7)):
            _runtime._start_engine(Config())


def test_variables_of_a_service_of_kubernetes_are_named_and_ignored(
    launched: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    launched.setenv("GRADWIRE_METRICS_PORT", "tcp://10.0.0.7:9400")
    runtime = _runtime.Runtime(Config.from_env(Config(port=0, log_level="info")))
    runtime.stop()
    (line,) = [record for record in caplog.records if "Kubernetes" in record.message]
    assert line.levelno == logging.INFO
    assert line.message.endswith(": GRADWIRE_METRICS_PORT")
