"""Rows of the training study in a file, a line of JSON each, so that an interrupted study goes on where it was.

The first line says what the rows belong to. A last line that was cut short by the interruption is dropped.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gradwire.bench.machine import command, machine
from loss_plan import Run

ROOT = Path(__file__).resolve().parents[2]
Row = dict[str, Any]


class OtherSettings(ValueError):
    """The file holds results of another study: nothing is added to it."""


class Store:
    """What has been measured so far.

    Attributes:
        head: what the rows belong to: `machine` and `settings`.
        rows: one for each run.
    """

    def __init__(self, path: Path | None, head: dict[str, Any], rows: list[Row]) -> None:
        self.path, self.head, self.rows = path, head, rows
        self._keys = {_key(row) for row in rows}

    @property
    def settings(self) -> dict[str, Any]:
        """Equal for all rows."""
        return self.head["settings"]

    @classmethod
    def go_on(cls, path: Path | None, settings: dict[str, Any]) -> Store:
        """Opens the file, or begins it; without a path nothing is written.

        Raises:
            OtherSettings: it was written with other settings.
        """
        if path is not None and path.exists() and path.stat().st_size:
            store = cls.read(path)
            if store.settings != settings:
                raise OtherSettings(f"{path} has results with {store.settings}, not {settings}: name another file")
            # Without the line that an interruption may have cut short.
            path.write_text("".join(json.dumps(line) + "\n" for line in [store.head, *store.rows]))
            return store
        head = {"benchmark": "loss_tolerance", "machine": machine(), **command(), "settings": settings}
        if path is not None:
            path.write_text(json.dumps(head) + "\n")
        return cls(path, head, [])

    @classmethod
    def read(cls, path: Path) -> Store:
        """The file as it is.

        Raises:
            OtherSettings: it holds no results of this study.
        """
        whole = [line for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
        try:
            head, *rows = [json.loads(line) for line in whole]
        except ValueError as error:
            raise OtherSettings(f"{path} holds no results: {error}") from None
        if head.get("benchmark") != "loss_tolerance":
            raise OtherSettings(f"{path} holds results of {head.get('benchmark')}")
        return cls(path, head, rows)

    def has(self, run: Run) -> bool:
        """Whether this run has been made."""
        return _key(run.key()) in self._keys

    def add(self, row: Row) -> None:
        """Keeps a row, in the file at once."""
        self.rows.append(row)
        self._keys.add(_key(row))
        if self.path is not None:
            with self.path.open("a") as file:
                file.write(json.dumps(row) + "\n")


def _key(row: Row) -> tuple[Any, ...]:
    return tuple(row[name] for name in ("task", "method", "kind", "share", "seed"))
