"""State of a training loop as plain JSON for its structure and a list of tensors: what `ElasticState` sends to a rank that joins.

Never pickled, so whoever can send to a rank cannot make it run anything. What comes out is of the types that went in; a type that
would not be is refused, on the rank that has it and before anything is sent.

Values of subclasses of numbers and texts (`numpy.float64`, `IntEnum`) become numbers and texts, a `Parameter` a tensor.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable
from typing import Any

import torch

from gradwire.errors import InvalidRequestError

PLAIN = (bool, int, float, str, type(None))
TENSORS = (torch.Tensor, torch.nn.Parameter)
# Of entries, by the word that says so in the JSON. An OrderedDict is what modules have; their `_metadata` goes with it.
SEQUENCES: dict[str, Callable[[list[Any]], Any]] = {"list": list, "tuple": tuple, "Size": torch.Size}
MAPPINGS: dict[str, Callable[[dict[Any, Any]], Any]] = {"dict": dict, "OrderedDict": OrderedDict, "Counter": Counter}
KINDS = {list: "list", tuple: "tuple", torch.Size: "Size", dict: "dict", OrderedDict: "OrderedDict", Counter: "Counter"}


def described(value: Any, tensors: list[torch.Tensor], place: str) -> Any:
    """A tree of lists whose first entry says what follows: JSON keeps neither tuples nor keys that are numbers.

    Args:
        value: tensors, numbers, texts, None, and lists, tuples and dictionaries of such.
        tensors: gets those that `value` holds.
        place: of the value in the state, for the error.

    Raises:
        InvalidRequestError: it is, or holds, something else.
    """
    if isinstance(value, torch.Tensor):
        return _described_tensor(value, tensors, place)
    if isinstance(value, PLAIN):
        return ["plain", value]
    kind = KINDS.get(type(value), "")
    if kind in SEQUENCES:
        return [kind, [described(entry, tensors, f"{place}[{index}]") for index, entry in enumerate(value)]]
    if kind in MAPPINGS:
        entries = [
            [described(key, tensors, f"{place}, a key"), described(entry, tensors, f"{place}[{key!r}]")]
            for key, entry in value.items()
        ]
        return [kind, entries, described(getattr(value, "_metadata", None), tensors, f"{place}._metadata")]
    raise _refused(place, type(value).__name__, "tensors, numbers, texts, lists, tuples and dictionaries are")


def rebuilt(told: Any, arrays: list[Any]) -> Any:
    """What `described` was given, with tensors on the CPU over `arrays`, `[bytes] u8` each.

    Raises:
        InvalidRequestError: nothing is described so. It came from another rank.
    """
    try:
        return _rebuilt(told, arrays)
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        problem = f"what another rank says of its state describes none: {type(error).__name__}: {error}"
        raise InvalidRequestError(problem) from error


def _rebuilt(told: Any, arrays: list[Any]) -> Any:
    kind, content = told[0], told[1]
    if kind == "tensor":
        return _rebuilt_tensor(content, arrays, told[2], told[3])
    if kind == "plain":
        if not isinstance(content, PLAIN):
            raise TypeError(f"{type(content).__name__} as a plain value")
        return content
    if kind in SEQUENCES:
        return SEQUENCES[kind]([_rebuilt(entry, arrays) for entry in content])
    value = MAPPINGS[kind]({_rebuilt(key, arrays): _rebuilt(entry, arrays) for key, entry in content})
    metadata = _rebuilt(told[2], arrays)
    if metadata is not None:
        value._metadata = metadata
    return value


def _rebuilt_tensor(index: Any, arrays: list[Any], name: Any, shape: Any) -> torch.Tensor:
    """`name` is looked up in a module that holds much else, and a negative index would count from the end."""
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype) or type(index) is not int or index < 0:
        raise TypeError(f"tensor {index!r} of {name!r}")
    if not all(type(size) is int and size >= 0 for size in shape):
        raise ValueError(f"tensor {index} of shape {shape}")
    data = torch.from_numpy(arrays[index])
    return (data.view(dtype) if data.numel() else torch.empty(0, dtype=dtype, device="cpu")).reshape(shape)


def _described_tensor(tensor: torch.Tensor, tensors: list[torch.Tensor], place: str) -> Any:
    if type(tensor) not in TENSORS:
        raise _refused(place, type(tensor).__name__, "plain tensors are")
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
        kind = "quantized" if tensor.is_quantized else "meta" if tensor.is_meta else str(tensor.layout)
        raise _refused(place, f"{kind} tensor", "dense tensors are")
    tensors.append(tensor)
    return ["tensor", len(tensors) - 1, str(tensor.dtype).removeprefix("torch."), list(tensor.shape)]


def _refused(place: str, found: str, allowed: str) -> InvalidRequestError:
    return InvalidRequestError(f"{place} is a {found}, which cannot be sent to a rank that joins as it is: {allowed}")
