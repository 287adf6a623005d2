"""Says once where a loss bound allows no packet to be missing: a transfer has too few of them among so many ranks."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from gradwire._policy import ALGORITHM_CODES

logger = logging.getLogger("gradwire")

# A smaller tensor has few packets whatever the number of ranks is. A bucket of DDP, 25 MB, goes in pieces of 6 MiB where it is on a GPU.
TENSOR_BYTES_MIN = 4 << 20
# No packet carries more, so that most groups need not be asked what theirs carry.
PACKET_BYTES_MAX = 1 << 16
# Before the values of a packet, and what they are a multiple of (`chunk_bytes_for` in crates/gradwire-wire/src/lib.rs).
HEAD_BYTES = 64
GRID_BYTES = 64


class SmallTransfers:
    """Looks at the calls of one group.

    Args:
        stats: of the group (`_native.Group.stats`).
        world_size: its ranks.
    """

    def __init__(self, stats: Callable[[], dict[str, Any]], world_size: int) -> None:
        self._stats = stats
        self._world_size = world_size
        self._packet_bytes: int | None = None
        self._is_said = world_size < 2

    def see(self, call: Any) -> None:
        """Warns, once, of a call (`_native.Call`) that tolerates loss, of which a bound above 0 allows none.

        Not between ranks of one host, where packets are large and none is lost.
        """
        policy = call.get("policy")
        if policy is None or self._is_said or call.get("algorithm") == ALGORITHM_CODES["parameter_server"]:
            return  # its servers may be few
        bound, tensor_bytes = policy["loss_bound"], call["input"][1]
        transfer_bytes = tensor_bytes // self._world_size
        allowed = bound * transfer_bytes
        if bound <= 0 or tensor_bytes < TENSOR_BYTES_MIN or allowed >= PACKET_BYTES_MAX:
            return
        if self._packet_bytes is None:
            self._packet_bytes = self._ask()
        if allowed < self._packet_bytes:
            self._is_said = True
            logger.warning(
                "loss_bound = %g allows none of the packets of %d bytes to be missing in transfers of %d bytes, as a tensor of %d bytes "
                "makes them between %d ranks: such calls wait for all of these, or for their deadline. Larger tensors (bucket_cap_mb "
                "of DDP, gpu_chunk_mb), a smaller mtu or a larger loss_bound let some be missing",
                bound, self._packet_bytes, transfer_bytes, tensor_bytes, self._world_size,
            )  # fmt: skip

    def _ask(self) -> int:
        stats = self._stats()
        if stats["security"]["all_local"]:
            return 0
        return int(stats["datagram_bytes"] - HEAD_BYTES) // GRID_BYTES * GRID_BYTES
