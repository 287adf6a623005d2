"""Where workers meet, as a dedicated server is told it. Without torch, whose import takes seconds: what is wrong is said before it."""

from __future__ import annotations

import os

from gradwire.errors import ConfigError


def checked(address: str) -> str | tuple[str, int]:
    """The path of a Store's file, which is there then, or the host and port of a Store.

    Args:
        address: `tcp://host:port` or `file:///path`.

    Raises:
        ConfigError: the address is neither, or there can be no such file.
    """
    kind, _, place = address.partition("://")
    host, _, port = place.rpartition(":")
    if kind == "file" and place:
        _check_file(address, place)
        return place
    if kind != "tcp" or not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
        allowed = "tcp://host:port | file:///path"
        raise ConfigError(
            f"store = {address!r} is not allowed: {allowed}", field="store", value=address, allowed=allowed
        )
    return host.strip("[]"), int(port)


def _check_file(address: str, place: str) -> None:
    """Opens it as torch will, which waits for minutes where its folder is not there. Raises ConfigError."""
    try:
        os.close(os.open(place, os.O_RDWR | os.O_CREAT | os.O_NONBLOCK | os.O_CLOEXEC, 0o644))
    except OSError as error:
        allowed = "a file that can be written, in a folder that is there"
        text = f"store = {address!r} cannot be opened: {error.strerror}; it must be {allowed}"
        raise ConfigError(text, field="store", value=address, allowed=allowed) from error
