"""Which loss policy a tolerant call gets: preset, then configuration, then the call's own arguments, then the operator."""

from __future__ import annotations

from typing import Any

from gradwire import _native
from gradwire.config import Config, check

ALGORITHM_CODES = {"auto": 0, "ring": 1, "transpose": 2}


def policy_numbers(
    config: Config,
    preset: str | None = None,
    *,
    loss_bound: float | None = None,
    deadline_ms: float | None = None,
    floor: float | None = None,
) -> _native.PolicyNumbers:
    """The numbers of one call. None means that the call does not say.

    A call that names a preset starts from the preset's own values: bounds of the configuration belong to the
    configuration's preset. What the operator set in the environment wins over everything.

    Raises:
        ConfigError: a value is out of range or the preset does not exist.
    """
    name = _chosen(config, "preset", preset)
    numbers = _native.preset_defaults(name)
    assert numbers is not None, f"Config allows preset {name}, the engine has no such"
    own_preset = preset is None or name != preset
    loss = _value(config, "loss_bound", loss_bound, own_preset=own_preset)
    deadline = _value(config, "deadline_ms", deadline_ms, own_preset=own_preset)
    least = _value(config, "floor", floor, own_preset=own_preset)
    if loss is not None:
        numbers["loss_bound"] = loss
    if deadline is not None:
        numbers["deadline_s"] = deadline / 1e3 if deadline > 0 else None
        numbers["deadline_factor"] = None
    if least is not None:
        numbers["floor"] = least
    return numbers


def algorithm_code(config: Config, algorithm: str | None = None) -> int:
    """Code of a schedule (`gradwire_collectives::Algorithm`).

    Raises:
        ConfigError: there is no such schedule.
    """
    return ALGORITHM_CODES[_chosen(config, "algorithm", algorithm)]


def _chosen(config: Config, name: str, argument: Any) -> Any:
    if argument is None or config.pinned(name):
        return getattr(config, name)
    return check(name, argument)


def _value(config: Config, name: str, argument: Any, *, own_preset: bool) -> Any:
    if config.pinned(name):
        return getattr(config, name)
    if argument is not None:
        return check(name, argument)
    return getattr(config, name) if own_preset else None
