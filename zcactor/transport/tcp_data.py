"""Bulk bytes over TCP: what is said on a data socket, and the socket itself.

Control frames and bulk bytes never share a socket. On a data socket the puller sends requests of a fixed size and the
owner answers each one, in order, by a status byte and, where that is `Answer.OK`, the bytes. Where the connection's
frames are sealed, tags go with them (`zcactor.transport.tcp_sealed`). Both ends work in threads with blocking calls
that hold no interpreter lock, so neither end's event loop notices.

A data socket belongs to a connection, which the puller names by a key of 16 random bytes that the owner gave it there.
When the connection ends the owner resets its data sockets: bytes that the network has not taken yet are dropped, not
delivered late, because the memory that they are read from may be used again.
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
import threading
from enum import IntEnum
from typing import ClassVar, Final

from zcactor.transport.liveness import RESET_ON_CLOSE

__all__ = ["KEY_NBYTES", "REQUEST", "Answer", "Channel"]

KEY_NBYTES: Final = 16
"""Bytes of the key that says which connection a data socket belongs to."""
REQUEST: Final = struct.Struct("<QQQ")
"""The object's id, the offset in the owner's arena, the number of bytes."""
PATIENCE: Final = 60.0
"""Seconds without a single byte until a blocking call gives up. A peer's host that is gone is noticed by the system
after seconds; this is for a process that is there and does nothing, and for data sockets that nobody uses any more."""

_TIMEVAL: Final = struct.Struct("@ll")


class Answer(IntEnum):
    """What the owner answers to a request."""

    OK = 0
    """The bytes follow."""
    REFUSED = 1
    """The object is not there any more, the bytes do not lie in the arena, or the process may not have them."""


class Channel:
    """A data socket that one thread works with, and that any thread may end.

    Args:
        sock: connected and authenticated; belongs to the channel from here.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._be_patient(sock)
        self.sock = sock
        self._lock = threading.Lock()
        self._ended = False
        self._closed = False
        self._offset = self._nbytes = 0  # of the last request
        self._poll = select.poll()
        self._poll.register(sock.fileno(), select.POLLRDHUP)
        self._poll_in = select.poll()
        self._poll_in.register(sock.fileno(), select.POLLIN | select.POLLRDHUP)

    lasts: ClassVar[float] = float("inf")
    """Bytes that a channel may carry in one direction; after so many a new one is to take its place."""

    @property
    def worn(self) -> bool:
        """Whether a new one is to take its place for another reason."""
        return False

    def _be_patient(self, sock: socket.socket) -> None:
        """Have calls block, for `PATIENCE` seconds."""
        sock.setblocking(True)
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):  # and not Python's, which costs a poll for each call
            sock.setsockopt(socket.SOL_SOCKET, option, _TIMEVAL.pack(*divmod(round(PATIENCE * 1e6), 10**6)))

    def send(self, data: bytes, *, more: bool = False) -> None:
        """Send all of `data`; where there is `more`, in one packet with what follows if that can be.

        Raises:
            OSError: the stream breaks, or takes nothing for `PATIENCE` seconds.
        """
        self.sock.sendall(data, socket.MSG_MORE if more else 0)

    def send_file(self, fd: int, offset: int, nbytes: int) -> None:
        """Send `nbytes` of a file from `offset` on, without their passing through this process.

        Raises:
            BrokenPipeError: the file ends before.
            OSError: as `send`.
        """
        end = offset + nbytes
        while offset < end:
            sent = os.sendfile(self.sock.fileno(), fd, offset, end - offset)
            if sent == 0:
                raise BrokenPipeError("the arena ends before its announced size")
            offset += sent

    def receive(self, view: memoryview) -> bool:
        """Fill `view` from the socket. False when the stream ends before its first byte.

        Raises:
            OSError: the stream ends or breaks inside it, or nothing came for `PATIENCE` seconds.
        """
        filled, nbytes = 0, len(view)
        while filled < nbytes:
            received = self._receive_into(view[filled:])
            if received == 0:
                if filled:
                    raise ConnectionResetError("a data socket ended inside a message")
                return False
            filled += received
        return True

    def wait(self, seconds: float) -> bool:
        """Whether there is something to receive, the stream's end included, within so many seconds."""
        return bool(self._poll_in.poll(seconds * 1000))

    def _receive_into(self, view: memoryview) -> int:
        return self.sock.recv_into(view, len(view), socket.MSG_WAITALL)

    def receive_whole(self, view: memoryview) -> None:
        """Fill `view`, which something is due for.

        Raises:
            OSError: as `receive`, and where the stream has ended before.
        """
        if not self.receive(view):
            raise ConnectionResetError("the other end closed the data socket")

    # ---- what is said; the puller asks and then takes, the owner is asked and then gives or refuses

    def ask(self, object_id: int, offset: int, nbytes: int, *, authenticate: bool, sealed: bool = False) -> None:
        """Ask the owner for bytes of its arena.

        Args:
            object_id: of whose object.
            offset, nbytes: where they lie.
            authenticate: whether they are to come with tags whatever was agreed for arrays. Without keys there are
                none.
            sealed: whether they are to come without, because they are ciphertext that is checked when it is opened.

        Raises:
            OSError: as `send`.
        """
        del authenticate, sealed
        self.send(REQUEST.pack(object_id, offset, nbytes))

    def answered(self) -> bool:
        """Whether the owner gives the bytes, which `take` must take then.

        Raises:
            OSError: as `receive_whole`.
        """
        answer = bytearray(1)
        self.receive_whole(memoryview(answer))
        return answer[0] == Answer.OK

    def take(self, view: memoryview) -> None:
        """Fill `view` with the bytes that were asked for, as many.

        Raises:
            OSError: as `receive_whole`.
        """
        self.receive_whole(view)

    def asked(self) -> tuple[int, int, int] | None:
        """The next request: object id, offset, bytes. None when the puller wants nothing more.

        Raises:
            OSError: as `receive`.
        """
        request = bytearray(REQUEST.size)
        if not self.receive(memoryview(request)):
            return None
        object_id, self._offset, self._nbytes = REQUEST.unpack(request)
        return object_id, self._offset, self._nbytes

    def refuse(self) -> None:
        """Answer that there are no such bytes.

        Raises:
            OSError: as `send`.
        """
        self.send(bytes((Answer.REFUSED,)))

    def give(self, fd: int) -> None:
        """Answer by the bytes that were asked for, from the file `fd`.

        Raises:
            OSError: as `send_file`.
        """
        self.send(bytes((Answer.OK,)), more=True)
        self.send_file(fd, self._offset, self._nbytes)

    # ---- the end

    def check_alive(self) -> None:
        """Make sure that the other end had not closed the socket when the last bytes were received.

        Raises:
            ConnectionResetError: it had, and may have written to the memory behind bytes that were still on their way.
        """
        if self._poll.poll(0):
            raise ConnectionResetError("the other end closed the data socket")

    def end(self) -> None:
        """From any thread: blocking calls return now, and `close` drops what is on its way. Idempotent."""
        with self._lock:  # the number of a descriptor that was closed meanwhile may be another socket's
            self._ended = True
            if not self._closed:
                with contextlib.suppress(OSError):  # it has ended already
                    self.sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """By the thread that works with the socket, when it does so no longer. Idempotent."""
        with self._lock:
            if self._ended and not self._closed:
                self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
            self._closed = True
            self.sock.close()

    def abandon(self) -> None:
        """In a forked child: close its copy of the descriptor, without the lock that a thread may have held."""
        self.sock.close()
