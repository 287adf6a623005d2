"""What the scripts share that write a document from the code."""

from __future__ import annotations

import sys
from pathlib import Path

DOCS = Path(__file__).parent.parent / "docs"


def keep(name: str, text: str, script: str, folder: Path = DOCS) -> int:
    """Writes a document of docs/, or of another folder; with `--check` on the command line compares it instead.

    Returns:
        The exit status: 1 if what is there is not what would be written.
    """
    document = folder / name
    if "--check" not in sys.argv[1:]:
        document.write_text(text)
        return 0
    if document.exists() and document.read_text() == text:
        return 0
    print(f"{name} is stale: run scripts/{script}", file=sys.stderr)
    return 1
