"""What can go wrong when a cluster of network namespaces is built; each error says what to do about it."""

from __future__ import annotations


class LabError(RuntimeError):
    """The small cluster cannot be built or was used wrongly. The message is one line and names the remedy."""


class WrongRequest(LabError):
    """What is asked for contradicts itself, is beyond what a network of this kind can do, or concerns a part that it has not."""


class NoLab(LabError):
    """Nobody answers for the lab of this name."""


class NoAnswer(LabError):
    """The lab of this name is there and does not answer, as it is stopped."""


class NamespacesUnavailable(LabError):
    """The kernel grants this user no network namespace, neither as root nor through a user namespace."""


class ToolMissing(LabError):
    """A program that the lab runs is not installed."""
