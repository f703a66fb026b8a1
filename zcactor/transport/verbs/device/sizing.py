"""The resources of connections by RDMA: queue entries and pinned memory, and the limit of connections that follows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from zcactor.config import MAX_VERBS_EAGER_LIMIT
from zcactor.transport.frames import LENGTH_PREFIX, max_frame_for
from zcactor.transport.stream.record_layer import RECORD_NBYTES
from zcactor.transport.verbs.device.bounce import BOUNCE_NBYTES
from zcactor.transport.verbs.device.slots import HEADER_NBYTES, SLOT_UNIT
from zcactor.transport.verbs.device.versions import SEALS_NBYTES

if TYPE_CHECKING:
    from zcactor.transport.verbs.driver.base import DeviceAttributes

__all__ = [
    "CQE_OF_PEER", "DEPTH", "FIXED_NBYTES", "MAX_CQE", "MAX_READS", "MAX_RECEIVES",
    "PROOF_NBYTES", "SEND_DEPTH", "SEND_REQUESTS", "peers_of", "pinned_nbytes", "slot_nbytes_for",
]  # fmt: skip

DEPTH: Final = 34
"""Messages that a peer may send before it gets credits, with the two that take no credit. One turn of the loop makes
fewer, as several frames share a message."""
SEND_DEPTH: Final = 32
"""Messages of one connection that may be under way."""
SEND_REQUESTS: Final = SEND_DEPTH + 4
"""Requests of a control queue pair: messages, and those at its end."""
MAX_READS: Final = 64
"""Requests of a bulk queue pair, of all pulls together."""
PROOF_NBYTES: Final = 4096
"""Bytes of the READ that proves a path."""
FIXED_NBYTES: Final = PROOF_NBYTES + SEALS_NBYTES + BOUNCE_NBYTES
"""Registered bytes that all connections share, besides the arena."""
_PEERS: Final = 1024
"""Connections that the queues have room for, unless the device has shorter queues."""
CQE_OF_PEER: Final = DEPTH + SEND_REQUESTS + MAX_READS
"""Completions that one connection may leave in the queue."""
MAX_CQE: Final = _PEERS * CQE_OF_PEER
MAX_RECEIVES: Final = _PEERS * DEPTH


def slot_nbytes_for(eager_limit: int) -> int:
    """Return the bytes of a slot that holds the largest frame, also when it is encrypted."""
    return (RECORD_NBYTES + HEADER_NBYTES + LENGTH_PREFIX + max_frame_for(eager_limit) + SLOT_UNIT - 1) & -SLOT_UNIT


def pinned_nbytes(arena_nbytes: int, peers: int = 1) -> int:
    """Return the most bytes that a process registers, with the largest slots: the arena, the memory that all
    connections share, and that of so many peers."""
    slots = (DEPTH + SEND_DEPTH + 2) * slot_nbytes_for(MAX_VERBS_EAGER_LIMIT)
    return arena_nbytes + FIXED_NBYTES + peers * (slots + MAX_READS * SLOT_UNIT)


def peers_of(limits: DeviceAttributes, arena_nbytes: int, memlock: int | None) -> int:
    """Return the number of connections that a process has room for at the same time.

    Args:
        limits: the limits of the device's queues.
        arena_nbytes: bytes of the arena.
        memlock: bytes that may be pinned; None for any number.
    """
    peers = min(min(MAX_CQE, limits.max_cqe) // CQE_OF_PEER, min(MAX_RECEIVES, limits.max_srq_wr) // DEPTH)
    if memlock is None:
        return peers
    fixed = pinned_nbytes(arena_nbytes, 0)
    return max(0, min(peers, (memlock - fixed) // (pinned_nbytes(arena_nbytes) - fixed)))
