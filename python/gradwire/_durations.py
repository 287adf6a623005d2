"""Durations as callers give them."""

from __future__ import annotations

from datetime import timedelta

from gradwire.errors import ConfigError


def seconds(name: str, duration: timedelta) -> float:
    """The argument `name` in seconds.

    Raises:
        ConfigError: it is no timedelta. A plain number would be taken for seconds by one library and for milliseconds by another.
    """
    if not isinstance(duration, timedelta):
        text = f"{name} = {duration!r} is not allowed: a datetime.timedelta, such as timedelta(seconds=10)"
        raise ConfigError(text, field=name, value=duration)
    return duration.total_seconds()
