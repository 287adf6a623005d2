"""Writes what was measured as JSON."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from gradwire import _files


def write(file: Path, measured: dict[str, Any]) -> None:
    """Writes a file whole or not at all: one of an earlier run is lost only when the new one is there.

    What is not finite, such as the loss of a training that has diverged, becomes null: JSON has no name for it.

    Raises:
        OSError: it cannot be written; nothing of it stays.
    """
    _files.replace(file, json.dumps(_finite(measured), indent=1, allow_nan=False) + "\n")


def _finite(value: Any) -> Any:
    """The same with None in place of each number that is not finite."""
    if isinstance(value, dict):
        return {name: _finite(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
