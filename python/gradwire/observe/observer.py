"""The observer of one process: it knows the groups, warns of stragglers, and answers who asks."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import math
import os
import socket
import sys
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from gradwire import _native
from gradwire._threads import start_thread
from gradwire.config import Config
from gradwire.errors import ConfigError, EngineError, GradwireError, StatusFolderError
from gradwire.observe.export import OpenTelemetryExport, PrometheusEndpoint, check_extras
from gradwire.observe.floods import FloodWatch
from gradwire.observe.refusals import RefusalWatch
from gradwire.observe.status import StatusServer, job_name_of
from gradwire.observe.stragglers import Straggler, StragglerWatch

if TYPE_CHECKING:
    from gradwire._runtime import Runtime

logger = logging.getLogger("gradwire")
T = TypeVar("T")

# Of the watch: a second, or a third of a shorter setting.
TICK_MAX_S = 1.0
# A look that comes later than this share of the setting: the process stood still. Less makes nobody a straggler who is not nearly one.
STILL_SHARE = 0.5
# In so many times the setting a warning of it comes once; the others are told at level info.
STILL_EVERY = 20.0
# Questions without an answer until a group is forgotten.
UNANSWERED_MAX = 2
PORT_MAX = 65535


class Observer:
    """Sees the groups of one engine.

    Args:
        owner: the process's runtime, which stops the observer before its engine.
        config: what is to be seen, and where.
    """

    def __init__(self, owner: Runtime, config: Config) -> None:
        self._owner = weakref.ref(owner)
        self._engine = owner.engine
        self._config = config
        self._groups: list[_Watched] = []
        # A signal handler may ask while its thread is in here, hence the kind of lock; so nothing that it may have added is lost here.
        self._lock = threading.RLock()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self.job = config.job or ""
        self.meeting = ""
        self.endpoint: PrometheusEndpoint | None = None
        self._parts: list[StatusServer | PrometheusEndpoint | OpenTelemetryExport] = []
        self._floods = FloodWatch()
        self._told_of_standing_s = -math.inf
        self._refusals = RefusalWatch()
        self.rank: int | None = None

    def job_at(self, address: str) -> dict[str, str]:
        """What rank 0 of a group that meets there tells the others: `name` of the job and `meeting`, by which it is found, too.

        Args:
            address: of the Store, as `Board.address` has it. Ranks may reach it by names of their own, so that of rank 0 counts.
        """
        if self.rank is not None:  # an earlier group has said it
            return {"name": self.job, "meeting": self.meeting}
        meeting = meeting_address(address)
        return {"name": _job_name(self._config, meeting), "meeting": meeting}

    def add(self, group: _native.Group, job: object) -> None:
        """A group was formed. The first one says which rank this process is, and starts what was asked for.

        Args:
            group: only looked at while somebody else keeps it.
            job: what its rank 0 has said of the job (`job_at`).
        """
        stats = group.stats()
        config = self._config
        # A group that goes on without lost ranks has no dedicated servers, and says how many are left, not which numbers they have.
        workers = stats["world_size"] if stats.get("epoch") is None else math.inf
        watch = StragglerWatch(config.straggler_warning_s, config.peer_timeout_s, workers)
        watched = _Watched(weakref.ref(group), stats, watch)
        with self._lock:
            is_first = self.rank is None
            # Nobody may ever ask for the groups that live: without a watch this is where those that do not are let go.
            self._let_go_of_the_dead()
            self._name_apart(watched)
            self._groups.append(watched)
        if is_first:
            self.rank = _rank_of_process(stats)
            told = {**self.job_at(""), **_texts(job)}
            self.meeting, self.job = told["meeting"], job_name_of(self._config.job or told["name"])
            self._start()

    def stats(self) -> dict[str, Any]:
        """Everything that is counted, as `gradwire.stats()` returns it."""
        groups = []
        for watched, group in self._live():
            if (counted := self._asked(watched, group.stats)) is not None:
                watched.see(counted.get("epoch"))
                times = {"formed_s": watched.formed_s, "connected_s": watched.connected_s}
                groups.append({**counted, "name": watched.name, **times})
        return {**self.identity(), "engine": self._engine.stats(), "groups": groups}

    def timelines(self, calls: int | None = None) -> str:
        """The latest collectives of every group, with who this process is, as JSON: read here, it would hold training up.

        Args:
            calls: no more collectives of each group, and no more of its other calls; None: all that are kept.
        """
        groups = []
        for watched, group in self._live():
            if (timeline := self._asked(watched, partial(group.timeline, calls))) is not None:
                groups.append(_joined({"name": watched.name, "rank": watched.rank}, timeline))
        return _joined(self.identity(), f'{{"groups": [{", ".join(groups)}]}}')

    def identity(self) -> dict[str, Any]:
        """Who this process is, and when this was."""
        return {
            "job": self.job,
            "meeting": self.meeting,
            "rank": self.rank,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "port": self._engine.port,
            "preset": self._config.preset,
            "time_s": time.time(),
            "stragglers": [
                {"group": watched.name, "rank": late.rank, "cause": late.cause, "text": late.text}
                for watched in self._groups.copy()
                if (late := watched.watch.current) is not None
            ],
        }

    def start_exports(self, local_rank: int) -> None:
        """Starts what exports metrics, if anything is configured to.

        Raises:
            MissingExtraError: its package is not installed.
            PortInUseError, AddressError: the Prometheus endpoint cannot listen there.
            ConfigError: there is no such port.
            EngineError: no thread can be started.
        """
        config = self._config
        check_extras(config)
        if config.metrics_port is not None:
            port = config.metrics_port + (local_rank if config.metrics_port else 0)
            if port > PORT_MAX:
                problem = f"metrics_port = {config.metrics_port} is not allowed: with LOCAL_RANK {local_rank} it would be {port}"
                raise ConfigError(problem, field="metrics_port", value=config.metrics_port)
            self.endpoint = PrometheusEndpoint(config.metrics_host, port, self.stats)
            self._parts.append(self.endpoint)
        if config.otlp_endpoint is not None:
            self._parts.append(OpenTelemetryExport(config.otlp_endpoint, config.otlp_every_s, self.stats))

    def stop(self) -> None:
        """Ends the threads; before the engine stops."""
        self._stopping.set()
        while self._parts:
            self._parts.pop().stop()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(timeout=5.0)

    def _start(self) -> None:
        self._open_status_socket()
        if self._config.straggler_warning_s <= 0:
            return
        try:
            self._thread = start_thread(self._watch, "gradwire-watch")
        except EngineError as error:  # training goes on unwatched
            logger.warning("no watch, rank %s will warn neither of stragglers nor of floods: %s", self.rank, error)

    def _open_status_socket(self) -> None:
        if not self._config.status_socket:
            return
        assert self.rank is not None, "the first group has said it"
        answers: dict[str, Callable[..., dict[str, Any] | str]] = {"stats": self.stats, "timelines": self.timelines}
        try:
            server = StatusServer(self.job, self.rank, answers)
        except (StatusFolderError, EngineError, OSError) as error:  # training goes on unseen
            logger.warning("no status socket, gradwire monitor will not find rank %d: %s", self.rank, error)
        else:
            self._parts.append(server)
            logger.info("status socket %s", server.path)

    def _watch(self) -> None:
        tick_s = min(TICK_MAX_S, self._config.straggler_warning_s / 3)
        looked_s = time.monotonic()
        while not self._stopping.wait(tick_s):
            self._look_at_all(self._stood_still(time.monotonic() - looked_s - tick_s))
            looked_s = time.monotonic()  # a look may wait for a network thread: that is no standstill

    def _stood_still(self, late_s: float) -> float:
        """Seconds for which this process cannot say whom it waited for, as a look that comes so late shows."""
        if late_s < STILL_SHARE * self._config.straggler_warning_s:
            return 0.0
        now_s = time.monotonic()
        is_news = now_s - self._told_of_standing_s >= STILL_EVERY * self._config.straggler_warning_s
        self._told_of_standing_s = now_s if is_news else self._told_of_standing_s
        logger.log(logging.WARNING if is_news else logging.INFO, "this process stood still for %.1f s (it was stopped or suspended, its "
                   "host was busy, or something held Python's lock): whom it waited for meanwhile is no straggler", late_s)  # fmt: skip
        return late_s

    def _look_at_all(self, still_s: float = 0.0) -> None:
        # Its own function: a group that its user has dropped must not live on in a local variable.
        watches = []
        for watched, group in self._live():
            if (watch := self._asked(watched, partial(watched.look, group, still_s))) is not None:
                watches.append(watch)
        if watches:
            self._tell_of_ports(watches)

    def _tell_of_ports(self, watches: list[dict[str, Any]]) -> None:
        """What is new about the ports of the process, which its groups share."""
        try:
            now_s, stats = time.monotonic(), self._engine.stats()
        except GradwireError:  # it is about to stop
            return
        self._tell_of_floods(self._floods.update(now_s, any(watch["is_flooded"] for watch in watches), stats))
        waited_s = max((watch["waiting"]["waited_s"] for watch in watches if watch["waiting"] is not None), default=0.0)
        self._tell_of_refusals(self._refusals.update(now_s, stats, waited_s))

    def _tell_of_refusals(self, news: str | None) -> None:
        if news:
            logger.warning("the kernel of this host refuses what rank %s sends, which is lost: %s", self.rank, news)
        elif news is not None:
            logger.info("the kernel of this host takes what rank %s sends again", self.rank)

    def _tell_of_floods(self, news: str | None) -> None:
        if news is None:
            return
        ports = ", ".join(map(str, self._engine.thread_ports))
        if news:
            logger.warning("a flood of this process, which listens on UDP port %s: most of it %s. Peers are told, and go on at the "
                           "rate that they had", ports, news)  # fmt: skip
        else:
            logger.info("the flood of this process, which listens on UDP port %s, is over", ports)

    def _live(self) -> list[tuple[_Watched, _native.Group]]:
        with self._lock:
            self._let_go_of_the_dead()
            both = [(watched, watched.group()) for watched in self._groups.copy()]
        return [(watched, group) for watched, group in both if group is not None]

    def _let_go_of_the_dead(self) -> None:
        for watched in self._groups.copy():
            if watched.group() is None:
                self._forget(watched)

    def _asked(self, watched: _Watched, question: Callable[[], T]) -> T | None:
        """What a group answers; None: nothing.

        One that was left, or whose network thread has ended, answers nothing any more and is forgotten; but so it does where a process is
        stopped for a while, so only the second time in a row.
        """
        began = time.monotonic()
        try:
            answer = question()
        except GradwireError as error:
            if began < watched.failed_at:  # the same silence, as another thread has heard it
                return None
            watched.unanswered, watched.failed_at = watched.unanswered + 1, time.monotonic()
            if watched.unanswered >= UNANSWERED_MAX:
                self._forget(watched)
                logger.info(
                    "group %s was left, or does not answer, and is not observed any more: %s", watched.name, error
                )
            return None
        watched.unanswered = 0
        return answer

    def _name_apart(self, watched: _Watched) -> None:
        """Rank 0 of each group names it, so one that was started again may name another one alike. As a label of metrics it is unique."""
        taken = {other.name for other in self._groups.copy()}
        names = (f"{watched.name} ({number})" for number in itertools.count(2))
        watched.name = next(name for name in itertools.chain([watched.name], names) if name not in taken)

    def _forget(self, watched: _Watched) -> None:
        with self._lock, contextlib.suppress(ValueError):  # whoever interrupted this has
            self._groups.remove(watched)


class _Watched:
    """A group and what is known about its stragglers."""

    def __init__(self, group: weakref.ref[_native.Group], stats: dict[str, Any], watch: StragglerWatch) -> None:
        self.group = group
        self.name: str = stats["name"]
        self.rank: int = stats["rank"]
        self.world_size: int = stats["world_size"]
        # Names are used again, by torch each time that its groups are formed: with this time they say which group it is.
        self.formed_s = time.time()
        # With each epoch the connections are new, and what counts of them begins at 0: when this one was first seen.
        self.connected_s = self.formed_s
        self._connected_in = _number_of(stats.get("epoch"))
        self.epoch = 0
        self.unreached_threads = 0
        # Questions in a row, and when the latest of them failed.
        self.unanswered = 0
        self.failed_at = 0.0
        self.watch = watch

    def see(self, epoch: dict[str, Any] | None) -> None:
        """Which epoch the group is in; None: lost ranks end it."""
        if (number := _number_of(epoch)) > self._connected_in:
            self._connected_in, self.connected_s = number, time.time()

    def look(self, group: _native.Group, still_s: float = 0.0) -> dict[str, Any]:
        """Says what is new about it, and returns what was seen.

        Args:
            group: the one that is watched.
            still_s: how long this process stood still since the look before.

        Raises:
            GradwireError: it was left meanwhile.
        """
        before = self.watch.current
        watch = group.watch_news()
        self.see(watch["epoch"])
        self._tell_of_losses(watch["epoch"])
        self._tell_of_threads(watch["unreached_threads"])
        news = self.watch.update(time.monotonic(), watch, still_s)
        if news is not None:
            self._tell(news, watch["epoch"])
        elif before is not None and self.watch.current is None:
            name = self.watch.name_of(before.rank)
            logger.info("group %s: %s is waited for no longer (%s)", self.name, name, before.cause)
        return watch

    def _tell_of_threads(self, unreached: int) -> None:
        if unreached <= self.unreached_threads:  # none where links have slowed down since: nobody misses them
            return
        self.unreached_threads = unreached
        logger.warning("group %s: %d of the network threads of rank %d are not used, as those of other ranks do not answer the first of "
                       "them: does a firewall let all of their UDP ports through? `gradwire doctor` says which it does not",
                       self.name, unreached, self.rank)  # fmt: skip

    def _tell_of_losses(self, epoch: dict[str, Any] | None) -> None:
        if epoch is None or epoch["number"] == self.epoch:
            return
        # Who was lost and is back in the same epoch goes on with the others.
        lost = [one for one in epoch["lost"] if one["epoch"] > self.epoch and one["rank"] not in epoch["members"]]
        joined = [one for one in epoch["joined"] if one["epoch"] > self.epoch]
        self.epoch = epoch["number"]
        for one in joined:
            logger.warning(
                "group %s, epoch %d: rank %d (%s) has joined", self.name, one["epoch"], one["rank"], one["host"]
            )
        if not lost:
            return
        logger.warning("group %s, epoch %d: ranks %s go on without %s",
                       self.name, self.epoch, ", ".join(map(str, epoch["members"])),
                       ", ".join(f"rank {one['rank']} ({one['host']})" for one in lost))  # fmt: skip

    def _tell(self, late: Straggler, epoch: dict[str, Any] | None) -> None:
        # Who calls late keeps all others waiting alike, and one says so: the next rank, which in a ring is the one that sees it.
        members = range(self.world_size) if epoch is None else epoch["members"]
        # Every rank has to find the same one, so how many there are, which a rank that has joined may know otherwise, counts nothing.
        teller = min(members, key=lambda rank: (rank <= late.rank, rank), default=None)
        level = logging.WARNING if self.rank == teller or late.cause != "compute" else logging.INFO
        name, seen_by = self.watch.name_of(late.rank), self.watch.name_of(self.rank)
        logger.log(level, "straggler: %s (%s), seen by %s of group %s: %s",
                   name, late.cause, seen_by, self.name, late.text)  # fmt: skip


def _joined(facts: dict[str, Any], more: str) -> str:
    """An object of JSON that has both; neither is empty."""
    return f"{json.dumps(facts)[:-1]}, {more[1:]}"


def _number_of(epoch: dict[str, Any] | None) -> int:
    return 0 if epoch is None else int(epoch["number"])


def _rank_of_process(stats: dict[str, Any]) -> int:
    """By which the process is known: torch's number, since the first group may be of a part of all ranks; else that in the group.

    A group that has more ranks than torch knows of joins several worlds of torch, and knows more than they do.
    """
    distributed = sys.modules.get("torch.distributed")
    if distributed is None or not distributed.is_available() or not distributed.is_initialized():
        return int(stats["rank"])
    return int(distributed.get_rank() if distributed.get_world_size() >= stats["world_size"] else stats["rank"])


def meeting_address(address: str) -> str:
    """Where the ranks met, which is no name where another one is known, but by which the job is found: the Store's, or the launcher's."""
    return address or ":".join(filter(None, (os.environ.get("MASTER_ADDR", ""), os.environ.get("MASTER_PORT", ""))))


def _job_name(config: Config, meeting: str) -> str:
    """A name that was given, or the launcher's, or where the ranks met, or else that of this process."""
    run_id = os.environ.get("TORCHELASTIC_RUN_ID", "")
    candidates = (
        config.job,
        run_id if run_id != "none" else "",
        os.environ.get("SLURM_JOB_ID", ""),
        meeting,
        f"{socket.gethostname()}-{os.getpid()}",
    )
    return job_name_of(next(filter(None, candidates)))


def _texts(job: object) -> dict[str, str]:
    """Of what lay in the Store that which is text."""
    return {key: value for key, value in job.items() if isinstance(value, str)} if isinstance(job, dict) else {}
