"""What those do who let clients in while the process has no file descriptor left.

A client who cannot be let in keeps the listener readable: who looks again at once looks for ever, beside the training.
"""

from __future__ import annotations

# So long nobody is let in then.
ACCEPT_PAUSE_S = 1.0


def has_gone(error: OSError) -> bool:
    """Whether who waited has gone again, by what `accept` raised; else who waits goes on waiting, for a descriptor or memory."""
    return isinstance(error, (BlockingIOError, ConnectionError))
