"""What `tolerate_loss` may be told beside what the engine is told: refused where it is wrong, not in a backward pass later.

No `from __future__ import annotations` here: see `_hook.py`.
"""

import operator
from collections.abc import Callable
from typing import Any

from gradwire.errors import ConfigError


def whole(value: Any) -> int | None:
    """A whole number as it is; None: it is none."""
    try:
        return None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return None


def flag(name: str, value: Any) -> bool:
    """True or False as it is.

    Raises:
        ConfigError: it is something else. Any text would be taken for true, `"no"` too.
    """
    if not isinstance(value, bool):
        raise _refused(name, value, "True | False")
    return value


def check_hook(arguments: dict[str, Any]) -> None:
    """Whether the hook can use these arguments of `tolerate_loss`, by name.

    Raises:
        ConfigError: one is not what it should be.
    """
    flag("error_feedback", arguments["error_feedback"])
    for name, (is_allowed, allowed) in _ALLOWED.items():
        if not is_allowed(arguments[name]):
            raise _refused(name, arguments[name], allowed)


def _is_at_least(least: int) -> Callable[[Any], bool]:
    def is_allowed(value: Any) -> bool:
        number = whole(value)
        return number is not None and number >= least

    return is_allowed


def _is_function(value: Any) -> bool:
    return value is None or callable(value)


def _writes_scalars(value: Any) -> bool:
    return value is None or callable(getattr(value, "add_scalar", None))


_ALLOWED: dict[str, tuple[Callable[[Any], bool], str]] = {
    "drift_every": (_is_at_least(0), "0 or more steps"),
    "steps_kept": (_is_at_least(1), "1 or more records"),
    "priority": (_is_function, "a function that is called with each bucket and returns its traffic class, or None"),
    "compression": (_is_function, "bf16_compress_wrapper or fp16_compress_wrapper of torch's default_hooks, or None"),
    "tensorboard": (_writes_scalars, "a SummaryWriter or whatever has its add_scalar, or None"),
}


def _refused(name: str, value: Any, allowed: str) -> ConfigError:
    return ConfigError(f"{name} = {value!r} is not allowed: {allowed}", field=name, value=value, allowed=allowed)
