"""Tells by hashes what the example learns from, the interpreter's own library, which differs between releases.

In a process of its own: the example imports torch, and its folder's modules have common names. The argument is that folder.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import sys

if __name__ == "__main__":
    sys.path.insert(0, sys.argv[1])
    corpus = importlib.import_module("gpt").Corpus.of_standard_library()
    parts = {"train": corpus.train, "validation": corpus.validation}
    told = {
        name: {"bytes": len(part), "sha256": hashlib.sha256(part.numpy()).hexdigest()} for name, part in parts.items()
    }
    print(json.dumps(told))
