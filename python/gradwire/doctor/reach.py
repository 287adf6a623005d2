"""At which addresses one rank reaches another, as the engine decides when they meet, and what it means that none answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from ipaddress import ip_address
from typing import Any

from gradwire.doctor.family import family_of_engine
from gradwire.doctor.findings import PROBLEM, Finding

# How the engine begins what a rank tells in place of a boot id that it cannot read.
UNKNOWN_BOOT = "pid-"


def are_local(hosts: Sequence[Mapping[str, Any]]) -> bool:
    """Whether all ranks are in one network namespace.

    Args:
        hosts: what each has said of itself.
    """
    return all(each["features"] is not None and _is_local(each["features"], hosts[0]["features"]) for each in hosts)


def addresses(own: Mapping[str, Any], peer: Mapping[str, Any]) -> list[str]:
    """Where a peer may be reached, best first.

    Args:
        own: what the engine of this rank got.
        peer: the same of the other.
    """
    if own["ipv6"] != peer["ipv6"]:
        return []
    is_local = _is_local(own, peer)
    first = [family_of_engine(peer).loopback] if is_local and own["loopback"] and peer["loopback"] else []
    # What is an address of this host too, such as a bridge of containers that every host has, does not leave it.
    leaving = [address for address in peer["addresses"] if is_local or address not in own["addresses"]]
    return first + (leaving or list(peer["addresses"]))


def is_loopback(address: str) -> bool:
    """Whether it leads to this host alone."""
    return ip_address(address).is_loopback


def judge(
    ranks: tuple[int, int], own: Mapping[str, Any], peer: Mapping[str, Any], *, answered: bool, peer_heard: bool | None
) -> list[Finding]:
    """What it means that a peer did not answer, given whether it has heard this rank, and where both listen.

    Args:
        ranks: this one and the peer.
        own: what this one has said of itself.
        peer: the same of the other.
        answered: at any address.
        peer_heard: whether anything has come there; None: it has not said.
    """
    rank, other = ranks
    asked = addresses(own["features"], peer["features"])
    if answered:
        return []
    if not asked:
        text, fix = _no_way(own["features"], peer["features"], ranks)
    elif peer_heard is None:
        text = f"no answer from UDP port {peer['port']} of {' or '.join(asked)}; whether anything arrives there is not known"
        fix = f"let UDP port {peer['port']} in on rank {other}'s host, UDP port {own['port']} on rank {rank}'s, and both in the network"
    elif peer_heard:
        text = f"packets arrive there, but no answer comes back to UDP port {own['port']} here"
        accept = f"nft insert rule inet filter input udp dport {own['port']} accept"
        fix = f"let UDP port {own['port']} in on rank {rank}'s host, for example: {accept}"
    else:
        port = peer["port"]
        text = f"nothing arrives at UDP port {port} of {' or '.join(asked)}"
        fix = f"let UDP port {port} in on rank {other}'s host and in the network, or name another interface in GRADWIRE_INTERFACE"
    return [Finding(PROBLEM, "reachability", text, fix, rank, other)]


def _no_way(own: Mapping[str, Any], peer: Mapping[str, Any], ranks: tuple[int, int]) -> tuple[str, str]:
    """Why there is no address to ask, and what to do."""
    if own["ipv6"] != peer["ipv6"]:
        here, there = ("IPv6", "IPv4") if own["ipv6"] else ("IPv4", "IPv6")
        text = f"this rank uses its {here} addresses and that one its {there} ones: the two do not reach each other"
        return text, "name addresses or networks of one family on every rank in GRADWIRE_INTERFACE"
    text = "it has no address that could be asked from here, loopback alone"
    if any(one["boot_id"].startswith(UNKNOWN_BOOT) for one in (own, peer)):
        text += "; whether it is on this host cannot be told where /proc/sys/kernel/random/boot_id cannot be read"
        return text, "mount /proc for both ranks, or bring an interface up that has an address"
    return text, f"on rank {ranks[1]}'s host bring an interface up, or name one in GRADWIRE_INTERFACE"


def _is_local(own: Mapping[str, Any], peer: Mapping[str, Any] | None) -> bool:
    """Whether two ranks are in one network namespace of one kernel."""
    names = ("boot_id", "network_namespace")
    return peer is not None and all(own[name] == peer[name] for name in names)
