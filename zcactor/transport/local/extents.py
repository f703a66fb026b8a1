"""Extents of GPU memory on their way to another process of the host, through a socket of their own.

The receiver names places in the sender's memory, and the sender answers with the extents around them, each with a
descriptor. Extents that nobody needs stay where they are: the memory of a GPU is not free before all have unmapped it.
"""

from __future__ import annotations

import contextlib
import os
import struct
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, NamedTuple

from zcactor.errors import ProtocolError
from zcactor.transport.local.unix import peer_descriptor, receive_descriptor, send_descriptor
from zcactor.transport.stream.handshake_io import receive_exactly, send_all

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Collection

__all__ = ["ExtentReply", "RemoteExtent", "Supply", "hand_out", "receive_extents"]

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


@dataclass(slots=True)
class ExtentReply:
    """An answer. All descriptors belong to the one that has it."""

    extents: list[RemoteExtent]
    events: int | None = None
    """The sender's page of events (`zcactor.device.driver.GpuDriver.event_page`); None where events are not shared."""
    process: int | None = None
    """A descriptor of the sender's process (pidfd_open(2)); None at the sender, or where the system gives none."""

    def close(self) -> None:
        """Close all descriptors."""
        for extent in self.extents:
            os.close(extent.fd)
        for fd in (self.events, self.process):
            if fd is not None:
                os.close(fd)


if TYPE_CHECKING:
    Supply = Callable[[bytes, Collection[int]], ExtentReply | None]
    """``supply(reader, places)``: the extents around places, for the process that is to read them; None for none."""


async def hand_out(sock: socket.socket, supply: Supply, reader: bytes) -> None:
    """Answer the process `reader`.

    Raises:
        ProtocolError: the reader names more than `MOST_EXTENTS` places.
        ConnectionLost, OSError: the connection is broken.
    """
    (count,) = _COUNT.unpack(await receive_exactly(sock, _COUNT.size))
    if count > MOST_EXTENTS:
        raise ProtocolError(f"the peer asks for {count} extents; at most {MOST_EXTENTS} are handed out at a time")
    places = struct.unpack(f"<{count}Q", await receive_exactly(sock, 8 * count))
    with contextlib.closing(supply(reader, places) or ExtentReply([])) as answer:
        for offset, nbytes, uuid, fd in answer.extents:
            await send_all(sock, _HEAD.pack(_EXTENT, offset, nbytes, uuid.encode()))
            await send_descriptor(sock, fd)
        await send_all(sock, _HEAD.pack(_END, 0, 0, b""))
        await send_descriptor(sock, answer.events)


async def receive_extents(sock: socket.socket, places: Collection[int]) -> ExtentReply:
    """Ask for the extents around places, of which there are at most `MOST_EXTENTS`.

    Raises:
        ProtocolError: the answer is malformed.
        ConnectionLost, OSError: the connection is broken.
    """
    await send_all(sock, struct.pack(f"<I{len(places)}Q", len(places), *places))
    answer = ExtentReply([])
    extents = answer.extents
    try:
        while True:
            kind, offset, nbytes, raw = _HEAD.unpack(await receive_exactly(sock, _HEAD.size))
            if kind == _END:
                answer.events = await receive_descriptor(sock)
                answer.process = None if answer.events is None else peer_descriptor(sock)
                return answer
            fd = await receive_descriptor(sock) if kind == _EXTENT else None
            if fd is not None:
                extents.append(RemoteExtent(offset, nbytes, raw.decode("ascii", "replace"), fd))
            if fd is None or len(extents) > len(places) or not raw.isascii():
                raise ProtocolError(f"the peer names an extent of kind {kind}, which is malformed or too many")
    except BaseException:
        answer.close()
        raise
