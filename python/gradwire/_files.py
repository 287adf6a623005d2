"""Files that are written after minutes or hours of work: whole or not there after it."""

from __future__ import annotations

import secrets
from pathlib import Path


def replace(file: Path, text: str) -> None:
    """Writes a file whole or not at all: one of an earlier run is lost only when the new one is there.

    Raises:
        OSError: it cannot be written; nothing of it stays.
    """
    if _is_stream(file):
        file.write_text(text)
        return
    file = file.resolve()
    # Not by the number of the process: in the sandbox's namespace those of two runs are the same. Made as any file is, for its mode.
    unfinished = file.with_name(f".{file.name}.{secrets.token_hex(8)}")
    try:
        with unfinished.open("x") as opened:
            opened.write(text)
        unfinished.replace(file)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


def _is_stream(file: Path) -> bool:
    """Whether it is a pipe, a terminal: nothing that could be replaced."""
    return file.exists() and not file.is_file()
