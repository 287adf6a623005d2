"""Every error that gradwire raises, and nothing else.

Three kinds of trouble, never mixed: packets that are lost or forged are only counted; what a user or operator can act
on is one of these classes; a bug is an assertion. docs/errors.md says for each class who can fix it and what state
remains. The numbers that disagree are attributes (`error.rank`, `error.silent_s`, ...), also in `error.fields`.

The Rust binding raises these classes by their names (crates/gradwire-py/src/errors.rs).
"""

from __future__ import annotations

from typing import Any


class GradwireError(RuntimeError):
    """Base of all errors.

    Args:
        message: one sentence that names the rank and what disagreed.
        fields: the numbers in it, readable as attributes.
    """

    def __init__(self, message: str = "", **fields: Any) -> None:
        super().__init__(message)
        self.message = message
        self.fields = fields

    def __getattr__(self, name: str) -> Any:
        fields = self.__dict__.get("fields", {})
        if name in fields:
            return fields[name]
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}; it has {sorted(fields)}")

    def __str__(self) -> str:
        return self.message

    def __reduce__(self) -> tuple[Any, ...]:
        return (_rebuild, (type(self), self.message, self.fields))


class ConfigError(GradwireError, ValueError):
    """A field, environment variable or argument does not exist, or its value is out of range.

    Fields, as far as they are known: field, value, allowed; nearest, of a name that does not exist. `error.fields` has those there are.
    """


class MissingExtraError(GradwireError, ImportError):
    """A setting, a command, `gradwire.torch` or `gradwire.Communicator` needs a package that is not installed.

    Fields: extra (of `pip install gradwire[...]`), package.
    """


class StatusFolderError(GradwireError):
    """There is no folder for the status socket that only this user can look into. Fields: folder."""


class UnsupportedError(GradwireError, TypeError):
    """A tensor, dtype, device, reduction or torch version that gradwire does not handle. The group goes on."""


class InvalidRequestError(GradwireError, ValueError):
    """The arguments of one call do not fit together. Nothing was sent; the group goes on."""


class PortInUseError(GradwireError):
    """A port is taken on this host: the UDP port, or the TCP port of the rendezvous or of the metrics. Fields: port."""


class AddressError(GradwireError):
    """No usable local address or interface, or no permission to use it. Fields: asked; found, of interfaces."""


class EngineError(GradwireError):
    """The engine could not start or has stopped: a failed system call, no permission. Fields: what."""


class ForkedError(EngineError):
    """A process group was used in a forked child; sockets and threads stay with the parent. Fields: owner_pid."""


class RendezvousError(GradwireError):
    """The ranks could not form a group. Fields: rank or ranks that are the cause; over: what rank 0 had to say is not known.

    store: address of the Store that did not answer, if that is why; empty where it has none.
    """


class MissingRankError(RendezvousError, TimeoutError):
    """Ranks did not publish themselves in the Store in time, or not read there what others had published.

    Fields: ranks; waited_s, or None; cause, where rank 0 told of it.
    """


class WorldSizeError(RendezvousError):
    """Ranks were started with different world sizes. Fields: rank, theirs, ours."""


class SettingsMismatchError(RendezvousError):
    """A setting that must be equal everywhere differs. Fields: rank, field, theirs, ours."""


class SecretMismatchError(RendezvousError):
    """A rank has another job secret than this one, or only one of the two has any. Fields: rank, problem."""


class UnreachableError(RendezvousError):
    """No packet came back from a rank, or it uses the other version of IP than this one. Fields: ranks."""


class GroupError(GradwireError):
    """A collective failed and its group is poisoned: every later call fails with the same cause.

    Ranks may disagree about what has been done. Destroy the group and form a new one.
    """


class MismatchError(GroupError):
    """Ranks called different things at the same place of their sequence. Fields: rank_a, a, rank_b, b."""


class PeerLostError(GroupError):
    """A rank fell silent. Fields: rank, host, silent_s, during, detail (stage, what had arrived, its place), reported_by.

    With `on_peer_loss="continue"` rank is None where the group is formed again and nobody is known to be lost, yet or at all.
    """


class PeerLeftError(GroupError):
    """A rank left while it was still needed. Fields: rank, host, during, waited_s, detail (as of `PeerLostError`)."""


class DeadlineError(GroupError, TimeoutError):
    """The group's timeout passed. Fields: during, waited_s, detail."""


class AbortedError(GroupError):
    """Another rank's group failed for a reason of its own, or this rank's network thread by a bug.

    Fields: rank, host, cause; and what this rank saw: during, waited_s, detail (as of `DeadlineError`).
    """


class NotMemberError(GroupError):
    """This rank may not go on (`on_peer_loss="continue"`). Fields: epoch, outcome, cause.

    No majority was reached, it was left out, or the ranks that are left have made different calls.
    """


class ServerMemoryError(GroupError):
    """A parameter server may not hold what a call needs on it. Fields: rank, host, during, needed_bytes, allowed_bytes."""


class ShutDownError(GroupError):
    """The group was shut down on this rank while a call was in flight. Fields: during."""


class WaitTimeoutError(GradwireError, TimeoutError):
    """`Work.wait(timeout)` gave up before the collective ended; it goes on and may be waited for again."""


def _rebuild(kind: type[GradwireError], message: str, fields: dict[str, Any]) -> GradwireError:
    return kind(message, **fields)
