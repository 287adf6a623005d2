"""Lets the tests of this folder use the lab's helpers."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "lab"))
