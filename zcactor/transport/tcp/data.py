"""Data sockets: the messages and the bytes of pulls over TCP.

Control frames and bulk bytes never share a socket. On a data socket the puller sends requests of a fixed size. The
owner answers each one, in order, by a status byte, and by the bytes unless that is `Answer.REFUSED`. With encrypted
frames, tags follow them (`zcactor.transport.tcp.authenticated`). Both ends use threads with blocking calls that do not
hold the interpreter lock, so they do not delay an event loop.

A data socket belongs to a connection. The puller names it by a key of 16 random bytes, which the owner has sent through
that connection. When the connection ends, the owner resets its data sockets. Bytes that the network has not taken yet
are dropped then and not delivered late, because their memory may be used again.
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

from zcactor.native import hot
from zcactor.transport.tcp.liveness import RESET_ON_CLOSE

__all__ = ["KEY_NBYTES", "REQUEST", "Answer", "Channel"]

KEY_NBYTES: Final = 16
"""Bytes of the key that names the connection of a data socket."""
REQUEST: Final = struct.Struct("<QQQ")
"""A request: the object's id, the offset in the owner's arena, and the number of bytes."""
PADDING_NBYTES: Final = 1024
"""Bytes between an answer and bytes that are sent from their mapping. The system copies these behind the answer into a
buffer that often begins a page. A processor that stores a little ahead of where it loads, in addresses modulo 4096,
takes each load for one of the bytes just stored, and waits (Intel 64 and IA-32 Architectures Optimization Reference
Manual, "Memory Disambiguation"). Blocks begin pages, too, so without the padding pulls of 8 MiB and more took twice the
time."""
PATIENCE: Final = 60.0
"""Seconds without a byte until a blocking call gives up. The system reports a lost host within seconds. This limit is
for a process that does nothing, and for unused data sockets."""
UNSENT_NBYTES: Final = 256 << 10
"""Bytes that a sender's system keeps beyond those that are under way (TCP_NOTSENT_LOWAT, tcp(7)). Few of them stay in
the caches until they are received, and megabytes do not."""
BYTES_US: Final = 50
"""Microseconds in which a thread looks for the next bytes before it sleeps (zcactor/native/receiving.c): more than the
packets of a line of 25 Gbit/s take, and less than those of 10."""
ANSWER_US: Final = 200
"""Microseconds in which it looks for an answer: those of an owner nearby come within that."""

_TIMEVAL: Final = struct.Struct("@ll")
_PADDING: Final = bytes(PADDING_NBYTES)


class Answer(IntEnum):
    """The owner's answer to a request."""

    OK = 0
    """The bytes follow."""
    REFUSED = 1
    """The object was freed, the bytes do not lie in the arena, or the process may not read them."""
    PADDED = 2
    """The bytes follow, after `PADDING_NBYTES` others."""


class Channel:
    """A data socket. One thread uses it, and any thread may end it.

    Args:
        sock: connected and authenticated; belongs to the channel from here.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._be_patient(sock)
        self.sock = sock
        self._lock = threading.Lock()
        self._ended = False
        self._closed = False
        self._offset = self._nbytes = 0  # those of the last request
        self._poll = select.poll()
        self._poll.register(sock.fileno(), select.POLLRDHUP)
        self._poll_in = select.poll()
        self._poll_in.register(sock.fileno(), select.POLLIN | select.POLLRDHUP)

    def is_bare(self, *, authenticate: bool, sealed: bool) -> bool:
        """Whether the bytes of such a request come as they are, so that each may be used when it has arrived."""
        del authenticate, sealed
        return True

    lasts: ClassVar[float] = float("inf")
    """Bytes that a channel may carry in one direction. After that a new one replaces it."""

    def _be_patient(self, sock: socket.socket) -> None:
        """Make calls block, for up to `PATIENCE` seconds."""
        sock.setblocking(True)
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_NBYTES)
        for option in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):  # Python's own timeout costs a poll for each call
            sock.setsockopt(socket.SOL_SOCKET, option, _TIMEVAL.pack(*divmod(round(PATIENCE * 1e6), 10**6)))

    def send(self, data: bytes | memoryview, *, more: bool = False) -> None:
        """Send all of `data`. With `more`, the system may put the next bytes into the same packet.

        Raises:
            OSError: the stream breaks, or takes nothing for `PATIENCE` seconds.
        """
        self.sock.sendall(data, socket.MSG_MORE if more else 0)

    def send_file(self, fd: int, offset: int, nbytes: int) -> None:
        """Send `nbytes` of a file from `offset` on, without a copy in this process.

        Raises:
            BrokenPipeError: the file ends before that.
            OSError: as `send`.
        """
        end = offset + nbytes
        while offset < end:
            sent = os.sendfile(self.sock.fileno(), fd, offset, end - offset)
            if sent == 0:
                raise BrokenPipeError("the arena ends before its announced size")
            offset += sent

    def receive(self, view: memoryview, looking: int = 0) -> bool:
        """Fill `view` from the socket. False when the stream ends before its first byte.

        Args:
            view: plain bytes.
            looking: microseconds in which the thread looks for bytes before it sleeps.

        Raises:
            OSError: the stream ends or breaks before `view` is full, or nothing arrives for `PATIENCE` seconds.
        """
        filled, nbytes = 0, len(view)
        while filled < nbytes:
            received = self._receive_into(view[filled:], looking)
            if received == 0:
                if filled:
                    raise ConnectionResetError("a data socket ended inside a message")
                return False
            filled += received
        return True

    def wait(self, seconds: float) -> bool:
        """Whether bytes or the end of the stream arrive within so many seconds."""
        return bool(self._poll_in.poll(seconds * 1000))

    def _receive_into(self, view: memoryview, looking: int) -> int:
        if not looking:
            return self.sock.recv_into(view, len(view), socket.MSG_WAITALL)
        received: int = hot.receive(self.sock.fileno(), view, looking)
        return received

    def receive_whole(self, view: memoryview, looking: int = BYTES_US) -> None:
        """Fill `view` from the socket, where bytes have to follow.

        Args:
            view, looking: as of `receive`.

        Raises:
            OSError: as `receive`, and where the stream ends before the first byte.
        """
        if not self.receive(view, looking):
            raise ConnectionResetError("the other end closed the data socket")

    # ---- the messages: the puller calls `ask`, `answered`, `take`, and the owner `asked`, and then `give` or `refuse`

    def ask(self, object_id: int, offset: int, nbytes: int, *, authenticate: bool, sealed: bool = False) -> None:
        """Ask the owner for bytes of its arena. Requests may follow before the answer, and are answered in order.

        Args:
            object_id: id of the object that has them.
            offset, nbytes: their place in the arena.
            authenticate: whether tags have to follow, also where this was not agreed for arrays. Without keys there are
                no tags.
            sealed: whether the bytes are ciphertext, which is checked when it is decrypted and needs no tags.

        Raises:
            OSError: as `send`.
        """
        del authenticate, sealed
        self.send(REQUEST.pack(object_id, offset, nbytes))

    def answered(self) -> bool:
        """Whether the owner sends the bytes. Then `take` has to be called.

        Raises:
            OSError: as `receive_whole`.
        """
        answer = bytearray(1)
        self.receive_whole(memoryview(answer), ANSWER_US)
        return self._follow(answer[0])

    def _follow(self, answer: int) -> bool:
        """Whether the bytes follow an answer; they come next then."""
        if answer == Answer.PADDED:
            self.receive_whole(memoryview(bytearray(PADDING_NBYTES)))
        return answer in (Answer.OK, Answer.PADDED)

    def take(self, view: memoryview) -> None:
        """Fill `view`, as long as the request, with the bytes.

        Raises:
            OSError: as `receive_whole`.
        """
        self.receive_whole(view)

    def asked(self) -> tuple[int, int, int] | None:
        """Receive the next request: object id, offset, bytes. None when the puller has closed the socket.

        Raises:
            OSError: as `receive`.
        """
        request = bytearray(REQUEST.size)
        if not self.receive(memoryview(request)):
            return None
        object_id, self._offset, self._nbytes = REQUEST.unpack(request)
        return object_id, self._offset, self._nbytes

    def refuse(self) -> None:
        """Answer the request by a refusal.

        Raises:
            OSError: as `send`.
        """
        self._answer(Answer.REFUSED)

    def give(self, fd: int, mapped: memoryview | None = None) -> None:
        """Answer the request by the bytes.

        Args:
            fd: the file with the arena.
            mapped: the requested bytes, where they are to be sent from a mapping instead of the file.

        Raises:
            OSError: as `send_file`.
        """
        if mapped is None:
            self._answer(Answer.OK, more=True)
            self.send_file(fd, self._offset, self._nbytes)
        else:
            self._answer(Answer.PADDED, more=True)
            self.send(_PADDING, more=True)
            self.send(mapped)

    def _answer(self, answer: Answer, *, more: bool = False) -> None:
        self.send(bytes((answer,)), more=more)

    # ---- the end

    def check_alive(self) -> None:
        """Make sure that the other end has not closed the socket before the last bytes were received.

        Raises:
            ConnectionResetError: it has, and may have reused the memory of bytes that were still under way.
        """
        if self._poll.poll(0):
            raise ConnectionResetError("the other end closed the data socket")

    def end(self) -> None:
        """Make blocking calls return now, and `close` drop all bytes under way. Any thread may call it. Idempotent."""
        with self._lock:  # a descriptor that was closed meanwhile may have become that of another socket
            self._ended = True
            if not self._closed:
                with contextlib.suppress(OSError):  # it has ended already
                    self.sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the socket. Only the thread that uses it may call this. Idempotent."""
        with self._lock:
            if self._ended and not self._closed:
                self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET_ON_CLOSE)
            self._closed = True
            self.sock.close()

    def abandon(self) -> None:
        """Close a forked child's copy of the descriptor, without the lock that a thread may have held."""
        self.sock.close()
