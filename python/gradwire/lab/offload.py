"""Switches a device's offloads off, as `ethtool -K DEV tx off tso off gso off gro off` does, without that program.

With offloads on, a virtual link carries packets of up to 64 KB that never existed on a wire: one drop would take away
forty packets at once, and a rate limit would count bursts instead of packets.
"""

from __future__ import annotations

import array
import fcntl
import socket
import struct

_SIOCETHTOOL = 0x8946
# From linux/ethtool.h. Without transmit checksums the kernel also gives up UDP segmentation (tx-udp-segmentation).
_SWITCHES = {"tx checksums": 0x17, "tso": 0x1F, "gso": 0x24, "gro": 0x2C}


def switch_off(device: str) -> None:
    """Switches all of them off on a device of the current network namespace. Raises OSError, naming the offload."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as control:
        for name, command in _SWITCHES.items():
            value = array.array("B", struct.pack("=II", command, 0))
            request = struct.pack("16sP", device.encode(), value.buffer_info()[0])
            try:
                fcntl.ioctl(control, _SIOCETHTOOL, request + bytes(40 - len(request)))
            except OSError as error:
                raise OSError(error.errno, f"{name} of {device}: {error.strerror}") from error
