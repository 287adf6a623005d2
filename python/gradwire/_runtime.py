"""The process's one engine: started with the first group, shared by all, stopped at exit.

Importing starts nothing. A forked child (a DataLoader worker) sees that it is not the owner: its groups fail with a typed
error, its own first group would start an engine of its own, and it never touches the parent's socket or thread.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import json
import logging
import os
import sys
import threading
import weakref
from collections.abc import Sequence
from multiprocessing import current_process, parent_process, util
from typing import Any

from gradwire import _native
from gradwire._completer import Completer
from gradwire._environment import Environment
from gradwire._launcher import candidate_ports, local_rank
from gradwire._outbox import Outbox
from gradwire.config import Config, service_links, settings
from gradwire.errors import ConfigError, ForkedError, PortInUseError
from gradwire.observe import Observer
from gradwire.observe.export import check_extras
from gradwire.secret import job_secret

logger = logging.getLogger("gradwire")

MEGABIT_BYTES = 1_000_000 / 8
# After everything else that a child of multiprocessing does at its end, of which the last is to wait for its own children.
LAST = -(1 << 31)


class Runtime:
    """Engine, completer and configuration of this process.

    Raises:
        ConfigError: a setting or `GRADWIRE_*` variable is wrong.
        PortInUseError: the port is taken.
        GradwireError: the engine cannot start.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self.environment = Environment()
        self.pid = os.getpid()
        check_extras(config)
        # As the engine has it: who takes it out of the environment, so that children do not see it, has it all the same.
        self.secret = job_secret(config)
        self.engine = _start_engine(config)
        self.completer = Completer(self.engine, sync_futures=config.sync_futures)
        self.outbox = Outbox()
        # Strong references: under TORCH_DISTRIBUTED_DEBUG=DETAIL torch drops the Python part of a backend.
        self.backends: dict[str, Any] = {}
        # Under DETAIL: those that were aborted, which have no name any more.
        self.aborted: set[Any] = set()
        self._warned_of_clear = False
        self.observer = Observer(self, config)
        try:
            self.observer.start_exports(local_rank() or 0)
        except BaseException:
            self.observer.stop()
            self.engine.stop()
            raise
        _show_log(config)
        self._say_what_deviates()
        if config.chaos is not None:
            logger.warning(
                "FAULT INJECTION IS ON in process %d: chaos = %s (%s). What this process receives is lost or delayed on purpose",
                self.pid, config.chaos, config.origin("chaos"),
            )  # fmt: skip
        features = self.engine.features()
        if (config.code_points() or config.marks_importance()) and not features["traffic_class"]:
            logger.warning(
                "no traffic class with a datagram, by the kernel or by `offload`: dscp_classes and importance have no effect"
            )
        logger.info("engine on UDP port %d, %s\n%s", self.engine.port, features, config.explain({}))

    def check_process(self) -> None:
        """Refuses use in a forked child.

        Raises:
            ForkedError: this is not the process that started the engine. Fields: owner_pid.
        """
        if os.getpid() != self.pid:
            raise ForkedError(
                f"this process group belongs to process {self.pid} and cannot be used in its forked child {os.getpid()}: form groups "
                "in the process that uses them",
                owner_pid=self.pid,
            )

    def _say_what_deviates(self) -> None:
        """Logs a port that is not this rank's own, and variables that are taken for nobody's settings."""
        number, own = local_rank(), candidate_ports(self.config.port)[0]
        if self.config.port is None and number is not None and self.engine.port != own:
            logger.warning(
                "UDP port %d, that of local rank %d, is taken (`ss -ulpn` says by whom): this rank listens on %d instead, which a "
                "firewall between hosts may not let through. If ranks have the same number since one task of Slurm starts several, set "
                "LOCAL_RANK for each", own, number, self.engine.port,
            )  # fmt: skip
        if links := service_links(os.environ):
            logger.info("ignored, since Kubernetes makes such variables of its Services: %s", ", ".join(links))

    def say_how_it_travels(self, name: str, security: dict[str, Any]) -> None:
        """Logs how the datagrams of a new group travel; once a warning, if they cross hosts in clear."""
        cipher = security["cipher"]
        if cipher is None and not security["all_local"] and not self._warned_of_clear:
            self._warned_of_clear = True
            logger.warning(
                "security = %s (%s): datagrams leave this host in clear, and whoever can send to it can forge them",
                self.config.security, self.config.origin("security"),
            )  # fmt: skip
        elif cipher is None:
            logger.info("group %s travels in clear", name)
        elif security["secret_configured"]:
            logger.info("group %s is sealed with %s and the job secret", name, cipher)
        else:
            logger.info(
                "group %s is sealed with %s; whoever reads the Store has the secret: set GRADWIRE_SECRET", name, cipher
            )

    def stop(self) -> None:
        """Leaves all groups, ends what is in flight, and runs the callbacks of every future."""
        if os.getpid() != self.pid:
            return
        self.backends.clear()
        self.aborted.clear()
        with contextlib.ExitStack() as after:  # from the last one on, whatever fails
            after.callback(self.completer.join, timeout_s=5.0)
            after.callback(self.engine.stop)
            # What is not yet in the engine must not come to it any more.
            after.callback(self.outbox.stop, timeout_s=1.0)
            self.observer.stop()


def configure(config: Config) -> None:
    """Sets the configuration of this process; `GRADWIRE_*` variables still win. Call before `init_process_group`.

    Raises:
        ConfigError: the engine runs already, or this is no `Config`.
    """
    if not isinstance(config, Config):
        raise ConfigError(f"config = {config!r} is not allowed: a gradwire.Config", field="config", value=config)
    with _process.lock:
        if _process.runtime is not None:
            raise ConfigError("configure() comes too late: the engine has started with the first process group")
        _process.config = config


def runtime() -> Runtime:
    """The process's runtime; the first call starts it.

    Raises:
        GradwireError: it cannot start, as `Runtime` says.
        EngineError: no thread can be started that completes futures, where calls have any (`have_futures`).
    """
    with _process.lock:
        if _process.runtime is None:
            _process.runtime = Runtime(Config.from_env(_process.config))
            _stop_at_exit(_process.runtime)
        _process.runtime.environment.warn_of_changes()
        if _process.calls_have_futures:
            _process.runtime.completer.start()
        return _process.runtime


def have_futures() -> None:
    """Calls of groups have futures from now on: what completes those starts before a group is formed, and not in the middle of a call."""
    _process.calls_have_futures = True


def configuration() -> Config:
    """The process's configuration, whether its runtime was started or not.

    Raises:
        ConfigError: a setting or `GRADWIRE_*` variable is wrong.
    """
    owner = _process.runtime
    return Config.from_env(_process.config) if owner is None else owner.config


def current() -> Runtime | None:
    """The process's runtime, if it was started."""
    return _process.runtime


def inherited() -> Runtime | None:
    """In a forked child: the runtime of its parent, whose groups it still knows and cannot use."""
    return _process.inherited[-1] if _process.inherited else None


def _stop_at_exit(owner: Runtime) -> None:
    reference = weakref.ref(owner)
    if parent_process() is None:
        # What a script gave to atexit before its first group may make calls. All of it comes before multiprocessing's turn, whose module
        # is imported earlier (by torch, or at the head of this one), unless the script did so earlier still. Of that turn this is the
        # first part: then it waits for its children, who may be ranks and wait for the goodbye.
        util.Finalize(None, _stop, (reference,), exitpriority=0)
        return
    # A child does what multiprocessing has before it does what atexit has, if it does that at all.
    atexit.register(_stop, reference)
    if _ends_without_atexit():
        # Without a goodbye the others lose the last call, too: it has ended here, but not every packet of it was confirmed.
        util.Finalize(None, _stop_behind_threads, (reference,), exitpriority=LAST)


def _ends_without_atexit() -> bool:
    """Children of multiprocessing that were forked end by os._exit; since Python 3.13 they do what atexit has before it."""
    is_child = parent_process() is not None
    return is_child and sys.version_info < (3, 13) and getattr(current_process(), "_start_method", "") != "spawn"


def _stop_behind_threads(reference: weakref.ref[Runtime]) -> None:
    # Threads may still be calling. Such a child waits for them after this, when it has told what ended it: so one of them stops the engine.
    def stop() -> None:
        while others := [each for each in threading.enumerate() if _is_waited_for(each)]:
            others[0].join()
        _stop(reference)

    try:
        threading.Thread(target=stop, name="gradwire-goodbye").start()
    except RuntimeError:  # the system starts none: then it is waited for them now
        stop()


def _is_waited_for(thread: threading.Thread) -> bool:
    return not thread.daemon and thread not in (threading.main_thread(), threading.current_thread())


def _stop(reference: weakref.ref[Runtime]) -> None:
    # The completer must be gone before the interpreter is: it would wake up in a process without Python.
    owner = reference()
    if owner is not None:
        owner.stop()


def group_settings(config: Config) -> dict[str, Any]:
    """The settings that must be equal on all ranks, as they are compared; each is a value that `Config` takes."""
    agreed = {f.name: getattr(config, f.name) for f in settings() if f.metadata.get("everywhere")}
    # What only marks the packets that leave one host is that host's affair: its network may take no code points.
    queues = ",".join(map(str, config.code_points())) if config.class_queues() else None
    return {**agreed, "dscp_classes": queues}


def fingerprint(config: Config) -> int:
    """64 bits of the settings that must be equal on all ranks.

    In a sealed record nobody can change them unseen, as they could the list of them that lies beside it so that errors can
    name a field.
    """
    text = json.dumps(group_settings(config), sort_keys=True)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def _show_log(config: Config) -> None:
    """Sets the logger's level where somebody asked for one, and sees to it that its messages are shown."""
    if config.origin("log_level") == "default":
        return  # the program's own level, or else that of its root logger
    logger.setLevel(config.log_level.upper())
    if logger.level < logging.WARNING and not logger.hasHandlers():
        # Python's own handler of last resort shows nothing below a warning.
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter(logging.BASIC_FORMAT))
        # A program that sets logging up later shows them itself.
        handler.addFilter(lambda _record: not logging.getLogger().hasHandlers())
        logger.addHandler(handler)


def _start_engine(config: Config) -> _native.Engine:
    faults = config.faults()
    values = {
        "interface": config.interface,
        "mtu": config.mtu,
        "eager_bytes": config.eager_bytes,
        "ack_every": config.ack_every,
        "ack_delay_us": config.ack_delay_us,
        "controller": config.controller_name(),
        "initial_rate": int(config.initial_rate_mbps * MEGABIT_BYTES),
        "peer_timeout_s": config.peer_timeout_s,
        "on_peer_loss": config.on_peer_loss,
        "connect_timeout_s": config.connect_timeout_s,
        "dscp": config.dscp,
        "dscp_classes": config.code_points(),
        "class_queues": config.class_queues(),
        "dscp_control": config.control_code_point(),
        "ecn": config.marks_importance(),
        "offload": config.offload == "auto",
        "urgency": config.urgency,
        "busy_poll_us": config.busy_poll_us,
        "give_way": config.give_way,
        "own_core": config.own_core,
        "send_thread": config.send_thread,
        "network_threads": config.network_threads,
        "paths": config.paths,
        "incast": config.incast,
        "servers": None if config.dedicated_servers() else config.servers,
        "spray": config.spray,
        "security": config.security,
        "secret": job_secret(config),
        "fingerprint": fingerprint(config),
        "chaos": None if faults is None else faults.numbers(),
    }
    return _engine_at(values, candidate_ports(config.port))


def _engine_at(values: dict[str, Any], candidates: Sequence[int]) -> _native.Engine:
    """An engine at the first port that is free; the error is that of the first one."""
    for port in candidates:
        try:
            return _native.Engine({**values, "port": port})
        except PortInUseError:
            continue
    return _native.Engine({**values, "port": candidates[0]})


class _Process:
    """What there is once in a process."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.config: Config | None = None
        self.runtime: Runtime | None = None
        self.calls_have_futures = False
        self.inherited: list[Runtime] = []

    def after_fork_in_child(self) -> None:
        """Forgets the parent's runtime without dropping it: its thread is the parent's. Its ports are free once the parent has ended."""
        self.lock = threading.Lock()
        if self.runtime is not None:
            self.runtime.engine.let_go_in_child()
            self.inherited.append(self.runtime)
            self.runtime = None


_process = _Process()
os.register_at_fork(after_in_child=_process.after_fork_in_child)
