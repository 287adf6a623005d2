"""A dedicated parameter server: a process that calls no collective and sums what the workers push.

It needs no configuration: worker 0 publishes what all ranks must agree about, and the policy of each call travels with it.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch.distributed as dist

from gradwire import _store_address
from gradwire._in_time import in_time
from gradwire._rendezvous import Served, first_worker, join_served_group
from gradwire._runtime import configure, group_settings
from gradwire.config import Config
from gradwire.errors import ConfigError, GradwireError, RendezvousError, SettingsMismatchError
from gradwire.secret import job_secret

LEAVE_TIMEOUT_S = 2.0
# Torch has so much more time to open a Store than is waited for it: it would end, or begin anew, just when the process does.
_LONGER_S = 300.0
_WAIT_MIN_S = 0.1
_LOOK_S = 5.0  # for one more try, which tells why there was no answer


@dataclass(frozen=True)
class Service:
    """What a server process is asked to do.

    Attributes:
        index: number of this server, from 0.
        servers, workers: so many there are; None: as worker 0 says. What it says otherwise is an error.
        memory_bytes: that the sums in flight may take.
        timeout_s: longest wait for worker 0, from `begun` on, and then for all others: who is started again whenever it has waited in vain
            would else give up while a job comes together whose worker 0 has just called it.
        begun: by `time.monotonic`, when it began to wait.
    """

    index: int
    servers: int | None
    workers: int | None
    memory_bytes: int
    timeout_s: float
    begun: float = field(default_factory=time.monotonic)

    def left_s(self) -> float:
        """Seconds that are left of the wait for the workers."""
        return round(max(_WAIT_MIN_S, self.begun + self.timeout_s - time.monotonic()), 1)


def open_store(address: str, timeout_s: float) -> Any:
    """The Store at `tcp://host:port` or `file:///path`, where the workers meet. Signals are heard meanwhile.

    Args:
        address: of it.
        timeout_s: longest wait for it, in seconds.

    Raises:
        ConfigError: the address is neither, or there can be no such file.
        RendezvousError: nobody answers there in time.
    """
    place = _store_address.checked(address)
    if isinstance(place, str):
        store = _opened(lambda: dist.FileStore(place, -1), address, timeout_s)
    else:
        longest = timedelta(seconds=timeout_s + _LONGER_S)
        make = partial(dist.TCPStore, *place, is_master=False, timeout=longest)
        store = _opened(make, address, timeout_s, place)
    store.set_timeout(timedelta(seconds=timeout_s))
    return store


def _opened(make: Callable[[], Any], address: str, timeout_s: float, server: tuple[str, int] | None = None) -> Any:
    """The Store that `make` opens; `server` is where it is, unless it is a file. Raises RendezvousError."""
    try:
        return in_time(make, timeout_s)
    except TimeoutError:
        why = f": {_why(server)}" if server else ""
        raise RendezvousError(f"no Store answers at {address} within {timeout_s:g} s{why}") from None
    except RuntimeError as error:  # DistNetworkError and DistStoreError are
        raise RendezvousError(f"no Store answers at {address}: {error}") from error


def _why(server: tuple[str, int]) -> str:
    """What torch, which still tries, would say in the end."""
    try:
        in_time(lambda: socket.create_connection(server, _LOOK_S).close(), _LOOK_S)
    except TimeoutError:
        return "nothing comes back from there"
    except OSError as error:
        return error.strerror or str(error)
    return "who listens there does not answer as a Store"


def serve(
    store: Any, service: Service, on_ready: Callable[[Served], None], on_end: Callable[[dict[str, Any]], None]
) -> None:
    """Serves the default group of the workers that meet at `store`, until all of them have left in good order.

    Args:
        store: as the workers have it, without prefixes.
        service: this server.
        on_ready: called once, when every worker and every server is connected.
        on_end: called once after it, however that ends, with the group's statistics; `served` among them says what this server did.

    Raises:
        ConfigError, SettingsMismatchError: the workers were told of other servers or settings.
        RendezvousError: the workers did not come, or cannot be reached.
        GroupError: a worker died, or the group failed for another reason.
    """
    round_number, first = first_worker(store, service.index, service.left_s())
    published = _agreed_settings(first)
    # Of what the first worker has its operator may have said a part: so it is no contradiction.
    published = {**published, "_origins": {"preset": ("environment of worker 0", published.get("preset"))}}
    settings = Config(**published)
    _refuse_downgrade(settings)
    served = Served(
        first["workers"] + service.index, first["workers"], settings.dedicated_servers(), service.memory_bytes
    )
    _compare(service, served)
    # The kernel chooses the port, so that a server beside workers takes none of theirs; GRADWIRE_PORT says otherwise.
    configure(Config(**published, port=0))
    _, group = join_served_group(store, served, service.timeout_s, round_number)
    try:
        on_ready(served)
        group.wait_for_workers()
    finally:
        with suppress(GradwireError):  # of an engine that has failed there are none
            on_end(group.stats())
        group.leave(LEAVE_TIMEOUT_S)


def _agreed_settings(first: dict[str, Any]) -> dict[str, Any]:
    """What worker 0 says of the settings that must be equal on all ranks.

    It decides nothing else here: whoever can write to the Store could have written it.

    Raises:
        RendezvousError: it names others.
    """
    published: dict[str, Any] = first["settings"]
    foreign = sorted(published.keys() - group_settings(Config()).keys())
    if foreign:
        text = (
            f"worker 0 on {first['host']} has settings that this version of gradwire does not take from it: {', '.join(foreign)}. "
            "Is the same version installed on workers and servers?"
        )
        raise RendezvousError(text, rank=0)
    return published


def _refuse_downgrade(published: Config) -> None:
    """What lies in the Store must not switch off what this server's operator has switched on by a secret."""
    ours = Config.from_env(published)
    if published.security == "off" and not ours.pinned("security") and job_secret(replace(ours, security="on")):
        raise SettingsMismatchError(
            "worker 0 has security = off, and this server has a job secret: set GRADWIRE_SECURITY=off here too, or on the workers on",
            rank=0,
            field="security",
            theirs="off",
            ours="auto",
        )


def _compare(service: Service, served: Served) -> None:
    for name, ours, theirs in (
        ("servers", service.servers, served.servers),
        ("workers", service.workers, served.workers),
    ):
        if ours is not None and ours != theirs:
            raise ConfigError(f"{name} = {ours}: the workers say {theirs}", field=name, value=ours, allowed=theirs)
    if service.index >= served.servers:
        allowed = f"0 to {served.servers - 1}, since the workers expect {served.servers} server(s)"
        raise ConfigError(
            f"index = {service.index} is not allowed: {allowed}", field="index", value=service.index, allowed=allowed
        )
