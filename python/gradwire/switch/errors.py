"""What can be wrong with what a switch's configuration is asked for."""

from __future__ import annotations


class SwitchError(ValueError):
    """No configuration follows from these numbers. The message is one line and says what would do."""
