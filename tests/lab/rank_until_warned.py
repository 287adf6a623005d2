"""One of two ranks that call small all-reduces until so many have been warned with these words, or they have waited too long.

    rank_until_warned.py RANKS WORDS

Prints the warnings as a JSON list.
"""

import json
import logging
import sys
import time

import numpy as np
from gradwire import Communicator

PATIENCE_SECONDS = 60.0


class Kept(logging.Handler):
    """Keeps what is said with these words."""

    def __init__(self, words: str) -> None:
        super().__init__(logging.WARNING)
        self._words = words
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if self._words in record.getMessage():
            self.said.append(record.getMessage())


def main() -> None:
    kept = Kept(sys.argv[2])
    logging.getLogger("gradwire").addHandler(kept)
    end = time.monotonic() + PATIENCE_SECONDS
    with Communicator() as communicator:
        # Both ranks leave the loop after the same call: the sum tells each what the other knows.
        while True:
            told = np.array([float(bool(kept.said)), float(time.monotonic() > end)], dtype=np.float32)
            communicator.all_reduce(told)
            if told[0] >= int(sys.argv[1]) or told[1] > 0:
                break
    print(json.dumps(kept.said))


main()
