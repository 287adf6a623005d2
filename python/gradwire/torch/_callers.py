"""Which threads of Python's call a group.

Ranks match calls by their order. Of several threads (a checkpoint's beside the training one) it differs between ranks, now and then, and
what comes of it is an error of all ranks that says nothing of threads. Autograd's own threads do not count: they call in the order of the
backward pass.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from gradwire.errors import MismatchError

Explanation = Callable[[Exception], Exception | None]


class Callers:
    """Of one group."""

    def __init__(self) -> None:
        self.are_several = False
        self._one = 0

    def see(self) -> None:
        """This thread makes a call that has a place in the order of the group's."""
        own = threading.get_ident()
        if own != self._one and not self.are_several and _is_pythons(own):
            self.are_several = self._one != 0
            self._one = own

    def explained(self, first: Explanation | None, failure: Exception) -> Exception | None:
        """Says of a disagreement between ranks that it may come of this, behind what else explains it."""
        error = failure if first is None else first(failure)
        if not self.are_several or not isinstance(error, MismatchError):
            return error
        text = (
            f"{error}; several threads of this process have called this group, and ranks match calls by their order: if the program "
            "orders them differently on each rank (async_save beside training), give each thread a group of its own (new_group)"
        )
        return MismatchError(text, **error.fields)


def _is_pythons(ident: int) -> bool:
    """Whether Python has started a thread, or it is the main one. Others it knows as dummies, if at all."""
    threads = (thread for thread in threading.enumerate() if thread.ident == ident)
    return not all([isinstance(thread, threading._DummyThread) for thread in threads])  # noqa: C419  no generator that calls
