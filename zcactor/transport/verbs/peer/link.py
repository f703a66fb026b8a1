"""The TCP socket beside the queue pairs: messages of `zcactor.transport.verbs.peer.bootstrap`, and signs of life."""

from __future__ import annotations

import socket
from typing import TYPE_CHECKING

from zcactor.errors import ProtocolError
from zcactor.transport.tcp.liveness import Liveness, timed_out
from zcactor.transport.verbs.peer.bootstrap import encode, split

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from zcactor.transport.verbs.peer.bootstrap import Message

__all__ = ["Link"]

_RECEIVE_NBYTES = 8192


class Link:
    """One connected socket. Runs on the loop's thread.

    Args:
        sock: non-blocking; belongs to the link from here.
        loop: the loop.
        take: called with each message. It raises `ProtocolError` where the peer violates the protocol.
        failed: called once with that error. Later messages are dropped, and only the end of the socket is reported.
        ended: called once with a description when the socket has ended, and the system's error if there was one.

    No function is called after its end, or after `close`.
    """

    def __init__(
        self,
        sock: socket.socket,
        loop: asyncio.AbstractEventLoop,
        take: Callable[[Message], None],
        failed: Callable[[ProtocolError], None],
        ended: Callable[[str, OSError | None], None],
    ) -> None:
        self._sock = sock
        self._loop = loop
        self._take = take
        self._failed = failed
        self._ended = ended
        self._in = bytearray()
        self._out = bytearray()
        self._refused = False  # the peer has violated the protocol
        self._over = False  # ended or closed
        self._closed = False
        self._liveness = Liveness(sock, loop, lambda how: self._end(how, timed_out()))
        loop.add_reader(sock.fileno(), self._on_readable)

    def fileno(self) -> int:
        """The descriptor of the socket; -1 once it is closed."""
        return self._sock.fileno()

    def tell(self, message: Message) -> None:
        """Send `message`. Bytes that the system does not take now are sent later. Nothing happens after the end."""
        if not self._over:
            self._out += encode(message)
            self._write()

    def _write(self) -> None:
        try:
            sent = self._sock.send(self._out)
        except BlockingIOError:
            sent = 0
        except OSError as error:
            self._end(f"broke: {error.strerror}", error)
            return
        del self._out[:sent]
        if self._out:
            self._loop.add_writer(self._sock.fileno(), self._write)
        else:
            self._loop.remove_writer(self._sock.fileno())

    def _on_readable(self) -> None:
        try:
            data = self._sock.recv(_RECEIVE_NBYTES)
        except BlockingIOError:
            return
        except OSError as error:
            self._end(f"broke: {error.strerror}", error)
            return
        if not data:
            self._end("was closed by the peer")
            return
        if self._refused:
            return
        self._in += data
        try:
            for message in split(self._in):
                self._take(message)
                if self._over:  # `take` has ended it
                    return
        except ProtocolError as error:
            self._refused = True
            if not self._over:
                self._failed(error)

    def finish(self) -> None:
        """End our half: no message is sent any more, but the peer's are received."""
        if not self._over:
            try:
                self._sock.shutdown(socket.SHUT_WR)
            except OSError as error:
                self._end(f"broke: {error.strerror}", error)

    def _end(self, how: str, error: OSError | None = None) -> None:
        self._stop()
        self._ended(how, error)

    def _stop(self) -> None:
        self._over = True
        self._liveness.stop()
        self._loop.remove_reader(self._sock.fileno())
        self._loop.remove_writer(self._sock.fileno())

    def close(self) -> None:
        """Close the socket. Idempotent."""
        if not self._closed:
            self._closed = True
            self._stop()
            self._sock.close()

    def abandon(self) -> None:
        """Close a forked child's copy of the socket. The loop belongs to the parent."""
        self._over = self._closed = True
        self._sock.close()
