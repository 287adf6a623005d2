"""All switches deliver what was sent. A virtual link does not verify checksums, so nothing else would notice."""

import shutil
import socket
import threading

import pytest
from gradwire.lab import Cluster, Link, NamespacesUnavailable, sandbox
from gradwire.lab.soft_cluster import SoftCluster
from gradwire.lab.uml_cluster import UmlCluster
from gradwire.lab.uml_switch import PROGRAM

CONTENT = b"".join(number.to_bytes(4, "little") for number in range(1 << 18))


def deliver(cluster, sender: int, receiver: int) -> bytes:
    """Sends the content over TCP from one host to another; returns what came."""
    with cluster.on_host(receiver):
        inbox = socket.create_server((cluster.address(receiver), 0))
    with cluster.on_host(sender):
        outbox = socket.create_connection(inbox.getsockname())
    connection, _ = inbox.accept()

    def send() -> None:
        with outbox:
            outbox.sendall(CONTENT)

    thread = threading.Thread(target=send)
    thread.start()
    received = bytearray()
    while data := connection.recv(1 << 16):
        received += data
    thread.join()
    return bytes(received)


@pytest.mark.parametrize("kind", [Cluster, SoftCluster, UmlCluster])
def test_what_arrives_is_what_was_sent_also_under_loss(kind):
    if kind is UmlCluster and shutil.which(PROGRAM) is None:
        pytest.skip(f"{PROGRAM} is not installed")

    def main() -> int:
        with kind(2, Link(rate_mbit=100), loss=0.01) as cluster:
            return 0 if deliver(cluster, 0, 1) == CONTENT and deliver(cluster, 1, 0) == CONTENT else 9

    try:
        assert sandbox.run(main) == 0
    except NamespacesUnavailable as error:
        pytest.skip(str(error))
