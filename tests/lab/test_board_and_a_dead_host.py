"""The host of a rank dies without a word while the rank is at the board: the rank may come again from another one."""

import contextlib
import socket
import time

from gradwire import _meeting_sockets
from gradwire._meeting import MeetingServer, MeetingStore
from gradwire.errors import RendezvousError
from gradwire.lab.network import Layout, Network
from sandboxed import in_sandbox

BOARD, DEAD, OTHER = range(3)
PORT = 29400
PATIENCE_S = 60.0
# And not before a busy machine has had its time to cut the host off and to try.
SOON = {socket.TCP_KEEPIDLE: 5, socket.TCP_KEEPINTVL: 2, socket.TCP_KEEPCNT: 2, socket.TCP_USER_TIMEOUT: 9000}


def comes_from(network, host):
    """Rank 1."""
    with network.on_host(host):
        return MeetingStore(network.address(BOARD), PORT, 1, PATIENCE_S)


def test_a_rank_whose_host_died_can_come_from_another_one(tmp_path, monkeypatch):
    monkeypatch.setattr(_meeting_sockets, "GONE", SOON)

    def main():
        with Network(Layout(hosts=3, switch="nft")) as network:
            with network.on_host(BOARD):
                server = MeetingServer(network.address(BOARD), PORT, 2)
            refused = 0
            with contextlib.closing(comes_from(network, DEAD)):
                network.set([DEAD], [0], is_cut=True)
                end = time.monotonic() + PATIENCE_S
                while True:
                    try:
                        comes_from(network, OTHER).close()
                    except RendezvousError as error:
                        assert "is here already" in str(error)  # noqa: PT017 - while it goes on it is this one
                        refused += 1
                        assert time.monotonic() < end, "it is never let in"
                    else:
                        break
            server.end(None, 0.0)
            return refused

    assert in_sandbox(tmp_path, main) > 0
