"""One of two ranks whose device takes no full datagrams any more in the middle of the job, until this is warned of.

    rank_refused.py SHRUNK_RANK

Prints the warnings as a JSON list.
"""

import json
import logging
import subprocess
import sys

import numpy as np
from gradwire import Communicator

ELEMS = 200_000


def set_mtu(mtu: int) -> None:
    subprocess.run(["ip", "link", "set", "dev", "eth0", "mtu", str(mtu)], check=True)


class Mends(logging.Handler):
    """Keeps what is said of the kernel, and sets the device back as whoever reads it would."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if "the kernel of this host" in record.getMessage():
            self.said.append(record.getMessage())
            set_mtu(1500)


def main() -> None:
    mends = Mends()
    logging.getLogger("gradwire").addHandler(mends)
    with Communicator() as communicator:
        communicator.all_reduce(np.ones(ELEMS, np.float32))
        if communicator.rank == int(sys.argv[1]):
            set_mtu(1300)
        gradients = np.full(ELEMS, communicator.rank + 1, np.float32)
        communicator.all_reduce(gradients)
        assert (gradients == 3).all()
    print(json.dumps(mends.said))


main()
