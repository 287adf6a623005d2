"""What the kernel tells of all links or addresses of this process's network namespace, by rtnetlink."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from contextlib import suppress

_HEADER, _ATTRIBUTE = struct.Struct("IHHII"), struct.Struct("HH")
_DUMP, _DONE, _ERROR = 0x301, 3, 2  # NLM_F_REQUEST and NLM_F_DUMP; NLMSG_DONE, NLMSG_ERROR
_WAIT_SECONDS = 1.0
_ANSWER_BYTES = 1 << 17


def dump(kind: int, question: bytes) -> Iterator[bytes]:
    """The content of each message that answers a question; none where the kernel refuses it.

    Args:
        kind: of the question, such as RTM_GETLINK.
        question: the structure that goes with it.
    """
    with (
        suppress(OSError, struct.error),
        socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, socket.NETLINK_ROUTE) as kernel,
    ):
        kernel.settimeout(_WAIT_SECONDS)
        kernel.send(_HEADER.pack(_HEADER.size + len(question), kind, _DUMP, 1, 0) + question)
        while True:
            answer = kernel.recv(_ANSWER_BYTES)
            at = 0
            while at + _HEADER.size <= len(answer):
                length, kind_of_answer, *_ = _HEADER.unpack_from(answer, at)
                if kind_of_answer in (_DONE, _ERROR) or length < _HEADER.size:
                    return
                yield answer[at + _HEADER.size : at + length]
                at += _padded(length)


def attributes(content: bytes) -> Iterator[tuple[int, bytes]]:
    """Kind and value of each attribute, as they follow the structure of a message."""
    at = 0
    while at + _ATTRIBUTE.size <= len(content):
        length, kind = _ATTRIBUTE.unpack_from(content, at)
        yield kind, content[at + _ATTRIBUTE.size : at + length]
        at += max(_ATTRIBUTE.size, _padded(length))


def _padded(length: int) -> int:
    return -(-length // 4) * 4
