"""The conversation by which two processes come to RDMA or not: offers and verdicts, over the socket that both hold.

It needs no device and nothing of those that use one, because who has none takes part in it to say so.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from zcactor.errors import ProtocolError
from zcactor.transport.greeting import receive_exactly, send_all
from zcactor.transport.verbs.bootstrap import MAX_MESSAGE, MAX_REASON, Verdict, decode, encode

if TYPE_CHECKING:
    import socket

    from zcactor.transport.verbs.bootstrap import Message

__all__ = ["both", "decline", "tell", "told"]


async def tell(sock: socket.socket, message: Message) -> None:
    """Send one message.

    Raises:
        ConnectionLost: the peer went away.
    """
    await send_all(sock, encode(message))


async def told(sock: socket.socket) -> Message:
    """The peer's next message.

    Raises:
        ProtocolError: it is none.
        ConnectionLost: the peer went away.
    """
    length = int.from_bytes(await receive_exactly(sock, 4), "little")
    if length > MAX_MESSAGE:
        raise ProtocolError(f"the peer announced a message of {length} bytes about RDMA; {MAX_MESSAGE} are allowed")
    return decode(await receive_exactly(sock, length))


async def both(sock: socket.socket, reason: str) -> str:
    """Exchange verdicts: empty when both ends succeeded, else what went wrong at one.

    Args:
        sock: to the peer.
        reason: what went wrong here; empty for nothing.

    Raises:
        ProtocolError: the peer says something else.
        ConnectionLost: the peer went away.
    """
    await tell(sock, Verdict(reason[:MAX_REASON]))
    theirs = await told(sock)
    if not isinstance(theirs, Verdict):
        raise ProtocolError(f"the peer sent {type(theirs).__name__.lower()!r} in the place of a verdict")
    return reason or (f"at the peer: {theirs.reason}" if theirs.reason else "")


async def decline(sock: socket.socket, reason: str) -> None:
    """Make no offer, for this reason, and hear what the peer would have offered.

    Raises:
        ProtocolError: what the peer says is no message.
        ConnectionLost: the peer went away.
    """
    await tell(sock, Verdict(reason[:MAX_REASON]))
    await told(sock)
