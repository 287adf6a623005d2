"""Which loss policy a tolerant call gets: preset, then configuration, then the call's own arguments, then the operator."""

from __future__ import annotations

from typing import Any

from gradwire import _native
from gradwire.config import TAGGING_PRESETS, Config, check, contradicts_reliable
from gradwire.errors import ConfigError

ALGORITHM_CODES = {
    "auto": 0,
    "ring": 1,
    "transpose": 2,
    "halving_doubling": 3,
    "parameter_server": 4,
    "weighted_transpose": 5,
    "one_shot": 6,
}
# The presets whose papers lose results on their way back. The others keep replicas identical.
GATHER_PRESETS = ("mlt", "dlcp", "ultima")
# Those that stop a transfer as soon as their bound is met; a lower floor would let a deadline stop it sooner.
PRESETS_STOPPED_BY_BOUND = ("mlt", "dlcp")


def policy_numbers(
    config: Config,
    preset: str | None = None,
    *,
    loss_bound: float | None = None,
    deadline_ms: float | None = None,
    floor: float | None = None,
    step_delay_max_ms: float | None = None,
    gather_loss_bound: float | None = None,
    gather_fill: str | None = None,
    divide_by: str | None = None,
    hadamard: str | None = None,
    delay_share: float = 1.0,
) -> _native.PolicyNumbers:
    """The numbers of one call. None means that the call does not say.

    A call that names another preset than the configuration starts from the preset's own values: bounds of the configuration
    belong to the configuration's preset. Options that only one preset has go with that preset. What the operator set in the environment
    wins over everything, so what the program says beside a preset of the operator's that has no use for it is left out. Under `reliable`
    everything is waited for, whatever bounds and deadlines are said. `delay_share`: the call's part of what its step may be delayed.

    Raises:
        ConfigError: a value is out of range, the preset does not exist, or it contradicts another value.
    """
    name = _chosen(config, "preset", preset)
    numbers = _native.preset_defaults(name)
    assert numbers is not None, f"Config allows preset {name}, the engine has no such"
    asked = {
        "loss_bound": loss_bound,
        "deadline_ms": deadline_ms,
        "floor": floor,
        "step_delay_max_ms": step_delay_max_ms,
        "gather_loss_bound": gather_loss_bound,
    }
    own_preset = name == config.preset
    said = {field: _value(config, field, value, own_preset=own_preset) for field, value in asked.items()}
    if name == "reliable":
        if loss_bound is not None and check("loss_bound", loss_bound) and not config.pinned("preset"):
            raise ConfigError(contradicts_reliable("loss_bound", loss_bound), field="loss_bound", value=loss_bound)
        said = {**dict.fromkeys(said), "gather_loss_bound": said["gather_loss_bound"]}
    _bound_contributions(numbers, said)
    _bound_results(config, numbers, said)
    if said["step_delay_max_ms"] is not None:
        numbers["deadline_max_s"] = said["step_delay_max_ms"] / 1e3 * delay_share
    numbers["gather_fill"] = _chosen(config, "gather_fill", gather_fill)
    numbers["divide_by"] = _chosen(config, "divide_by", divide_by)
    numbers["hadamard"] = _rotation(config, name, _chosen(config, "hadamard", hadamard), hadamard)
    _apply_preset_options(config, numbers)
    if said["deadline_ms"] is not None:
        _fix_deadline(numbers, said["deadline_ms"])
    if numbers["recovery"] == "never":
        _check_that_time_ends_it(name, said["floor"], said["deadline_ms"])
    problem = _native.policy_problem(numbers)
    if problem is not None:
        raise ConfigError(f"preset {name} with these settings is not possible: {problem}", field="preset", value=name)
    return numbers


def of_one_stage(numbers: _native.PolicyNumbers) -> _native.PolicyNumbers:
    """The same for a reduce-scatter, which sends no results back and is not rotated."""
    return {**numbers, "hadamard": "off", "gather_loss_bound": 0.0, "gather_recovery": "at_once"}


def results_may_be_lost(numbers: _native.PolicyNumbers) -> bool:
    """Whether ranks may end with different results of a call: some of them may be missing on their way back."""
    return numbers["gather_loss_bound"] > 0 or numbers["gather_recovery"] == "never"


def algorithm_code(config: Config, algorithm: str | None = None) -> int:
    """Code of a schedule (`gradwire_collectives::Algorithm`).

    Raises:
        ConfigError: there is no such schedule.
    """
    return ALGORITHM_CODES[_chosen(config, "algorithm", algorithm)]


def _rotation(config: Config, preset: str, chosen: str, asked: str | None) -> str:
    """Rotated gradients are all alike: where the network is told which ones matter, only who asks for it has them rotated.

    So it is under the presets that say so, also where a call names one: what their receivers cut counts as loss, and `auto` would rotate
    on a network that loses nothing. An `auto` of the operator's leaves it to the program, so that a call which must not be rotated is not.
    """
    is_told = config.marks_importance() or (config.importance is None and preset in TAGGING_PRESETS)
    return "off" if chosen == "auto" and (is_told or asked == "off") else str(chosen)


def _bound_contributions(numbers: _native.PolicyNumbers, said: dict[str, Any]) -> None:
    """The bound of the reduce stage, and the least that its deadlines accept: what that asks for where it stops transfers."""
    loss, least = said["loss_bound"], said["floor"]
    if loss is not None:
        numbers["loss_bound"] = loss
        if least is None and numbers["preset"] in PRESETS_STOPPED_BY_BOUND:
            least = 1.0 - loss
    if least is not None:
        numbers["floor"] = least


def _bound_results(config: Config, numbers: _native.PolicyNumbers, said: dict[str, Any]) -> None:
    """The bound of the gather stage."""
    preset, bound = numbers["preset"], said["gather_loss_bound"]
    if bound is not None:
        bound = _gather_bound(config, preset, bound)
    elif said["loss_bound"] is not None:
        bound = _gather_bound_beside(preset, said["loss_bound"], numbers["gather_loss_bound"])
    if bound is not None:
        numbers["gather_loss_bound"] = bound
        numbers["gather_recovery"] = "when_asked" if bound > 0 else "at_once"


def _gather_bound(config: Config, preset: str, bound: float) -> float:
    if bound > 0 and preset not in GATHER_PRESETS:
        if config.pinned("preset") and not config.pinned("gather_loss_bound"):
            return 0.0  # the program's, for another preset than the operator's
        raise ConfigError(
            f"gather_loss_bound = {bound:g} is not allowed with preset {preset}, which keeps replicas identical: one of "
            f"{', '.join(GATHER_PRESETS)}",
            field="gather_loss_bound",
            value=bound,
        )
    return bound


def _gather_bound_beside(preset: str, loss_bound: float, default: float) -> float | None:
    """The bound of results where only that of contributions is set; None: the preset's own rule.

    MLT's paper has one bound for both stages. DLCP's results have a smaller one, and are not cut while they flow as long as it is smaller.
    """
    if preset == "mlt":
        return loss_bound
    return min(default, loss_bound / 10) if preset == "dlcp" else None


def _apply_preset_options(config: Config, numbers: _native.PolicyNumbers) -> None:
    """Options of LTP and ULTIMA, where the policy has their rule."""
    if numbers["data_share"] is not None and config.data_percentage is not None:
        numbers["data_share"] = config.data_percentage / 100
    if numbers["data_share"] is not None and config.epoch_transfers is not None:
        numbers["epoch_transfers"] = config.epoch_transfers
    if numbers["data_share"] is not None and config.critical_packets is not None:
        numbers["critical_packets"] = config.critical_packets
    if numbers["deadline_margin_s"] is not None and config.deadline_margin_ms is not None:
        numbers["deadline_margin_s"] = config.deadline_margin_ms / 1e3
    if numbers["quiet_share"] is not None and config.quiet_percentage is not None:
        numbers["quiet_share"] = config.quiet_percentage / 100
    if numbers["warm_up_rounds"] is not None and config.warm_up_rounds is not None:
        numbers["warm_up_rounds"] = config.warm_up_rounds


def _fix_deadline(numbers: _native.PolicyNumbers, deadline_ms: float) -> None:
    """A fixed deadline, or none at all for 0, in place of the preset's rule."""
    numbers["deadline_s"] = deadline_ms / 1e3 if deadline_ms > 0 else None
    numbers["deadline_factor"] = None
    numbers["deadline_margin_s"] = None
    numbers["warm_up_rounds"] = None


def _check_that_time_ends_it(preset: str, floor: float | None, deadline_ms: float | None) -> None:
    """Where nothing is sent again, only a deadline that takes whatever has arrived ends every wait."""
    for field, value, is_wrong in (("floor", floor, bool(floor)), ("deadline_ms", deadline_ms, deadline_ms == 0)):
        if is_wrong:
            text = f"{field} = {value:g} is not allowed with preset {preset}: nothing is sent again there, so a deadline must end the wait"
            raise ConfigError(f"{text}, whatever has arrived; leave {field} unset", field=field, value=value)


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
