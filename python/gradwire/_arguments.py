"""Arguments of the Communicator's calls: rows for each rank, tags and other whole numbers."""

from __future__ import annotations

import operator
from collections.abc import Sequence

from gradwire._arrays import Array
from gradwire.errors import InvalidRequestError


def row_of(array: Array, ranks: int) -> tuple[int, ...]:
    """Shape of a rank's row of an array that has one for each.

    Raises:
        InvalidRequestError: it has not.
    """
    if array.ndim == 0 or array.shape[0] != ranks:
        raise InvalidRequestError(f"the array is {array.shape}: it needs a row for each of {ranks} ranks")
    return array.shape[1:]


def rows(array: Array, asked: Sequence[int], ranks: int) -> list[int]:
    """How many rows of the array each rank gets; nothing asked: equally many.

    Raises:
        InvalidRequestError: they are not its rows.
    """
    if array.ndim == 0:
        raise InvalidRequestError("the array has no rows")
    there = array.shape[0]
    found = counts("send_rows", asked, ranks)
    if not found:
        if there % ranks:
            raise InvalidRequestError(f"{there} rows cannot be divided equally among {ranks} ranks")
        return [there // ranks] * ranks
    if sum(found) != there:
        raise InvalidRequestError(f"send_rows = {found} do not divide {there} rows")
    return found


def counts(name: str, asked: Sequence[int], ranks: int) -> list[int]:
    """A number of rows for each rank, or none at all.

    Raises:
        InvalidRequestError: it is something else.
    """
    try:
        found = [] if asked is None else [whole("a number of rows", count) for count in asked]
    except TypeError:
        raise InvalidRequestError(f"{name} = {asked!r} is not allowed: a number of rows for each rank") from None
    if found and (len(found) != ranks or min(found) < 0):
        raise InvalidRequestError(f"{name} = {found} are not the rows of {ranks} ranks")
    return found


def tag(value: int) -> int:
    """The tag of a message.

    Raises:
        InvalidRequestError: it is none.
    """
    number = whole("tag", value)
    if not 0 <= number < 1 << 32:
        raise InvalidRequestError(f"tag = {value} is not allowed: 0 to 4294967295")
    return number


def whole(name: str, value: int) -> int:
    """The number itself.

    Raises:
        InvalidRequestError: it is none, or has a fraction.
    """
    try:
        return operator.index(value)
    except TypeError:
        raise InvalidRequestError(f"{name} = {value!r} is not allowed: a whole number") from None
