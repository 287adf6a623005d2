"""The explicit tolerant reductions. The only way by which a value of the user's can be lost, and only if asked for."""

from __future__ import annotations

import logging
import reprlib
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from gradwire import _native
from gradwire._durations import seconds
from gradwire._policy import ALGORITHM_CODES, algorithm_code, of_one_stage, policy_numbers, results_may_be_lost
from gradwire._runtime import configuration, current, inherited
from gradwire.config import Config
from gradwire.errors import ConfigError, InvalidRequestError, UnsupportedError
from gradwire.torch import _compat, _memory, _profile
from gradwire.torch._arguments import flag, whole
from gradwire.torch._group import Call, GroupLink
from gradwire.torch._pieces import Piece
from gradwire.torch._reduction import LINEAR, name_of, reduction
from gradwire.torch._staging import Staging
from gradwire.torch._tags import PRIORITY_OF_CLASS_0, PRIORITY_STEP, tag_options
from gradwire.torch._work import GradwireWork

logger = logging.getLogger("gradwire")

# The order of calls in flight is a byte (crates/gradwire-py/src/call.rs).
PRIORITY_MAX = 255
_POLICIES_MAX = 256


def all_reduce(
    tensor: torch.Tensor,
    op: Any = dist.ReduceOp.AVG,
    *,
    loss_bound: float | None = None,
    preset: str | None = None,
    deadline: timedelta | None = None,
    step_delay_max: timedelta | None = None,
    delay_share: float = 1.0,
    gather_loss_bound: float | None = None,
    gather_fill: str | None = None,
    divide_by: str | None = None,
    hadamard: str | None = None,
    algorithm: str | None = None,
    output: torch.Tensor | None = None,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
    residual: torch.Tensor | None = None,
    priority: int | None = None,
    traffic_class: int | None = None,
    important: torch.Tensor | Sequence[bool] | None = None,
    contributions: bool = False,
) -> GradwireWork:
    """Reduces `tensor` over all ranks, in place or into `output`, and may leave a bounded share of the contributions behind.

    Every rank passes the same arguments, `tensor`, `output` and `residual` excepted.

    Args:
        tensor: float32, bfloat16 or float16, any shape.
        op: AVG divides each element as `divide_by` says. SUM is that mean times the number of ranks: of those that are left
            (`report().members`) once `on_peer_loss="continue"` has lost some, also in a call that was in flight then. A GPU's tensor
            that goes in pieces (`gpu_chunk_mb`) may then be times another number in each: `report().parts` has their `members`.
        loss_bound: share of each transfer of the reduce stage that may be missing, 0 to 0.9; with `reliable` 0 alone. None: the preset's.
        preset: `auto`, `mlt`, `dlcp`, `ltp`, `ultima` or `reliable`: its rules of what may be missing, while rate control, code points
            and importance stay those of the configuration's. None: the configuration's.
        deadline: after which a transfer is closed with what has arrived. None: the preset's; zero: never.
        step_delay_max: the most that waiting for retransmissions may delay a step; deadlines stay derived from what was
            measured, and below this, which stages that wait for each other share. None: the preset's.
        delay_share: this call's part of it, above 0 to 1, where a step has several calls.
        gather_loss_bound: share of the results that may be missing on their way back. Above 0 ranks may end with different
            bits; `report().filled` says where. None: the preset's, 0 for all but `mlt`, `dlcp` and
            `ultima`.
        gather_fill: `zero`, `previous` or `local`: what a result holds that did not arrive, or that no rank's values reached the server
            for. `previous` is what `output` held before, for example the latest result; it needs an `output`, and no rotation.
            None: the configuration's.
        output: like `tensor`, in memory of its own: gets the result instead of it. None: in place.
        hadamard: `on` or `off`: whether the tensor is sent rotated, so that a lost packet takes a little of every element and
            not all of a few; `auto`: from 5 % loss on. `report().rotated_elems` says whether it was. None: the configuration's.
        divide_by: `contributions` or `world`: what the mean of an element divides by that some ranks' values are missing for.
            None: the configuration's.
        algorithm: `auto`, `ring`, `transpose`, `halving_doubling`, `parameter_server`, `weighted_transpose` or `one_shot`. None: the
            configuration's.
        group: None means the default group.
        async_op: return at once; the caller waits.
        residual: like `tensor`. What this rank's values that did not count still owe to the mean is written here at their
            places, all else stays as it is: the value less the mean that stood in for it (with `divide_by="world"`: all of
            it); of a rotated tensor each element gets its part of all that.
            Add it to the next tensor and clear it: then no contribution is lost, it is only late.
        priority: 0 to 255; lower goes first when several are in flight. Local to this rank. None: that of the class.
        traffic_class: 0 (the most urgent) to `classes` - 1: which queue of a switch, by `dscp_classes`. Local to this rank.
        important: which parts of the tensor a switch should keep longest, a mask of any length: the tensor is thought of
            as cut into as many equal parts. None: as the configuration's `importance` says. Local to this rank.
        contributions: count for the report how many ranks are in each block of the result (`report().contributions`). Local to
            this rank.

    Returns:
        The work; `work.report()` says what was delivered. Its wait and future carry every error.

    Raises:
        GradwireError: without `async_op`, the call failed.
        InvalidRequestError: `tensor`, `output` and `residual` are not alike, or `gather_fill` cannot be met.
        UnsupportedError: the group has another backend, or the dtype or the reduction tolerates no loss.
        ConfigError: a value is out of range, or of another kind.

    # Loss
    An element that a rank's contribution is missing for is the mean over the others, or as if it had been zero
    (`divide_by`); all ranks get the same bits. Only with presets `mlt`, `dlcp` and `ultima`, as their papers have it, a result
    may be missing on a rank, which then holds what `Config.gather_fill` says; with `gather_loss_bound=0` never.
    """
    link = link_of(group)

    def prepare(piece: Piece) -> Call:
        config, (into, rest) = link.owner.config, piece.written
        options = reduction(piece.tensor, op)
        _check_tolerant(tensor, residual, output, op)
        options["policy"] = timed_policy(
            config,
            preset,
            loss_bound=loss_bound,
            deadline=deadline,
            step_delay_max=step_delay_max,
            delay_share=_share(delay_share) / piece.count,
            gather_loss_bound=gather_loss_bound,
            gather_fill=gather_fill,
            divide_by=divide_by,
            hadamard=hadamard,
        )
        options["algorithm"] = algorithm_code(config, algorithm)
        options |= tag_options(config, traffic_class, piece.mask(important))
        options["priority"] = _order(priority, traffic_class)
        options["contributions"] = flag("contributions", contributions)
        staging = Staging()
        assert into is not None
        target = _memory.writable(into, staging, load=True)
        source = _memory.readable(piece.read[0], staging) if piece.read else target
        call = Call("all_reduce", [into], source, target, staging, options)
        if rest is not None:
            owed = _memory.writable(rest, staging, load=True)
            options["residual"] = _memory.address(owed)
            call.keep.extend(_memory.kept(owed))
        return call

    whole = Piece([tensor, residual]) if output is None else Piece([output, residual], [tensor])
    link.deliveries.bring()
    trace = _profile.begin("all_reduce", [tensor], link)
    work = link.start_in_pieces("all_reduce", None, whole, prepare)
    if trace is not None:
        trace.end_with(work)
    link.hand_out(work, is_waited_for=not async_op)
    if not async_op:
        work.wait()
    return work


def reduce_scatter(
    output: torch.Tensor,
    tensor: torch.Tensor,
    op: Any = dist.ReduceOp.AVG,
    *,
    loss_bound: float | None = None,
    preset: str | None = None,
    deadline: timedelta | None = None,
    step_delay_max: timedelta | None = None,
    delay_share: float = 1.0,
    divide_by: str | None = None,
    group: dist.ProcessGroup | None = None,
    async_op: bool = False,
    residual: torch.Tensor | None = None,
    traffic_class: int | None = None,
    important: torch.Tensor | Sequence[bool] | None = None,
    contributions: bool = False,
) -> GradwireWork:
    """Reduces `tensor` `[world_size * elems]` over all ranks, of which each keeps its own part, and may leave contributions behind.

    Half the bytes of `all_reduce`, as no result is sent back. `tensor` is only read. Every rank passes the same arguments, tensors and
    class excepted.

    Args:
        output: `[elems]`, gets this rank's part; of the dtype and on the device of `tensor`.
        tensor: float32, bfloat16 or float16, any shape; row r of `world_size` equal ones is rank r's.
        op: AVG divides each element as `divide_by` says. SUM is that mean times the number of ranks.
        loss_bound: share of each transfer that may be missing, 0 to 0.9. None: the preset's.
        preset: as in `all_reduce`, like the next four.
        deadline: after which a transfer is closed with what has arrived.
        step_delay_max: the most that waiting for retransmissions may delay a step.
        delay_share: this call's part of it, above 0 to 1, where a step has several calls.
        divide_by: `contributions` or `world`.
        group: None means the default group.
        async_op: return at once; the caller waits.
        residual: like `tensor`, on every rank or on none. What this rank owes to later steps is written here, all else stays as it is: its
            values that did not count, and in its own part less the mean for each rank that was missing, since they do not learn
            it. With `divide_by="contributions"` the mean of an element that at most half of the ranks are in divides by all
            ranks then, and nothing but the lost values is owed for it (docs/error-feedback.md).
        traffic_class: as in `all_reduce`, and so is the order among calls in flight.
        important: as in `all_reduce`, a mask over all of `tensor`.
        contributions: as in `all_reduce`, of this rank's part.

    Returns:
        The work. `work.report().uncounted` are places in `tensor`. Its wait carries every error.

    Raises:
        GradwireError: without `async_op`, the call failed.
        InvalidRequestError: `tensor`, `output` and `residual` do not fit together.
        UnsupportedError: the group has another backend, or the dtype or the reduction tolerates no loss.
        ConfigError: a value is out of range, or of another kind.

    # Loss
    An element that a rank's contribution is missing for is the mean over the others, or as if it had been zero (`divide_by`). This
    rank's own is never missing from its part. It is not rotated.
    """
    link = link_of(group)

    def prepare(piece: Piece) -> Call:
        (into, rest), (rows,) = piece.written, piece.read
        assert into is not None
        _check_tolerant(tensor, residual, None, op, what="reduce-scatter")
        _check_apart("residual", residual, "output", output)
        _check_rows(rows, into, link.world_size)
        options = reduction(into, op)
        numbers = timed_policy(
            link.owner.config,
            preset,
            loss_bound=loss_bound,
            deadline=deadline,
            step_delay_max=step_delay_max,
            delay_share=_share(delay_share) / piece.count,
            divide_by=divide_by,
        )
        options["policy"] = of_one_stage(numbers)
        options |= tag_options(link.owner.config, traffic_class, piece.mask(important))
        options["priority"] = _order(None, traffic_class)
        options["contributions"] = flag("contributions", contributions)
        staging = Staging()
        target = _memory.writable(into, staging, load=False)
        call = Call("reduce_scatter", [into], _memory.readable(rows, staging), target, staging, options)
        if rest is not None:
            owed = _memory.writable(rest, staging, load=True)
            options["residual"] = _memory.address(owed)
            call.keep.extend(_memory.kept(owed))
        return call

    whole = Piece([output, residual], [tensor], link.world_size)
    link.deliveries.bring()
    trace = _profile.begin("reduce_scatter", [tensor], link, [output])
    work = link.start_in_pieces("reduce_scatter", None, whole, prepare)
    if trace is not None:
        trace.end_with(work)
    link.hand_out(work, is_waited_for=not async_op)
    if not async_op:
        work.wait()
    return work


def tolerant_group(
    ranks: Sequence[int] | None = None,
    *,
    timeout: timedelta | None = None,
    loss_bound: float | None = None,
    preset: str | None = None,
    deadline: timedelta | None = None,
    step_delay_max: timedelta | None = None,
    gather_loss_bound: float | None = None,
    gather_fill: str | None = None,
    divide_by: str | None = None,
    algorithm: str | None = None,
) -> Any:
    """A new process group whose all-reduces of gradients may lose, for hooks that reduce by themselves.

    torch's PowerSGD and compression hooks take a process group: with this one what they send tolerates loss, so that
    compression and loss tolerance compose (LTP section VI-A). In it every all-reduce of float32, bfloat16 and float16 by SUM
    or AVG may leave a bounded share of the contributions behind; everything else on it stays exact. A SUM is the mean of
    what arrived times the number of ranks: of those that are left once `on_peer_loss="continue"` has lost some, while the hooks divide
    by the first number, so that their gradients are smaller then. Nothing is fed back to the next step but what the hook itself feeds back.

    Args:
        ranks: as for `torch.distributed.new_group`, which this calls: on all ranks, in the same order.
        timeout: of the group.
        loss_bound: as in `all_reduce`, like all that follow.
        preset: the rule.
        deadline: of a transfer.
        step_delay_max: that waiting for retransmissions may cost a stage.
        gather_loss_bound: share of the results that may be missing on their way back, in the presets `mlt`, `dlcp` and `ultima`: above 0
            replicas may differ, and a warning says so.
        gather_fill: `zero` or `local`, of a result that did not arrive. The hooks reduce in place, where no previous result is.
        divide_by: what a mean divides by where contributions are missing.
        algorithm: the schedule.

    Returns:
        The group, or torch's `GroupMember.NON_GROUP_MEMBER` on other ranks.

    Raises:
        ConfigError: a value is out of range, or `ring` where results may be lost; or `gather_fill` (`GRADWIRE_GATHER_FILL`) is `previous`.
        GradwireError: the ranks could not form the group.
    """
    config = configuration()
    numbers = timed_policy(
        config,
        preset,
        loss_bound=loss_bound,
        deadline=deadline,
        step_delay_max=step_delay_max,
        gather_loss_bound=gather_loss_bound,
        gather_fill=gather_fill,
        divide_by=divide_by,
    )
    if numbers["gather_fill"] == "previous":
        text = "gather_fill = previous is not kept in a tolerant_group, whose reductions are in place: zero or local"
        raise ConfigError(text, field="gather_fill", value="previous")
    warn_of_lost_results(numbers)
    tolerance = {
        "policy": numbers,
        "algorithm": schedule_of(config, algorithm, numbers),
        **tag_options(config, None, None),
    }
    group = dist.new_group(ranks, timeout=timeout, backend="gradwire")
    if group is not dist.GroupMember.NON_GROUP_MEMBER:
        link_of(group).tolerance = tolerance
    return group


def schedule_of(config: Config, algorithm: str | None, numbers: _native.PolicyNumbers) -> int:
    """Code of the schedule that these numbers go with, for whoever reduces later: the engine would refuse every reduction.

    Raises:
        ConfigError: there is no such schedule, or it is a ring and results may be lost; or previous results are to fill in rotated ones.
    """
    if numbers["gather_fill"] == "previous" and numbers["hadamard"] == "on":
        text = "gather_fill = previous is not allowed with hadamard = on: previous results are not rotated"
        raise ConfigError(f"{text}. zero or local, or hadamard = auto", field="gather_fill", value="previous")
    code = algorithm_code(config, algorithm)
    if code == ALGORITHM_CODES["ring"] and results_may_be_lost(numbers):
        text = (
            "algorithm = ring is not allowed where results may be lost, whose holes a ring would hand on: another one"
        )
        raise ConfigError(f"{text}, or gather_loss_bound = 0", field="algorithm", value="ring")
    return code


def warn_of_lost_results(numbers: _native.PolicyNumbers) -> None:
    """Says so where replicas may end with different results."""
    if results_may_be_lost(numbers):
        bound = numbers["gather_loss_bound"]
        share = f"{bound:g} of them" if bound > 0 else "none is sent again"
        logger.warning("averaged gradients may be lost on their way back (%s): replicas may differ", share)


def timed_policy(
    config: Config, preset: str | None, *, deadline: timedelta | None, step_delay_max: timedelta | None, **more: Any
) -> _native.PolicyNumbers:
    """`policy_numbers` of durations as callers have them; settings count milliseconds. What was asked before is not worked out again."""
    asked = (preset, deadline, step_delay_max, *more.items(), *map(type, more.values()))
    try:
        known = config.policies.get(asked)
    except TypeError:  # a value that has no hash is none that is allowed
        known = None
    if known is None:
        known = policy_numbers(
            config,
            preset,
            deadline_ms=_milliseconds("deadline", deadline),
            step_delay_max_ms=_milliseconds("step_delay_max", step_delay_max),
            **more,
        )
        if len(config.policies) >= _POLICIES_MAX:  # of a caller that changes a bound with each step
            config.policies.clear()
        config.policies[asked] = known
    return {**known}


def _milliseconds(name: str, time: timedelta | None) -> float | None:
    return None if time is None else seconds(name, time) * 1e3


def link_of(group: dist.ProcessGroup | None) -> GroupLink:
    """The engine's side of a process group.

    Raises:
        GradwireError: as `adapter_of`.
    """
    link: GroupLink = adapter_of(group).link
    return link


def adapter_of(group: dist.ProcessGroup | None) -> Any:
    """What torch calls for a process group, or for the devices of it that are gradwire's (`Collectives`).

    Raises:
        UnsupportedError: gradwire does not serve it, this rank is not in it, or there is none.
        InvalidRequestError: it is something else, such as a mesh.
        ForkedError: it is the parent's.
    """
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise UnsupportedError("this rank is not in the group: only its members make its calls")
    group = dist.group.WORLD if group is None else group
    owner = current() or inherited()
    name = getattr(group, "group_name", None)
    adapter = None if owner is None or name is None else owner.backends.get(name)
    if adapter is None and owner is not None and group is not None:
        adapter = _renamed(group)
    if adapter is None and group is None:
        raise UnsupportedError("there is no process group: call init_process_group first")
    if adapter is None and not isinstance(group, dist.ProcessGroup):
        given = reprlib.repr(group)
        raise InvalidRequestError(
            f"{given} is no process group: give one of torch.distributed's (of a mesh mesh.get_group()), or None"
        )
    if adapter is None:
        raise UnsupportedError(f"the process group has backend {dist.get_backend(group)!r}, not 'gradwire'")
    adapter.link.owner.check_process()
    return adapter


def _renamed(group: dist.ProcessGroup) -> Any:
    """The adapter of a group to which torch gave its name later (`shrink_group`), or that was aborted."""
    if isinstance(getattr(group, "link", None), GroupLink):
        return group  # before torch 2.14, or one that changes its members
    try:
        adapter = _compat.peeled(group._get_backend(torch.device("cpu")))
    except RuntimeError:
        return None
    return adapter if isinstance(getattr(adapter, "link", None), GroupLink) else None


def _share(delay_share: float) -> float:
    try:
        is_share = 0.0 < delay_share <= 1.0
    except TypeError:
        is_share = False
    if not is_share:
        text = f"delay_share = {delay_share!r} is not allowed: above 0 to 1"
        raise ConfigError(text, field="delay_share", value=delay_share)
    return delay_share


def _order(priority: int | None, traffic_class: int | None) -> int | None:
    """Urgent classes leave first, unless the call says otherwise."""
    if priority is not None and ((number := whole(priority)) is None or not 0 <= number <= PRIORITY_MAX):
        raise ConfigError(
            f"priority = {priority!r} is not allowed: 0 to {PRIORITY_MAX}", field="priority", value=priority
        )
    if priority is not None or traffic_class is None:
        return priority
    return PRIORITY_OF_CLASS_0 + PRIORITY_STEP * traffic_class


def _check_rows(rows: torch.Tensor, row: torch.Tensor, world_size: int) -> None:
    if rows.numel() != world_size * row.numel() or rows.dtype != row.dtype or rows.device != row.device:
        raise InvalidRequestError(
            f"output is {row.dtype} with {row.numel()} elements on {row.device}: a part of {world_size} of a {rows.dtype} with "
            f"{rows.numel()} on {rows.device} was expected"
        )


def _check_tolerant(
    tensor: torch.Tensor, residual: torch.Tensor | None, output: torch.Tensor | None, op: Any, what: str = "all-reduce"
) -> None:
    name = name_of(op)
    if name not in LINEAR:
        text = f"a tolerant {what} by {name} is not supported: by one of {', '.join(LINEAR)}"
        raise UnsupportedError(text, dtype=str(tensor.dtype), op=name)
    if tensor.dtype not in _memory.TOLERANT_DTYPES:
        names = ", ".join(str(dtype) for dtype in _memory.TOLERANT_DTYPES)
        raise UnsupportedError(
            f"a tolerant {what} of {tensor.dtype} is not supported: one of {names}", dtype=str(tensor.dtype), op=name
        )
    for argument, other in (("residual", residual), ("output", output)):
        if other is not None:
            _check_alike(argument, other, tensor)
    _check_apart("residual", residual, "tensor", tensor)
    _check_apart("output", output, "tensor", tensor)
    _check_apart("residual", residual, "output", output)


def _check_alike(name: str, other: torch.Tensor, tensor: torch.Tensor) -> None:
    if not isinstance(other, torch.Tensor):
        raise InvalidRequestError(
            f"{name} is a {type(other).__name__}: it must be a tensor like the one that is reduced"
        )
    if other.shape != tensor.shape or other.dtype != tensor.dtype or other.device != tensor.device:
        raise InvalidRequestError(
            f"{name} is {other.dtype} {tuple(other.shape)} on {other.device}, the tensor {tensor.dtype} "
            f"{tuple(tensor.shape)} on {tensor.device}"
        )


def _check_apart(name: str, one: torch.Tensor | None, other_name: str, other: torch.Tensor | None) -> None:
    """The engine checks it of what it is given: for tensors that are copied, buffers of their own."""
    if one is not None and other is not None and _memory.share_memory(one, other):
        raise InvalidRequestError(f"{name} and {other_name} share memory: each needs its own")
