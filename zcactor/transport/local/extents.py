"""Extents of GPU memory on their way to another process of the host, through a socket of their own.

The receiver says which extents it has. The sender answers with those that it lacks, each with a descriptor, and then
with those of the receiver's that are no more.
"""

from __future__ import annotations

import os
import struct
from typing import TYPE_CHECKING, Final, NamedTuple

from zcactor.errors import ProtocolError
from zcactor.transport.local.unix import receive_descriptor, send_descriptor
from zcactor.transport.stream.handshake_io import receive_exactly, send_all

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Collection

__all__ = ["RemoteExtent", "Supply", "hand_out", "receive_extents"]

_COUNT: Final = struct.Struct("<I")
_HEAD: Final = struct.Struct("<BQQ40s")
"""Kind, offset, bytes and UUID of the GPU."""
_END, _EXTENT = range(2)
MOST_EXTENTS: Final = 1 << 16
"""Extents of a process, at most: 64 MiB each on 4 TiB of GPU memory."""


class RemoteExtent(NamedTuple):
    """An extent of another process's GPU memory."""

    offset: int
    """The place among all extents of its process, on all GPUs; never that of another extent."""
    nbytes: int
    uuid: str
    """UUID of the GPU, 40 characters."""
    fd: int
    """A descriptor, which belongs to the one that has the record."""


if TYPE_CHECKING:
    Supply = Callable[[Collection[int]], tuple[list[RemoteExtent], list[int]]]
    """``supply(known)``: the extents that are not known, and the offsets that are known and are no more."""


async def hand_out(sock: socket.socket, supply: Supply) -> None:
    """Answer a receiver.

    Raises:
        ProtocolError: the receiver says that it has more than `MOST_EXTENTS`.
        ConnectionLost, OSError: the connection is broken.
    """
    known = await _numbers(sock)
    extents, gone = supply(known)
    try:
        for offset, nbytes, uuid, fd in extents:
            await send_all(sock, _HEAD.pack(_EXTENT, offset, nbytes, uuid.encode()))
            await send_descriptor(sock, fd)
        await send_all(sock, _HEAD.pack(_END, 0, 0, b""))
        await _send_numbers(sock, gone)
    finally:
        for extent in extents:
            os.close(extent.fd)


async def receive_extents(sock: socket.socket, known: Collection[int]) -> tuple[list[RemoteExtent], list[int]]:
    """Ask for the extents that are not known.

    Returns:
        The extents, whose descriptors belong to the caller, and the offsets that are known and are no more.

    Raises:
        ProtocolError: the answer is malformed.
        ConnectionLost, OSError: the connection is broken.
    """
    await _send_numbers(sock, known)
    extents: list[RemoteExtent] = []
    try:
        while True:
            kind, offset, nbytes, raw = _HEAD.unpack(await receive_exactly(sock, _HEAD.size))
            if kind == _END:
                return extents, await _numbers(sock)
            fd = await receive_descriptor(sock) if kind == _EXTENT else None
            if fd is not None:
                extents.append(RemoteExtent(offset, nbytes, raw.decode("ascii", "replace"), fd))
            if fd is None or len(extents) > MOST_EXTENTS or not raw.isascii():
                raise ProtocolError(f"the peer names an extent of kind {kind}, which is malformed or too many")
    except BaseException:
        for extent in extents:
            os.close(extent.fd)
        raise


async def _numbers(sock: socket.socket) -> list[int]:
    (count,) = _COUNT.unpack(await receive_exactly(sock, _COUNT.size))
    if count > MOST_EXTENTS:
        raise ProtocolError(f"the peer names {count} extents, and a process has at most {MOST_EXTENTS}")
    return list(struct.unpack(f"<{count}Q", await receive_exactly(sock, 8 * count)))


async def _send_numbers(sock: socket.socket, numbers: Collection[int]) -> None:
    await send_all(sock, struct.pack(f"<I{len(numbers)}Q", len(numbers), *numbers))
