"""The negotiation of RDMA between two processes: offers and verdicts, over their socket.

It needs no device, and imports no code for devices, because a process without a device takes part in it to decline.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from zcactor.errors import ProtocolError
from zcactor.transport.stream.handshake_io import receive_exactly, send_all
from zcactor.transport.verbs.peer.bootstrap import MAX_MESSAGE, MAX_REASON, PathVerdict, decode, encode

if TYPE_CHECKING:
    import socket

    from zcactor.transport.verbs.peer.bootstrap import Message

__all__ = ["both", "decline", "tell", "told"]


async def tell(sock: socket.socket, message: Message) -> None:
    """Send one message.

    Raises:
        ConnectionLost: the peer has ended.
    """
    await send_all(sock, encode(message))


async def told(sock: socket.socket) -> Message:
    """Receive the peer's next message.

    Raises:
        ProtocolError: the bytes are no message.
        ConnectionLost: the peer has ended.
    """
    length = int.from_bytes(await receive_exactly(sock, 4), "little")
    if length > MAX_MESSAGE:
        raise ProtocolError(f"the peer announced a message of {length} bytes about RDMA; {MAX_MESSAGE} are allowed")
    return decode(await receive_exactly(sock, length))


async def both(sock: socket.socket, reason: str) -> str:
    """Exchange verdicts. Returns an empty string when both ends have succeeded, otherwise the failure of one.

    Args:
        sock: the socket to the peer.
        reason: the failure at this end; empty without one.

    Raises:
        ProtocolError: the peer sends another message.
        ConnectionLost: the peer has ended.
    """
    await tell(sock, PathVerdict(reason[:MAX_REASON]))
    theirs = await told(sock)
    if not isinstance(theirs, PathVerdict):
        raise ProtocolError(f"the peer sent {type(theirs).__name__.lower()!r} in the place of a verdict")
    return reason or (f"at the peer: {theirs.reason}" if theirs.reason else "")


async def decline(sock: socket.socket, reason: str) -> bool:
    """Decline RDMA, or a pair of ports, for this reason, and receive the peer's offer. Returns whether the peer has
    declined, too.

    Raises:
        ProtocolError: the peer's bytes are no message.
        ConnectionLost: the peer has ended.
    """
    await tell(sock, PathVerdict(reason[:MAX_REASON]))
    return isinstance(await told(sock), PathVerdict)
