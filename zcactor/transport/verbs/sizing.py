"""What connections by RDMA take of a device and of memory that may be pinned, and how many there is room for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from zcactor.transport.base import LENGTH_PREFIX
from zcactor.transport.framing import max_frame_for
from zcactor.transport.verbs.bounce import BOUNCE_NBYTES
from zcactor.transport.verbs.pulling import MAX_READS
from zcactor.transport.verbs.records import RECORD_NBYTES
from zcactor.transport.verbs.seals import SEALS_NBYTES
from zcactor.transport.verbs.slots import HEADER_NBYTES, SLOT_UNIT

if TYPE_CHECKING:
    from zcactor.transport.verbs.base import DeviceAttributes

__all__ = [
    "CQE_OF_PEER", "DEPTH", "FIXED_NBYTES", "MAX_CQE", "MAX_RECEIVES", "MAX_VERBS_EAGER_LIMIT", "PROOF_NBYTES",
    "SEND_DEPTH", "SEND_REQUESTS", "peers_of", "pinned_nbytes", "slot_nbytes_for",
]  # fmt: skip

MAX_VERBS_EAGER_LIMIT: Final = 32768
"""Bytes; slots have room for that and for the rest of a frame, and each peer takes 68 of them."""
DEPTH: Final = 34
"""Messages that a peer may send before it hears of credits, with the two that take none. More than one loop's turn
brings: several frames share a message."""
SEND_DEPTH: Final = 32
"""Messages of one connection that may be under way."""
SEND_REQUESTS: Final = SEND_DEPTH + 4
"""Requests of a control queue pair: its messages, and those that end it."""
PROOF_NBYTES: Final = 4096
"""Bytes that prove a path."""
FIXED_NBYTES: Final = PROOF_NBYTES + SEALS_NBYTES + BOUNCE_NBYTES
"""Bytes that are registered for all connections, besides the arena."""
_PEERS: Final = 1024
"""Connections that the queues are made for, where the device has queues that long."""
CQE_OF_PEER: Final = DEPTH + SEND_REQUESTS + MAX_READS
"""Completions that one connection may leave in the queue."""
MAX_CQE: Final = _PEERS * CQE_OF_PEER
MAX_RECEIVES: Final = _PEERS * DEPTH


def slot_nbytes_for(eager_limit: int) -> int:
    """Bytes of a slot that holds the largest frame, sealed or not."""
    return (RECORD_NBYTES + HEADER_NBYTES + LENGTH_PREFIX + max_frame_for(eager_limit) + SLOT_UNIT - 1) & -SLOT_UNIT


def pinned_nbytes(arena_nbytes: int, peers: int = 1) -> int:
    """Bytes that a process has registered at most, with the largest slots: its arena, what all connections share, and
    what each of so many needs."""
    slots = (DEPTH + SEND_DEPTH + 2) * slot_nbytes_for(MAX_VERBS_EAGER_LIMIT)
    return arena_nbytes + FIXED_NBYTES + peers * (slots + MAX_READS * SLOT_UNIT)


def peers_of(limits: DeviceAttributes, arena_nbytes: int, memlock: int | None) -> int:
    """Connections that a process has room for at a time.

    Args:
        limits: of the device, for its queues.
        arena_nbytes: bytes of the arena.
        memlock: bytes that may be pinned, None for any number.
    """
    peers = min(min(MAX_CQE, limits.max_cqe) // CQE_OF_PEER, min(MAX_RECEIVES, limits.max_srq_wr) // DEPTH)
    if memlock is None:
        return peers
    fixed = pinned_nbytes(arena_nbytes, 0)
    return max(0, min(peers, (memlock - fixed) // (pinned_nbytes(arena_nbytes) - fixed)))
