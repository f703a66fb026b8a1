"""The making of a connection's two queue pairs, for connections, and for the check whether they can work."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING, Final

from zcactor.transport.verbs.device.sizing import MAX_READS, SEND_REQUESTS

if TYPE_CHECKING:
    from zcactor.transport.verbs.driver.base import CompletionQueue, Device, QueuePair, SharedReceiveQueue

__all__ = ["make_bulk", "make_control"]

_INLINE_SIZES: Final = (256, 128, 64, 0)
"""Bytes of inline data that are asked for in turn. A small call and its answer fit 256. Drivers refuse more than their
limit, which no attribute of the device reports: irdma takes 48 to 216 bytes by generation, bnxt_re about 100. The
driver may grant more than was asked for."""
_TOO_MUCH: Final = frozenset({errno.EINVAL, errno.EOPNOTSUPP})
"""The errors of drivers for too much inline data."""


def make_control(device: Device, cq: CompletionQueue, srq: SharedReceiveQueue) -> QueuePair:
    """Make the queue pair of messages, which carries as much inline data as the driver takes of `_INLINE_SIZES`. With 0
    all messages are sent from registered memory.

    Raises:
        OSError: the device cannot make it, not even without inline data.
        VerbsError: the device's queues are too short.
    """
    for nbytes in _INLINE_SIZES[:-1]:
        try:
            return device.create_queue_pair(cq, srq, max_send_wr=SEND_REQUESTS, max_inline=nbytes)
        except OSError as error:
            if error.errno not in _TOO_MUCH:
                raise
    return device.create_queue_pair(cq, srq, max_send_wr=SEND_REQUESTS, max_inline=_INLINE_SIZES[-1])


def make_bulk(device: Device, cq: CompletionQueue) -> QueuePair:
    """Make the queue pair of READs, which receives nothing.

    Raises:
        OSError: the device cannot make it.
        VerbsError: the device's queues are too short.
    """
    return device.create_queue_pair(cq, None, max_send_wr=MAX_READS, max_inline=0)
