"""The stranger of the flood benchmark: sends datagrams to one address at a steady rate, for so many seconds.

    python flood_stranger.py ADDRESS PORT SECONDS BYTES PER_SECOND

A data packet of the right version for a connection id that is drawn anew for each, the rest random. Prints how many it sent.
"""

from __future__ import annotations

import os
import socket
import sys
import time

IDS = 4096  # prepared datagrams: making one must not be what limits the rate
BURST = 8
VERSION_AND_KIND = 0x10  # version 1, data
CONNECTION_ID = slice(4, 7)


def datagrams(size: int) -> list[bytes]:
    """Datagrams with ids across the whole space of 24 bits."""
    made = []
    for _ in range(IDS):
        datagram = bytearray(os.urandom(size))
        datagram[0] = VERSION_AND_KIND
        datagram[CONNECTION_ID] = os.urandom(3)
        made.append(bytes(datagram))
    return made


def main() -> None:
    """Sends in small bursts when they are due; blocks where the link is full, so never sends faster than that takes."""
    address, port, seconds, size, rate = (
        sys.argv[1],
        int(sys.argv[2]),
        float(sys.argv[3]),
        int(sys.argv[4]),
        float(sys.argv[5]),
    )
    prepared = datagrams(size)
    sent = 0
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
        stranger.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 16)
        stranger.connect((address, port))
        begun = time.monotonic()
        while (now := time.monotonic() - begun) < seconds:
            time.sleep(max(0.0, sent / rate - now))
            for number in range(sent, sent + BURST):
                stranger.send(prepared[number % IDS])
            sent += BURST
    print(sent)


if __name__ == "__main__":
    main()
